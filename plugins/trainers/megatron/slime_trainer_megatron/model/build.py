"""A model family's description -> this rank's part of the model, as Megatron modules.

Called by the trainer and by checkpoint conversion, after `ProcessGroups`. The weights are random until
`weights_in.load_hf` or a checkpoint fills them. A rank of a pipeline with virtual stages holds several chunks, and only
the first chunk of the first rank embeds, only the last of the last has logits.

The critic's output layer: one value per token instead of logits.

Put on the last pipeline stage by `model.py`. It takes the place of `ColumnParallelLinear` as `GPTModel.output_layer`
and is called like it. It is the same on all tensor-parallel ranks, and a fresh one is zero, not random, as in the
embedded trainer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from slime_embedded.models.rope import llama3_frequencies
from slime_embedded.trainer.shared_settings import Role
from torch import nn
from torch.nn import functional

from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_trainer_megatron.arguments.config import padded_vocab_size
from slime_trainer_megatron.cpu_mode import on_device
from slime_trainer_megatron.families.family import Architecture, MegatronModel
from slime_trainer_megatron.layout import Layout
from slime_trainer_megatron.model.specs import block_spec
from slime_trainer_megatron.process_groups import joined_device
from slime_trainer_megatron.step.balancing import mend_routers


def build_model(
    args: Args,
    model: MegatronModel,
    config: Any,
    layout: Layout,
    *,
    role: Role = "actor",
    provider: Callable[..., Any] | None = None,
) -> list[Any]:
    """Build the chunks of this rank's pipeline stage.

    Logits are [B, S, rows / tensor size], of this tensor-parallel rank's part of the vocabulary; values [B, S, 1].

    Args:
        args: The run's settings.
        model: Of the family.
        config: From `transformer_config`.
        layout: Of the groups that this process is in.
        role: A critic has a head for one value in place of the output layer.
        provider: `--custom-model-provider-path`: `(pre_process, post_process)` or, with virtual stages,
            `(pre_process, post_process, vp_stage)` -> a `GPTModel` or the like.

    Returns:
        One `GPTModel` per virtual stage, on this process's device, in training mode, not wrapped. Beside Megatron's
        own attributes each has `unpadded_vocab_size`: rows of the output matrix from there on belong to no token.

    Raises:
        ConfigError: The provider cannot build a chunk, or the model is split in a way Megatron refuses.
    """
    from megatron.core import parallel_state

    device = joined_device()
    chunks = []
    with on_device(device):
        for vp_stage in range(layout.virtual) if layout.virtual else [None]:
            place = {
                "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            }
            if provider is not None:
                chunk = _provided(provider, vp_stage, **place)
            else:
                chunk = _gpt(args, model, config, layout, role=role, device=device, vp_stage=vp_stage, **place)
            if role == "critic" and place["post_process"]:
                chunk.output_layer = ValueHead(config)
            if model.architecture.transformer.get("multi_latent_attention"):
                _mark_query_norms(chunk, config)
            if config.num_moe_experts:
                _mark_experts(chunk, layout)
                mend_routers(chunk)
            chunk.unpadded_vocab_size = model.architecture.vocab_size
            chunks.append(chunk.to(device))
    return chunks


def _gpt(
    args: Args,
    model: MegatronModel,
    config: Any,
    layout: Layout,
    *,
    role: Role,
    device: torch.device,
    vp_stage: int | None,
    pre_process: bool,
    post_process: bool,
) -> Any:
    from megatron.core.models.gpt import GPTModel

    architecture = model.architecture
    chunk = GPTModel(
        config,
        block_spec(config, model, device=device, vp_stage=vp_stage),
        vocab_size=padded_vocab_size(args, architecture.vocab_size, layout),
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        # A critic's head takes the output layer's place, so nothing of it is shared.
        share_embeddings_and_output_weights=architecture.tie_word_embeddings and role != "critic",
        position_embedding_type="rope",
        rotary_percent=architecture.rotary_percent,
        rotary_base=architecture.rotary_base,
        vp_stage=vp_stage,
    )
    _scale_rope(chunk, architecture)
    return chunk


def _scale_rope(chunk: Any, architecture: Architecture) -> None:
    """Llama 3's scaling with the numbers of config.json.

    Megatron's own (`rope_scaling=True`) fixes three of the four: factors 1 and 4 and a context of 8192 tokens.
    """
    if architecture.rope_scaling is None:
        return
    rotary = chunk.rotary_pos_emb
    rotary.inv_freq = llama3_frequencies(rotary.inv_freq, architecture.rope_scaling)


def _mark_query_norms(chunk: Any, config: Any) -> None:
    """Keep the gradient of MLA's query norm right without sequence parallelism.

    `finalize_model_grads.py` `_allreduce_non_tensor_model_parallel_grads` sums over tensor-parallel ranks whatever
    is named "q_layernorm", which is right where each rank norms its own heads. MLA norms the compressed query, whole
    on every rank, so the sum would be as many times too large; with this mark it is a mean of equals.
    """
    if not config.sequence_parallel:
        for name, parameter in chunk.named_parameters():
            if "q_layernorm" in name:
                parameter.average_gradients_across_tp_domain = True


def _mark_experts(chunk: Any, layout: Layout) -> None:
    """Sum experts' gradients over the ranks that hold the same experts.

    Megatron takes an expert for a dense layer where `--expert-model-parallel-size` is 1 (tensor_parallel/layers.py sets
    `allreduce` by that alone). With `--expert-tensor-parallel-size` other than the tensor size these are not the same
    ranks: every tensor-parallel rank would train its copy of the expert on its own tokens.
    """
    if layout.expert == 1 and layout.expert_tensor not in (None, layout.tensor):
        for name, parameter in chunk.named_parameters():
            if ".mlp.experts." in name:
                parameter.allreduce = False


def _provided(provider: Callable[..., Any], vp_stage: int | None, **place: bool) -> Any:
    takes = inspect.signature(provider).parameters
    by_name = "vp_stage" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values())
    if vp_stage is not None and not by_name:
        raise ConfigError(
            f"--custom-model-provider-path: {provider} takes no `vp_stage`, which virtual pipeline stages need"
        )
    chunk = provider(**place, **({"vp_stage": vp_stage} if by_name else {}))
    if not isinstance(chunk, torch.nn.Module):
        raise ConfigError(f"--custom-model-provider-path: {provider} returned {type(chunk).__name__}, not a module")
    return chunk


class ValueHead(nn.Module):
    """`weight` [1, hidden] and `bias` [1].

    Args:
        config: The `TransformerConfig`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.sequence_parallel: bool = config.sequence_parallel
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        for parameter in (self.weight, self.bias):
            # Each tensor-parallel rank then sees a part of the tokens, so the parts' gradients are summed.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """[S, B, hidden], or this rank's part of S under sequence parallelism -> [S, B, 1] float32, and no bias."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        values = functional.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            # Every rank computes the same loss of the whole, so the gradient of a part is a slice, not a sum.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
