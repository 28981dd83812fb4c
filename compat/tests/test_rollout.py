"""`slime.rollout`: sglang_rollout, base_types, data_source, sft_rollout."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from slime.rollout import fully_async_rollout, sft_rollout, sglang_streaming_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.data_source import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer, pop_first
from slime.rollout.fully_async_rollout import AsyncRolloutWorker, generate_rollout_fully_async
from slime.rollout.sglang_rollout import (
    GenerateState,
    abort,
    eval_rollout,
    eval_rollout_single_dataset,
    generate,
    generate_and_rm,
    generate_and_rm_group,
    generate_rollout,
    generate_rollout_async,
    get_model_url,
    router_url,
)
from slime.rollout.sglang_streaming_rollout import generate_streaming
from slime.utils.types import Sample

import slime_core
from slime_core.errors import CheckpointError, ConfigError, RolloutError
from slime_core.protocols import RolloutTraits, traits_of

MakeArgs = Callable[..., Any]
PARAMS = {"temperature": 1.0, "max_new_tokens": 8}


def prompt(index: int = 0, **fields: Any) -> Sample:
    return Sample(prompt="1+1=?", label="7777", index=index, group_index=index, **fields)


# -- generate --------------------------------------------------------------------------------------------


async def test_generate(make_args: MakeArgs, engine: Any) -> None:
    args = make_args()
    sample = await generate(args, prompt(session_id="mine"), dict(PARAMS))
    assert sample.response == "7777"
    assert sample.response_tokens == [engine.token] * 4
    assert sample.rollout_log_probs == [-0.25] * 4
    assert sample.loss_mask == [1] * 4
    assert sample.status == Sample.Status.COMPLETED
    assert sample.weight_versions == ["3"]
    (body,) = engine.bodies("/generate")
    assert body["input_ids"] == sample.prompt_tokens == GenerateState(args).tokenizer.encode("1+1=?")
    assert body["return_logprob"] is True
    assert isinstance(body["sampling_params"]["sampling_seed"], int)
    assert engine.requests[-1][2]["X-SMG-Routing-Key"] == "mine"


async def test_generate_goes_on_and_counts_what_is_there(make_args: MakeArgs, engine: Any) -> None:
    args = make_args()
    sample = await generate(args, prompt(), dict(PARAMS))
    await generate(args, sample, {**PARAMS, "max_new_tokens": 6})
    assert sample.response_length == 6
    assert engine.bodies("/generate")[1]["sampling_params"]["max_new_tokens"] == 2
    assert engine.bodies("/generate")[1]["input_ids"][-4:] == [engine.token] * 4
    await generate(args, sample, {**PARAMS, "max_new_tokens": 6})
    assert sample.status == Sample.Status.TRUNCATED
    assert len(engine.requests) == 2


async def test_generate_raises_what_the_engine_says(make_args: MakeArgs, engine: Any) -> None:
    engine.refusals = [400]
    with pytest.raises(aiohttp.ClientResponseError, match="not now"):
        await generate(make_args(), prompt(), dict(PARAMS))


async def test_a_stream_is_the_same_answer_and_what_came_is_kept(
    make_args: MakeArgs, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = make_args()
    state = GenerateState(args)
    whole = Sample(prompt="1+1=?", index=0, session_id="s")
    streamed = copy.deepcopy(whole)
    await generate(args, whole, state.sampling_params.copy())
    await generate_streaming(args, streamed, state.sampling_params.copy())
    assert [event["name"] for event in streamed.trace["events"]] == ["sglang_generate_stream"] * 2
    assert engine.requests[-1][2]["X-SMG-Routing-Key"] == "s"
    del streamed.trace
    streamed.prefix_cache_info = whole.prefix_cache_info  # the stream does not tell
    assert streamed == whole
    engine.hold = True
    cut = Sample(prompt="2+2=?", index=1)
    read, real = asyncio.Event(), sglang_streaming_rollout.stream_events

    async def counted(*words: Any, **keywords: Any) -> AsyncIterator[dict[str, Any]]:
        number = 0
        async for event in real(*words, **keywords):
            yield event
            number += 1  # the reader has taken it, and asks for the next one
            if number == 2:
                read.set()

    async def interrupt() -> None:
        await read.wait()
        state.aborted = True
        engine.released.set()

    monkeypatch.setattr(sglang_streaming_rollout, "stream_events", counted)
    await asyncio.gather(interrupt(), generate_streaming(args, cut, state.sampling_params.copy()))
    assert cut.status == Sample.Status.ABORTED
    assert 2 <= cut.response_length <= 3
    assert cut.loss_mask == [1] * cut.response_length
    engine.refusals = [400]
    with pytest.raises(aiohttp.ClientResponseError, match="not now"):
        await generate_streaming(args, Sample(prompt="x", index=2), state.sampling_params.copy())


def test_addresses(make_args: MakeArgs, engine: Any) -> None:
    args = make_args()
    assert router_url(args) == engine.url
    args = SimpleNamespace(
        sglang_router_ip="::1", sglang_router_port=3, sglang_model_routers={"ref": ("h", 4)}, sglang_config=None
    )
    assert get_model_url(args, "ref") == "http://h:4/generate"
    with pytest.raises(ConfigError, match="no model 'actor' is served; there are: 'ref'"):
        get_model_url(args, "actor")
    args.sglang_model_routers = None
    assert get_model_url(args, "actor", "/health") == "http://[::1]:3/health"
    with pytest.raises(ConfigError, match="takes no `context`"):
        router_url(SimpleNamespace(sglang_router_ip=None))


# -- generate_and_rm -------------------------------------------------------------------------------------


async def test_generate_and_rm(make_args: MakeArgs, engine: Any) -> None:
    args = make_args()
    sample = await generate_and_rm(args, prompt(), dict(PARAMS))
    assert (sample.reward, sample.status) == (1.0, Sample.Status.COMPLETED)
    assert await generate_and_rm(args, sample, dict(PARAMS)) is sample
    assert len(engine.bodies("/generate")) == 1


async def test_generate_and_rm_calls_the_users_functions_in_order(make_args: MakeArgs, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import copy\n"
        "from slime.rollout.sglang_rollout import generate as builtin\n"
        "async def fan_out(args, sample, sampling_params, evaluation=False):\n"
        "    sample.metadata['evaluation'] = evaluation\n"
        "    sample = await builtin(args, sample, sampling_params)\n"
        "    return [sample, copy.deepcopy(sample)]\n"
        "def note(args, sample, evaluation=False):\n    sample.metadata['hook'] = evaluation\n"
        "async def rm(args, samples):\n    return [s.metadata['hook'] + 2.0 for s in samples]\n"
        "async def broken(args, sample, sampling_params):\n    raise OSError('tool is gone')\n"
    )
    args = make_args(
        custom_generate_function_path=f"{file}:fan_out", custom_rm_path=f"{file}:rm", rm_type=None,
        rollout_sample_hook_path=f"{file}:note",
    )  # fmt: skip
    siblings = await generate_and_rm(args, prompt(), dict(PARAMS), evaluation=True)
    assert [s.reward for s in siblings] == [3.0, 3.0]
    assert [s.metadata["evaluation"] for s in siblings] == [True, True]
    assert {s.rollout_id for s in siblings} == {0}
    failed = await generate_and_rm(args, prompt(1, generate_function_path=f"{file}:broken"), dict(PARAMS))
    assert failed.status == Sample.Status.FAILED
    assert "tool is gone" in failed.metadata["failure"]["error"]
    assert failed.reward is None


async def test_group_rewards_are_left_to_the_group(make_args: MakeArgs, tmp_path: Path) -> None:
    file = tmp_path / "rm.py"
    file.write_text("async def rm(args, samples):\n    return [float(len(samples))] * len(samples)\n")
    args = make_args(custom_rm_path=str(file), rm_type=None, group_rm=True)
    alone = await generate_and_rm(args, prompt(), dict(PARAMS))
    assert (alone.reward, alone.status) == (None, Sample.Status.COMPLETED)
    group = await generate_and_rm_group(args, [prompt(1), prompt(2), prompt(3)], dict(PARAMS))
    assert [s.reward for s in group] == [3.0] * 3
    assert [s.index for s in group] == [1, 2, 3]


async def test_two_settings_do_not_mix(make_args: MakeArgs) -> None:
    first, second = make_args(rm_type="exact"), make_args(rm_type="random")
    group = await asyncio.gather(
        *(generate_and_rm(a, prompt(i), dict(PARAMS)) for i in range(8) for a in (first, second))
    )
    assert [s.reward for s in group[::2]] == [1.0] * 8
    assert {s.reward for s in group[1::2]} == {0.0, 1.0}


# -- GenerateState ---------------------------------------------------------------------------------------


async def test_state_is_one_per_process(make_args: MakeArgs) -> None:
    args = make_args(rollout_temperature=0.5, rollout_top_p=0.9, sglang_server_concurrency=2)
    state = GenerateState(args)
    assert GenerateState(make_args()) is state
    assert state.args is args
    assert state.processor is None
    assert state.sampling_params["temperature"] == 0.5
    assert state.sampling_params["max_new_tokens"] == 8
    assert state.sampling_params["no_stop_trim"] is True
    async with state.semaphore, state.semaphore:
        assert state.semaphore.locked()
    assert (state.remaining_batch_size, state.pendings, state.aborted) == (0, set(), False)


def test_state_lives_in_any_loop(make_args: MakeArgs) -> None:
    args = make_args(sglang_server_concurrency=1)

    async def many() -> list[float]:
        samples = await asyncio.gather(*(generate_and_rm(args, prompt(i), dict(PARAMS)) for i in range(3)))
        return [s.reward for s in samples]

    for _ in range(2):
        assert asyncio.run(many()) == [1.0] * 3


async def test_submitted_groups_can_be_aborted(make_args: MakeArgs, engine: Any) -> None:
    args = make_args(partial_rollout=True, over_sampling_batch_size=4)
    state = GenerateState(args)
    engine.hold = True
    state.submit_generate_tasks([[prompt(0), prompt(1)], [prompt(2), prompt(3)]])
    assert (state.remaining_batch_size, len(state.pendings)) == (2, 2)
    for _ in range(4):
        assert await asyncio.to_thread(engine.arrived.acquire, timeout=30)
    groups = await abort(args, rollout_id=5)
    assert [[s.index for s in group] for group in groups] == [[0, 1], [2, 3]]
    for sample in (s for group in groups for s in group):
        assert sample.status == Sample.Status.ABORTED
        assert sample.response == "7"
        assert sample.metadata["start_rollout_id"] == 5
        assert sample.reward is None
    assert state.aborted
    late = await generate_and_rm(args, prompt(9), dict(PARAMS))
    assert (late.status, late.response) == (Sample.Status.ABORTED, "")
    assert await generate_and_rm_group(args, [prompt(9)], dict(PARAMS))
    state.reset()
    again = await generate_and_rm(args, groups[0][0], dict(PARAMS))
    assert (again.response, again.status) == ("77777", Sample.Status.COMPLETED)
    assert engine.bodies("/abort_request")[0] == {"abort_all": True}


# -- whole rollouts --------------------------------------------------------------------------------------


def test_generate_rollout(make_args: MakeArgs, tmp_path: Path) -> None:
    file = tmp_path / "keep.py"
    file.write_text(
        "from slime.rollout.filter_hub.base_types import DynamicFilterOutput\n"
        "def keep(args, samples, **kwargs):\n"
        "    odd = samples[0].group_index % 2\n    return DynamicFilterOutput(keep=not odd, reason='odd')\n"
    )
    args = make_args(dynamic_sampling_filter_path=str(file))
    source = RolloutDataSourceWithBuffer(args)
    output = call_rollout_fn(generate_rollout, args, 0, source, evaluation=False)
    assert isinstance(output, RolloutFnTrainOutput)
    assert [[s.index for s in group] for group in output.samples] == [[0, 1], [4, 5]]
    assert output.metrics["rollout/dynamic_filter/drop_odd"] == 1
    assert all(s.reward == 0.0 for group in output.samples for s in group)
    assert [s.label for s in output.samples[1]] == ["4", "4"]


def test_fully_async_rollouts_take_what_was_finished_first_and_leave_the_rest(
    make_args: MakeArgs, tmp_path: Path
) -> None:
    file = tmp_path / "filters.py"
    file.write_text("def odd(args, group):\n    return group[0].group_index % 2 == 1\n")
    args = make_args(sglang_server_concurrency=8, dynamic_sampling_filter_path=f"{file}:odd", eval_interval=None)
    source = RolloutDataSourceWithBuffer(args)
    taken = [generate_rollout_fully_async(args, rollout_id, source) for rollout_id in range(3)]
    groups = [group for output in taken for group in output.samples]
    assert [len(output.samples) for output in taken] == [2, 2, 2]
    assert all(sample.reward is not None and len(group) == 2 for group in groups for sample in group)
    indices = [group[0].group_index for group in groups]
    assert len(set(indices)) == 6
    assert {index % 2 for index in indices} == {1}
    worker = fully_async_rollout._worker
    assert worker is not None
    assert worker.concurrency == 4
    assert worker.queue_size() <= 4


async def test_what_was_aborted_is_given_back_and_what_raised_is_raised(make_args: MakeArgs) -> None:
    source = RolloutDataSourceWithBuffer(make_args())
    worker = AsyncRolloutWorker(source.args, source)
    worker.concurrency = 0  # draws nothing
    (group,) = source.get_samples(1)
    for sample in group:
        sample.status = Sample.Status.ABORTED

    async def come_back(problem: Exception | None) -> list[Sample]:
        if problem is not None:
            raise problem
        return group

    for problem in (None, RuntimeError("broken")):
        flight = asyncio.ensure_future(come_back(problem))
        flight.add_done_callback(worker._landed)
        await asyncio.wait([flight])
        await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="broken"):
        await worker.take(1)
    assert worker.queue_size() == 0
    assert source.get_samples(1) == [group]
    worker.stop()


async def test_generate_rollout_async_takes_the_method(make_args: MakeArgs) -> None:
    args = make_args(over_sampling_batch_size=4)
    source = RolloutDataSourceWithBuffer(args)
    output, back = await generate_rollout_async(args, 0, source.get_samples)
    assert len(output.samples) == 2
    assert len(back) == 2
    assert len({g[0].group_index for g in [*output.samples, *back]}) == 4
    assert source.get_buffer_length() == 0


async def test_evaluation(make_args: MakeArgs, data: Path) -> None:
    args = make_args(eval_prompt_data=["held", f"{data}@[:3]"], n_samples_per_eval_prompt=2, eval_interval=1)
    output, none = await eval_rollout(args, 0)
    assert isinstance(output, RolloutFnEvalOutput)
    assert none == []
    assert output.data["held"]["rewards"] == [0.0] * 6
    alone = await eval_rollout_single_dataset(args, 0, args.eval_datasets[0])
    assert alone["held"]["truncated"] == [False] * 6
    assert [s.label for s in alone["held"]["samples"]] == ["0", "0", "2", "2", "4", "4"]


def test_bare_answers_are_wrapped() -> None:
    groups = [[Sample(reward=1.0)]]
    output = call_rollout_fn(lambda args, rollout_id, source, evaluation: groups, 1, 2, 3, evaluation=False)
    assert output == RolloutFnTrainOutput(groups, {})
    data = {"x": {"rewards": [], "truncated": []}}
    output = call_rollout_fn(lambda args, rollout_id, source, evaluation: data, 1, 2, 3, evaluation=True)
    assert output == RolloutFnEvalOutput(data, {})
    with pytest.raises(RolloutError):
        call_rollout_fn(lambda *a, evaluation: 5, 1, 2, 3, evaluation=False)
    assert RolloutFnTrainOutput is slime_core.RolloutFnTrainOutput


# -- data sources ----------------------------------------------------------------------------------------


def indices(groups: list[list[Sample]]) -> list[list[int | None]]:
    return [[s.index for s in group] for group in groups]


def test_a_source_draws_and_counts(make_args: MakeArgs) -> None:
    source = RolloutDataSource(make_args())
    assert len(source) == 10
    assert indices(source.get_samples(2)) == [[0, 1], [2, 3]]
    assert (source.epoch_id, source.sample_offset, source.sample_group_index, source.sample_index) == (0, 2, 2, 4)
    source.sample_offset, source.sample_group_index, source.sample_index = 9, 20, 40
    groups = source.get_samples(2)
    assert indices(groups) == [[40, 41], [42, 43]]
    assert [g[0].label for g in groups] == ["18", "0"]
    assert source.epoch_id == 1
    source.epoch_id = 4
    assert source.epoch_id == 4
    assert [s.label for s in source.dataset.samples][:3] == ["0", "2", "4"]
    assert source.dataset is source.dataset
    with pytest.raises(RolloutError, match="RolloutDataSourceWithBuffer"):
        source.add_samples(groups)
    assert isinstance(source, DataSource)


def test_the_buffer_comes_first(make_args: MakeArgs, tmp_path: Path) -> None:
    source = RolloutDataSourceWithBuffer(make_args())
    first = source.get_samples(3)
    source.add_samples(first[1:])
    assert source.get_buffer_length() == len(source.buffer) == 2
    assert source.take_metrics() == {"rollout/buffer/waiting_groups": 2.0}
    assert indices(source.get_samples(3)) == [[2, 3], [4, 5], [6, 7]]
    with pytest.raises(RolloutError, match="group of 1 samples; --n-samples-per-prompt is 2"):
        source.add_samples([first[0], first[1][:1]])
    assert source.buffer == []


def test_pop_first() -> None:
    buffer = [[Sample(index=i)] for i in range(3)]
    assert indices(pop_first(None, None, buffer, 2)) == [[0], [1]]
    assert indices(buffer) == [[2]]
    assert indices(pop_first(None, 7, buffer, 2)) == [[2]]
    assert buffer == []


def test_buffer_filters_are_called_and_checked(make_args: MakeArgs, tmp_path: Path) -> None:
    file = tmp_path / "filters.py"
    file.write_text(
        "def last(args, rollout_id, buffer, num_samples):\n"
        "    group = buffer.pop()\n    group[0].metadata['by'] = rollout_id\n    return [group]\n"
        "def keeps(args, rollout_id, buffer, num_samples):\n    return buffer[:num_samples]\n"
        "def many(args, rollout_id, buffer, num_samples):\n    return [buffer.pop() for _ in range(2)]\n"
    )

    def source(name: str) -> RolloutDataSourceWithBuffer:
        made = RolloutDataSourceWithBuffer(make_args(buffer_filter_path=f"{file}:{name}"))
        made.add_samples(made.get_samples(2))
        made.begin_rollout(3, 1)
        return made

    groups = source("last").get_samples(2)
    assert indices(groups) == [[2, 3], [4, 5]]
    assert groups[0][0].metadata["by"] == 3
    with pytest.raises(RolloutError, match="without removing"):
        source("keeps").get_samples(1)
    with pytest.raises(RolloutError, match="list of 2; expected a list of at most 1"):
        source("many").get_samples(1)
    with pytest.raises(ConfigError, match="is a buffer class"):
        RolloutDataSourceWithBuffer(make_args(buffer_filter_path="fifo"))


def test_everything_is_in_the_checkpoint(make_args: MakeArgs) -> None:
    args = make_args()
    source = RolloutDataSourceWithBuffer(args)
    source.add_samples(source.get_samples(2)[1:])
    source.update_metadata({"seen": 2})
    state = json.loads(json.dumps(source.state_dict()))
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load_state_dict(state)
    assert indices(resumed.buffer) == [[2, 3]]
    assert resumed.get_metadata() == {"seen": 2}
    assert indices(resumed.get_samples(2)) == [[2, 3], [4, 5]]
    with pytest.raises(CheckpointError, match="another one"):
        resumed.load_state_dict({"version": 1})


def test_a_subclass_that_saves_is_left_to_it(make_args: MakeArgs, tmp_path: Path) -> None:
    class Mine(RolloutDataSourceWithBuffer):
        def save(self, rollout_id: int) -> None:
            super().save(rollout_id)
            self.saved = rollout_id

    class Draws(RolloutDataSourceWithBuffer):
        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            return super().get_samples(num_samples)

    args = make_args(save=tmp_path, load=tmp_path)
    source = Mine(args)
    assert not hasattr(source, "state_dict")
    assert hasattr(Draws(args), "state_dict")
    source.add_samples(source.get_samples(1))
    source.save(4)
    assert source.saved == 4
    resumed = Mine(args)
    resumed.load(4)
    assert indices(resumed.buffer) == [[0, 1]]
    resumed.load(None)
    with pytest.raises(CheckpointError, match="rollout 6"):
        resumed.load(5)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        source.nothing  # noqa: B018


def test_supervised_rows(make_args: MakeArgs, tokenizer: Any) -> None:
    args = make_args(n_samples_per_prompt=1)
    output = sft_rollout.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    (first,), (second,) = output.samples
    assert tokenizer.decode(second.response_tokens) == "2<|end|>"
    assert second.loss_mask == [1] * second.response_length
    assert (first.reward, first.status) == (0.0, Sample.Status.COMPLETED)
    assert not traits_of(sft_rollout.generate_rollout, RolloutTraits).needs_engine
