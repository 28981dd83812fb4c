"""What the benchmarks found and must not come back: costs that no result depends on."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from slime_core import Sample
from slime_core.config import Args
from slime_core.launch.ranks import set_up_process
from slime_core.rollout.stage import RolloutParts, RolloutStage
from slime_core.sample import RolloutFnTrainOutput


def test_samples_of_a_rollout_are_never_formatted() -> None:
    """asyncio.Runner hands its task, and with it the task's result, to `signal`, which formats it."""
    formatted = []

    class Watched(Sample):
        def __repr__(self) -> str:
            formatted.append(self.index)
            return "sample"

    async def rollout(args, rollout_id, data_source, evaluation=False):
        sample = Watched(index=0, group_index=0, tokens=[1], status=Sample.Status.COMPLETED)
        return RolloutFnTrainOutput([[sample]])

    stage = RolloutStage(Args(), RolloutParts(data_source=None, rollout_function=rollout, eval_function=rollout))
    try:
        groups, _ = stage.generate_groups(0)
    finally:
        stage.stop()
    assert [sample.index for group in groups for sample in group] == [0]
    assert not formatted


@pytest.mark.parametrize(
    ("before", "after"),
    [((700, 10, 10), (50_000, 20, 10)), ((0, 10, 10), (0, 10, 10)), ((90_000, 5, 5), (90_000, 5, 5))],
)
def test_the_garbage_collector_runs_less_often_but_stays_off_or_rarer(before, after) -> None:
    kept = gc.get_threshold()
    try:
        gc.set_threshold(*before)
        set_up_process(Args(num_threads=None, seed=1))
        assert gc.get_threshold() == after
    finally:
        gc.set_threshold(*kept)


@pytest.mark.slow
def test_building_a_model_does_not_load_the_compiler() -> None:
    code = """
import sys, torch
from slime_core.models.config import ModelConfig
from slime_embedded.models.decoder import Decoder, init_weights
hf = dict(model_type="qwen3", vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
          num_attention_heads=2, tie_word_embeddings=False)
config = ModelConfig.from_hf(hf)
decoder = Decoder.from_weights(config, init_weights(config, seed=0).items())
assert all(p.requires_grad and not p.is_meta for p in decoder.parameters())
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
