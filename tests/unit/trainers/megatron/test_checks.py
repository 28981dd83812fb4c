"""What is said about flags, models and layouts before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from slime_trainer_megatron.checks import check_run

from slime_core.config import Args
from slime_core.errors import ConfigError
from tests.sweeps import sweep

QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    return tmp_path


def run(directory: Path, **flags: Any) -> list[str]:
    args = {"hf_checkpoint": str(directory), "device": "cpu", "train_backend": "megatron", **flags}
    return check_run(Args(**args))


def test_agreeing_flags_pass(directory: Path) -> None:
    flags = {"num_layers": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "swiglu": True}
    assert run(directory, **flags, num_layers_per_virtual_pipeline_stage=1) == []


@sweep(
    "flags, message",
    [
        ({"pipeline_model_parallel_size": 3}, "cannot be spread evenly over 3 stages"),
        ({"fp8": "hybrid"}, "--fp8-format hybrid: it needs Transformer Engine; on CPU remove it"),
        ({"moe_router_load_balancing_type": "global_aux_loss"}, "global_aux_loss: it waits in every layer"),
        ({"moe_router_load_balancing_type": "sinkhorn", "use_routing_replay": True}, "chooses experts for all tokens"),
        ({"moe_router_topk": 2}, "--moe-router-topk 2: the model has none"),
        ({"recompute_granularity": "selective", "recompute_num_layers": 1}, "parts of every layer are recomputed"),
        ({"only_train_params_name_list": ["nothing"]}, "--only-train-params-name-list: no parameter is left to train"),
        ({"freeze_params_name_list": ["linear_x"]}, "linear_x: no parameter has such a name; .*model.norm.weight"),
        ({"only_train_params_name_list": ["q_proj"]}, "Megatron keeps .*q_proj.* trained without the others"),
        ({"lora_rank": 2, "freeze_params_name_list": ["q_proj"]}, "Megatron keeps .*k_proj.lora_A.* in one parameter"),
        ({"lora_rank": 2, "lora_target_modules": ["attention"]}, "attention: no such module in this model; allowed"),
    ],
)
def test_contradictions(directory: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(directory, **flags)


def test_what_a_cpu_cannot_do_is_switched_off_with_one_warning(directory: Path) -> None:
    flags = {"attention_backend": "flash", "optimizer_cpu_offload": True, "bias_dropout_fusion": False}
    (said,) = run(directory, **flags, exp_avg_dtype="bf16", moe_token_dispatcher_type="flex")
    for flag in (
        "--attention-backend flash",
        "--optimizer-cpu-offload",
        "--exp-avg-dtype bf16",
        "dispatcher-type flex",
    ):
        assert flag in said
    assert run(directory, **flags, device="cuda") == []
    assert run(directory, moe_token_dispatcher_type="allgather", device="cuda") == [
        "--moe-token-dispatcher-type allgather: it needs sequences of one length; alltoall is used instead"
    ]


def test_flags_without_effect_are_one_warning_each(directory: Path) -> None:
    assert run(directory, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.0) == [
        f"without effect, since {directory} has no experts: --moe-aux-loss-coeff 0.1"
    ]
    assert run(directory, recompute_method="block", recompute_num_layers=2) == [
        "without effect with no --recompute-granularity: --recompute-method block, --recompute-num-layers 2"
    ]
    assert run(directory, recompute_granularity="full", recompute_method="block", recompute_num_layers=2) == []
    (said,) = run(directory, freeze_params_name_list=["embed", "lm_head"])
    assert said.startswith("--freeze-params-name-list lm_head: no parameter has such a name")
    assert run(directory, freeze_params_name_list=[r"decoder\.layers\.0\.", "linear_qkv"]) == [], "Megatron's names"
    assert run(directory, lora_rank=2, lora_target_modules=["q_proj"], only_train_params_name_list=["q_proj"]) == []


def test_a_critics_flags_are_checked_against_its_model(directory: Path) -> None:
    critic = directory / "critic"
    critic.mkdir()
    (critic / "config.json").write_text(json.dumps({**QWEN3, "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match="--num-layers 4: the model has 2"):
        run(directory, num_layers=4, critic_load=str(critic))
    assert run(directory, num_layers=4, critic_load=str(critic), role_settings={"critic": {"num_layers": 2}}) == []


def test_roles_share_their_processes(directory: Path) -> None:
    for role in ("critic", "actor"):
        said = f"the run has --tensor-model-parallel-size 1; the {role} has --tensor-model-parallel-size 2"
        with pytest.raises(ConfigError, match=f"actor and critic share their processes.*{said}"):
            run(directory, role_settings={role: {"tensor_model_parallel_size": 2}})


def test_all_that_is_wrong_is_said_at_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_trainer_megatron.installed.core_directory", lambda: None)
    with pytest.raises(ConfigError) as raised:
        run(directory, hidden_size=65, num_layers=5, tensor_model_parallel_size=3, fp8="hybrid")
    said = str(raised.value)
    for part in ("megatron-core is not installed", "--hidden-size 65", "--num-layers 5", "--fp8-format hybrid"):
        assert part in said
    assert "--tensor-model-parallel-size 3 does not divide the model's 4 attention heads" in said
