"""Megatron's transformer layer with a norm also on the output of attention and of the feed-forward block.

`megatron.py` puts it in the layer specs. Imports Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import TransformerLayer


class SandwichLayer(TransformerLayer):  # type: ignore[misc]
    """x + norm(attention(norm(x))), then the same with the feed-forward block.

    Megatron adds an output to the residual stream in one place per block, `self_attn_bda` and `mlp_bda`; the norms
    come in there.
    """

    self_attn_bda: Any
    mlp_bda: Any

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        norm = _norm_of(submodules)
        size = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_self_attn_layernorm = build_module(norm, config=config, **size)
        self.post_mlp_layernorm = build_module(norm, config=config, **size)
        self.self_attn_bda = _after(self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda = _after(self.post_mlp_layernorm, self.mlp_bda)


def _norm_of(submodules: Any) -> Any:
    """The norm that the layer has anyway; Transformer Engine's has it inside of the linear layer behind it."""
    if submodules.input_layernorm is not IdentityOp:
        return submodules.input_layernorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _after(norm: Callable[[Any], Any], bias_dropout_add: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's function that adds an output to the residual stream, of the normed output."""

    def make(training: bool, fused: bool) -> Callable[..., Any]:
        add = bias_dropout_add(training, fused)

        def of_normed(output_with_bias: tuple[Any, Any], residual: Any, dropout: float) -> Any:
            output, bias = output_with_bias
            assert bias is None, "the norm would have to come after the bias"
            return add((norm(output), None), residual, dropout)

        return of_normed

    return make
