"""Adapters in a torch model: `LoraLinear` in place of `nn.Linear`, and the exported weights.

Used by the embedded trainer. A model with adapters has the parameters `X.lora_A` and `X.lora_B` for every adapted
`X.weight`; `merged_weights` hides them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from slime_embedded.models.lora import LoraSettings, first_adapter, merged, module_of

DOWN, UP = "lora_A", "lora_B"
ADAPTERS = "adapters"
"""Folder of a checkpoint with a subfolder for each of `--lora-adapters`, and first part of the names of their weights
on the way to an engine."""


class LoraLinear(nn.Module):
    """`x W^T + b` with W = weight + scale * B A.

    Args:
        linear: Layer whose parameters become this module's, without a copy.
        down: [rank, in] float32, A.
        up: [out, rank] float32, B.
        scale: alpha / rank.
        merge: Multiply with the merged weight, as an engine does, instead of adding the adapter's output. Same results
            up to rounding, at rank / rows of the matrix product more.
    """

    def __init__(
        self, linear: nn.Linear, down: torch.Tensor, up: torch.Tensor, scale: float, *, merge: bool = False
    ) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A, self.lora_B = nn.Parameter(down), nn.Parameter(up)
        self.scale, self.merge = scale, merge
        self.adapted = True
        """Whether the adapter takes part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out]."""
        if not self.adapted:
            return functional.linear(x, self.weight, self.bias)
        if self.merge:
            result: torch.Tensor = _MergedLinear.apply(  # type: ignore[no-untyped-call]
                x, self.weight, self.lora_A, self.lora_B, self.bias, self.scale
            )
            return result
        added = functional.linear(functional.linear(x, self.lora_A), self.lora_B)
        return functional.linear(x, self.weight, self.bias) + added * self.scale

    def merged_weight(self) -> torch.Tensor:
        """Return the merged weight [out, in], a new tensor without gradient."""
        return merged(self.weight.detach(), self.lora_A.detach(), self.lora_B.detach(), self.scale)


class _MergedLinear(torch.autograd.Function):
    """Product with the merged weight; the backward pass recomputes the merged weight instead of keeping it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        bias: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, down, up)
        ctx.scale = scale
        return functional.linear(x, merged(weight, down, up, scale), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, down, up = ctx.saved_tensors
        rows, flat = x.flatten(0, -2), grad.flatten(0, -2)
        # With G = grad^T x the gradient of the merged weight: dA = scale B^T G and dB = scale G A^T.
        grad_x = grad.matmul(merged(weight, down, up, ctx.scale)) if ctx.needs_input_grad[0] else None
        grad_down = ctx.scale * flat.matmul(up).t().matmul(rows)
        grad_up = ctx.scale * flat.t().matmul(rows.matmul(down.t()))
        return grad_x, None, grad_down, grad_up, None, None


def add_adapters(
    model: nn.Module, lora: LoraSettings, seed: int, *, merge: bool = False, adapter: str = ""
) -> list[str]:
    """Put adapters into a model in place and freeze everything else; HF names of the adapted weights.

    Args:
        model: Its parameters have HF names.
        lora: Which, and of what rank.
        seed: The run's.
        merge: As for `LoraLinear`.
        adapter: Name of `--lora-adapters`, on which the first values depend; empty for the shared adapter.

    Raises:
        ConfigError: The targets do not fit the model.
    """
    model.requires_grad_(False)
    chosen = lora.select({name: tuple(p.shape) for name, p in model.named_parameters()})
    for name in chosen:
        parent, _, word = module_of(name).rpartition(".")
        owner = model.get_submodule(parent)
        linear = getattr(owner, word)
        assert isinstance(linear, nn.Linear), f"{name} is no linear layer"
        device = linear.weight.device
        drawn_for = f"{adapter}/{name}" if adapter else name
        down, up = first_adapter(drawn_for, linear.weight.shape, lora.rank, seed)
        setattr(owner, word, LoraLinear(linear, down.to(device), up.to(device), lora.scale, merge=merge))
    return chosen


def first_adapters(model: nn.Module, lora: LoraSettings, seed: int) -> dict[str, torch.Tensor]:
    """Return the first values of a model's shared adapters by name, as `add_adapters` sets them."""
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            pair = first_adapter(f"{name}.weight", module.weight.shape, lora.rank, seed)
            found |= dict(zip((f"{name}.{DOWN}", f"{name}.{UP}"), pair))
    return found


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Leave the adapters of a model out of its passes."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for layer in layers:
        layer.adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapted = True


def merged_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield HF names and tensors without gradient: merged weights of adapted layers, else the live weights."""
    adapted = dict(adapted_weights(model))
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] not in (DOWN, UP):
            yield name, adapted[name]() if name in adapted else parameter.detach()


def adapted_weights(model: nn.Module) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Yield the HF name of each adapted weight, and the function that returns the merged tensor."""
    return ((f"{name}.weight", m.merged_weight) for name, m in model.named_modules() if isinstance(m, LoraLinear))


def served_adapters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `MODULE.lora_A` and `MODULE.lora_B` without gradient, B times the scale, for engines that add them."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield f"{name}.{DOWN}", module.lora_A.detach()
            yield f"{name}.{UP}", module.lora_B.detach() * module.scale


def base_weights(model: nn.Module, *, adapters: bool = False) -> dict[str, torch.Tensor]:
    """Return live tensors by HF name: the weights without adapters, or only `MODULE.lora_A` and `.lora_B`."""
    found = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    return {name: tensor for name, tensor in found if (name.rpartition(".")[2] in (DOWN, UP)) is adapters}


adapter_weights = partial(base_weights, adapters=True)
