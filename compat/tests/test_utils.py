"""`slime.utils`: types, misc, async_utils, data, mask_utils, processing_utils, metric_utils, eval_config."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
from pathlib import Path
from typing import Any

import pytest
import slime.data
from slime.utils import data as data_module
from slime.utils import misc
from slime.utils.async_utils import AsyncLoopThread, get_async_loop, run
from slime.utils.data import Dataset, read_file
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.metric_utils import compute_pass_rate, compute_statistics, dict_add_prefix, has_repetition
from slime.utils.processing_utils import encode_image_for_rollout_engine, load_processor, load_tokenizer
from slime.utils.types import RolloutBatch, Sample

import slime_core
from slime_core.config import EvalDataset
from slime_core.errors import ConfigError, DataError, PluginError
from slime_core.sample import SampleStatus


def test_types_are_slime_cores() -> None:
    assert Sample is slime_core.Sample
    assert Sample.Status is SampleStatus
    assert Sample.Status.COMPLETED.value == "completed"
    assert EvalDatasetConfig is EvalDataset
    batch: RolloutBatch = {"tokens": []}
    assert batch == {"tokens": []}


# -- misc ------------------------------------------------------------------------------------------------


def test_load_function(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def fn():\n    return 1\n")
    assert misc.load_function("json.dumps") is json.dumps
    assert misc.load_function(f"{file}:fn")() == 1
    assert misc.load_function("slime.rollout.data_source.pop_first").__name__ == "pop_first"
    with pytest.raises(PluginError, match="load_function"):
        misc.load_function("json.nothing_there")


def test_singleton() -> None:
    class One(metaclass=misc.SingletonMeta):
        def __init__(self, value: int) -> None:
            self.value = value

    class Other(One):
        pass

    assert One(1) is One(2)
    assert One(3).value == 1
    assert Other(4).value == 4
    misc.SingletonMeta.clear_all_instances()
    assert One(5).value == 5
    misc.SingletonMeta.clear_all_instances()


@pytest.mark.parametrize(
    ("rollout_id", "interval", "per_epoch", "total", "expected"),
    [
        (1, 2, None, None, True),
        (2, 2, None, None, False),
        (2, None, 3, 3, False),
        (2, 5, 3, None, True),
        (3, 5, 3, None, False),
        (6, 5, None, 7, True),
    ],
)
def test_periodic_action(
    rollout_id: int, interval: int | None, per_epoch: int | None, total: int | None, expected: bool
) -> None:
    assert misc.should_run_periodic_action(rollout_id, interval, per_epoch, total) is expected


def test_small_things() -> None:
    assert misc.group_by([3, 1, 4, 1], key=lambda n: n % 2) == {1: [3, 1, 1], 0: [4]}
    assert misc.group_by("aba") == {"a": ["a", "a"], "b": ["b"]}
    assert misc.Box([1]).inner == [1]
    first = misc.get_free_port(20000, consecutive=2)
    with socket.socket() as probe:
        probe.bind(("", first))
        probe.listen(1)
        assert misc.get_free_port(first, consecutive=2) > first
    socket.inet_pton(
        socket.AF_INET6 if ":" in misc.get_current_node_ip() else socket.AF_INET, misc.get_current_node_ip()
    )


# -- async_utils -----------------------------------------------------------------------------------------


def test_run_gives_results_and_errors_and_keeps_its_loop() -> None:
    async def loop_of() -> Any:
        await asyncio.sleep(0)
        return asyncio.get_running_loop()

    async def fail() -> None:
        raise KeyError("lost")

    assert run(loop_of()) is run(loop_of()) is get_async_loop().loop
    with pytest.raises(KeyError, match="lost"):
        run(fail())


async def test_run_works_while_another_loop_turns() -> None:
    async def three() -> int:
        return 3

    assert run(three()) == 3


def test_run_inside_run_is_refused() -> None:
    async def inner() -> int:
        return 1

    async def outer() -> int:
        return run(inner())

    with pytest.raises(RuntimeError, match="await the coroutine"):
        run(outer())


def test_a_loop_closes_what_was_opened_in_it() -> None:
    closed = []

    async def held() -> Any:
        try:
            yield 1
        finally:
            closed.append(True)

    generator = held()

    async def begin() -> int:
        return int(await anext(generator))

    thread = AsyncLoopThread()
    assert thread.run(begin()) == 1
    thread.stop()
    thread.stop()
    assert closed == [True]
    assert thread.loop.is_closed()


def _ignore_terminate() -> None:
    import signal
    import time

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(60)


def test_terminate_process() -> None:
    from slime.utils.http_utils import terminate_process

    process = multiprocessing.get_context("fork").Process(target=_ignore_terminate)
    process.start()
    terminate_process(process, timeout=0.5)
    assert not process.is_alive()
    terminate_process(process)


# -- data ------------------------------------------------------------------------------------------------


def test_read_file_with_slices(data: Path) -> None:
    assert [row["a"] for row in read_file(f"{data}@[2:4]")] == ["4", "6"]
    assert [row["a"] for row in read_file(f"{data}@[-1:]")] == ["18"]
    assert len(list(read_file(str(data)))) == 10
    with pytest.raises(DataError, match="no such file"):
        list(read_file("nowhere.jsonl"))


def test_dataset(data: Path, tokenizer: Any) -> None:
    dataset = Dataset(
        f"{data}@[:4]", tokenizer, None, None, prompt_key="q", label_key="a", apply_chat_template=True, seed=1
    )
    assert len(dataset) == 4
    assert dataset[1].prompt == "<|user|>1+1=?<|end|><|assistant|>"
    assert dataset[1].label == "2"
    assert dataset[1].tokens == tokenizer.encode(dataset[1].prompt, add_special_tokens=False)
    orders = []
    for epoch in (1, 2, 1):
        dataset.shuffle(epoch)
        orders.append([s.label for s in dataset.samples])
        assert sorted(orders[-1]) == ["0", "2", "4", "6"]
    assert orders[0] == orders[2]
    assert len({tuple(order) for order in orders}) == 2
    assert [s.label for s in dataset.origin_samples] == ["0", "2", "4", "6"]
    assert slime.data.Dataset is data_module.Dataset


def test_dataset_leaves_long_prompts_out(tokenizer: Any, tmp_path: Path) -> None:
    rows = tmp_path / "long.jsonl"
    rows.write_text('{"text": "1"}\n{"text": "11111111"}\n{"text": "22"}\n')
    assert [s.prompt for s in Dataset(str(rows), tokenizer, None, 3).samples] == ["1", "22"]


def test_dataset_with_images(tmp_path: Path) -> None:
    from slime_data.images import load_processor
    from slime_testing_contracts.tiny_vision import IMAGE_TOKENS, tiny_vision_model, write_image

    from slime_core.multimodal import image_token_of

    image = write_image(tmp_path / "a.png", 1)
    rows, columns = tmp_path / "rows.jsonl", {"image": "images"}
    rows.write_text('{"text": "see <image>", "images": ["a.png"]}\n{"text": "nothing", "images": []}\n')
    processor = load_processor(tiny_vision_model())
    found = Dataset(str(rows), processor.tokenizer, processor, multimodal_keys=columns, apply_chat_template=True)
    token = image_token_of(str(tiny_vision_model()))
    assert [s.tokens.count(token) for s in found.samples] == [IMAGE_TOKENS, 0]
    assert found[0].multimodal_inputs == {"images": [str(image)]}
    assert set(found[0].multimodal_train_inputs) == {"pixel_values"}
    assert found[1].multimodal_inputs is None
    with pytest.raises(ConfigError, match="multimodal_keys needs the model's processor"):
        Dataset(str(rows), processor.tokenizer, multimodal_keys=columns)


# -- mask_utils ------------------------------------------------------------------------------------------

CHAT = [
    {"role": "system", "content": "add"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
]


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5"])
def test_loss_masks_select_what_the_assistant_wrote(tokenizer: Any, kind: str) -> None:
    generator = MultiTurnLossMaskGenerator(tokenizer, tokenizer_type=kind)
    ids, mask = generator.get_loss_mask(CHAT)
    assert generator.get_text_from_loss_mask(ids, mask) == ["2<|end|>", "4<|end|>"]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    (length,) = generator.get_response_lengths([mask])
    assert mask[-length:][0] == 1
    assert sum(mask[:-length]) == 0


def test_loss_masks_of_one_turn_of_none_and_of_what_follows(tokenizer: Any) -> None:
    last = MultiTurnLossMaskGenerator(tokenizer, "distill_qwen")
    assert last.get_text_from_loss_mask(*last.get_loss_mask(CHAT)) == ["4<|end|>"]
    every = MultiTurnLossMaskGenerator(tokenizer)
    skipped = [*CHAT[:2], {**CHAT[2], "step_loss_mask": 0}, *CHAT[3:]]
    assert every.get_text_from_loss_mask(*every.get_loss_mask(skipped)) == ["4<|end|>"]
    assert "step_loss_mask" not in skipped[4]
    ids, mask = every.get_loss_mask(CHAT[:4])
    assert tokenizer.decode(ids).endswith("<|user|>2+2<|end|>")
    assert every.get_text_from_loss_mask(ids, mask) == ["2<|end|>"]
    ids, mask = every.get_loss_mask(CHAT[:2])
    assert sum(mask) == 0
    assert every.get_response_lengths([mask, [0, 1, 0]]) == [0, 2]
    with pytest.raises(ValueError, match="qwen, qwen3, qwen3_5, distill_qwen"):
        MultiTurnLossMaskGenerator(tokenizer, "llama")


# -- the others ------------------------------------------------------------------------------------------


def test_processing(model_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0]['content'] }}!")
    assert load_tokenizer(str(model_dir)).encode("12", add_special_tokens=False)
    tokenizer = load_tokenizer(str(model_dir), chat_template_path=str(template))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    assert load_processor(str(model_dir)) is None


class _Image:
    """What is used of a PIL image."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def convert(self, mode: str) -> _Image:
        return _Image(mode)

    def save(self, file: Any, format: str) -> None:
        file.write(f"{format} {self.mode}".encode())


def test_images_become_data_urls() -> None:
    assert encode_image_for_rollout_engine(_Image("RGBA")) == "data:image/png;base64,UE5HIFJHQg=="


def test_metrics() -> None:
    assert dict_add_prefix({"a": 1}, "x/") == {"x/a": 1}
    assert compute_statistics([1, 2, 6]) == {"mean": 3.0, "median": 2.0, "max": 6.0, "min": 1.0}
    assert compute_statistics([]) == {}
    # One of two right, none of two: pass@1 = (1/2 + 0) / 2, pass@2 = (1 + 0) / 2.
    assert compute_pass_rate([1, 0, 0, 0], 2) == {"pass@1": 0.25, "pass@2": 0.5}
    assert compute_pass_rate([1, 0], 1) == {}
    with pytest.raises(ValueError, match="groups of 2"):
        compute_pass_rate([1, 0, 1], 2)
    assert has_repetition("ab" * 20000)
    assert not has_repetition("ab")
