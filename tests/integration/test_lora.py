"""Whole runs with `--lora-rank`: served merged, learned, resumed, and refused where nobody could train them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from slime_runs import Run
from slime_runs.index import Filter
from slime_testing_contracts.loop import LoopRun
from transformers import AutoTokenizer

from tests.backends.kill.runs import Kills
from tests.conftest import Slime, TinyRun
from tests.run_files import gaps, last_commit, metrics, timeless, trained
from tests.zygote import Zygote


def test_it_learns(run_loop: Callable[..., LoopRun]) -> None:
    run = run_loop(12, lr="3e-2", custom_rm_path="slime_testing_contracts.tiny.digits", lora_rank=8)
    rewards = run.metric("rollout/raw_reward")
    assert sum(rewards[:2]) / 2 < 0.1
    assert sum(rewards[-2:]) / 2 > 0.2


# -- several adapters --------------------------------------------------------------------------------------

BY_ROLE = '''
def by_role(args, samples, reward):
    """The same prompt to both; one is to end with a digit, the other with a letter."""
    wanted = {"figures": str.isdigit, "words": str.isalpha}
    return {name: float(wanted[name](sample.response[-1:])) for name, sample in samples.items()}
'''


@pytest.fixture
def policies(tiny: TinyRun, tmp_path: Path) -> dict[str, Any]:
    """Flags of a run of two roles with an adapter each, and turns that end with a digit or letter."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.root / "model")
    ends = [i for i in range(len(tokenizer)) if len(text := tokenizer.decode([i])) == 1 and text.isalnum()]
    (tmp_path / "by_role.py").write_text(BY_ROLE)
    roles = [{"name": name, "prompt": "{question}"} for name in ("figures", "words")]
    own = {"roles": roles, "order": ["figures", "words"], "reward_path": f"{tmp_path / 'by_role.py'}:by_role"}
    (tmp_path / "roles.yaml").write_text(yaml.safe_dump({"multi_agent": own}))
    return {
        "custom_generate_function_path": "multi_agent", "custom_config_path": tmp_path / "roles.yaml",
        "apply_chat_template": None, "rollout_stop_token_ids": ends, "lora_rank": 8, "lr": "3e-2",
        "lora_adapters": ["figures", "words"], "num_steps_per_rollout": 1,
    }  # fmt: skip


def scores(run: Path, rollout: int) -> dict[str, float]:
    found: dict[str, list[float]] = {"figures": [], "words": []}
    for sample in Run(run).samples(Filter(data_set="", rollout=rollout)):
        found[sample.row["metadata"]["role"]].append(float(sample.row["reward"]))
    return {role: sum(rewards) / len(rewards) for role, rewards in found.items()}


@pytest.mark.slow
def test_two_roles_learn_different_things_from_the_same_prompts(
    slime: Slime, tiny: TinyRun, tmp_path: Path, policies: dict[str, Any]
) -> None:
    flags = {**policies, "num_rollout": 8, "eval_interval": None, "eval_prompt_data": None}
    slime("train", *tiny.argv(tmp_path / "two", **flags, check_weight_update_equal=True))
    slime("train", *tiny.argv(tmp_path / "one", **{**flags, "lora_adapters": None}))
    assert min(scores(tmp_path / "two", 7).values()) > 0.7
    assert min(scores(tmp_path / "one", 7).values()) < 0.4, "one policy cannot do both after the same prompt"
    assert max(gaps(tmp_path / "two")) < 1e-4
    first = trained(tmp_path / "two")[0]
    assert min(first[f"train/grad_norm/{name}"] for name in ("figures", "words")) > 0 == first["train/grad_norm/shared"]


@pytest.mark.slow
def test_adapters_are_served_resumed_evaluated_and_exported(
    slime: Slime, refused: Any, tiny: TinyRun, tmp_path: Path, policies: dict[str, Any]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = {**policies, "true_on_policy_mode": True, "update_weight_transport": "disk", "num_rollout": 2}
    slime("train", *tiny.argv(whole, **flags, check_weight_update_equal=True))
    assert gaps(whole) == [0.0] * 2
    slime("train", *tiny.argv(parts, **{**flags, "num_rollout": 1}))
    slime("train", *tiny.argv(parts, **flags, load=parts))
    assert last_commit(parts) == last_commit(whole)
    assert timeless(parts)[-1] == timeless(whole)[-1]
    commit = max((whole / "checkpoints").glob("rollout_*"))
    model = ("--config", whole / "config.yaml", "--hf-checkpoint", commit, "--run-dir", tmp_path / "eval")
    slime("eval", *model)
    report = json.loads((tmp_path / "eval" / "eval.json").read_text())
    last = [line["eval/held"] for line in metrics(whole) if "eval/held" in line][-1]
    assert report["metrics"]["eval/held"] == last
    for form in ("merged", "peft"):
        done = slime("export", whole, "--format", form, "--adapter", "words", "-o", tmp_path / form)
        assert "largest difference of logits" in done.stdout
    words, figures = (
        load_file(commit / "adapters" / name / "adapter_model.safetensors") for name in ("words", "figures")
    )
    assert all(
        torch.equal(tensor, words[name])
        for name, tensor in load_file(tmp_path / "peft" / "adapter_model.safetensors").items()
    )
    assert any(not torch.equal(tensor, figures[name]) for name, tensor in words.items())
    base, merged = (
        load_file(tiny.root / "model" / "model.safetensors"),
        load_file(tmp_path / "merged" / "model.safetensors"),
    )
    assert {name for name in base if not torch.equal(base[name], merged[name])} == {n for n in base if "proj" in n}
    assert all(torch.equal(tensor, base[name]) for name, tensor in load_file(commit / "model.safetensors").items())
    said = refused("export", whole, "--format", "peft", "--adapter", "judge", "-o", tmp_path / "no")
    assert "--lora-adapters of the run: figures, words" in said


@pytest.mark.slow
def test_killed_with_several_adapters(tiny: TinyRun, tmp_path: Path, zygote: Zygote, policies: dict[str, Any]) -> None:
    """Once in the middle of a rollout, so that conversations are put back, and once before a commit."""
    kills = Kills(tiny, tmp_path, [zygote], flags=policies)
    kills.record()
    kills.check_all([["engine_step.step:begin#30"], ["commit_rename.rename:end#3"]])
    assert sum(kills.done.values()) == 2
