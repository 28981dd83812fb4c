"""Images in observations, compared with the model's own processor on the whole conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slime_data.images import load_processor
from slime_generators.multi_turn import generate
from slime_testing_contracts import CharTokenizer, Reply, ScriptedEngine
from slime_testing_contracts.tiny import tiny_model
from slime_testing_contracts.tiny_vision import tiny_qwen2_vl, tiny_vision_model, write_image
from slime_testing_probes.probes import PROBES, Bench

from slime_core import GenerateContext, Sample, SampleStatus, resolve
from slime_core.config import Args
from slime_core.errors import RolloutError
from slime_core.multimodal import image_token_of, open_image
from slime_core.sample import GenerationOutput, admission

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


@pytest.mark.parametrize("observation", [1, 2, 3])
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


@pytest.mark.parametrize("model", [tiny_vision_model, tiny_qwen2_vl])
@pytest.mark.parametrize("interrupted", [False, True])
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
