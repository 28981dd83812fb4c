"""The planner's memory estimate against the peak of a real step, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slime_commands.plan.memory import FACTOR, Parameters, Sharding, total, trainer_items
from slime_embedded.models.decoder import init_weights
from slime_embedded.models.logprobs import CHUNK_ELEMENTS

from slime_core.config import Args
from slime_core.models.config import ModelConfig
from slime_core.models.family import decoder_shape
from slime_core.models.hf_io import write_config, write_weights

pytestmark = pytest.mark.backends

MEASURE = """
import json, os, sys
from pathlib import Path
import torch
from slime_core.config import Args
from slime_core.protocols import MicroBatchOutput
from slime_embedded.trainer.trainer import EmbeddedTrainer
from slime_core.sample import TrainBatch

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

torch.set_num_threads(1)
torch.randn(64, 64, requires_grad=True).matmul(torch.randn(64, 64)).sum().backward()
before = status("VmRSS")
model, length = sys.argv[1], int(sys.argv[2])
trainer = EmbeddedTrainer(Args(hf_checkpoint=model, device="cpu", dtype="float32", lr=1e-4,
    lr_decay_style="constant", clip_grad=1.0, weight_decay=0.0, adam_eps=1e-8, distributed_timeout_minutes=5))
batch = TrainBatch(tokens=[[7] * length], response_lengths=[length - 1], rewards=[1.0], raw_rewards=[1.0],
    loss_masks=[[1] * (length - 1)], group_indices=[0], rollout_ids=[0], rollout_id=0,
    truncated=[0], sample_indices=[0], rollout_mask_sums=[length - 1])
def loss(output):
    value = -output.log_probs.mean()
    return value, {"loss": value.detach()}
trainer.train_step(batch, [[0]], loss)
print(json.dumps(status("VmHWM") - before))
"""


ARGS = Args(
    lora_rank=None, use_dynamic_batch_size=False, micro_batch_size=1, recompute_granularity=None,
    log_probs_chunk_size=-1,
)  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_measured_peak_lies_within_the_factor(tmp_path: Path) -> None:
    hf = {
        "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096,
        "max_position_embeddings": 4096, "tie_word_embeddings": True, "initializer_range": 0.02,
    }  # fmt: skip
    weights = dict(init_weights(ModelConfig.from_hf(hf, qk_norm=True), seed=0).items())
    write_weights(tmp_path, weights.items())
    write_config(tmp_path, hf)
    parameters = Parameters.of_directory(tmp_path)
    assert parameters.total == sum(t.numel() for t in weights.values())
    assert parameters.embeddings == 4096 * 256
    items = trainer_items(
        ARGS, parameters, decoder_shape(tmp_path, None), Sharding(), longest=512, chunk_elements=CHUNK_ELEMENTS["cpu"]
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), "512"],
        capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    print(f"measured {measured / 2**20:.0f} MiB, estimate {total(items) / 2**20:.0f} MiB")
    assert 1 / FACTOR <= measured / total(items) <= FACTOR
