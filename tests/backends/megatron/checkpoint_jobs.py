"""What the ranks of the checkpoint tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.backends.megatron import trainer_jobs as jobs

AFTER = 3
"""Steps after the checkpoint."""


def trained(
    model: str, *, load: str | None = None, save: str | None = None, more: bool = True, **flags: Any
) -> dict[str, Any]:
    """Two steps and a save, or a load; then with `more` three steps: metrics, weights, log-probs, own moments."""
    from slime_trainer_megatron.trainer import MegatronTrainer

    trainer = MegatronTrainer(jobs.settings(model, use_kl_loss=True, keep_old_actor=True, **flags))
    try:
        part, micro_batches = jobs.shares(trainer.world_size, trainer.micro_batch_multiple)[trainer.rank]
        data = jobs.batch(part)
        fixed = [torch.full((n,), -4.0) for n in data.response_lengths]
        loss_fn = jobs.clipped_loss(data, fixed, fixed)

        def step() -> dict[str, float]:
            return dict(trainer.train_step(data, micro_batches, loss_fn, with_entropy=True).metrics)

        if load is not None:
            trainer.load(Path(load))
        else:
            step()
            trainer.update_reference()
            trainer.update_old_actor()
            step()
        if save is not None:
            trainer.save(Path(save))
        frozen = {role: trainer.log_probs(data, micro_batches, role=role) for role in ("ref", "old_actor")}
        return {
            "rank": trainer.rank,
            "size": trainer.world_size,
            "metrics": [step() for _ in range(AFTER if more else 0)],
            "weights": {name: tensor.detach().clone() for name, tensor in trainer.named_weights()},
            "moments": [
                state[name].clone()
                for optimizer in trainer.optimizer._torch_optimizers()
                for state in optimizer.state.values()
                for name in ("exp_avg", "exp_avg_sq")
            ],
            "frozen": frozen,
        }
    finally:
        trainer.close()


def converted(action: str, **flags: Any) -> str:
    """`slime convert` on this rank."""
    from slime_trainer_megatron.checkpoints import convert

    from slime_core.config import load_settings

    argv = [word for name, value in flags.items() for word in _flag(name, value)]
    args = load_settings(argv, command="show", env={}).args
    return convert.hf_to_megatron(args) if action == "hf-to-megatron" else convert.megatron_to_hf(args)


def _flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag] if value is True else [flag, str(value)]
