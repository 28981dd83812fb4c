"""`--moe-aux-loss-coeff`, `--moe-z-loss-coeff` and `--moe-router-bias-update-rate`, correct in every layout.

`model.py` patches the routers of a new model, `forward.py` calls this module for the losses of a step. Each loss is a
mean over the step's tokens, independent of micro-batches and ranks; `forward.py` `_scale_router_losses` scales it.

    load balancing, of a micro-batch of n tokens:  E / (k n^2) sum over experts of (probability x tokens that chose it)
    z-loss, of a token:                            logsumexp(router logits)^2

Nothing here runs unless the user sets an option; all three are 0 by default (`config.py` `FOR_RL`). Load balancing
counts the router's own choice, also with replayed experts. The bias counts the experts that were used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from slime_trainer_megatron.step.packed import PackedBatch
from slime_trainer_megatron.weights.parameters import unwrapped

_SUMS = "router_loss_sums"
"""Attribute of a router: metric -> its loss, before the coefficient, times tokens, summed over a step on this rank."""


def mend_routers(chunk: Any) -> None:
    """Replace what Megatron's routers compute wrongly here (transformer/moe/router.py)."""
    for router in _routers(chunk):
        router._apply_aux_loss = partial(_balanced, router, "aux_loss", "router_load_balancing_loss")
        router._apply_seq_aux_loss = partial(_balanced_sequence, router)
        router.apply_z_loss = partial(_z_loss, router)
        router._apply_expert_bias = partial(_count, router)


def _routers(chunk: Any) -> list[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for module in chunk.modules() if isinstance(module, TopKRouter)]


def _balanced(
    router: Any,
    kind: str,
    name: str,
    probs: torch.Tensor,
    scores: torch.Tensor,
    routing_map: torch.Tensor,
    with_padding_mask: bool = False,
) -> torch.Tensor:
    """Add the load balancing loss to the graph of `probs`.

    Megatron's own divides by the number of tokens, which is 0 in an idle micro-batch. Without a mask it weighs by the
    tokens of only one of the ranks that share the micro-batch (`get_tokens_per_expert_and_token_count`).
    """
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, switch_load_balancing_loss_func

    coefficient = router.get_aux_loss_coeff(kind)
    if not coefficient:
        return probs
    tokens = reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), router.tp_cp_group)
    total = tokens.sum() / router.topk
    loss = switch_load_balancing_loss_func(
        probs=scores,
        tokens_per_expert=tokens,
        total_num_tokens=total.clamp(min=1),
        topk=router.topk,
        num_experts=router.config.num_moe_experts,
        moe_aux_loss_coeff=coefficient,
        fused=router.config.moe_router_fusion,
    )
    _note(router, name, loss / coefficient * total)
    attached: torch.Tensor = MoEAuxLossAutoScaler.apply(probs, loss * total)
    return attached


def _balanced_sequence(
    router: Any,
    probs: torch.Tensor,
    scores: torch.Tensor,
    routing_map: torch.Tensor,
    seq_length: int,
    bsz: int,
    with_padding_mask: bool = False,
) -> torch.Tensor:
    """Add the sequence loss: a packed micro-batch is one row, so Megatron's sequence is the whole micro-batch."""
    assert bsz == 1, "micro-batches are packed"
    return _balanced(router, "seq_aux_loss", "router_seq_load_balancing_loss", probs, scores, routing_map)


def _z_loss(router: Any, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Add the z-loss to the graph of `logits`.

    Megatron's own divides by the number of ranks that share a micro-batch, although their gradients are summed.
    """
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    coefficient = router.config.moe_z_loss_coeff
    if not (coefficient and router.training and torch.is_grad_enabled()):
        return logits
    squares = logits.float().logsumexp(dim=-1).square()
    total = (squares if padding_mask is None else squares * ~padding_mask).sum()
    _note(router, "router_z_loss", total)
    attached: torch.Tensor = MoEAuxLossAutoScaler.apply(logits, coefficient * total)
    return attached


def _note(router: Any, name: str, value: torch.Tensor) -> None:
    sums = router.__dict__.setdefault(_SUMS, {})
    value = value.detach().double()
    sums[name] = sums[name] + value if name in sums else value


def _count(router: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    """Tokens per expert, for the update of the bias. Upstream's cannot take a mask: it is [tokens], the map is not."""
    if not (router.enable_expert_bias and torch.is_grad_enabled()):
        return
    with torch.no_grad():
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        router.local_tokens_per_expert += routing_map.sum(dim=0)


def router_losses(
    chunks: Sequence[Any], micro_batches: Sequence[PackedBatch], device: torch.device
) -> dict[str, float]:
    """Return a step's metrics `router_load_balancing_loss`, `router_seq_load_balancing_loss`, `router_z_loss`.

    Only losses with a coefficient are returned, without the coefficient, as means over the step's tokens and the layers
    with experts. Collective over all ranks; resets the sums.
    """
    from megatron.core import parallel_state

    config = unwrapped(chunks[0]).config
    routers = [router for chunk in chunks for router in _routers(chunk)]
    names = [name for name, coefficient in _coefficients(config).items() if coefficient]
    totals = torch.zeros(len(names) + 1, dtype=torch.float64, device=device)
    for router in routers:
        for name, value in router.__dict__.pop(_SUMS, {}).items():
            totals[names.index(name)] += value
    totals[-1] = len(routers) * sum(micro.num_tokens for micro in micro_batches)
    dist.all_reduce(totals)
    # Each rank that shares a micro-batch has a part of its loss, but counted all of its tokens.
    sharing = parallel_state.get_tensor_and_context_parallel_group().size()
    return {name: float(totals[i] / totals[-1]) * sharing for i, name in enumerate(names)}


def _coefficients(config: Any) -> dict[str, float]:
    """Return metric -> coefficient of the loss."""
    types, given = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    of_type = dict(zip(types, given, strict=True)) if isinstance(types, list) else {types: given}
    return {
        "router_load_balancing_loss": of_type.get("aux_loss", 0.0),
        "router_seq_load_balancing_loss": of_type.get("seq_aux_loss", 0.0),
        "router_z_loss": config.moe_z_loss_coeff or 0.0,
    }


def expert_biases(chunks: Sequence[Any]) -> list[torch.Tensor]:
    """Return the biases that a step changes (`--moe-router-bias-update-rate`), to restore after a skipped step."""
    config = unwrapped(chunks[0]).config
    if not (config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate):
        return []
    return [router.expert_bias for chunk in chunks for router in _routers(chunk)]
