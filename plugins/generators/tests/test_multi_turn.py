"""Turns with an environment: tokens, deadlines, interruptions, images."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from slime_data.images import load_processor, open_image
from slime_environments.session import places
from slime_environments.session.session import EnvironmentSession
from slime_generators.multi_turn import generate
from slime_testing_contracts import CharTokenizer, Reply, Request, ScriptedEngine
from slime_testing_contracts.tiny import tiny_model
from slime_testing_contracts.tiny_vision import tiny_qwen2_vl, tiny_vision_model, write_image
from slime_testing_probes.probes import PROBES, Bench

from slime_core import GenerateContext, Sample, SampleStatus, resolve
from slime_core.config import Args
from slime_core.errors import ConfigError, DataError, EnvironmentTimeoutError, PluginError, RolloutError
from slime_core.multimodal import image_token_of
from slime_core.plugins.loading import import_file
from slime_core.sample import GenerationOutput, admission

FILE = Path(__file__).with_name("guessing.py")
TOKENIZER = CharTokenizer()
TEMPLATE = "<|user|>{observation}<|end|><|assistant|>"


@pytest.fixture(autouse=True)
def world() -> Any:
    """The module that the specs load: `CLOSED` and `HANG` are there."""
    module = import_file(FILE, "the test")
    module.CLOSED.clear()
    module.LIVE.clear()
    module.MOST[:] = [0]
    module.HANG.clear()
    module.HANGS.clear()
    yield module
    module.HANG.set()
    for thread in list(places.THREADS.left_behind):
        thread.join(60)


def row(label: str = "5", **metadata: Any) -> Sample:
    return Sample(index=3, label=label, prompt="Guess: ", tokens=TOKENIZER.encode("Guess: "), metadata=metadata)


def chat(label: str = "5", **metadata: Any) -> Sample:
    messages = [{"role": "user", "content": "Guess"}]
    sample = Sample(index=3, label=label, prompt=messages, metadata=metadata)
    sample.tokens = TOKENIZER.encode(str(TOKENIZER.apply_chat_template(messages, False, add_generation_prompt=True)))
    return sample


def run(engine: ScriptedEngine, sample: Sample, name: str = "Guess", *, limit: int = 200, **args: Any) -> Sample:
    own = {"observation_template": TEMPLATE, **args.pop("own", {})}
    settings = Args(environment_path=f"{FILE}:{name}", plugins={"multi_turn": own}, **args)
    params = {"max_new_tokens": limit, "skip_special_tokens": True}
    return asyncio.run(generate(settings, sample, params, context=GenerateContext(engine, TOKENIZER)))


def test_turns_are_trained_and_observations_are_not(world: Any) -> None:
    engine = ScriptedEngine(["3", "7", "5"], weight_version=2)
    sample = run(engine, row())
    higher, lower = (TEMPLATE.replace("{observation}", word) for word in ("higher", "lower"))
    assert TOKENIZER.decode(sample.response_tokens) == f"3<|end|>{higher}7<|end|>{lower}5<|end|>"
    first, second = len(TOKENIZER.encode(higher)), len(TOKENIZER.encode(lower))
    assert sample.loss_mask == [1, 1] + [0] * first + [1, 1] + [0] * second + [1, 1]
    assert sample.token_weight_versions == [2, 2] + [-1] * first + [2, 2] + [-1] * second + [2, 2]
    assert engine.requests[1].input_ids == sample.prompt_tokens + sample.response_tokens[: 2 + first]
    assert engine.requests[1].sampling_params["max_new_tokens"] == 200 - 2 - first
    assert sample.status == SampleStatus.COMPLETED
    assert sample.reward == 0.75
    record = sample.metadata["environment"]
    assert record == {"turns": 3, "rewards": [-0.125, -0.125, 1.0], "info": {"guesses": 3}, "ended": "done"}
    assert sample.metadata["num_turns"] == 3
    assert [turn[:3] for turn in sample.turns or ()] == [
        (0, 2, -0.125), (2 + first, 4 + first, -0.125), (4 + first + second, 6 + first + second, 1.0),
    ]  # fmt: skip
    assert world.CLOSED == ["Guess"]
    assert sample.non_generation_time > 0


@pytest.mark.parametrize(("name", "rule", "reward"), [("Corridor", "sum", 1.25), ("Gym", "last", 1.25)])
def test_the_form_that_a_newcomer_writes_first(name: str, rule: str, reward: float) -> None:
    sample = run(ScriptedEngine(["right", "left", "right", "right"]), row(), name, own={"reward": rule})
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, reward)
    assert sample.reward_components == {"exit": 1.0, "style": 0.25}
    turns = sample.known_turns()
    assert [turn.reward for turn in turns] == [0.0, 0.0, 0.0, 1.25]
    states = [turn.state for turn in turns]
    assert states == (["0", "1", "0", "1"] if name == "Corridor" else [None] * 4)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("Two", r"step returned tuple; expected slime_core.Step, or \(observation, reward, done\)"),
        ("Nan", r"step: reward nan; expected a finite number"),
        ("Word", r"step: reward 'style' 'good'; expected a finite number"),
    ],
)
def test_what_a_step_returns_is_checked(name: str, complaint: str) -> None:
    with pytest.raises(PluginError, match=complaint):
        run(ScriptedEngine(["x"]), row(), name)


def test_chat_rows_are_continued_by_their_template() -> None:
    sample = run(ScriptedEngine(["3", "5"]), chat(first="from 1 to 9"))
    assert TOKENIZER.decode(sample.prompt_tokens) == "<|user|>Guess\nfrom 1 to 9<|end|><|assistant|>"
    assert TOKENIZER.decode(sample.response_tokens) == "3<|end|><|user|>higher<|end|><|assistant|>5<|end|>"
    assert [str(span.source) for span in sample.spans or []][-3:] == ["sampled", "user", "sampled"]
    tools = run(ScriptedEngine(["3", "5"]), chat(), "Chatting")
    assert "<|tool|>higher<|end|>" in TOKENIZER.decode(tools.response_tokens)


@pytest.mark.parametrize(
    ("rule", "reward"), [("sum", 0.875), ("last", 1.0), ("environment", {"score": 0.5, "guesses": 2.0}), ("none", None)]
)
def test_the_reward_is_what_is_asked_for(rule: str, reward: Any) -> None:
    assert run(ScriptedEngine(["3", "5"]), row(), "Remembering", own={"reward": rule}).reward == reward


def test_a_reward_that_is_named_scores() -> None:
    assert run(ScriptedEngine(["5"]), row(), rm_type="exact").reward is None
    assert run(ScriptedEngine(["5"]), row(rm_type="exact")).reward is None
    assert run(ScriptedEngine(["5"]), row(), rm_type="exact", own={"reward": "sum"}).reward == 1.0
    with pytest.raises(PluginError, match="has no method score"):
        run(ScriptedEngine([]), row(), own={"reward": "environment"})


def test_turns_are_limited_by_the_row_then_the_options() -> None:
    engine = ScriptedEngine(lambda request: "1")
    sample = run(engine, row(max_turns=2), own={"max_turns": 3})
    assert (len(engine.requests), sample.status) == (2, SampleStatus.TRUNCATED)
    assert sample.metadata["environment"]["ended"] == "max_turns"
    assert sample.reward == -0.25
    assert TOKENIZER.decode(sample.response_tokens).endswith("1<|end|>"), "no observation that nobody reads"


def test_what_does_not_fit_ends_it() -> None:
    sample = run(ScriptedEngine(["3"]), row(), limit=6)
    assert (sample.status, sample.metadata["environment"]["ended"]) == (SampleStatus.TRUNCATED, "length")
    half = run(ScriptedEngine(["55555555555"]), row(), limit=6)
    assert half.metadata["environment"]["turns"] == 0, "half an action is none"
    assert half.status == SampleStatus.TRUNCATED
    engine = ScriptedEngine(["555"])
    sample = run(engine, row(), "Once", own={"max_turn_tokens": 2})
    assert engine.requests[0].sampling_params["max_new_tokens"] == 2
    assert sample.metadata["environment"]["info"] == {"raw": "55", "finish": "length", "action": "55"}
    assert sample.status == SampleStatus.COMPLETED


# -- interrupted samples -----------------------------------------------------------------------------------


def interrupted(name: str, sample: Sample | None = None) -> Sample:
    """After one step, in the middle of the second turn; as a checkpoint stores it."""
    sample = run(ScriptedEngine(["3", Reply("7", "abort")]), sample or row(), name)
    assert sample.status == SampleStatus.ABORTED
    return Sample.from_dict(sample.to_dict())


@pytest.mark.parametrize("make", [row, chat])
def test_a_snapshot_is_gone_on_from(make: Any, world: Any) -> None:
    sample = interrupted("Remembering", make())
    before = list(sample.tokens)
    engine = ScriptedEngine(["7", "5"])
    run(engine, sample, "Remembering")
    assert engine.requests[0].input_ids == before
    assert sample.tokens[: len(before)] == before
    assert sample.metadata["environment"] == {
        "turns": 3, "rewards": [-0.125, -0.125, 1.0], "info": {"guesses": 3}, "ended": "done",
    }  # fmt: skip
    whole = run(ScriptedEngine(["3", "77", "5"]), make(), "Remembering")
    assert (sample.tokens, sample.loss_mask, sample.reward) == (whole.tokens, whole.loss_mask, whole.reward)
    assert sample.turns == whole.turns
    assert [turn.reward for turn in sample.turns or ()] == [-0.125, -0.125, 1.0]
    assert world.CLOSED == ["Remembering"] * 3


def test_without_a_snapshot_it_starts_again_and_says_why() -> None:
    sample = run(engine := ScriptedEngine(["5"]), interrupted("Guess"))
    assert TOKENIZER.decode(sample.response_tokens) == "5<|end|>"
    assert engine.requests[0].input_ids == sample.prompt_tokens
    (why,) = sample.metadata["environment"]["restarts"]
    assert "has no snapshot and restore" in why
    assert sample.metadata["environment"]["turns"] == 1


def test_nothing_done_is_gone_on_from_where_reset_shows_the_same() -> None:
    aborted = [Reply("1", "abort")]
    sample = run(ScriptedEngine(aborted), row(first="1 to 99"))
    sample = Sample.from_dict(sample.to_dict())
    sample.label = "15"
    sample = run(ScriptedEngine(["5"]), sample)
    assert TOKENIZER.decode(sample.response_tokens) == "15<|end|>"
    assert (sample.reward, sample.metadata["environment"]["turns"]) == (1.0, 1)
    assert "restarts" not in sample.metadata["environment"]
    changed = run(ScriptedEngine(aborted), row(first="1 to 99"))
    changed.metadata["first"] = "1 to 9"
    changed = run(ScriptedEngine(["5"]), changed)
    assert changed.metadata["environment"]["restarts"] == ["reset showed something else than before"]
    assert "1 to 9<" in TOKENIZER.decode(changed.prompt_tokens)


def test_a_cancellation_during_a_step_is_gone_on_from_before_it(world: Any) -> None:
    sample = row()

    async def cancelled() -> None:
        settings = Args(environment_path=f"{FILE}:Hanging", plugins={})
        context = GenerateContext(ScriptedEngine(["3", "7"]), TOKENIZER)
        task = asyncio.create_task(generate(settings, sample, {"max_new_tokens": 99}, context=context))
        while not world.HANGS.is_set():  # before it, the thread would have nothing to do and close at once
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert sample.metadata["environment"]["acting"]
    assert sample.status == SampleStatus.PENDING
    assert world.CLOSED == [], "its thread is in the step"
    world.HANG.set()
    for thread in list(places.THREADS.left_behind):
        thread.join(60)
    assert world.CLOSED == ["Hanging"], "closed in its thread once the step has returned"


# -- what goes wrong ---------------------------------------------------------------------------------------


@pytest.fixture
def second_step_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes before it has `environment_step_timeout`, since a thread or an interpreter must start."""
    step = EnvironmentSession.step

    async def limited(self: EnvironmentSession, action: str, turn: Any) -> Any:
        if self._steps:
            self._step_timeout = 1.0
        return await step(self, action, turn)

    monkeypatch.setattr(EnvironmentSession, "step", limited)


def test_a_step_that_hangs_fails_the_sample_and_not_the_loop(world: Any, second_step_is_short: None) -> None:
    async def both() -> int:
        turns = 0

        async def beats() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.01)

        beat = asyncio.create_task(beats())
        settings = Args(environment_path=f"{FILE}:Hanging", environment_step_timeout=60.0, plugins={})
        context = GenerateContext(ScriptedEngine(["3", "5"]), TOKENIZER)
        with pytest.raises(EnvironmentTimeoutError, match=r"step 2 for sample 3: not done within 1 s"):
            await generate(settings, row(), {"max_new_tokens": 99}, context=context)
        beat.cancel()
        return turns

    assert asyncio.run(both()) > 5
    assert len(places.THREADS.left_behind) == 1


@pytest.mark.slow  # an episode's deadline keeps them the same way
def test_at_a_deadline_the_turns_so_far_may_be_kept(world: Any, second_step_is_short: None) -> None:
    sample = run(
        ScriptedEngine(["3", "5"]), row(), "Hanging", own={"on_timeout": "truncate"}, environment_step_timeout=60.0
    )
    assert (sample.status, sample.reward) == (SampleStatus.TRUNCATED, -0.125)
    assert sample.metadata["environment"]["ended"] == "timeout"
    sample.validate()


def test_an_episode_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: Request) -> str | Reply:
        if request.input_ids == row().tokens:
            return "3"
        loop = asyncio.get_running_loop()
        real = loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + 100)  # in its second turn the deadline passes
        return Reply("5", delay=600)

    sample = run(ScriptedEngine(answer), row(), own={"timeout": 60, "on_timeout": "truncate"})
    assert (sample.status, sample.metadata["environment"]["turns"]) == (SampleStatus.TRUNCATED, 1)
    with pytest.raises(EnvironmentTimeoutError, match="the episode of sample 3"):
        run(ScriptedEngine(answer), row(), own={"timeout": 60})


def environments_below() -> list[psutil.Process]:
    """Processes of environments that this process has started; other tests, in other processes, have theirs."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "slime_environments.session.child" in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.mark.slow
def test_a_process_that_hangs_is_killed(world: Any, second_step_is_short: None) -> None:
    with pytest.raises(EnvironmentTimeoutError, match="step 2"):
        run(ScriptedEngine(["3", "5"]), row(), "HangingProcess", environment_step_timeout=60.0)
    assert psutil.wait_procs(environments_below(), timeout=60)[1] == []


def test_threads_of_environments_are_bounded(world: Any) -> None:
    async def crowd() -> None:
        settings = Args(environment_path=f"{FILE}:Guess", environment_threads=3, plugins={})

        async def one() -> None:
            engine = ScriptedEngine([Reply("5<|end|>", delay=0.02)])
            await generate(settings, row(), {"max_new_tokens": 99}, context=GenerateContext(engine, TOKENIZER))

        await asyncio.gather(*(one() for _ in range(20)))

    asyncio.run(crowd())
    assert world.CLOSED == ["Guess"] * 20
    assert world.MOST[0] == 3


def test_what_an_environment_raises_names_it_and_its_line(world: Any) -> None:
    with pytest.raises(PluginError, match=r"step 1 raised RuntimeError: the world is broken \(at .*guessing.py:\d+"):
        run(ScriptedEngine(["3"]), row(), "Raising")
    assert world.CLOSED == ["Raising"]


def test_settings_that_cannot_be_are_told() -> None:
    with pytest.raises(ConfigError, match="set --environment-path NAME"):
        asyncio.run(
            generate(Args(), row(), {"max_new_tokens": 9}, context=GenerateContext(ScriptedEngine([]), TOKENIZER))
        )
    with pytest.raises(DataError, match="turned into text by --apply-chat-template"):
        run(ScriptedEngine([]), row(), apply_chat_template=True)
    with pytest.raises(DataError, match=r"has no \{observation\} in it"):
        run(ScriptedEngine([]), row(), own={"observation_template": "nothing"})
    for name in ("max_turns", "max_turn_tokens", "timeout"):
        with pytest.raises(ConfigError, match=rf"plugins.multi_turn.{name} 0.*greater than 0"):
            run(ScriptedEngine([]), row(), own={name: 0})


WORLD = '''
class World:
    """Shows a picture at the beginning and after the first turn."""

    def __init__(self):
        self.steps = 0

    def show(self, number):
        return [{{"role": "user", "content": [
            {{"type": "text", "text": f"picture {{number}}: "}},
            {{"type": "image", "image": "{folder}/" + f"{{number}}.png"}},
        ]}}]

    def reset(self):
        return self.show(0)

    def step(self, action):
        self.steps += 1
        return self.show(1) if self.steps == 1 else "words", 0.5, self.steps == 3

    def snapshot(self):
        return self.steps

    def restore(self, sample, state):
        self.steps = state
'''


class Seeing(ScriptedEngine):
    """A scripted engine that takes images."""

    async def generate(
        self, input_ids: Sequence[int], sampling_params: Any, *, image_data: Sequence[str] = (), **named: Any
    ) -> GenerationOutput:
        self.seen = [*getattr(self, "seen", []), len(image_data)]
        return await super().generate(input_ids, sampling_params, **named)


@pytest.mark.parametrize("observation", [2, 3])
def test_a_model_of_text_is_told_of_before_the_run(observation: int, tmp_path: Path) -> None:
    """The checks before a run play up to the second observation; a later image ends the run."""
    (tmp_path / "world.py").write_text(
        "class World:\n"
        "    number = 0\n"
        "    def show(self):\n"
        "        self.number += 1\n"
        f"        image = [{{'type': 'image', 'image': 'x.png'}}] if self.number == {observation} else 'words ' * 9\n"
        "        return [{'role': 'user', 'content': image}]\n"
        "    def reset(self):\n        return self.show()\n"
        "    def step(self, action):\n        return self.show(), 0.0, False\n"
    )
    args = Args(
        hf_checkpoint=str(tiny_model()), environment_path=f"{tmp_path}/world.py:World",
        custom_generate_function_path="", n_samples_per_prompt=2,
    )  # fmt: skip
    row = {"place": "row 1", "spec": None, "prompt": [{"role": "user", "content": "Look."}], "label": None}
    bench = Bench(args, [{**row, "metadata": {}}])
    said = pytest.raises(RolloutError, match=r"shows an image, and the model of --hf-checkpoint .* reads text")
    with nullcontext() if observation == 3 else said:
        PROBES["generators"](bench, resolve("generators", "multi_turn"))
    context = GenerateContext(ScriptedEngine(lambda _: "42"), CharTokenizer())
    with said:
        asyncio.run(generate(args, bench.prompt(), {"max_new_tokens": 200}, context=context))


@pytest.mark.parametrize(("model", "interrupted"), [(tiny_vision_model, True), (tiny_qwen2_vl, False)])
def test_images_in_observations(model: Callable[[], Path], interrupted: bool, tmp_path: Path) -> None:
    directory = model()
    processor = load_processor(directory)
    pictures = [write_image(tmp_path / f"{number}.png", number) for number in range(2)]
    (tmp_path / "world.py").write_text(WORLD.format(folder=tmp_path))
    args = Args(hf_checkpoint=str(directory), environment_path=f"{tmp_path}/world.py:World")
    sample = Sample(index=3, prompt=[{"role": "user", "content": "Look."}])
    sample.tokens = processor.tokenizer.encode("Look.", add_special_tokens=False)
    replies: list[Any] = ["cat", Reply("do", "abort"), "g", "end"] if interrupted else ["cat", "dog", "end"]
    engine = Seeing(replies, tokenizer=processor.tokenizer)
    context = GenerateContext(engine, processor.tokenizer)
    while sample.status in (SampleStatus.PENDING, SampleStatus.ABORTED):
        sample = Sample.from_dict(sample.to_dict())
        sample = asyncio.run(generate(args, sample, {"max_new_tokens": 200}, context=context))
    assert engine.seen == ([1, 2, 2, 2] if interrupted else [1, 2, 2])
    assert sample.status == SampleStatus.COMPLETED
    assert admission.problem(sample, image_token_of(str(directory))) is None
    assert [turn.reward for turn in sample.turns or ()] == [0.5, 0.5, 0.5]

    def shown(number: int) -> list[dict[str, Any]]:
        return [{"type": "text", "text": f"picture {number}: "}, {"type": "image"}]

    conversation = [
        {"role": "user", "content": "Look."}, {"role": "user", "content": shown(0)},
        {"role": "assistant", "content": "cat"}, {"role": "user", "content": shown(1)},
        {"role": "assistant", "content": "dog"}, {"role": "user", "content": "words"},
        {"role": "assistant", "content": "end"},
    ]  # fmt: skip
    text = processor.tokenizer.apply_chat_template(conversation, tokenize=False)
    images = [open_image(str(picture)) for picture in pictures]
    expected = processor(text=[text], images=images, return_tensors="np", add_special_tokens=False)
    assert sample.tokens == expected["input_ids"][0].tolist()
    assert set(sample.multimodal_train_inputs) == set(expected) - {"input_ids", "attention_mask"}
    for name, array in sample.multimodal_train_inputs.items():
        found = np.asarray(array)
        if name == "mm_token_type_ids":  # the trainer adds the zeros of the text after the last image
            found = np.pad(found, ((0, 0), (0, len(sample.tokens) - found.shape[1])))
        np.testing.assert_array_equal(found, expected[name], name)
