"""Tiny HF checkpoints of model families, and Megatron models of them in whatever layout the process is in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from slime_trainer_megatron.families import MegatronModel, critic_of, load_megatron_model

SIZES: Mapping[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", EXPERTS),
    "qwen3-moe-mixed": ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2, "norm_topk_prob": False}),
}
"""Name -> HF's `model_type`, and entries of `config.json`."""
DEEPSEEK = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 12, "max_position_embeddings": 64, "n_routed_experts": 8,
    "num_experts_per_tok": 4, "moe_intermediate_size": 16, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "initializer_range": 0.15,
    "tie_word_embeddings": False, "pad_token_id": None,
}  # fmt: skip


def save_tiny(directory: Path, variant: str, *, shard_size: str = "5GB", **overrides: Any) -> Any:
    """Write a random checkpoint; the model of transformers, float32, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, entries = FAMILIES[variant]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, "initializer_range": 0.1, **entries, **overrides})
    build: Any = AutoModelForCausalLM.from_config
    reference = build(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for tensor in reference.parameters():
            if tensor.dim() == 1:  # norms and biases start at constants
                tensor.add_(torch.randn(tensor.shape) * 0.1)
    reference.save_pretrained(directory, max_shard_size=shard_size)
    return reference


def save_deepseek(directory: Path) -> None:
    """Sigmoid scores, a bias for the choice, two of four groups, four of eight experts; the first layer dense."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    build: Any = AutoModelForCausalLM.from_config
    model = build(AutoConfig.for_model("deepseek_v3", **DEEPSEEK))
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.add_(0.2 * torch.randn(buffer.shape))
    model.save_pretrained(directory)


def chunks_of(
    model: MegatronModel, *, dtype: torch.dtype = torch.float32, role: str = "actor", padded: int = 64
) -> list[Any]:
    """This rank's chunks, in the layout of the process groups, which must be there.

    Args:
        model: Of the family.
        dtype: Of the parameters.
        role: "critic" has a value head.
        padded: Rows of the embedding over all tensor-parallel ranks.
    """
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from slime_trainer_megatron.cpu_mode import on_device
    from slime_trainer_megatron.model.build import ValueHead
    from slime_trainer_megatron.model.specs import block_spec

    architecture = model.architecture
    virtual = state.get_virtual_pipeline_model_parallel_world_size()
    latent = architecture.transformer.get("multi_latent_attention")
    chunks = []
    with on_device("cpu"):
        config = (MLATransformerConfig if latent else TransformerConfig)(
            **architecture.transformer,
            tensor_model_parallel_size=state.get_tensor_model_parallel_world_size(),
            pipeline_model_parallel_size=state.get_pipeline_model_parallel_world_size(),
            virtual_pipeline_model_parallel_size=virtual,
            expert_model_parallel_size=state.get_expert_model_parallel_world_size(),
            expert_tensor_parallel_size=state.get_expert_tensor_parallel_world_size(),
            sequence_parallel=state.get_tensor_model_parallel_world_size() > 1 and bool(architecture.num_experts),
            use_cpu_initialization=True,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            batch_p2p_comm=False,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            moe_grouped_gemm=False,
            moe_token_dispatcher_type="alltoall",
        )
        for stage in range(virtual) if virtual else [None]:
            last = state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
            chunk = GPTModel(
                config,
                block_spec(config, model, device=torch.device("cpu"), vp_stage=stage),
                vocab_size=padded,
                max_sequence_length=architecture.max_position_embeddings,
                pre_process=state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=last,
                share_embeddings_and_output_weights=architecture.tie_word_embeddings and role != "critic",
                position_embedding_type="rope",
                rotary_percent=architecture.rotary_percent,
                rotary_base=architecture.rotary_base,
                vp_stage=stage,
            )
            if role == "critic" and last:
                chunk.output_layer = ValueHead(config)
            chunks.append(chunk)
    return chunks


def family(directory: Path, role: str = "actor") -> MegatronModel:
    """The map of a checkpoint."""
    model = load_megatron_model(directory)
    return critic_of(model) if role == "critic" else model
