"""Runs with images that need no SGLang: rows, a server that answers them by what they hold, and the flags of a run."""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime_testing_contracts.tiny_vision import IMAGE_TOKENS, tiny_vision_model, write_image

from tests.conftest import TinyRun
from tests.unit.engines.sglang.api.servers import Server, answer
from tests.unit.engines.sglang.api.weight_servers import WeightServer

PICTURED, PLAIN, SAMPLES = 4, 1, 2
"""Rows with an image, rows without, and samples of each; a rollout draws all."""
_REWARD = """
import os, signal
from slime_core import RewardTraits, declares

@declares(RewardTraits(execution="inline"))
def reward(args, sample, **kwargs):
    if os.environ.get("END") == str(sample.index):
        os.kill(os.getpid(), signal.SIGKILL)
    return float(sample.index % 3)
"""


class Pictures(WeightServer):
    """It takes weights, counts prompts as SGLang does, and answers with two tokens that the request decides."""

    async def generate(self, body: Any) -> Any:
        images = body.get("image_data", [])
        made = zlib.crc32(json.dumps([body["input_ids"], images]).encode())
        prompt = len(body["input_ids"]) + (IMAGE_TOKENS - 1) * len(images)
        return answer(60 + made % 20, 80 + made % 7, version=self.version, prompt_tokens=prompt)


@contextmanager
def serving() -> Iterator[tuple[Server, Pictures]]:
    """A server on a thread of its own."""
    pictures = Pictures()
    server, loop = Server(pictures, 0), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(60)
        yield server, pictures
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def write_inputs(folder: Path) -> None:
    """Images, rows and the reward; with END it kills the run at the sample of that number."""
    rows = []
    for number in range(PICTURED):
        write_image(folder / f"{number}.png", number)
        rows.append({"input": f"which <image> {number}", "label": "x", "images": [f"{number}.png"]})
    rows += [{"input": "no image", "label": "x"}] * PLAIN
    (folder / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "rm.py").write_text(_REWARD)


def argv(folder: Path, save: Path, server: Server, **changes: Any) -> list[str]:
    """Flags of two rollouts on what `write_inputs` wrote."""
    flags: dict[str, Any] = {
        "hf_checkpoint": tiny_vision_model(), "prompt_data": folder / "images.jsonl", "eval_prompt_data": None,
        "eval_interval": None, "multimodal_keys": json.dumps({"image": "images"}), "num_rollout": 2,
        "rollout_batch_size": PICTURED + PLAIN, "n_samples_per_prompt": SAMPLES, "num_steps_per_rollout": 1,
        "rollout_engine": "http", "rollout_external_engine_addrs": server.address, "device": "cpu",
        "save_debug_rollout_data": f"{save}-samples/{{rollout_id}}.jsonl", "load": save,
    }  # fmt: skip
    return ["train", *TinyRun(folder).argv(save, **flags | changes)]
