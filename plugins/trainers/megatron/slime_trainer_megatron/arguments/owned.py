"""Fields of megatron-core's configurations that a user does not set, or not with effect, and why.

`flags.py` says so when one is given; `config.py` sets those that are slime's. Data only. A field in `OWNED` may be
given with the value that slime sets anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SCHEDULE_PLAN = "slime's forward step makes no schedule plan; remove it"
_LENGTHS = "lengths differ between micro-batches, and a CUDA graph needs one; remove it"
_FSDP = "slime wraps models in Megatron's DistributedDataParallel; remove it"
_MAMBA = "there are no Mamba models here; remove it"
_EXPORT = "weights are exported from parameters in bfloat16 or float32; remove it"
_DATA = "slime cuts sequences over context-parallel ranks by itself; remove it"
_STAGES = "set --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers for uneven stages"
_CLIP = "the step that clips is not slime's; remove it"

OWNED: Mapping[str, tuple[Any, str]] = {
    "variable_seq_lengths": (True, "lengths differ between micro-batches; remove it"),
    "average_in_collective": (False, "gradients are summed, and the loss is a mean already; remove it"),
    "use_megatron_fsdp": (False, _FSDP),
    "use_custom_fsdp": (False, _FSDP),
    "init_model_with_meta_device": (False, _FSDP),
    "data_parallel_sharding_strategy": ("no_shard", _FSDP),
    "outer_dp_sharding_strategy": ("no_shard", _FSDP),
    "num_distributed_optimizer_instances": (1, "the optimizer is spread over all data-parallel ranks; remove it"),
    "overlap_moe_expert_parallel_comm": (False, _SCHEDULE_PLAN),
    "delay_wgrad_compute": (False, _SCHEDULE_PLAN),
    "ep_overlap_early_attn_memory_release": (False, _SCHEDULE_PLAN),
    "enable_cuda_graph": (False, _LENGTHS),
    "external_cuda_graph": (False, _LENGTHS),
    "cuda_graph_impl": ("none", _LENGTHS),
    "hybrid_context_parallel": (False, _DATA),
    "max_seqlen_per_dp_cp_rank": (None, _DATA),
    "hierarchical_context_parallel_sizes": (None, _DATA),
    "moe_enable_routing_replay": (False, "set --use-routing-replay"),
    "pipeline_model_parallel_layout": (None, _STAGES),
    "mtp_standalone": (False, "Megatron sets it by itself; remove it"),
    "heterogeneous_block_specs": (False, "the model family's plugin brings its layers; remove it"),
    "is_hybrid_model": (False, _MAMBA),
    "mamba_state_dim": (128, _MAMBA),
    "mamba_head_dim": (64, _MAMBA),
    "mamba_num_groups": (8, _MAMBA),
    "mamba_num_heads": (None, _MAMBA),
    "use_mamba_mem_eff_path": (True, _MAMBA),
    "fp8_param": (False, _EXPORT),
    "fp4_param": (False, _EXPORT),
    "fp8_param_gather": (False, _EXPORT),
    "qk_clip": (False, _CLIP),
    "log_max_attention_logit": (False, _CLIP),
    "inference_rng_tracker": (False, "slime seeds the generators of model parallelism by itself; remove it"),
    "use_ring_exchange_p2p": (False, "it needs a torch of one's own; remove it"),
}
"""Field -> (the value it has here, what to do instead)."""

FOR_RL: Mapping[str, Any] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_bias_update_rate": 0.0,
    "moe_token_dispatcher_type": "alltoall",
}
"""Defaults where Megatron's are for pre-training: log-probs are the same in every pass, and experts are chosen as in
the engine's copy of the weights."""

_INFERENCE = "it concerns Megatron's own inference"
_FP16 = "it concerns loss scaling, which only --fp16 has"
_MUON = "it concerns the optimizer Muon, which --optimizer does not have"
_OLD = "Megatron itself ignores it"

NO_EFFECT: Mapping[str, str] = {
    "moe_extended_tp": _OLD,
    "async_tensor_model_parallel_allreduce": _OLD,
    "fp8_interval": _OLD,
    "barrier_with_L1_time": "slime has timers of its own",
    "cross_entropy_loss_fusion": "slime computes log-probs by itself",
    "cross_entropy_fusion_impl": "slime computes log-probs by itself",
    "log_num_zeros_in_grad": "slime's step does not count them",
    "flash_decode": _INFERENCE,
    "inference_sampling_seed": _INFERENCE,
    "inference_fuse_tp_communication": _INFERENCE,
    "use_inference_optimized_layers": _INFERENCE,
    "symmetric_ar_type": _INFERENCE,
    "mlp_chunks_for_prefill": _INFERENCE,
    "cache_mla_latents": _INFERENCE,
    "loss_scale": _FP16,
    "initial_loss_scale": _FP16,
    "min_loss_scale": _FP16,
    "loss_scale_window": _FP16,
    "hysteresis": _FP16,
    "muon_momentum": _MUON,
    "muon_split_qkv": _MUON,
    "muon_use_nesterov": _MUON,
    "muon_scale_mode": _MUON,
    "muon_fp32_matmul_prec": _MUON,
    "muon_num_ns_steps": _MUON,
    "muon_tp_mode": _MUON,
    "muon_extra_scale_factor": _MUON,
}
"""Field -> why setting it changes nothing; one warning."""

_TE = "it needs Transformer Engine"
_GPU = "it needs a GPU"

NOT_ON_CPU: Mapping[str, tuple[Any, str]] = {
    "transformer_impl": ("local", _TE),
    "attention_backend": ("auto", "slime's own attention runs there"),
    "gradient_accumulation_fusion": (False, "it needs Transformer Engine or Apex"),
    "masked_softmax_fusion": (False, _GPU),
    "bias_activation_fusion": (False, "it is compiled for GPUs"),
    "bias_dropout_fusion": (False, "it is compiled for GPUs"),
    "apply_rope_fusion": (False, _TE),
    "fused_single_qkv_rope": (False, _TE),
    "persist_layer_norm": (False, "it needs Apex"),
    "memory_efficient_layer_norm": (False, "it needs Apex"),
    "use_fused_weighted_squared_relu": (False, _GPU),
    "moe_grouped_gemm": (False, _TE),
    "moe_use_legacy_grouped_gemm": (False, _GPU),
    "moe_permute_fusion": (False, _TE),
    "moe_router_fusion": (False, _TE),
    "moe_enable_deepep": (False, "DeepEP needs GPUs"),
    "moe_shared_expert_overlap": (False, "it needs CUDA streams"),
    "tp_comm_overlap": (False, _TE),
    "use_te_rng_tracker": (False, _TE),
    "use_te_activation_func": (False, _TE),
    "batch_p2p_comm": (False, "gloo sends one by one"),
    "overlap_p2p_comm": (False, _GPU),
    "overlap_p2p_comm_warmup_flush": (False, _GPU),
    "cpu_offloading": (False, "activations are on the host already"),
    "fine_grained_activation_offloading": (False, "activations are on the host already"),
    "optimizer_cpu_offload": (False, "the optimizer is on the host already"),
    "overlap_cpu_optimizer_d2h_h2d": (False, "the optimizer is on the host already"),
    "use_precision_aware_optimizer": (False, "it needs Transformer Engine's Adam"),
    "nccl_ub": (False, "it needs nccl"),
    "use_cpu_initialization": (True, "there is no other device"),
    "distribute_saved_activations": (False, _GPU),
}
"""Field -> (its value on CPU, why): speed and memory only, so that a script for GPUs runs; one warning."""

REFUSED_ON_CPU: Mapping[str, tuple[Any, str]] = {
    "fp8": (None, _TE),
    "fp4": (None, _TE),
    "use_kitchen": (False, _GPU),
    "batch_invariant_mode": (False, "its kernels are for GPUs"),
    "attention_dropout": (0.0, "slime's own attention there has no dropout"),
}
"""Field -> (the only value on CPU, why): it changes what is computed."""
