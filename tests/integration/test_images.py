"""Rows with images through a server over HTTP, into dumps, training and weights; killed in a rollout, and resumed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from slime_data.saved import read_samples
from slime_runs.view.server import make_app
from slime_testing_contracts.tiny_vision import IMAGE_TOKENS, tiny_vision_model
from starlette.testclient import TestClient

from slime_core.multimodal import image_token_of, image_url
from slime_core.sample import SampleStatus
from tests.image_runs import PICTURED, PLAIN, SAMPLES, argv, serving, write_inputs
from tests.zygote import Zygote

WEIGHTS = "checkpoints/rollout_000000{}/model.safetensors"


@pytest.mark.slow
def test_from_rows_to_a_run_that_was_killed_in_a_rollout(tmp_path: Path, zygote: Zygote) -> None:
    write_inputs(tmp_path)
    whole, save = tmp_path / "whole", tmp_path / "run"
    with serving() as (server, pictures):
        done = zygote.run(argv(tmp_path, whole, server), dict(os.environ), 120)
        assert done.returncode == 0, done.stderr
        bodies, served = server.asked("/generate"), pictures.weights
        per_rollout = (PICTURED + PLAIN) * SAMPLES
        killed = zygote.run(argv(tmp_path, save, server), {**os.environ, "END": str(per_rollout + 3)}, 120)
        assert killed.returncode == -signal.SIGKILL
        resumed = zygote.run(argv(tmp_path, save, server), dict(os.environ), 120)
        assert resumed.returncode == 0, resumed.stderr
    assert "continuing with rollout 2" in resumed.stdout

    samples = [s for r in range(2) for s in read_samples(Path(f"{whole}-samples/{r}.jsonl"))]
    assert len(samples) == len(bodies) == 2 * per_rollout
    assert {s.status for s in samples} == {SampleStatus.TRUNCATED}
    urls = {image_url(str(tmp_path / f"{n}.png")): n for n in range(PICTURED)}
    asked = [urls[url] for body in bodies for url in body.get("image_data", [])]
    assert sorted(asked) == sorted([*range(PICTURED)] * 2 * SAMPLES), "each image, for every sample of both rollouts"
    pictured = [s for s in samples if s.multimodal_inputs]
    assert len(pictured) == 2 * PICTURED * SAMPLES
    sent, token = {tuple(body.get("image_data", ())): body["input_ids"] for body in bodies}, _image_token()
    for s in pictured:
        first = s.prompt_tokens.index(token)
        assert s.prompt_tokens[first : first + IMAGE_TOKENS] == [token] * IMAGE_TOKENS
        once = s.prompt_tokens[: first + 1] + s.prompt_tokens[first + IMAGE_TOKENS :]
        assert sent[tuple(s.image_data())] == once, "one token for its image"

    with TestClient(make_app(whole), base_url="http://127.0.0.1") as page:
        shown = page.get(
            "api/sample", params={"rollout": 0, "sample": next(s.index for s in pictured if "0" in s.prompt)}
        ).json()["images"]
    path = str(tmp_path / "0.png")
    assert {"name": path, "source": image_url(path)} in shown

    first, second = (load_file(whole / WEIGHTS.format(rollout)) for rollout in range(2))
    assert not torch.equal(_vision(first), _vision(second)), "the second step reached the vision tower"
    assert served.keys() == second.keys(), "the server knows the weights by the names of the files"
    again = load_file(save / WEIGHTS.format(1))
    assert all(torch.equal(second[name], again[name]) for name in second)
    repeated = [s for r in range(2) for s in read_samples(Path(f"{save}-samples/{r}.jsonl"))]
    assert [(s.tokens, s.multimodal_train_inputs) for s in repeated] == [
        (s.tokens, s.multimodal_train_inputs) for s in samples
    ]


def _image_token() -> int:
    token = image_token_of(str(tiny_vision_model()))
    assert token is not None
    return token


def _vision(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.flatten() for name, t in sorted(weights.items()) if "vision_tower" in name])
