"""What cannot be obeyed ends `slime train` with one line, before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import TinyRun
from tests.sweeps import sweep

FILES = {
    "wrong.py": "def reward(sample):\n    return 0.0\n",
    "old.py": "from slime.ray.rollout import RolloutManager\n\nasync def reward(args, sample): ...\n",
    "other.py": "from tests.toy_trainer import ToyTrainer\n\nclass Other(ToyTrainer):\n    pass\n",
    "roles.yaml": "multi_agent:\n  roles: [{name: solver, adapter: c}]\n  order: [solver]\n",
    "bad.jsonl": '{"input": "1+1=?", "label": "2"}\n{not json\n',
}
MOE = {"hf_checkpoint": "{moe}/model"}
TWO: dict[str, Any] = {"lora_rank": 4, "lora_adapters": ["a", "b"]}
EXACT = {"true_on_policy_mode": True}
LATE = {"prompt_data", "lora_target_modules"}
"""Found once data and model are read, when the directory is there."""
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"rollout_bach_size": 4}, ["--rollout-batch-size"]),
    ({"advantage_estimator": "grop"}, ["grpo"]),
    ({"train_backend": "embeded"}, ["embedded"]),
    ({"hf_checkpoint": "nowhere"}, ["no HF-layout model"]),
    ({"prompt_data": "{folder}/bad.jsonl"}, ["bad.jsonl:2"]),
    ({"update_weight_transport": "detla"}, ["no weight_transports plugin 'detla'", "'delta'"]),
    ({"shadow_filter_path": "none_such"}, ["--shadow-filter-path", "none_such"]),
    ({"custom_rm_path": "nowhere.py"}, ["nowhere.py"]),
    ({"custom_rm_path": "{folder}/wrong.py"}, ["(args, sample", "(sample)"]),
    ({"custom_rm_path": "{folder}/old.py"}, ["slime-compat has no slime.ray", "{folder}/old.py"]),
    ({"custom_rm_path": None, "rm_type": "remote_rm"}, ["--rm-url"]),
    ({"custom_rm_path": None, "rm_type": "llm_judge"}, ["plugins.llm_judge.url"]),
    ({"custom_rm_path": None, "rm_type": "weighted_sum"}, ["plugins.weighted_sum.terms"]),
    ({"custom_rm_path": None, "rm_type": "boxed_mth"}, ["math"]),
    ({"lora_rank": 4, "lora_target_modules": ["qproj"]}, ["--lora-target-modules qproj"]),
    ({"lora_rank": 4, "train_backend": "{folder}/other.py:Other"}, ["--lora-rank 4 (flag) has no effect with"]),
    ({"lora_adapters": ["a"]}, ["--lora-adapters 'a'", "without --lora-rank"]),
    (TWO | {"lora_adapters": ["a", "a"]}, ["--lora-adapters", "once"]),
    (TWO | {"train_backend": "{folder}/other.py:Other"}, ["--lora-adapters 'a' 'b'", "does not choose among adapters"]),
    (TWO | {"train_backend": "fsdp"}, ["--lora-adapters 'a' 'b'", "type --train-backend embedded"]),
    (
        TWO | {"rollout_engine": "http", "rollout_external_engine_addrs": "127.0.0.1:1"},
        ["--lora-adapters 'a' 'b'", "type --rollout-engine embedded"],
    ),
    (TWO | {"keep_old_actor": True}, ["--keep-old-actor", "copies one model"]),
    (
        TWO | {"custom_generate_function_path": "multi_agent", "custom_config_path": "{folder}/roles.yaml"},
        ["role 'solver': adapter 'c'; --lora-adapters has a b"],
    ),
    (
        {"lora_rank": 4, "lora_adapters": ["critic", "judge"], "custom_generate_function_path": "multi_agent"},
        ["--lora-adapters judge: no role of multi_agent has this name"],
    ),
    ({"lora_rank": 4, "lora_unmerged": True}, ["--lora-unmerged", "takes merged weights only"]),
    (EXACT | {"partial_rollout": True}, ["--true-on-policy-mode", "--partial-rollout"]),
    (EXACT | {"use_tis": True}, ["--true-on-policy-mode", "--use-tis"]),
    (EXACT | {"dtype": "bfloat16"}, ["--true-on-policy-mode", "float32"]),
    (
        EXACT | {"rollout_engine": "http", "rollout_external_engine_addrs": "127.0.0.1:1"},
        ["--true-on-policy-mode", "does not compute the same bits"],
    ),
    ({"use_routing_replay": True}, ["--use-routing-replay", "dense model"]),
    ({"use_rollout_routing_replay": True}, ["routing-replay", "dense model"]),
    (MOE | {"use_routing_replay": True, "loss_type": "sft_loss"}, ["routing-replay", "policy_loss"]),
    (MOE | {"use_routing_replay": True, "proximal_policy": "interpolate"}, ["--use-rollout-routing-replay"]),
    (MOE | {"use_rollout_routing_replay": True, "no_use_routing_replay": True}, ["routing-replay", "contradicts"]),
    (
        MOE | {"use_routing_replay": True, "train_backend": "tests.toy_trainer:ToyTrainer"},
        ["cannot replay routing"],
    ),
    (
        MOE | {"use_rollout_routing_replay": True, "rollout_engine": "slime_testing_probes.scripted:ScriptedEngine"},
        ["routing-replay", "does not say which experts"],
    ),
]


@sweep("changes, said", REFUSED)
def test_it_is_said_before_anything_starts(
    changes: dict[str, Any],
    said: list[str],
    tiny: TinyRun,
    tiny_moe: TinyRun,
    tmp_path: Path,
    refused: Callable[..., str],
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)

    def placed(value: Any) -> Any:
        return value.format(folder=tmp_path, moe=tiny_moe.root) if isinstance(value, str) else value

    run = tmp_path / f"run-{len([*tmp_path.iterdir()])}"
    message = refused("train", *tiny.argv(run, **{name: placed(v) for name, v in changes.items()}))
    assert [words for words in map(placed, said) if words not in message] == [], message
    assert run.exists() == (not LATE.isdisjoint(changes))
    assert not (run / "metrics.jsonl").exists()
