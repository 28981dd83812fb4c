"""Whole runs with vLLM, as a user types them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.backends.whole_runs import running, samples
from tests.conftest import SLIME, TinyRun
from tests.run_files import metrics

pytestmark = [pytest.mark.backends, pytest.mark.timeout(1800)]

ROLLOUTS = 3


def train(tiny: TinyRun, folder: Path, **flags: Any) -> Path:
    """Train; each update compares what is served with what was trained. Return the run directory."""
    save, template = folder / "run", folder / "samples" / "{rollout_id}.jsonl"
    argv = tiny.argv(
        save, num_rollout=ROLLOUTS, eval_interval=None, eval_prompt_data=None, rollout_engine="vllm", device="cpu",
        save_debug_rollout_data=template, **{"check_weight_update_equal": True} | flags,
    )  # fmt: skip
    with running([SLIME, "train", *argv], folder, folder / "log") as started:
        started.finish()
        assert started.left() == []
    lines = [line for line in metrics(save) if "train/loss" in line]
    assert len(lines) == ROLLOUTS
    for line in lines:
        assert line["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert line["rollout/failed_ratio"] == line["rollout/staleness"] == 0
        assert line["engine/ready_workers"] == 1
    for rollout in range(ROLLOUTS):
        versions = {version for s in samples(template, rollout) for version in s["token_weight_versions"]}
        assert versions == {rollout + 1}
    return save


def test_a_run_trains_on_a_server_that_runs_already(tiny: TinyRun, lent_server: str, tmp_path: Path) -> None:
    """By broadcast, as the run did not launch the server."""
    save = train(tiny, tmp_path, rollout_external_engine_addrs=lent_server)
    assert not (save / "engines").exists()


LOOPS: dict[str, dict[str, Any]] = {
    "one-step": {"async": True},
    "full": {"async": True, "async_mode": "full", "sglang_server_concurrency": 6, "max_staleness": 2, "use_tis": True},
    "partial": {"partial_rollout": True, "over_sampling_batch_size": 8, "sglang_server_concurrency": 24},
}


@pytest.mark.parametrize("loop", LOOPS)
def test_tokens_have_the_log_probs_of_their_versions(
    tiny: TinyRun, lent_server: str, tmp_path: Path, loop: str
) -> None:
    """With weights that come in flight, or samples that the next rollout continues."""
    save, template = tmp_path / "run", tmp_path / "samples" / "{rollout_id}.jsonl"
    argv = tiny.argv(
        save, num_rollout=4, eval_interval=None, eval_prompt_data=None, rollout_engine="vllm", device="cpu",
        save_debug_rollout_data=template, rollout_max_response_len=96, lr="1e-2",
        rollout_external_engine_addrs=lent_server, **LOOPS[loop],
    )  # fmt: skip
    with running([SLIME, "train", *argv], tmp_path, tmp_path / "log") as started:
        started.finish()
    directories = [tiny.root / "model", *(save / "checkpoints" / f"rollout_{number:07d}" for number in range(3))]
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in directories]
    mixed = 0
    for rollout in range(4):
        for sample in samples(template, rollout):
            versions, count = torch.tensor(sample["token_weight_versions"]), sample["response_length"]
            assert len(versions) == count > 0
            mixed += len(versions.unique()) > 1
            told = torch.tensor(sample["rollout_log_probs"], dtype=torch.float64)
            ids = torch.tensor([sample["tokens"]])
            for version in versions.unique().tolist():
                with torch.no_grad():
                    logits = models[version - 1](ids).logits[0, -count - 1 : -1].double()
                wanted = logits.log_softmax(-1).gather(1, ids[0, -count:, None])[:, 0]
                assert float((wanted - told)[versions == version].abs().max()) < 5e-5, (rollout, version)
    assert (mixed > 0) == (loop != "one-step")


def test_a_run_trains_on_a_server_of_its_own(tiny: TinyRun, vllm_python: Path, tmp_path: Path) -> None:
    save = train(tiny, tmp_path, engine_python=vllm_python, engine_start_timeout=900)
    assert "POST /inference/v1/generate" in (save / "engines/default/0.log").read_text()


def test_roles_answer_with_adapters_of_their_own(tiny: TinyRun, vllm_python: Path, tmp_path: Path) -> None:
    """Every sample's log-probs are those of its role's adapter; both adapters move, and nothing else is sent."""
    roles = [{"name": "solver"}, {"name": "critic", "prompt": "{solver} right?"}]
    own = {"multi_agent": {"roles": roles, "order": ["solver", "critic"]}}
    (tmp_path / "roles.yaml").write_text(yaml.safe_dump(own))
    save = train(
        tiny, tmp_path, check_weight_update_equal=None, engine_python=vllm_python, engine_start_timeout=900,
        custom_generate_function_path="multi_agent", custom_config_path=tmp_path / "roles.yaml",
        apply_chat_template=None, lora_rank=4, lora_adapters=["solver", "critic"], lora_unmerged=True, lr="3e-2",
        rollout_stop_token_ids=list(range(128, 272)),  # else turns are cut, after which no other role speaks
    )  # fmt: skip
    trained = [line for line in metrics(save) if "train/loss" in line]
    assert all(sum(line[f"train/grad_norm/{name}"] for line in trained) > 0 for name in ("solver", "critic"))
    used = {s["train_metadata"]["adapter"] for s in samples(tmp_path / "samples" / "{rollout_id}.jsonl", 2)}
    assert used == {"solver", "critic"}
    whole = (tiny.root / "model/model.safetensors").stat().st_size
    assert max(line["perf/update_weights_wire_bytes"] for line in trained) < whole / 2
