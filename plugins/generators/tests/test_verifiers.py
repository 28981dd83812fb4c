from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest

from slime_core.config import Args

pytest.importorskip("verifiers")
from slime_generators.verifiers import Options, _spec, generate
from slime_generators.verifiers.environments import TaskRows
from slime_testing_contracts import DataSourceContract, GeneratorContract
from slime_testing_probes.scripted import CharTokenizer, ScriptedEngine

from slime_core import GenerateContext, Sample, SampleStatus, options
from slime_core.errors import ConfigError, EngineError

COLUMNS = {"input": "input", "metadata": "metadata"}
PARAMS = {"max_new_tokens": 200, "temperature": 1.0, "skip_special_tokens": False}
SPOKEN = "<|user|>Write digits, task 3.<|end|><|assistant|>"


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environments of these tests, here and in the programs that verifiers starts."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "examples" / "verifiers")]
    for folder in folders:
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]))


def settings(**own: Any) -> Args:
    return Args(plugins={"verifiers": {"env": "digit-echo", **own}}, metadata_key="metadata")


def rows(args: Args, **select: Any) -> TaskRows:
    return TaskRows(json.loads(_spec(options(args, "verifiers", Options))), select, COLUMNS)


def sample_of(args: Args, index: int) -> Sample:
    row = rows(args)[index]
    return Sample(index=index, group_index=0, prompt=row["input"], tokens=[1], metadata=row["metadata"])


def play(engine: ScriptedEngine, index: int = 3, **own: Any) -> list[Sample]:
    args = settings(**own)
    context = GenerateContext(engine, CharTokenizer())
    return asyncio.run(generate(args, sample_of(args, index), dict(PARAMS), context=context))


def test_an_episode_of_two_turns_is_one_trajectory_with_the_environments_reward() -> None:
    (sample,) = play(ScriptedEngine(["12", "3a"]))
    assert sample.status == SampleStatus.COMPLETED, sample.metadata
    assert CharTokenizer().decode(sample.prompt_tokens) == SPOKEN
    said = CharTokenizer().decode(sample.tokens[len(sample.prompt_tokens) :])
    assert said == "12<|end|><|user|>again<|end|><|assistant|>3a<|end|>"
    mask = sample.loss_mask or []
    trained = [t for t, m in zip(sample.tokens[-len(mask) :], mask, strict=True) if m]
    assert CharTokenizer().decode(trained) == "12<|end|>3a<|end|>"
    assert sample.reward == 0.75
    assert sample.metadata["verifiers"]["rewards"] == {"share_of_digits": 0.75}
    assert sample.reward_components == {"share_of_digits": 0.75}
    assert sample.metadata["verifiers"]["metrics"]["answers"] == 2.0
    assert sample.metadata["verifiers"]["errors"] == []


def test_every_run_that_trains_is_a_sample_with_its_own_reward() -> None:
    first, second = play(ScriptedEngine(["12", "ab"]), pair="best-of-n", config={"n": 2})
    assert (first.response, first.reward) == ("12<|end|>", 1.0)
    assert (second.response, second.reward) == ("ab<|end|>", 0.0)
    assert first.rollout_id == second.rollout_id == 3
    assert first.metadata["sample_metrics"]["verifiers/metric/best"] == 1.0
    assert second.metadata["sample_metrics"]["verifiers/metric/best"] == 0.0


def test_seats_that_do_not_train_play_and_leave_no_sample() -> None:
    engine = ScriptedEngine(["7", "what?", "8"])
    one, two = play(engine, index=0, env="digit_seats")
    assert len(engine.requests) == 3
    assert (one.response, two.response) == ("7<|end|>", "8<|end|>")
    assert (one.metadata["verifiers"]["seat"], two.metadata["verifiers"]["seat"]) == ("first", "second")
    assert one.metadata["sample_metrics"] == {"verifiers/first/reward/seven": 1.0}
    assert two.metadata["sample_metrics"] == {"verifiers/second/reward/seven": 0.0}


def test_a_run_that_fails_fails_alone() -> None:
    one, two = play(ScriptedEngine(["7", "what?", EngineError("out of memory")]), index=0, env="digit_seats")
    assert (one.status, one.reward) == (SampleStatus.COMPLETED, 1.0)
    assert two.status == SampleStatus.FAILED
    assert two.rollout_id == one.rollout_id
    (sample,) = play(ScriptedEngine(["1", "2"]), env="digit_trouble")
    assert sample.status == SampleStatus.FAILED
    assert "a reward that raises" in json.dumps(sample.metadata)


def test_samples_at_the_same_time_are_told_apart_and_leave_nothing_behind() -> None:
    args = settings()

    async def several() -> list[list[Sample]]:
        context = GenerateContext(ScriptedEngine(lambda request: "7"), CharTokenizer())
        played = (generate(args, sample_of(args, n), dict(PARAMS), context=context) for n in range(4))
        done = await asyncio.gather(*played)
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
        return done

    for number, (sample,) in enumerate(asyncio.run(several())):
        assert f"task {number}." in CharTokenizer().decode(sample.prompt_tokens)
        assert sample.reward == 1.0


@pytest.mark.slow
def test_tools_of_a_task_are_called() -> None:
    call = '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'
    (sample,) = play(ScriptedEngine([call, "42"]), index=0, env="digit_tools")
    assert sample.status == SampleStatus.COMPLETED, sample.metadata
    assert "42" in sample.response.removeprefix(call).split("<|assistant|>")[0], "the tool's answer"
    assert sample.reward == 1.0


def test_rows_are_selected_and_fingerprinted() -> None:
    args = settings()
    assert len(rows(args)) == 48
    chosen = rows(args, include={"idx": ["40:48"]})
    assert chosen[0]["metadata"]["verifiers"]["task"]["idx"] == 40
    assert chosen.fingerprint() != rows(args).fingerprint()
    assert rows(args).fingerprint() == rows(args).fingerprint()


def test_wrong_settings_are_told() -> None:
    with pytest.raises(ConfigError, match="no_such_environment"):
        rows(settings(env="no-such-environment"))
    with pytest.raises(ConfigError, match="name an installed environment"):
        rows(settings(env=""))
    with pytest.raises(ConfigError, match="select"):
        rows(settings(), nonsense=1)
    args, context = settings(), GenerateContext(ScriptedEngine([]), CharTokenizer())
    with pytest.raises(ConfigError, match="no task"):
        asyncio.run(generate(args, Sample(index=0, prompt="x", tokens=[1]), dict(PARAMS), context=context))


class TestTasks(DataSourceContract):
    component = "verifiers"
    args: ClassVar[dict[str, Any]] = {
        "plugins": {"verifiers": {"env": "digit-echo"}}, "metadata_key": "metadata", "label_key": None,
    }  # fmt: skip


class TestEpisodes(GeneratorContract):
    component = "verifiers"
    plays_programs = True
    script = ("12", "3a")
    args: ClassVar[dict[str, Any]] = {"plugins": {"verifiers": {"env": "digit-echo"}}}

    def sample(self) -> Sample:
        """One of the environment's tasks."""
        spec = json.loads(_spec(options(self.settings, "verifiers", Options)))
        row = TaskRows(spec, {}, {"input": "input", "metadata": "metadata"})[0]
        sample = super().sample()
        sample.metadata = row["metadata"]
        return sample


@pytest.mark.slow
class TestEpisodesOfSeveralRuns(TestEpisodes):
    script = ("12", "3a")
    args: ClassVar[dict[str, Any]] = {
        "plugins": {"verifiers": {"env": "digit-echo", "pair": "best-of-n", "config": {"n": 2}}},
    }
