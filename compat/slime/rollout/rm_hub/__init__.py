r"""`slime.rollout.rm_hub`: score samples in user code, with any reward of slime-rl.

`async_rm` and `batched_async_rm` choose the reward as slime_core does: a sample's own `custom_rm_path`, then its row's,
then the row's `rm_type`, then `--custom-rm-path`, then `--rm-type`. The name may be any installed reward (`slime
plugins list --kind rewards`). Its plugin runs on a thread here, not in a worker process, so a grader that exceeds
`--rm-timeout` is abandoned, not killed.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from slime import _missing
from slime._settings import settings_of
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score as compute_score_dapo
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime_core.plugins.answers import last_boxed
from slime_core.sample import Sample

if TYPE_CHECKING:
    from slime_core.plugins.adapters import RewardCaller

_CALLERS: OrderedDict[tuple[int, str], tuple[Any, RewardCaller]] = OrderedDict()
"""(id of the settings, spec) -> the settings, kept so that the id stays theirs, and the caller."""
_KEPT = 64
_LOCK = threading.Lock()


def scorer(args: Any, spec: str, origin: str = "slime.rollout.rm_hub") -> RewardCaller:
    """Return the reward called `spec`, ready to be called. Raises slime_core.errors.PluginError."""
    from slime_core.plugins.adapters import RewardCaller
    from slime_core.plugins.resolve import absolute_spec, resolve

    key = id(args), spec
    with _LOCK:  # a process has several event loops, each on a thread of its own
        if key in _CALLERS:
            _CALLERS.move_to_end(key)
            return _CALLERS[key][1]
    resolved = resolve("rewards", spec, origin=origin)
    settings = settings_of(args)
    caller = RewardCaller(resolved, settings, spec=absolute_spec(spec), group=settings.group_rm)
    with _LOCK:
        _CALLERS[key] = args, caller
        while len(_CALLERS) > _KEPT:
            _CALLERS.popitem(last=False)
    return caller


def spec_of(args: Any, sample: Sample) -> str:
    """Return the spec of the sample's reward. Raises LookupError if none is set."""
    own = sample.custom_rm_path or sample.metadata.get("custom_rm_path") or sample.metadata.get("rm_type")
    spec = own or getattr(args, "custom_rm_path", None) or getattr(args, "rm_type", None)
    if not spec:
        raise LookupError("no reward function: set --rm-type, --custom-rm-path, or rm_type in the row's metadata")
    return str(spec)


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """Return the sample's reward: a number, or a mapping for `--reward-key`.

    Args:
        args: The run's settings.
        sample: A finished sample; it is not changed.
        kwargs: `evaluation` is passed on; other arguments of THUDM/slime are ignored.

    Raises:
        LookupError: No reward is set.
        slime_core.errors.PluginError: The reward does not exist, or returned an invalid value.
        Exception: Any exception of the reward.
    """
    (reward,) = await scorer(args, spec_of(args, sample)).score([sample], bool(kwargs.get("evaluation", False)))
    return reward


async def batched_async_rm(args: Any, samples: list[Sample], **kwargs: Any) -> list[Any]:
    """Return the samples' rewards in order; a reward function that takes several samples is called once.

    Arguments and errors are those of `async_rm`; a sample's own `custom_rm_path` is used here as well.
    """
    evaluation = bool(kwargs.get("evaluation", False))
    by_spec: dict[str, list[int]] = {}
    for position, sample in enumerate(samples):
        by_spec.setdefault(spec_of(args, sample), []).append(position)
    calls: list[tuple[Any, list[int]]] = []
    for spec, positions in by_spec.items():
        caller = scorer(args, spec)
        calls += [(caller, positions)] if caller.batched else [(caller, [p]) for p in positions]
    answers = await asyncio.gather(*(c.score([samples[p] for p in positions], evaluation) for c, positions in calls))
    rewards: list[Any] = [None] * len(samples)
    for (_, positions), answer in zip(calls, answers):
        for position, reward in zip(positions, answer):
            rewards[position] = reward
    return rewards


async def remote_rm(args: Any, sample: Sample, max_retries: int = 10) -> Any:
    """Score prompt, response and label with the service at `args.rm_url`, by the reward `remote`.

    Raises:
        ValueError: `max_retries` is not 10; set the plugin's option `plugins.remote_rm.attempts` instead.
    """
    if max_retries != 10:
        raise ValueError("remote_rm: set plugins.remote_rm.attempts in the run's YAML instead of max_retries")
    (reward,) = await scorer(args, "remote_rm").score([sample], False)
    return reward


def extract_boxed_answer(solution: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`; None if no box is closed (`slime_core.last_boxed`)."""
    return last_boxed(solution)


__all__ = [
    "async_rm",
    "batched_async_rm",
    "compute_gpqa_reward",
    "compute_score_dapo",
    "extract_boxed_answer",
    "f1_score",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
    "remote_rm",
]
__getattr__ = _missing.names(__name__)
