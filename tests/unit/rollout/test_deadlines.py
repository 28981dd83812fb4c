"""What becomes of prompt groups and rollouts that hang, by every policy."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
from slime_runs.board import start_board, stop_board

from slime_core.errors import RolloutError, RolloutInterrupted
from slime_core.rollout import deadlines
from slime_core.rollout.deadlines import Interruptible, evaluated
from slime_core.sample import Sample
from slime_core.waits import current
from tests.unit.rollout.parts import Source, make_runner, roll, rollout_args
from tests.virtual_time import in_virtual_time

STEP = 0.03
"""Virtual seconds of the deadlines here."""


def _args(**changes):
    more = {
        "rm_timeout": None, "rollout_timeout": None, "group_timeout": STEP, "rollout_stop_timeout": STEP,
    }  # fmt: skip
    return rollout_args(**{**more, **changes})


class Generator:
    """Never ends for the samples in `hangs`, the first `times` times; with `deaf` not even when cancelled."""

    label = "generator 'test'"

    def __init__(self, hangs=(), times=1000, deaf=False) -> None:
        self.hangs, self.times, self.deaf, self.calls = set(hangs), times, deaf, []
        self.release, self.evaluated = asyncio.Event(), set()

    async def call(self, args, sample, params, *, evaluation=False, context=None):
        self.calls.append(sample.index)
        self.evaluated.add(evaluation)
        if sample.index in self.hangs and self.calls.count(sample.index) <= self.times:
            while not self.release.is_set():
                try:
                    await self.release.wait()
                except asyncio.CancelledError:
                    if not self.deaf:
                        raise
        sample.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info={"finish_reason": {"type": "stop"}})
        return sample


def _groups(output):
    return [g[0].group_index for g in output.samples]


@in_virtual_time
async def test_substitute_draws_another_prompt() -> None:
    output = await roll(_args(), Generator(hangs=[1]))
    assert _groups(output) == [1, 2]
    assert output.metrics["rollout/groups_drawn"] == 3
    assert [v for k, v in output.metrics.items() if k.endswith("group_timeout")] == [1]


@in_virtual_time
async def test_retry_generates_the_same_prompt_afresh() -> None:
    generator = Generator(hangs=[1], times=1)
    output = await roll(_args(group_timeout_policy="retry"), generator)
    assert _groups(output) == [0, 1]
    assert generator.calls.count(0) == generator.calls.count(1) == 2, "the whole group"
    assert output.metrics["rollout/groups_drawn"] == 2
    assert all((s.response_length, s.status) == (1, Sample.Status.COMPLETED) for s in output.samples[0])


@in_virtual_time
async def test_retries_are_bounded() -> None:
    generator = Generator(hangs=[1])
    output = await roll(_args(group_timeout_policy="retry"), generator)
    assert _groups(output) == [1, 2]
    assert generator.calls.count(1) == 3, "--group-timeout-retries 2"


@in_virtual_time
async def test_shrink_goes_on_with_the_samples_that_are_done() -> None:
    output = await roll(_args(group_timeout_policy="shrink"), Generator(hangs=[1]))
    assert _groups(output) == [0, 1]
    assert [s.status for s in output.samples[0]] == [Sample.Status.COMPLETED, Sample.Status.FAILED]
    assert output.samples[0][0].reward == 0.0
    assert output.samples[0][1].metadata["failure"]["where"] == "--group-timeout"


@in_virtual_time
async def test_drop_leaves_whole_optimizer_steps() -> None:
    source = Source()
    args = _args(rollout_batch_size=4, over_sampling_batch_size=4, global_batch_size=4, group_timeout_policy="drop")
    output = await roll(args, Generator(hangs=[1]), source)
    assert _groups(output) == [1, 2]
    assert [g[0].group_index for g in source.returned] == [3], "what is too little for a step goes back"


@in_virtual_time
async def test_drop_of_everything_is_an_error() -> None:
    with pytest.raises(RolloutError, match="0 of 2 kept"):
        await roll(_args(group_timeout_policy="drop"), Generator(hangs=[0, 2]))


@pytest.mark.parametrize("policy", ["substitute", "shrink", "drop"])
@in_virtual_time
async def test_an_evaluated_group_has_nothing_in_its_place(policy) -> None:
    args, generator = _args(group_timeout_policy=policy), Generator(hangs=[1])
    runner = make_runner(args, generator)
    (group,) = Source().get_samples(1)
    done = await deadlines.group_runner(runner)(group, {}, rollout_id=3, evaluation=True)
    assert [s.status for s in done] == [Sample.Status.COMPLETED, Sample.Status.FAILED]
    assert generator.evaluated == {True}
    args.group_timeout_policy = "stop"
    (group,) = Source().get_samples(1)
    with pytest.raises(RolloutError, match="evaluated group 0 at rollout 4: not done"):
        await deadlines.group_runner(runner)(group, {}, rollout_id=3, evaluation=True)


@pytest.mark.parametrize("deaf", [False, True])
def test_a_generate_function_has_rollout_timeout_whatever_it_catches(deaf: bool) -> None:
    @in_virtual_time
    async def run() -> None:
        generator = Generator(hangs=[1], deaf=deaf)
        output = await roll(_args(group_timeout=None, rollout_timeout=STEP), generator)
        first, late = output.samples[0]
        assert (first.status, late.status) == (Sample.Status.COMPLETED, Sample.Status.FAILED)
        reason = "error: not done within --rollout-timeout 0.03 s"
        assert late.metadata["failure"] == {"where": "generator 'test'", "error": reason}
        generator.release.set()
        await asyncio.sleep(1)
        assert (late.tokens, late.reward) == ([1], None)

    run()


@in_virtual_time
async def test_stop_ends_the_run_with_a_report(tmp_path) -> None:
    before = set(current())  # what the garbage collector has not yet ended of other tests
    start_board(tmp_path, "rollout")
    try:
        with pytest.raises(RolloutError, match=r"group 0 of rollout 4: not done within 0.03 s .*stalls/.*\.txt"):
            await roll(_args(group_timeout_policy="stop"), Generator(hangs=[1]))
    finally:
        stop_board()
    (report,) = (tmp_path / "stalls").iterdir()
    text = report.read_text()
    assert "generator 'test'" in text
    assert "await self.release.wait()" in text, "the line that hangs"
    assert set(current()) <= before


@in_virtual_time
async def test_a_task_that_ignores_its_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "CANCEL_GRACE", 0.01)
    generator, source = Generator(hangs=[1], deaf=True), Source()
    output = await roll(_args(group_timeout_policy="retry"), generator, source)
    assert _groups(output) == [1, 2]
    assert generator.calls.count(1) == 1, "what may still write to the samples is not given them again"
    generator.release.set()
    await asyncio.sleep(0)


@in_virtual_time
async def test_groups_in_excess_that_ignore_their_cancellation_do_not_hold_the_end(monkeypatch) -> None:
    monkeypatch.setattr(deadlines, "CANCEL_GRACE", 0.01)
    generator, source = Generator(hangs=[1], deaf=True), Source()
    output = await roll(_args(group_timeout=None, over_sampling_batch_size=3), generator, source)
    assert _groups(output) == [1, 2]
    (returned,) = source.returned
    assert [(s.index, s.status, s.tokens) for s in returned] == [(i, Sample.Status.PENDING, [1]) for i in (0, 1)]
    generator.release.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert [s.tokens for s in returned] == [[1], [1]], "a late write goes to nobody's samples"


@in_virtual_time
async def test_the_clock_starts_with_a_place() -> None:
    """A queue longer than the deadline is no reason to give groups up."""

    class Slow(Generator):
        async def call(self, *args, **keywords):
            await asyncio.sleep(STEP / 3)
            return await super().call(*args, **keywords)

    args = _args(rollout_batch_size=6, over_sampling_batch_size=6, sglang_server_concurrency=2, group_timeout=STEP)
    assert _groups(await roll(args, Slow())) == list(range(6))


@in_virtual_time
async def test_a_rollout_in_which_no_sample_ends_stops_the_run() -> None:
    with pytest.raises(RolloutError, match=r"groups of rollout 4: not done within 0\.03 s"):
        await roll(_args(group_timeout=None, rollout_stall_timeout=STEP), Generator(hangs=[1, 2]))


@in_virtual_time
async def test_a_rollout_that_moves_on_does_not() -> None:
    class OneByOne(Generator):
        async def call(self, *args, **keywords):
            await asyncio.sleep(STEP / 2)
            return await super().call(*args, **keywords)

    args = _args(group_timeout=None, rollout_stall_timeout=STEP, sglang_server_concurrency=1)
    assert _groups(await roll(args, OneByOne())) == [0, 1]


# -- evaluations -----------------------------------------------------------------------------------------


async def hang(begun: asyncio.Event) -> None:
    begun.set()
    await asyncio.Event().wait()


async def test_an_interrupt_ends_what_runs_and_what_comes(recwarn: pytest.WarningsRecorder) -> None:
    before = set(current())  # what the garbage collector has not yet ended of other tests
    evaluations, begun = Interruptible(), asyncio.Event()
    running = asyncio.create_task(evaluated(evaluations, hang(begun), "evaluation", None))
    await begun.wait()
    evaluations.interrupt()
    with pytest.raises(RolloutInterrupted) as interrupted:
        await running
    assert not interrupted.value.drew
    again = asyncio.Event()
    with pytest.raises(RolloutInterrupted):
        await evaluated(evaluations, hang(again), "evaluation", None)
    assert not again.is_set()
    gc.collect()
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]
    assert set(current()) <= before


async def test_the_deadline_stops_the_run_with_a_report(tmp_path: Path) -> None:
    start_board(tmp_path, "test")
    try:
        with pytest.raises(RolloutError, match=r"evaluation at rollout 3: .*0\.02 s.*--eval-timeout.*stalls"):
            await evaluated(Interruptible(), hang(asyncio.Event()), "evaluation at rollout 3", 0.02)
    finally:
        stop_board()
    (report,) = (tmp_path / "stalls").iterdir()
    assert "evaluation at rollout 3 (deadline 0.02 s" in report.read_text()
