"""R3 with real SGLang: whose experts each row is, with and without the router, and a whole run that replays them."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slime_embedded.models.decoder import Decoder
from slime_embedded.models.routing import Routing
from slime_engine_sglang.engine import SglangEngine
from slime_testing_contracts.tiny import tiny_moe_model

from slime_core.models.config import load_model_config
from slime_core.models.hf_io import read_weights
from slime_core.sample import Sample
from tests.conftest import TinyRun

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]

PROMPT = [3, 4, 5, 6, 7, 8] * 6
PARAMS = {"max_new_tokens": 20, "temperature": 1.0, "ignore_eos": True}
LAYERS, PER_TOKEN = 3, 2


async def test_rows_are_the_experts_of_their_tokens(sglang_args: Callable[..., Any], tmp_path: Path) -> None:
    """A fresh prompt, the same one from the cache, two at once and a second turn, through the router."""
    model = tiny_moe_model(dense_layer=False)
    args = sglang_args(model, tmp_path, use_rollout_routing_replay=True)
    samples = [Sample(tokens=list(PROMPT)) for _ in range(4)]
    engine = SglangEngine(args)
    try:
        await engine.start()

        async def turn(sample: Sample) -> None:
            output = await engine.generate(sample.tokens, PARAMS)
            sample.append_response_tokens(args, output.token_ids, output.log_probs, meta_info=output.meta_info)

        await turn(samples[0])
        await turn(samples[1])
        await asyncio.gather(turn(samples[2]), turn(samples[3]))
        samples[3].append_response_tokens(args, [9, 10, 11], trainable=False)
        await turn(samples[3])
    finally:
        await engine.stop()
    assert samples[1].prefix_cache_info.cached_tokens > 0
    decoder = Decoder.from_weights(load_model_config(model), read_weights(model))
    for sample in samples:
        routing, ids = Routing(None), torch.tensor(sample.tokens)
        with torch.no_grad():
            hidden = decoder.hidden(ids, [len(ids)], routing=routing)
        expected = routing.used(len(ids), LAYERS, PER_TOKEN)[:-1].numpy()
        found = np.asarray(sample.rollout_routed_experts)
        assert found.shape == (len(ids) - 1, LAYERS, PER_TOKEN)
        np.testing.assert_array_equal(np.sort(found), expected)
        assert len(np.unique(found)) > PER_TOKEN, "the tokens use different experts, so a shifted row would show"
        scores = torch.log_softmax(hidden @ decoder.head_weight.T, -1)[-sample.response_length - 1 : -1]
        own = scores.gather(1, ids[-sample.response_length :, None])[:, 0]
        mask = torch.tensor(sample.loss_mask) > 0
        gap = (own - torch.tensor(sample.rollout_log_probs)).abs()[mask].max().item()
        assert gap < 1e-4, gap


MEGATRON = {"train_backend": "megatron", "data_pad_size_multiplier": 1}


@pytest.mark.parametrize("trainer", [{}, MEGATRON], ids=["embedded", "megatron"])
def test_a_run_replays_them(
    slime: Callable[..., subprocess.CompletedProcess[str]],
    tiny: TinyRun,
    sglang_python: Path,
    tmp_path: Path,
    trainer: dict[str, Any],
) -> None:
    argv = tiny.argv(
        tmp_path / "run", hf_checkpoint=tiny_moe_model(dense_layer=False), rollout_engine="sglang", device="cpu",
        rollout_num_gpus=1, engine_python=sglang_python, no_engine_router=True, use_rollout_routing_replay=True,
        num_rollout=2, eval_interval=None, eval_prompt_data=None, **trainer,
    )  # fmt: skip
    slime("train", *argv, timeout=400)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/loss" in row]
    assert [row["rollout/routing_replay_fraction"] for row in trained] == [1.0, 1.0]
    assert all(row["train/train_rollout_logprob_abs_diff_max"] < 1e-4 for row in trained)
    assert all(row["train/routing_mismatch"] < 0.5 for row in trained)
