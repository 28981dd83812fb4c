"""`--use-routing-replay` and `--use-rollout-routing-replay`, checked before anything is loaded.

Called by `launch/prepare.py`. What a reader would get wrong: the model is judged by `config.json` alone, since a
trainer may know families that no plugin here describes.
"""

from __future__ import annotations

from pathlib import Path

from slime_core.config import Settings
from slime_core.errors import ConfigError
from slime_core.launch.components import Components
from slime_core.models.config import read_hf_config
from slime_core.protocols import EngineTraits, TrainerTraits, traits_of

_NUMBER_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names under which HF configurations give it."""


def check_routing_replay(settings: Settings, parts: Components) -> None:
    """Engine, trainer, loss and model must be able to.

    Raises:
        ConfigError: One of them is not.
    """
    args = settings.args
    if not args.use_routing_replay:
        return
    asked = "use_rollout_routing_replay" if args.use_rollout_routing_replay else "use_routing_replay"
    if parts.trainer is not None:
        if not traits_of(parts.trainer, TrainerTraits).routing_replay:
            raise ConfigError(
                f"{settings.cite(asked)}: {settings.cite('train_backend')} cannot replay routing (its traits do not say"
                " `routing_replay`); choose another --train-backend"
            )
        if not getattr(parts.loss, "needs_advantages", True):
            raise ConfigError(
                f"{settings.cite(asked)}: --loss-type {args.loss_type!r} has no log-prob pass and no rollout to repeat;"
                " it works with policy_loss"
            )
    engine = parts.engine
    tells = traits_of(engine, EngineTraits).returns_routed_experts
    if args.use_rollout_routing_replay and engine is not None and not tells:
        raise ConfigError(
            f"{settings.cite(asked)}: {settings.cite('rollout_engine')} does not say which experts it used (its traits"
            " do not say `returns_routed_experts`); choose another --rollout-engine, or --use-routing-replay alone"
        )
    checkpoint = str(args.hf_checkpoint)
    if (Path(checkpoint) / "config.json").is_file():
        hf = read_hf_config(checkpoint)
        text = hf.get("text_config") or {}
        if not any(part.get(name) for part in (hf, text) for name in _NUMBER_OF_EXPERTS):
            raise ConfigError(
                f"{settings.cite(asked)}: {settings.cite('hf_checkpoint')} is a dense model"
                f" ({hf['model_type']}: no {', '.join(_NUMBER_OF_EXPERTS)} in config.json); remove the flag"
            )
