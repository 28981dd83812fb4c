"""`slime_core.Trainer` with `launcher="ray"`: steps, calls, a change and resume, with the bytes of inline runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.backends, pytest.mark.timeout(900)]

SCRIPT = """
import sys
from slime_testing_contracts.tiny import digits, tiny_model
from slime_core import Trainer
from slime_core.models.hf_io import read_weights
from slime_core.weights.sync import tensor_checksum

ROWS = [{"input": f"{a}+{b}=?", "label": str(a + b)} for a in range(10, 18) for b in range(10, 14)]
SMALL = dict(num_rollout=3, rollout_batch_size=4, n_samples_per_prompt=4, rollout_max_response_len=8, lr=3e-3,
             apply_chat_template=True, num_steps_per_rollout=1, num_threads=1, preflight=False)
scale = 2.0

def make(**changes):
    reward = lambda args, sample: scale * digits(args, sample)  # a closure of the script
    return Trainer(tiny_model(), data=ROWS, reward=reward, **SMALL, **changes)

def checksums(trainer):
    return {name: tensor_checksum(tensor) for name, tensor in read_weights(trainer.run.checkpoint)}

def steps(trainer):
    for step in trainer:
        assert len(step.samples) == 16 and step.advantages, step
        if step.number == 1:
            trainer.change(lr=1e-3)
    return checksums(trainer)

def calls(trainer):
    with trainer:
        for number in range(3):
            trainer.update(trainer.rollout())
            trainer.sync()
            if number == 0:
                trainer.change(lr=1e-3)
    return checksums(trainer)

here, cluster = {}, {"launcher": "ray", "ray_address": sys.argv[1]}
expected = steps(make(**here))
assert steps(make(**cluster)) == expected
print("steps are the same", flush=True)
assert calls(make(**cluster)) == expected
print("calls are the same", flush=True)
first = make(**cluster, save="resumed")
for step in first:
    break
assert first.run.state() == "drained"
assert checksums(first) != expected
run = make(**cluster, save="resumed", resume=True).train()
assert [line["step"] for line in run.metrics()] == [1, 2, 3]
print("resumed", flush=True)
"""


def test_steps_calls_a_change_and_resume_on_a_cluster(cluster: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", cluster],
        capture_output=True, text=True, timeout=800, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = [
        line for line in done.stdout.splitlines() if line in ("steps are the same", "calls are the same", "resumed")
    ]
    assert said == ["steps are the same", "calls are the same", "resumed"]
