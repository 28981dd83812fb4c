"""Routing replay: use the experts of `TrainBatch.routed_experts` in the actor's passes through Megatron's layers.

`trainer.py` makes one `RoutingReplay` for the trained model. `forward.py` gives each micro-batch its `MicroRouting`,
which reaches every layer in `PackedSeqParams`. Megatron's routers get their experts from the object in `router_replay`
(transformer/moe/moe_utils.py `topk_routing_with_score_function`) and compute the experts' weights themselves: softmax
or sigmoid, with or without bias, groups and normalisation.

A pipeline alternates forward and backward passes of several micro-batches, and a recomputed layer runs in the middle of
them. So nothing counts calls: a layer identifies its micro-batch by its call's arguments, and keeps the experts that it
used there. For rows without replay (padding, `FREE`) the router decides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.protocols import Args
from slime_core.sample import TrainBatch
from slime_core.sample.routed_experts import FREE
from slime_trainer_megatron.process_groups import ProcessGroups
from slime_trainer_megatron.step.packed import PackedBatch
from slime_trainer_megatron.weights.parameters import unwrapped

MISMATCH = "routing_mismatch"
"""Metric: share of replayed (token, layer) pairs whose router would choose other experts."""


@dataclass
class MicroRouting:
    """The routing of one micro-batch in this rank's layers and rows."""

    rows: slice
    """Slice of the micro-batch's rows on this context-parallel rank; a part of them under sequence parallelism."""
    replayed: dict[int, torch.Tensor]
    """Layer -> [rows, k] int16 experts; `FREE` if the router decides."""
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    """Layer -> [rows, k] int16 experts that were used."""
    mismatches: dict[int, torch.Tensor] = field(default_factory=dict)
    """Layer -> [2]: number of replayed rows for which the router would choose another set, and of all replayed rows."""

    def choose(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        """Return [rows, k] int64 experts to use, given the router's own choice."""
        replayed = self.replayed[layer].to(torch.int64)
        assert replayed.shape == own.shape, f"layer {layer}: rows {tuple(own.shape)}, expected {tuple(replayed.shape)}"
        given = replayed[:, :1] >= 0
        used = torch.where(given, replayed, own)
        different = (used.sort(dim=-1).values != own.sort(dim=-1).values).any(dim=-1).sum()
        # Assigned, not added: a layer that is recomputed for its gradient calls this twice.
        self.mismatches[layer] = torch.stack((different, given.sum())).double()
        self.chosen[layer] = used.to(torch.int16)
        return used


class LayerReplay:
    """Source of experts for one layer's router; Megatron's name for such an object is `RouterReplay`."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.routing: MicroRouting | None = None
        """Routing of the micro-batch that the layer computes; None: the router decides."""

    @contextmanager
    def following(self, routing: MicroRouting | None) -> Iterator[None]:
        """Use the routing while the layer computes its micro-batch."""
        before, self.routing = self.routing, routing
        try:
            yield
        finally:
            self.routing = before

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [rows, k] scores and numbers of the experts to use; Megatron calls it with scores [rows, experts]."""
        assert default_compute_topk is not None
        own_scores, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.routing is None:
            return own_scores, own
        used = self.routing.choose(self.layer, own)
        return scores.gather(1, used), used


class RoutingReplay:
    """Replay in the layers of one model.

    Args:
        chunks: The model's chunks on this rank; their routers are changed to use the replay.
        groups: Process groups of this process.
    """

    def __init__(self, chunks: Sequence[Any], groups: ProcessGroups) -> None:
        config = unwrapped(chunks[0]).config
        self._groups, self._device = groups, groups.device
        self._splits_rows = bool(config.sequence_parallel)
        self._per_token = int(config.moe_router_topk)
        assert int(config.num_moe_experts) < 2**15, "numbers of experts are kept as int16"
        self.layers = sorted(layer for chunk in chunks for layer in _install(chunk))
        """Layers with experts on this rank."""
        self.all_layers = self._over_stages(int(config.num_layers))

    def _over_stages(self, num_layers: int) -> list[int]:
        """Return the layers with experts of the whole model."""
        has = torch.zeros(num_layers, dtype=torch.int32, device=self._device)
        has[self.layers] = 1
        dist.all_reduce(has, op=dist.ReduceOp.MAX, group=self._groups.pipeline_group)
        return torch.nonzero(has)[:, 0].tolist()

    # -- before a pass ---------------------------------------------------------------------------------

    def attach(self, batch: TrainBatch, micro_batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """Return the micro-batches with the batch's routing attached; idle micro-batches have no routing."""
        return [replace(micro, routing=self._of(batch, micro)) if micro.positions else micro for micro in micro_batches]

    def _of(self, batch: TrainBatch, micro: PackedBatch) -> MicroRouting:
        assert batch.routed_experts is not None
        width = micro.token_ids.shape[1]
        whole = np.full((len(self.layers), micro.num_tokens, self._per_token), FREE, dtype=np.int16)
        start = 0
        for position, length in zip(micro.positions, micro.lengths, strict=True):
            # A sample's last token has no row, since it predicts no token.
            rows = batch.routed_experts[position][:, self.layers]
            whole[:, start : start + length - 1] = rows.transpose(1, 0, 2)
            start += length
        here = np.full((len(self.layers), width, self._per_token), FREE, dtype=np.int16)
        here[:, micro.token_rows.cpu().numpy()] = whole[:, micro.token_places.cpu().numpy()]
        part = self._part(width)
        tensor = torch.from_numpy(here[:, part]).to(self._device)
        return MicroRouting(part, dict(zip(self.layers, tensor, strict=True)))

    def _part(self, width: int) -> slice:
        """Return the rows of this tensor-parallel rank's routers."""
        if not self._splits_rows:
            return slice(0, width)
        each = width // self._groups.tensor_size
        return slice(self._groups.tensor_rank * each, (self._groups.tensor_rank + 1) * each)

    # -- after a pass ----------------------------------------------------------------------------------

    def keep(self, batch: TrainBatch, micro_batches: Sequence[PackedBatch]) -> None:
        """Write the experts that the pass used where the batch has none, in place and the same on every rank."""
        assert batch.routed_experts is not None
        for micro in micro_batches:
            # All ranks of a replica have the same batch, so all of them go on, or none.
            if not any((batch.routed_experts[p][:, self.all_layers] == FREE).any() for p in micro.positions):
                continue
            used = self._whole(micro)
            start = 0
            for position, length in zip(micro.positions, micro.lengths, strict=True):
                array = batch.routed_experts[position]
                known, found = array[:, self.all_layers], used[start : start + length - 1]
                array[:, self.all_layers] = np.where(known == FREE, found, known)
                start += length

    def _whole(self, micro: PackedBatch) -> np.ndarray:
        """Return [L, layers with experts, k] experts used for the samples' tokens, from all stages and all rows."""
        routing: MicroRouting = micro.routing
        shape = (micro.num_tokens, len(self.all_layers), self._per_token)
        # Every entry is on one rank (or on equal ones), and the others have FREE, which is less than any number.
        whole = torch.full(shape, FREE, dtype=torch.int32, device=self._device)
        here = (micro.token_rows >= routing.rows.start) & (micro.token_rows < routing.rows.stop)
        rows, places = micro.token_rows[here] - routing.rows.start, micro.token_places[here]
        for layer in self.layers:
            whole[places, self.all_layers.index(layer)] = routing.chosen[layer][rows].int()
        groups = self._groups
        wanted = [(self._splits_rows, groups.tensor_group), (groups.context_size > 1, groups.context_group)]
        for splits, group in [*wanted, (groups.pipeline_size > 1, groups.pipeline_group)]:
            if splits:
                dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
        return whole.cpu().numpy()

    def mismatch(self, micro_batches: Sequence[PackedBatch]) -> float:
        """Return `routing_mismatch` of a pass over all ranks."""
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        for micro in micro_batches:
            if micro.routing is not None:
                total = sum(micro.routing.mismatches.values(), start=total)
        # Where tensor-parallel ranks count the same rows, both numbers are as many times too large.
        dist.all_reduce(total)
        return float(total[0]) / max(float(total[1]), 1.0)


def _install(chunk: Any) -> list[int]:
    """Connect the chunk's routers and layers to `LayerReplay` objects. Return the numbers of the layers."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    found = []
    for layer in unwrapped(chunk).decoder.layers:
        if not isinstance(layer.mlp, MoELayer):
            continue
        asked = LayerReplay(layer.layer_number - 1)
        layer.mlp.router.router_replay = asked
        layer.register_forward_pre_hook(_Begins(asked), with_kwargs=True)
        layer.register_forward_hook(_Ends(asked), always_call=True)
        if layer.mlp.moe_layer_recompute:
            layer.mlp.forward = _Remembering(layer.mlp, asked)
        found.append(asked.layer)
    return found


class _Begins:
    """Hook at the start of a layer's call; a recomputation has the same arguments as the first call."""

    def __init__(self, asked: LayerReplay) -> None:
        self._asked = asked

    def __call__(self, module: Any, args: Args, kwargs: dict[str, Any]) -> None:
        self._asked.routing = getattr(kwargs.get("packed_seq_params"), "routing", None)


class _Ends:
    """Hook at the end of a layer's call, so that a router called outside a layer decides freely."""

    def __init__(self, asked: LayerReplay) -> None:
        self._asked = asked

    def __call__(self, module: Any, args: Args, output: Any) -> None:
        self._asked.routing = None


class _Remembering:
    """Wrapper of `MoELayer.forward` for `--recompute-modules moe`, which reruns the router without a layer call.

    A closure over the module runs again and calls the module's `route` (transformer/moe/moe_layer.py
    `custom_forward`). So every forward pass gets its own copy of the module, with a `route` that remembers.
    """

    def __init__(self, module: Any, asked: LayerReplay) -> None:
        self._module, self._asked = module, asked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, asked, routing = self._module, self._asked, self._asked.routing

        def route(*inputs: Any, **named: Any) -> Any:
            with asked.following(routing):
                return type(module).route(module, *inputs, **named)

        again = copy.copy(module)
        again.route = route
        return type(module).forward(again, *args, **kwargs)
