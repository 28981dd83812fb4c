"""`slime train --train-backend megatron` over two ranks, killed after a commit and started again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.backends.whole_runs import hold, running
from tests.conftest import SLIME, Slime, TinyRun
from tests.run_files import timeless
from tests.turn_worlds import FAN_OUT, WORLD

pytestmark = pytest.mark.backends

FLAGS = {
    "train_backend": "megatron",
    "tensor_model_parallel_size": 2,
    "num_rollout": 4,
    "eval_interval": None,
    "eval_prompt_data": None,
    "save_interval": 1,
    "data_pad_size_multiplier": 1,
}


def _groups(directory: Path) -> list[int]:
    files = [directory / f"{rollout}.jsonl" for rollout in range(4)]
    return sorted({(i, json.loads(line)["group_index"]) for i, f in enumerate(files) for line in f.open()})


@pytest.mark.smoke
def test_killed_after_a_commit_and_resumed(tiny: TinyRun, slime_ranks: Slime, tmp_path: Path) -> None:
    """Every group once, the same metrics and weights; then the run directory serves as a reference, by its step."""
    whole, save = tmp_path / "whole", tmp_path / "run"
    dumps = {path: {"save_debug_rollout_data": f"{path}-dump/{{rollout_id}}.jsonl"} for path in (whole, save)}
    slime_ranks("train", *tiny.argv(whole, **FLAGS, **dumps[whole]), timeout=240)
    argv = [SLIME, "train", *tiny.argv(save, **FLAGS, **dumps[save], load=save)]
    held = ["--custom-rollout-log-function-path", hold(tmp_path, 3)]  # it stays until it is killed
    with running([*argv, *held], tmp_path, tmp_path / "log") as run:
        run.until("rollout 2/")  # the commit after rollout 1, counted from 0, may be half written
        run.kill()
        assert run.left() == []
    assert (save / "checkpoints/rollout_0000000").is_dir()
    assert not (save / "checkpoints/rollout_0000003").is_dir()
    done = slime_ranks(*argv[1:], timeout=240)
    assert f"resumed from {save}" in done.stdout
    assert "weights, optimizer, data cursor, buffer and RNG restored" in done.stdout
    assert timeless(save) == timeless(whole)
    # The engine serves what the two ranks have trained.
    assert all(line["train/train_rollout_logprob_abs_diff"] < 1e-5 for line in timeless(save))
    assert _groups(Path(f"{save}-dump")) == _groups(Path(f"{whole}-dump"))
    assert len({group for _, group in _groups(Path(f"{save}-dump"))}) == len(_groups(Path(f"{save}-dump"))) == 16
    last = "checkpoints/rollout_0000003/model.safetensors"
    found, expected = load_file(save / last), load_file(whole / last)
    assert found.keys() == expected.keys()
    assert all((found[name] == tensor).all() for name, tensor in expected.items())

    flags = {**FLAGS, "num_rollout": 1, "use_kl_loss": True, "ref_load": save, "ref_ckpt_step": 1, "load": whole}
    flags |= {"finetune": True, "ckpt_step": 1, "tensor_model_parallel_size": None, "pipeline_model_parallel_size": 2}
    done = slime_ranks("train", *tiny.argv(tmp_path / "next", **flags, num_steps_per_rollout=1), timeout=240)
    assert f"reference: weights of {save}/checkpoints/rollout_0000001, a slime commit after rollout 2" in done.stdout
    assert f"weights of {whole}/checkpoints/rollout_0000001" in done.stdout
    # Actor and reference begin as the same weights, so the first step's KL is that of equal models.
    assert timeless(tmp_path / "next")[-1]["train/kl_loss"] == pytest.approx(0.0, abs=1e-6)


def test_the_adaptive_kl_coefficient_is_resumed(tiny: TinyRun, slime_ranks: Slime, tmp_path: Path) -> None:
    """Both ranks of one model move it, and both take it from the commit."""
    flags = {**FLAGS, "num_rollout": 3, "use_kl_loss": True, "kl_loss_coef": 0.1, "lr": "1e-2"}
    flags |= {"set": "plugins.adaptive_kl.target=1e-4"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    slime_ranks("train", *tiny.argv(whole, **flags))
    slime_ranks("train", *tiny.argv(parts, **{**flags, "num_rollout": 1}))
    slime_ranks("train", *tiny.argv(parts, **flags, load=parts))
    assert timeless(parts) == timeless(whole)
    coefficients = [line.get("rollout/kl_coefficient") for line in timeless(whole)]
    assert coefficients[0] is None
    assert 0.1 != coefficients[1] != coefficients[2]


ALGORITHMS = {
    **{name: {"advantage_estimator": name} for name in ("gigpo", "mt_grpo", "vapo")},
    "kl_cov": {"advantage_estimator": "grpo", "loss_type": "kl_cov"},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_turns_of_partial_rollouts_and_fan_out_are_resumed(
    name: str, tiny: TinyRun, slime_ranks: Slime, tmp_path: Path
) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    (tmp_path / "fan_out.py").write_text(FAN_OUT)
    flags = {
        **FLAGS, **ALGORITHMS[name], "num_rollout": 2, "custom_generate_function_path": tmp_path / "fan_out.py",
        "environment_path": tmp_path / "world.py", "custom_rm_path": None, "rm_workers": None, "label_key": None,
        "apply_chat_template": None, "rollout_max_response_len": 40, "partial_rollout": True,
        "over_sampling_batch_size": 6,
        "set": "plugins.multi_turn={max_turn_tokens: 3, reward: sum}",
    }  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    slime_ranks("train", *tiny.argv(whole, **flags))
    slime_ranks("train", *tiny.argv(parts, **flags, load=whole / "checkpoints/rollout_0000000"))
    assert timeless(parts)[-1] == timeless(whole)[-1]
    assert all(line["train/grad_norm"] > 0 for line in timeless(whole))
    last = "checkpoints/rollout_0000001/model.safetensors"
    found, expected = load_file(parts / last), load_file(whole / last)
    assert all((found[name] == tensor).all() for name, tensor in expected.items())
