"""Settings -> what the policy loss is made with: the loss, its off-policy correction and its reducer, checked.

Called by `launch/components.py`. A correction is built here, at start-up, so that bounds which contradict each other
end the command before a model is loaded.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from slime_core.config import Settings
from slime_core.errors import ConfigError, PluginError
from slime_core.launch.resolver import Resolver
from slime_core.plugins.signatures import construct, declared
from slime_core.protocols import Args, with_defaults
from slime_core.workers.call import guarded

logger = logging.getLogger(__name__)

CORRECTION, REDUCER = "custom_tis_function_path", "custom_pg_loss_reducer_function_path"
FUNCTION = "custom_loss_function_path"
DEFAULT_CORRECTION = "tis"


@dataclass
class Objective:
    """A loss and the keywords it is built with."""

    loss: Any
    keywords: dict[str, Any]

    def build(self, args: Args, estimator: Any) -> Any:
        """The loss of this run."""
        loss = self.loss(args, estimator, **self.keywords)
        if loss.needs_advantages is None:
            loss.needs_advantages = self.needs_advantages(args)
        return loss

    def needs_advantages(self, args: Args) -> bool:
        """Whether the loss, built, will need them."""
        said: bool | None = self.loss.needs_advantages
        return args.compute_advantages_and_returns if said is None else said


def resolve_objective(settings: Settings, r: Resolver) -> Objective:
    """Resolve `--loss-type` and what acts on its policy term.

    Raises:
        ConfigError: A setting that the chosen loss or correction does not read, or that contradicts another.
        PluginError: Something cannot be found, loaded or called.
    """
    from slime_core.learning.loss import LossBase

    loss = with_defaults(r.setting("losses", "loss_type"), LossBase)
    if loss.needs_advantages and not settings.args.compute_advantages_and_returns:
        raise ConfigError(
            f"{settings.cite('compute_advantages_and_returns')}: --loss-type {settings.args.loss_type!r} needs"
            " advantages; remove it, or choose a loss without them, such as sft_loss"
        )
    keywords = {"corrector": _corrector(settings, r)}
    keywords["reducer"] = _reducer(r)
    keywords["function"] = r.function("custom_losses", FUNCTION)
    wanted = {name: value for name, value in keywords.items() if value is not None}
    takes = declared(loss, wanted)
    asked_by = {"corrector": ("use_tis", "get_mismatch_metrics"), "reducer": (REDUCER,), "function": (FUNCTION,)}
    if loss.needs_function and keywords["function"] is None:
        raise ConfigError(f"{settings.cite('loss_type')} needs --{FUNCTION.replace('_', '-')} PATH")
    for name in wanted.keys() - takes:
        flag = next(f for f in asked_by[name] if getattr(settings.args, f))
        raise ConfigError(
            f"{settings.cite(flag)}: --loss-type {settings.args.loss_type!r} does not take a {name}; it works with"
            f" {'custom_loss' if name == 'function' else 'policy_loss'}"
        )
    for flag in ("use_opsm", "proximal_policy"):
        if settings.is_given(flag) and not declared(loss, ("corrector",)):
            raise ConfigError(
                f"{settings.cite(flag)}: --loss-type {settings.args.loss_type!r} does not read it; it works with"
                " policy_loss"
            )
    warn_without_effect(settings, loss.ignores, f"--loss-type {settings.args.loss_type!r}")
    return Objective(loss, wanted)


def warn_without_effect(settings: Settings, unread: Iterable[str], chosen: str) -> None:
    """Warn of settings that the user gave and `chosen` does not read. Raises PluginError for what is no setting."""
    unknown = sorted(name for name in unread if name not in settings.origins)
    if unknown:
        raise PluginError(f"{chosen} ignores {', '.join(unknown)}, which is no setting")
    given = [settings.cite(name) for name in sorted(unread) if settings.is_given(name)]
    if given:
        logger.warning("without effect with %s, which does not read it: %s", chosen, ", ".join(given))


def _corrector(settings: Settings, r: Resolver) -> Any:
    args = settings.args
    if not (args.use_tis or args.get_mismatch_metrics):
        return None
    from slime_core.learning.corrections import SETTINGS
    from slime_core.learning.corrector import Corrector

    spec = r.named(CORRECTION) or (DEFAULT_CORRECTION if args.use_tis else None)
    component: Any = None
    if spec is not None:
        origin = r.origin(CORRECTION) if getattr(args, CORRECTION) else settings.cite("use_tis")
        found = r.spec("corrections", spec, origin).obj
        component = construct(found, args) if inspect.isclass(found) else found
        if hasattr(component, "weigh"):
            _check_component(settings, component, spec, [name for name in SETTINGS if settings.is_given(name)])
            component.weigh = guarded(component.weigh, f"{origin} {spec!r}")
        else:
            component = guarded(component, f"{origin} {spec!r}")
    return Corrector(args, component, applies=args.use_tis, reports_mismatch=args.get_mismatch_metrics)


def _check_component(settings: Settings, component: Any, spec: str, given: list[str]) -> None:
    unread = [settings.cite(name) for name in given if name not in getattr(component, "reads", given)]
    if unread:
        raise ConfigError(
            f"correction {spec!r} does not read {', '.join(unread)}; choose one that does"
            " (--custom-tis-function-path mis), or remove"
        )
    if settings.args.proximal_policy == "interpolate" and getattr(component, "whole_step", False):
        raise ConfigError(
            f"{settings.cite('proximal_policy')}: correction {spec!r} normalises over the whole optimizer step, but"
            " interpolated log-probs are known only micro-batch by micro-batch; remove one"
        )


def _reducer(r: Resolver) -> Callable[..., Any] | None:
    """The reducer's maker, tried on one token so that what it lacks is said now."""
    found = r.function("loss_reducers", REDUCER)
    if found is None:
        return None
    make = functools.partial(found, args=r.args) if "args" in declared(found, ("args",)) else found
    import torch

    from slime_core.learning.reducers import reduced

    one = torch.ones(1)
    reduced(make, r.args, one, one, [2], [1])
    return make
