"""A vision-language model that SGLang serves: rows with images, to the second step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from slime_testing_contracts.tiny_vision import tiny_qwen2_vl, write_image

from tests.backends.whole_runs import samples
from tests.conftest import Slime, TinyRun
from tests.run_files import metrics

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]


def test_log_probs_are_the_trainers_before_and_after_an_update(
    tiny: TinyRun, slime: Slime, sglang_python: Path, tmp_path: Path
) -> None:
    """SGLang makes the images' tokens itself, and its vision tower sees the weights of every update."""
    names = [write_image(tmp_path / f"{n}.png", n).name for n in range(2)]
    rows = [("which <image>", names[:1]), ("<image> or <image>", names), ("no image", [])]
    data = tmp_path / "images.jsonl"
    data.write_text("".join(json.dumps({"input": text, "label": "x", "images": i}) + "\n" for text, i in rows))
    model, template = shutil.copytree(tiny_qwen2_vl(), tmp_path / "model"), tmp_path / "samples" / "{rollout_id}.jsonl"
    flags = tiny.argv(
        tmp_path / "run", hf_checkpoint=model, prompt_data=data, multimodal_keys=json.dumps({"image": "images"}),
        eval_prompt_data=None, eval_interval=None, custom_rm_path="random", rollout_batch_size=3,
        n_samples_per_prompt=2, num_steps_per_rollout=1, num_rollout=2, lr="1e-2", device="cpu", save_interval=2,
        rollout_engine="sglang", rollout_num_gpus=1, no_engine_router=True, engine_python=sglang_python,
        save_debug_rollout_data=template,
    )  # fmt: skip
    slime("train", *flags, timeout=300)
    lines = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert len(lines) == 2
    assert all(line["train/train_rollout_logprob_abs_diff_max"] < 1e-4 for line in lines)
    assert lines[0]["train/grad_norm"] > 0
    for rollout in range(2):
        counts = [len((s["multimodal_inputs"] or {}).get("images", ())) for s in samples(template, rollout)]
        assert sorted(counts) == [0, 0, 1, 1, 2, 2]
