"""What generate functions leave behind when they fail: samples that the rest of the run can handle."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from slime_core.errors import RolloutError
from slime_core.rollout.batch import make_batch
from slime_core.rollout.fate import Outcome, decide
from slime_core.rollout.generate import SampleRunner
from slime_core.sample import Sample
from tests.unit.rollout.parts import Scorer, make_runner, rollout_args

ARGS = rollout_args()


class Generator:
    """Runs `function(sample)` for sample 1 and answers all others with one token."""

    label = "generator 'g'"

    def __init__(self, function: Any) -> None:
        self.function = function

    async def call(self, args, sample, sampling_params, *, evaluation=False, context=None):
        if sample.index == 1:
            return await self.function(sample)
        sample.append_response_tokens(tokens=[9], log_probs=[-1.0], meta_info={"finish_reason": {"type": "stop"}})
        return sample


def _runner(function: Any, resolve: Any = {}.__getitem__, args: Any = ARGS) -> SampleRunner:
    return make_runner(args, Generator(function), Scorer(lambda sample: 1.0), resolve=resolve)


def _group() -> list[Sample]:
    return [Sample(group_index=0, index=i, tokens=[1, 2, 3], prompt="p") for i in range(2)]


async def _tokens_only(sample: Sample) -> Sample:
    sample.tokens += [7, 7]
    raise KeyError("lost")


async def _half_written(sample: Sample) -> Sample:
    sample.tokens += [7, 7]
    sample.response_length, sample.loss_mask = 2, [1]
    raise KeyError("lost")


async def _replaced(sample: Sample) -> Sample:
    sample.tokens = [8]
    raise KeyError("lost")


async def _no_tokens(sample: Sample) -> Sample:
    sample.tokens = None  # type: ignore[assignment]
    raise KeyError("lost")


@pytest.mark.parametrize("function", [_tokens_only, _half_written, _replaced, _no_tokens])
def test_a_sample_cut_off_while_it_was_written_keeps_its_prompt_and_nothing_else(function: Any) -> None:
    group = asyncio.run(_runner(function).run_group(_group(), {}, rollout_id=0))
    torn = group[1]
    assert (torn.status, torn.reward, torn.response_length) == (Sample.Status.FAILED, None, 0)
    assert torn.tokens == [1, 2, 3]
    assert torn.metadata["failure"]["error"] == "KeyError: 'lost'"
    assert "test_generate.py:" in torn.metadata["failure"]["at"]
    batch = make_batch(ARGS, 0, [group], None)
    assert (batch.loss_masks, batch.rewards) == ([[1], [0]], [1.0, 0.0])


def test_a_function_may_end_the_run() -> None:
    async def cannot(sample: Sample) -> Sample:
        raise RolloutError("no model here reads images")

    with pytest.raises(RolloutError, match="no model here"):
        asyncio.run(_runner(cannot).run_group(_group(), {}, rollout_id=0))


def test_what_was_written_before_the_error_and_fits_together_stays() -> None:
    async def second_turn_fails(sample: Sample) -> Sample:
        sample.append_response_tokens(tokens=[5], log_probs=[-1.0], text="five")
        raise KeyError("lost")

    torn = asyncio.run(_runner(second_turn_fails).run_group(_group(), {}, rollout_id=0))[1]
    assert (torn.tokens, torn.response, torn.status) == ([1, 2, 3, 5], "five", Sample.Status.FAILED)


@pytest.mark.parametrize(
    "fields",
    [
        {"loss_mask": [1, 1, 1]}, {"response_length": 9}, {"response_length": -1}, {"response_length": None},
        {"tokens": None}, {"loss_mask": 5}, {"rollout_log_probs": [0.0] * 4}, {"reward": "high"}, {"turns": 5},
        {"rollout_routed_experts": 5, "metadata": None}, {"status": "done"},
    ],
)  # fmt: skip
def test_an_answer_that_does_not_fit_together_fails_its_sample_and_no_batch(fields: dict[str, Any]) -> None:
    async def wrong(sample: Sample) -> Sample:
        sample.append_response_tokens(tokens=[9], log_probs=[-1.0], meta_info={"finish_reason": {"type": "stop"}})
        for name, value in ({"reward": 0.5} | fields).items():
            setattr(sample, name, value)
        return sample

    group = asyncio.run(_runner(wrong).run_group(_group(), {}, rollout_id=0))
    assert (group[1].status, group[1].reward) == (Sample.Status.FAILED, None)
    assert group[1].metadata["failure"]["where"] == "generator 'g'"
    assert make_batch(ARGS, 0, [group], None).loss_masks[1] == [0]


def test_a_reward_that_raises_costs_its_sample_however_its_status_is_written() -> None:
    async def as_text(sample: Sample) -> Sample:
        sample.append_response_tokens(tokens=[9], log_probs=[-1.0])
        sample.status, sample.token_weight_versions = "completed", None  # type: ignore[assignment]
        return sample

    for reward, masks in ((lambda sample: 1.0, [[1], [1]]), (lambda sample: {}[sample.index], [[0], [0]])):
        runner = make_runner(ARGS, Generator(as_text), Scorer(reward), resolve={}.__getitem__)
        group = asyncio.run(runner.run_group(_group(), {}, rollout_id=0))
        assert make_batch(ARGS, 0, [group], None).loss_masks == masks


async def _gives_up(sample: Sample) -> Sample:  # as coding_agent_rl's _abort_result
    sample.tokens, sample.response, sample.response_length, sample.loss_mask = [0, 0], "", 1, [0]
    sample.rollout_log_probs, sample.reward, sample.remove_sample = [0.0], 0.0, True
    sample.status = Sample.Status.ABORTED
    return sample


async def _is_interrupted(sample: Sample) -> Sample:
    sample.status = Sample.Status.ABORTED
    return sample


@pytest.mark.parametrize(("function", "outcome"), [(_gives_up, Outcome.KEPT), (_is_interrupted, Outcome.AGAIN)])
def test_a_sample_that_gave_up_leaves_its_siblings_to_train(function: Any, outcome: Outcome) -> None:
    runner = _runner(function)
    group = asyncio.run(runner.run_group(_group(), {}, rollout_id=0))
    context: Any = Mock(runner=runner)
    context.filters.decide.return_value.keep = True
    assert decide(context, group, lambda: False)[0] == outcome
    if outcome == Outcome.KEPT:
        assert context.filters.decide.call_args.args == ([group[0]],)
        batch = make_batch(ARGS, 0, [group], None)
        assert [any(mask) for mask in batch.loss_masks] == [True, False]


def test_a_time_out_of_the_functions_own_is_not_called_the_runs() -> None:
    async def mine(sample: Sample) -> Sample:
        raise TimeoutError("my service")

    async def endless(sample: Sample) -> Sample:
        await asyncio.Event().wait()
        return sample

    error = asyncio.run(_runner(mine).run_group(_group(), {}, rollout_id=0))[1].metadata["failure"]["error"]
    assert error == "TimeoutError: my service"
    args = ARGS.model_copy(update={"rollout_timeout": 0.05})
    sample = asyncio.run(_runner(endless, args=args).run_group(_group(), {}, rollout_id=0))[1]
    assert sample.metadata["failure"]["error"] == "error: not done within --rollout-timeout 0.05 s"


def test_a_row_that_names_no_generate_function_there_is_fails_alone() -> None:
    def resolve(spec: str) -> Any:
        raise LookupError(f"no generator {spec!r}")

    group = _group()
    group[0].generate_function_path = "nowhere"

    async def fine(sample: Sample) -> Sample:
        sample.append_response_tokens(tokens=[9], log_probs=[-1.0], meta_info={"finish_reason": {"type": "stop"}})
        return sample

    done = asyncio.run(_runner(fine, resolve).run_group(group, {}, rollout_id=0))
    assert "no generator 'nowhere'" in done[0].metadata["failure"]["error"]
    assert done[1].reward == 1.0
