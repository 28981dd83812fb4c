"""A prompt -> several candidates of another generate function, for generators that choose among them.

`best_of_n` and `self_consistency` call `sample_candidates` and return one of the candidates as it was sampled. A
candidate is the result of one call, so it may have several samples (fan-out). All candidates together hold one place of
the engine (`--sglang-server-concurrency` counts samples of the run).
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

from slime_core import Args, GenerateCaller, GenerateContext, Group, RewardCaller, Sample, SampleStatus, resolve
from slime_core.errors import ConfigError, PluginError

_PENDING = (SampleStatus.PENDING, SampleStatus.ABORTED)


class Candidate(NamedTuple):
    """The result of a call of the generate function."""

    number: int
    """Index of the candidate, from 0."""
    samples: Group


async def sample_candidates(
    args: Args,
    sample: Sample,
    sampling_params: dict[str, Any],
    context: GenerateContext,
    *,
    num: int,
    generator: str,
    origin: str,
) -> list[Candidate] | None:
    """Sample `num` candidates from the prompt at once; each has its own seed, made of the sample's seed and its number.

    A candidate whose call raised is skipped, unless all calls raised.

    Args:
        args: The run's settings.
        sample: The prompt; not changed.
        sampling_params: Sampling parameters of the sample's generate function.
        context: Context of the sample's generate function.
        num: Number of candidates.
        generator: Name or path of the generate function.
        origin: The option that names it, for messages.

    Returns:
        The candidates in order, or None when a rollout's end interrupted one of several, so the sample must be
        repeated. A single candidate is returned as it is, to be continued.

    Raises:
        PluginError: The generate function cannot be found or loaded, or lacks the `context` that it needs here.
        Exception: The error of the first call, if all calls raised.
    """
    caller = GenerateCaller(resolve("generators", generator, origin=origin))

    async def one(number: int, done: Callable[[], None]) -> Group:
        own = copy.deepcopy(sample)
        own.session_id = f"{sample.session_id or sample.index}-c{number}"
        params = {**sampling_params, "sampling_seed": _seed(sampling_params.get("sampling_seed"), number)}
        try:
            made = await caller.call(args, own, params, evaluation=context.evaluation, context=context)
        finally:
            done()
        return made if isinstance(made, list) else [made]

    with _live_together(context.engine, num) as done:
        results = await asyncio.gather(*(one(i, done) for i in range(num)), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
    found = [Candidate(i, made) for i, made in enumerate(results) if not isinstance(made, BaseException)]
    if not found:
        raise next(result for result in results if isinstance(result, BaseException))
    interrupted = any(s.status in _PENDING for c in found for s in c.samples)
    return None if interrupted and num > 1 else found


def choose(
    name: str, sample: Sample, candidates: Sequence[Candidate], chosen: Candidate, **facts: Any
) -> Sample | list[Sample]:
    """Return the chosen candidate's samples in place of `sample`, with the facts of the choice in `metadata[name]`."""
    for each in chosen.samples:
        each.session_id = sample.session_id
        each.metadata[name] = {
            **facts,
            "chosen": chosen.number,
            "candidates": [c.number for c in candidates],
            "response_tokens": sum(s.response_length for c in candidates for s in c.samples),
        }
    return chosen.samples if len(chosen.samples) > 1 else chosen.samples[0]


def in_training(name: str) -> ConfigError:
    """Return the error of a generator that chooses among candidates and is used for samples that are trained on."""
    return ConfigError(
        f"{name} is for evaluation: trained on, its samples would be chosen ones, not the policy's. Give it to"
        " evaluation data sets (custom_generate_function_path in --eval-config), or type"
        f" --set plugins.{name}.in_training=true"
    )


async def candidate_rewards(
    args: Args, candidates: Sequence[Candidate], spec: str | None, context: GenerateContext, origin: str
) -> list[float]:
    """Return [candidates] mean rewards over each candidate's samples; minus infinity if failed or not scored.

    Rewards that a generate function has set count if `spec` does not name another reward.

    Args:
        args: The run's settings.
        candidates: Candidates of one prompt.
        spec: Name or path of a reward; None is the sample's own, or the run's.
        context: Context of the sample.
        origin: The option that names it, for messages.

    Raises:
        ConfigError: No reward scores the candidates.
        Exception: The reward's error, if it raised for every candidate.
    """
    results = await asyncio.gather(
        *(_reward(args, c.samples, spec, context, origin) for c in candidates), return_exceptions=True
    )
    failures = [r for r in results if isinstance(r, BaseException)]
    fatal = next((r for r in failures if not isinstance(r, Exception) or isinstance(r, ConfigError)), None)
    if fatal is not None or len(failures) == len(results):
        raise fatal or failures[0]
    return [float("-inf") if isinstance(r, BaseException) else r for r in results]


async def _reward(args: Args, samples: Group, spec: str | None, context: GenerateContext, origin: str) -> float:
    if any(s.status in (SampleStatus.FAILED, *_PENDING) for s in samples):
        return float("-inf")
    values = []
    for sample in samples:
        reward: Any = sample.reward if spec is None else None
        if reward is None:
            name = spec or sample.custom_rm_path or sample.metadata.get("custom_rm_path")
            name = name or sample.metadata.get("rm_type") or _run_reward(args)
            if not name:
                raise ConfigError(f"{origin}: nothing scores the candidates; name a reward, or set --rm-type NAME")
            (reward,) = await _scorer(args, str(name), origin).score([sample], evaluation=context.evaluation)
        values.append(_number(args, reward, context.evaluation))
    return sum(values) / len(values)


def _run_reward(args: Args) -> str | None:
    return args.custom_rm_path or args.rm_type


def _scorer(args: Args, spec: str, origin: str) -> RewardCaller:
    scorer = RewardCaller(resolve("rewards", spec, origin=origin), args)
    if scorer.scores_groups:
        raise ConfigError(f"{origin}: {scorer.label} scores whole groups; candidates are scored one by one")
    return scorer


def _number(args: Args, reward: Any, evaluation: bool) -> float:
    if not hasattr(reward, "keys"):
        return float(reward)
    key = (args.eval_reward_key if evaluation else None) or args.reward_key
    if key not in reward:
        raise PluginError(f"a candidate's reward is a mapping with keys {sorted(reward)}; --eval-reward-key says which")
    return float(reward[key])


def _seed(seed: int | None, number: int) -> int | None:
    """Return 31 bits of the sample's seed and the candidate's number; None if the sample has no seed."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.blake2b(repr((seed, number)).encode(), digest_size=4).digest(), "little") >> 1


@contextmanager
def _live_together(engine: Any, num: int) -> Iterator[Callable[[], None]]:
    """Count each candidate as live until all but one have ended, so that a held engine waits for it as for a sample.

    The sample itself is live already and stands for the last candidate. Yields a function to call when a candidate has
    ended.
    """
    live: Callable[[], AbstractContextManager[None]] | None = getattr(engine, "live", None)
    with ExitStack() as left:
        held: list[ExitStack] = []
        if live is not None:
            held = [left.enter_context(ExitStack()) for _ in range(num - 1)]
            for each in held:
                each.enter_context(live())

        def done() -> None:
            if held:
                held.pop().close()

        yield done
