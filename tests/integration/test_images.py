"""Rows with images, through a server over HTTP, into dumps, through training, a checkpoint and a resumed run."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from slime_core.data.dumps import read_samples
from slime_core.engines.sglang_api.requests import image_token_of
from slime_core.multimodal import image_url
from slime_core.testing.loop import run_loop
from slime_core.testing.tiny_vision import IMAGE_TOKENS, tiny_vision_model, write_image
from slime_core.types import SampleStatus
from tests.unit.engines.sglang_api.servers import Server, answer, generating


@contextmanager
def serving() -> Iterator[Server]:
    """A server on a thread of its own that answers every request with two other tokens; it counts prompts as SGLang."""

    async def react(_server: Server, _request: Any, body: Any, before: int) -> Any:
        prompt = len(body["input_ids"]) + (IMAGE_TOKENS - 1) * len(body.get("image_data", []))
        return answer(60 + before % 20, 80 + before % 7, version="0", prompt_tokens=prompt)

    server, loop = Server(generating(react), 0), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(30)
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def write_data(folder: Path) -> Path:
    rows = []
    for number in range(4):
        write_image(folder / f"{number}.png", number)
        rows.append({"input": f"which <image> {number}", "label": "x", "images": [f"{number}.png"]})
    rows.append({"input": "no image", "label": "x"})
    path = folder / "images.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def vision(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.flatten() for name, t in sorted(weights.items()) if "vision_tower" in name])


def test_from_rows_to_a_resumed_run(tmp_path: Path) -> None:
    data, dumps = write_data(tmp_path), tmp_path / "dumps" / "{rollout_id}.jsonl"
    shared: dict[str, Any] = {
        "hf_checkpoint": tiny_vision_model(), "rollout_batch_size": 5, "n_samples_per_prompt": 2,
        "multimodal_keys": {"image": "images"}, "save_debug_rollout_data": None, "device": "cpu",
    }  # fmt: skip
    with serving() as server:
        run_loop(
            tmp_path / "rollouts", 2, **shared | {
                "prompt_data": data, "debug_rollout_only": True, "rollout_engine": "http", "save": None,
                "rollout_external_engine_addrs": [server.address], "save_debug_rollout_data": dumps,
                "custom_rm_path": "random",
            },
        )  # fmt: skip
        bodies = server.asked("/generate")
    samples = [s for i in range(2) for s in read_samples(Path(str(dumps).format(rollout_id=i)))]
    assert len(samples) == len(bodies) == 20
    assert {s.status for s in samples} == {SampleStatus.TRUNCATED}
    urls = {image_url(str(tmp_path / f"{n}.png")): n for n in range(4)}
    asked = [urls[url] for body in bodies for url in body.get("image_data", [])]
    assert sorted(asked) == sorted([0, 1, 2, 3] * 4), "each of 4 images, 2 samples of 2 rollouts"
    pictured = [s for s in samples if s.multimodal_inputs]
    assert len(pictured) == 16
    by_url = {tuple(body.get("image_data", ())): body["input_ids"] for body in bodies}
    token = image_token_of(str(tiny_vision_model()))
    for s in pictured:
        first = s.prompt_tokens.index(token)
        assert s.prompt_tokens[first : first + IMAGE_TOKENS] == [token] * IMAGE_TOKENS
        once = s.prompt_tokens[: first + 1] + s.prompt_tokens[first + IMAGE_TOKENS :]
        assert by_url[tuple(s.image_data())] == once, "one token for its image"
    trained = shared | {
        "load_debug_rollout_data": dumps, "prompt_data": "unused", "save_interval": 1, "micro_batch_size": 2
    }  # fmt: skip
    run_loop(tmp_path / "whole", 2, **trained)
    run_loop(tmp_path / "half", 1, **trained)
    run_loop(tmp_path / "half", 2, **trained, load=tmp_path / "half" / "run")
    name = "checkpoints/rollout_0000001/model.safetensors"
    once, resumed = (load_file(tmp_path / run / "run" / name) for run in ("whole", "half"))
    assert once.keys() == resumed.keys()
    assert all(torch.equal(once[key], resumed[key]) for key in once)
    first = load_file(tmp_path / "whole/run/checkpoints/rollout_0000000/model.safetensors")
    assert not torch.equal(vision(first), vision(once)), "the second step reached the vision tower"
