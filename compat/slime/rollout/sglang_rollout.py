"""`slime.rollout.sglang_rollout`: names for users' generate and rollout functions, over slime_core's rollout stage.

All functions call the engine at `args.sglang_router_ip:args.sglang_router_port`, which `slime train` sets when a
generate or rollout function takes no `context`::

    generate_rollout -> slime_core.rollout.pool (draw, filter, replace, give back)
                            -> generate_and_rm_group -> generate_and_rm -> generate -> POST /generate

A sample whose function raises is returned FAILED with the reason, and the run continues. Fan-out siblings are entries
of their group, not a separate list.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from slime_engine_sglang import get_model_url

from slime import _missing
from slime.rollout._state import GenerateState, RouterEngine, router_url
from slime.utils.async_utils import run
from slime_core.sample import Group, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, SampleStatus

logger = logging.getLogger(__name__)

STOP_DEADLINE = 60.0
"""Deadline in seconds for aborted groups to end."""
_ABORT_AGAIN = 1.0
"""Seconds until the engine is asked to abort again: a request may have been on its way the first time."""


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Continue `sample.tokens` until the model stops or the response, earlier tokens included, has `max_new_tokens`.

    Raises:
        aiohttp.ClientError, TimeoutError: The engine refused or did not answer (`slime.utils.http_utils.post`).
    """
    state = GenerateState(args)
    state.encode(sample)
    room = int(sampling_params["max_new_tokens"]) - sample.response_length
    if room <= 0:
        sample.status = SampleStatus.TRUNCATED
        return sample
    params = {**state.seeded(sample, sampling_params), "max_new_tokens": room}
    output = await RouterEngine(args).generate(sample.tokens, params, session_id=sample.session_id)
    sample.append_response_tokens(
        args, output.token_ids, output.log_probs, meta_info=output.meta_info, text=output.text
    )
    return sample


async def generate_and_rm(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate a sample by its generate function, call the sample hooks, and score it (not with `--group-rm`).

    Finished samples are returned unchanged; once `GenerateState.aborted` is set, other samples are returned ABORTED.

    Returns:
        The sample, or the siblings of a generate function that returned a list.

    Raises:
        slime_core.errors.RolloutError: `--max-consecutive-failures` samples in a row failed.
    """
    state = GenerateState(args)
    runner = state.runner(args, score_groups=False)
    siblings = await runner.run_group(
        [sample], dict(sampling_params), rollout_id=state.rollout_id, evaluation=evaluation
    )
    if state.aborted and sample.status == SampleStatus.PENDING:
        sample.status = SampleStatus.ABORTED
    return siblings[0] if len(siblings) == 1 else siblings


async def generate_and_rm_group(
    args: Any, group: Group, sampling_params: dict[str, Any], evaluation: bool = False
) -> Group:
    """Run `generate_and_rm` for all samples at once, then score the group with `--group-rm`; keep the order."""
    state = GenerateState(args)
    if state.aborted:
        return group
    runner = state.runner(args)
    return await runner.run_group(group, dict(sampling_params), rollout_id=state.rollout_id, evaluation=evaluation)


async def abort(args: Any, rollout_id: int) -> list[Group]:
    """Abort the engine's requests and wait for `GenerateState.pendings`.

    Returns:
        With `--partial-rollout` the groups to give back to the data source; otherwise none.
    """
    state = GenerateState(args)
    state.aborted = True
    pendings, waited = set(state.pendings), 0.0
    while pendings and waited < STOP_DEADLINE:
        await RouterEngine(args).abort()
        _, pendings = await asyncio.wait(pendings, timeout=_ABORT_AGAIN)
        waited += _ABORT_AGAIN
    for late in pendings:
        logger.warning("a group did not stop within %.0f s of the abort; cancelled", STOP_DEADLINE)
        late.cancel()
    results = await asyncio.gather(*state.pendings, return_exceptions=True)
    state.pendings = set()
    groups: list[Group] = []
    for result in results:
        if isinstance(result, BaseException):
            logger.warning("a group was lost when the rollout was aborted: %s: %s", type(result).__name__, result)
        elif args.partial_rollout:
            for sample in result:
                if sample.response_length:
                    sample.metadata.setdefault("start_rollout_id", rollout_id)
            groups.append(result)
    return sorted(groups, key=lambda group: group[0].group_index or 0)


class _Drawn:
    """A data source made of only `get_samples`; returned groups are kept for the caller."""

    def __init__(self, get_samples: Callable[[int], list[Group]]) -> None:
        self.get_samples = get_samples
        self.given_back: list[Group] = []

    def add_samples(self, samples: list[Group]) -> None:
        self.given_back += samples


async def generate_rollout_async(
    args: Any, rollout_id: int, data_source: Callable[[int], list[Group]] | Any
) -> tuple[RolloutFnTrainOutput, list[Group]]:
    """Generate a rollout by slime_core's rules; return it with the groups to give back to the data source.

    Args:
        args: The run's settings.
        rollout_id: Number of the rollout.
        data_source: The bound method `get_samples`, as in THUDM/slime, or a data source.
    """
    drawn = _Drawn(getattr(data_source, "get_samples", data_source))
    output = await _rollout(args, rollout_id, drawn, evaluation=False)
    assert isinstance(output, RolloutFnTrainOutput)
    return output, drawn.given_back


async def eval_rollout(args: Any, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[Group]]:
    """Generate and score every evaluation data set; the second part of the result is always empty."""
    output = await _rollout(args, rollout_id, None, evaluation=True)
    assert isinstance(output, RolloutFnEvalOutput)
    return output, []


async def eval_rollout_single_dataset(args: Any, rollout_id: int, dataset_cfg: Any) -> dict[str, dict[str, Any]]:
    """Evaluate a data set of `args.eval_datasets`; return `{name: {"rewards", "truncated", "samples"}}`."""
    from slime_core.data.prompts import eval_samples
    from slime_core.rollout.evaluate import eval_columns, eval_sampling_params

    state = GenerateState(args)
    runner, params = state.runner(args), eval_sampling_params(args, dataset_cfg)
    groups = eval_samples(args, dataset_cfg, state.tokenizer)
    runs = (runner.run_group(group, params, rollout_id=rollout_id, evaluation=True) for group in groups)
    samples = [sample for group in await asyncio.gather(*runs) for sample in group]
    return {dataset_cfg.name: eval_columns(args, samples)}


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Run slime_core's own rollout, for functions that wrap it; groups given back go to `data_source`.

    Raises:
        slime_core.errors.RolloutError: See `slime_core.rollout.pool.generate_rollout`.
    """
    return run(_rollout(args, rollout_id, data_source, evaluation))


async def _rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    from slime_core.plugins.resolve import resolve
    from slime_core.rollout.fate import FilterStage
    from slime_core.rollout.pool import RolloutContext
    from slime_core.rollout.pool import generate_rollout as whole_rollout

    state = GenerateState(args)
    state.reset()
    spec = getattr(args, "dynamic_sampling_filter_path", None)
    function = resolve("filters", spec, origin="--dynamic-sampling-filter-path").obj if spec else None
    context = RolloutContext(state.runner(args), FilterStage(args, function, spec or ""))
    return await whole_rollout(args, rollout_id, data_source, evaluation, context=context)


__all__ = [
    "GenerateState",
    "RouterEngine",
    "abort",
    "eval_rollout",
    "eval_rollout_single_dataset",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
    "router_url",
]
__getattr__ = _missing.names(__name__)
