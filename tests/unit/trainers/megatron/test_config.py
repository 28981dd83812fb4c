"""What of the flags and the architecture reaches Megatron's configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from slime_commands.models.megatron_flags import megatron_flags
from slime_commands.models.presets import ModelPreset, model_presets
from slime_trainer_megatron.arguments.architecture import COMPARED, check_architecture
from slime_trainer_megatron.arguments.config import ddp_config, optimizer_config, padded_vocab_size, transformer_config
from slime_trainer_megatron.arguments.fields import ConfigField, known_fields
from slime_trainer_megatron.arguments.owned import NO_EFFECT, NOT_ON_CPU, OWNED, REFUSED_ON_CPU
from slime_trainer_megatron.families import Architecture, decoder_architecture
from slime_trainer_megatron.layout import Layout

from slime_core.config import Args
from slime_core.config.foreign import Lists, find_foreign, find_owners
from slime_core.config.settings import FLAG, Entry
from slime_core.config.spec import flag_specs
from slime_core.errors import ConfigError
from slime_core.plugins.manager import current_registry
from slime_core.plugins.resolve import resolve as resolve_plugin
from tests.sweeps import sweep

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HF = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "rms_norm_eps": 1e-6,
}  # fmt: skip
DENSE = decoder_architecture(HF)
MOE = decoder_architecture(HF, num_moe_experts=4, moe_ffn_hidden_size=32, moe_router_topk=2)


def settings(**flags: Any) -> Args:
    return Args(**{"hf_checkpoint": "none", **flags})


def model(architecture: Architecture = DENSE, *, device: torch.device = CPU, layout: Any = None, **flags: Any) -> Any:
    args = settings(**flags)
    return transformer_config(args, architecture, layout or Layout.from_args(args), device=device)


def test_defaults_are_those_of_rl_and_of_a_cpu() -> None:
    found = model(MOE)
    expected = {
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": False,
        "variable_seq_lengths": True, "calculate_per_token_loss": True, "batch_p2p_comm": False,
        "use_cpu_initialization": True, "params_dtype": torch.float32, "pipeline_dtype": torch.float32,
        "gradient_accumulation_fusion": False, "masked_softmax_fusion": False, "bias_activation_fusion": False,
        "bias_dropout_fusion": False, "transformer_impl": "local",
    }  # fmt: skip
    assert {name: getattr(found, name) for name in expected} == expected
    for name, (value, _) in NOT_ON_CPU.items():
        if hasattr(found, name):
            assert getattr(found, name) == (AttnBackend.auto if name == "attention_backend" else value)


NEEDS: dict[str, dict[str, Any]] = {
    "attention_softmax_in_fp32": {},
    "recompute_method": {"recompute_granularity": "full", "recompute_num_layers": 1},
    "recompute_num_layers": {"recompute_granularity": "full", "recompute_method": "block"},
    "recompute_modules": {"recompute_granularity": "selective"},
    "moe_pad_expert_input_to_capacity": {"moe_expert_capacity_factor": 2.0},
    "num_layers_in_first_pipeline_stage": {"pipeline_model_parallel_size": 2},
    "num_layers_in_last_pipeline_stage": {"pipeline_model_parallel_size": 2},
    "overlap_param_gather": {"overlap_grad_reduce": True},
    "defer_embedding_wgrad_compute": {"pipeline_model_parallel_size": 2, "gradient_accumulation_fusion": True},
    "decoupled_min_lr": {"decoupled_lr": 0.5},
    "moe_aux_loss_coeff": {},
}
"""Flag -> others that Megatron wants with it."""
VALUES: dict[str, Any] = {
    "recompute_modules": ["mlp"],
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_expert_capacity_factor": 2.0,
    "cuda_graph_scope": "attn",
    "offload_modules": ["attn_norm"],
    "cp_comm_type": "p2p",
    "fp8_recipe": "tensorwise",
    "fp4_recipe": "custom",
}

ONLY_WITH_ANOTHER = {
    "defer_embedding_wgrad_compute": ".* when gradient accumulation fusion is not used",
    "moe_router_padding_for_quantization": "fp8/fp4 must be specified",
    "moe_router_padding_for_fp8": "fp8/fp4 must be specified",
}


def _another(field: ConfigField) -> Any:
    """A value that is not the field's default."""
    if field.name in VALUES:
        return VALUES[field.name]
    if field.choices:
        return next(choice for choice in field.choices if choice != field.default)
    value = {"bool": not field.default, "int": 3, "float": 0.125, "str": "some_name"}[field.kind]
    return [value] if field.shape == "list" else value


def _of(owner: str) -> list[ConfigField]:
    skipped = {*OWNED, *NO_EFFECT, *NOT_ON_CPU, *REFUSED_ON_CPU, *COMPARED, *flag_specs()}
    layout = {
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
        "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
        "moe_token_dispatcher_type",
    }  # fmt: skip
    return [f for f in known_fields().fields.values() if owner in f.owners and f.name not in skipped | layout]


@sweep("field", _of("transformer"))
def test_every_field_given_by_a_flag_arrives_in_the_transformer_config(field: ConfigField) -> None:
    value = _another(field)
    flags = {**NEEDS.get(field.name, {}), field.name: value}
    if field.name in ONLY_WITH_ANOTHER:
        # Megatron was given it, and wants what a CPU has not.
        with pytest.raises(ConfigError, match=f"refuses the settings: {ONLY_WITH_ANOTHER[field.name]}"):
            model(MOE, **flags)
        return
    found = getattr(model(MOE, **flags), field.name)
    if field.name == "cuda_graph_scope":
        found = found[0].name
    assert found == value


@sweep("field, owner", [(field, owner) for owner in ("optimizer", "ddp") for field in _of(owner)])
def test_every_field_given_by_a_flag_arrives_in_the_other_configs(field: ConfigField, owner: str) -> None:
    value, made = _another(field), {"optimizer": optimizer_config, "ddp": ddp_config}[owner]
    args = settings(**{**NEEDS.get(field.name, {}), field.name: value})
    if field.name == "reuse_grad_buf_for_mxfp8_param_ag" and owner == "ddp":
        with pytest.raises(ConfigError, match="Reuse grad buffer only when keeping params in MXFP8"):
            made(args, device=CPU)
        return
    assert getattr(made(args, device=CPU), field.name) == value


def test_on_a_gpu_flags_keep_their_values() -> None:
    flags = {"bias_dropout_fusion": False, "attention_backend": "flash", "moe_token_dispatcher_type": "flex"}
    found = model(MOE, device=CUDA, dtype="float32", **flags)
    assert (found.bias_activation_fusion, found.bias_dropout_fusion) == (True, False)
    assert (found.attention_backend, found.moe_token_dispatcher_type) == (AttnBackend.flash, "flex")
    assert found.use_cpu_initialization is False
    assert found.batch_p2p_comm is True
    found = model(device=CUDA, dtype="float32", layout=Layout(pipeline=2, virtual=2))
    assert (found.overlap_p2p_comm, found.batch_p2p_comm) == (True, False)


def test_optimizer() -> None:
    flags = {"lr": 2e-6, "min_lr": 1e-7, "weight_decay": 0.1, "adam_beta2": 0.98, "clip_grad": 0.5, "critic_lr": 1e-5}
    found = optimizer_config(settings(**flags), device=CPU)
    assert {name: getattr(found, name) for name in flags if name != "critic_lr"} == {
        name: value for name, value in flags.items() if name != "critic_lr"
    }
    assert (found.optimizer, found.use_distributed_optimizer, found.bf16) == ("adam", True, False)
    with pytest.raises(ConfigError, match=r"--optimizer sgd: .* adam only; remove it"):
        optimizer_config(settings(**flags, optimizer="sgd"), device=CPU)
    assert optimizer_config(settings(**flags), role="critic", device=CPU).lr == 1e-5
    assert optimizer_config(settings(optimizer_cpu_offload=True), device=CPU).optimizer_cpu_offload is False
    assert optimizer_config(settings(use_distributed_optimizer=False), device=CPU).use_distributed_optimizer is False
    found = optimizer_config(settings(exp_avg_dtype="bf16", use_precision_aware_optimizer=True), device=CPU)
    assert (found.exp_avg_dtype, found.use_precision_aware_optimizer) == (torch.float32, False)


def test_gradients_are_summed_in_float32() -> None:
    assert ddp_config(settings(), device=CPU).grad_reduce_in_fp32 is False
    assert ddp_config(settings(bf16=True), device=CPU).grad_reduce_in_fp32 is True
    assert ddp_config(settings(bf16=True, grad_reduce_in_fp32=False), device=CPU).grad_reduce_in_fp32 is False
    with pytest.raises(ConfigError, match="--overlap-param-gather: needs --overlap-grad-reduce"):
        ddp_config(settings(overlap_param_gather=True), device=CPU)


@pytest.mark.parametrize(
    ("flags", "tensor", "rows"),
    [
        ({}, 1, 101),
        ({}, 2, 102),
        ({"make_vocab_size_divisible_by": 64}, 1, 128),
        ({"make_vocab_size_divisible_by": 64}, 4, 256),
        ({"padded_vocab_size": 128}, 2, 128),
    ],
)
def test_rows_of_the_embedding(flags: dict[str, Any], tensor: int, rows: int) -> None:
    assert padded_vocab_size(settings(**flags), 101, Layout(tensor=tensor)) == rows
    with pytest.raises(ConfigError, match=r"--padded-vocab-size .*: a multiple of 2 .* vocabulary, 101"):
        padded_vocab_size(settings(padded_vocab_size=103), 101, Layout(tensor=2))


# -- flags that state the architecture, against config.json ----------------------------------------------

OWNERS = find_owners(["--no-plugins"], {})[0]
WITH_FAMILY = [p for p in model_presets().values() if p.model_type in current_registry().names("megatron_models")]

QWEN3_MOE = "qwen3-30B-A3B"
DEEPSEEK = "deepseek-v3"


def architecture_of(hf: Mapping[str, Any]) -> Architecture:
    family = resolve_plugin("megatron_models", str(hf["model_type"]), origin="test")
    found: Architecture = family.obj(hf).architecture
    return found


def flags_of(preset: ModelPreset) -> dict[str, Any]:
    given = [(flag.replace("-", "_"), Entry(value, FLAG)) for flag, value in megatron_flags(preset).items()]
    assert all(find_foreign(OWNERS, name) for name, _ in given)
    return {name: entry.value for name, entry in Lists(OWNERS, {}).read(given).items()}


def check(preset: str, **flags: Any) -> None:
    hf = model_presets()[preset].config
    check_architecture(Args(**flags), hf, architecture_of(hf))


@sweep("preset", WITH_FAMILY)
def test_the_flags_of_every_preset_agree_with_its_family(preset: ModelPreset) -> None:
    flags = flags_of(preset)
    assert len(flags) >= 15
    check_architecture(Args(**flags), preset.config, architecture_of(preset.config))


MISMATCHES = [
    ("qwen3-4B", {"num_layers": 30}, "--num-layers 30: the model has 36 (num_hidden_layers)"),
    ("qwen3-4B", {"kv_channels": 80}, "--kv-channels 80: the model has 128 (head_dim)"),
    ("qwen3-4B", {"vocab_size": 152064}, "--vocab-size 152064: the model has 151936 (vocab_size)"),
    ("qwen3-4B", {"rotary_base": 1e4}, "--rotary-base 10000.0: the model has 1000000.0 (rope_theta)"),
    ("qwen3-4B", {"layernorm_epsilon": 1e-5}, "--norm-epsilon 1e-05: the model has 1e-06 (rms_norm_eps)"),
    ("qwen3-4B", {"untie_embeddings_and_output_weights": True}, "the model has tie_word_embeddings True"),
    ("qwen3-4B", {"qk_layernorm": False}, "--no-qk-layernorm: the model has True"),
    ("qwen3-4B", {"normalization": "LayerNorm"}, "--normalization LayerNorm: the model has RMSNorm"),
    ("qwen3-4B", {"swiglu": False}, "the model has another activation"),
    ("qwen3-4B", {"group_query_attention": False}, "the model has 8 key-value heads for 32 heads"),
    ("qwen3-4B", {"use_rope_scaling": True}, "the model has rope_scaling None"),
    ("qwen3-4B", {"num_moe_experts": 8}, "--num-moe-experts 8: the model has none"),
    ("qwen3-4B", {"window_size": [128, 0]}, "--window-size 128 0: the model has none (sliding_window)"),
    ("llama3.1-8B-Instruct", {"rope_scaling_factor": 4.0}, "--rope-scaling-factor 4.0: the model has rope_scaling"),
    (QWEN3_MOE, {"num_moe_experts": 64}, "--num-moe-experts 64: the model has 128"),
    (QWEN3_MOE, {"moe_shared_expert_intermediate_size": 9}, "the model has none"),
    (DEEPSEEK, {"moe_layer_freq": 1}, "--moe-layer-freq 1: the model has [0]*3+[1]*58"),
    (DEEPSEEK, {"moe_router_score_function": "softmax"}, "the model has sigmoid"),
    (DEEPSEEK, {"moe_router_group_topk": 2}, "--moe-router-group-topk 2: the model has 4 (topk_group)"),
    (DEEPSEEK, {"rotary_scaling_factor": 1.0}, "the model has 40.0 (rope_scaling.factor)"),
    (DEEPSEEK, {"rope_type": "rope"}, "--rope-type rope: the model has yarn"),
    ("qwen3-next-80B-A3B", {"full_attention_interval": 3}, "--full-attention-interval 3: the model has"),
]


@sweep("preset, flags, message", MISMATCHES)
def test_every_kind_of_mismatch_is_seen(preset: str, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(preset, **flags)
    head, line = str(caught.value).split("\n")
    assert head == "flags contradict the model's config.json, which is what is trained; remove or correct them:"
    assert message in line


@pytest.mark.parametrize(
    ("preset", "flags"),
    [
        ("qwen3-4B", {}),
        ("qwen3-4B", {"moe_router_num_groups": 1, "moe_shared_expert_intermediate_size": 0}),
        (QWEN3_MOE, {"ffn_hidden_size": 1}),  # no layer is dense
        (DEEPSEEK, {"moe_router_pre_softmax": False}),  # says nothing about sigmoid scores
        ("moonlight", {"beta_fast": 7.0, "moe_router_num_groups": 1, "moe_router_group_topk": 1}),
    ],
)
def test_flags_that_say_nothing_else_are_fine(preset: str, flags: dict[str, Any]) -> None:
    check(preset, **flags)
