"""`--true-on-policy-mode`: whole runs in which trainer and engine agree bit for bit, and runs in which they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Slime, TinyRun
from tests.run_files import gaps


@pytest.mark.slow
def test_every_rollout_is_bitwise_on_policy(slime: Slime, tiny: TinyRun, tmp_path: Path) -> None:
    flags = {"rollout_max_response_len": 100, "rollout_temperature": 0.8, "use_dynamic_batch_size": True}
    argv = tiny.argv(tmp_path / "exact", true_on_policy_mode=True, max_tokens_per_gpu=600, **flags)
    slime("train", *argv)
    assert gaps(tmp_path / "exact") == [0.0] * 4
    argv = tiny.argv(tmp_path / "fast", num_rollout=2, max_tokens_per_gpu=600, **flags)
    slime("train", *argv)
    assert all(gap > 0 for gap in gaps(tmp_path / "fast")), "without the mode the two differ, so the test can fail"


def test_a_kept_actor_is_the_one_that_sampled(slime: Slime, tiny: TinyRun, tmp_path: Path) -> None:
    """The comparison is with the old actor's log-probs, so a copy of other weights would end the run."""
    slime("train", *tiny.argv(tmp_path / "kept", true_on_policy_mode=True, keep_old_actor=True, num_rollout=3))
    assert gaps(tmp_path / "kept") == [0.0] * 3


@pytest.mark.slow
def test_tokens_changed_after_sampling_end_the_run(slime: Slime, tiny: TinyRun, tmp_path: Path) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text(
        "from slime_core.protocols import EditTraits, declares\n"
        "@declares(EditTraits(edits_samples=True))\n"
        "def sample_hook(args, sample, rollout_id):\n"
        "    if rollout_id == 1 and sample.index % 4 == 2:\n"
        "        sample.tokens[-1] = (sample.tokens[-1] + 1) % 10\n"
    )
    argv = tiny.argv(tmp_path / "run", true_on_policy_mode=True, rollout_sample_hook_path=hook)
    done = slime("train", *argv, check=False)
    assert done.returncode == 1
    assert "rollout 2, --true-on-policy-mode: sample" in done.stderr
    assert len(gaps(tmp_path / "run")) == 1, "the rollout before was trained on, the wrong one was not"
