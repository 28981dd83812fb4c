"""Which experts each token goes through: given from outside (routing replay), and noted for the caller.

The trainer makes a `Routing` for a forward pass over packed tokens; every mixture-of-experts layer asks its
`LayerRouting`. Replaying the engine's experts in the trainer is "Rollout Routing Replay" (R3, Ma et al. 2025): where
the two sides would choose differently, log-probs of the same token differ by whole experts, not by rounding.

`FREE` marks a token of one layer for which nobody chose; the router chooses there, and that is no error (prompt tokens
without routing, tool output, dense layers).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

FREE = -1
"""Stands in place of each expert number of a token whose experts the router chooses."""


@dataclass
class LayerRouting:
    """The routing of the rows that one layer computes."""

    replayed: torch.Tensor | None
    """[rows, k] experts in ascending order, `FREE` in rows that the router decides; None: it decides all."""
    chosen: torch.Tensor | None = None
    """[rows, k] what was used, set by `choose`."""
    mismatches: torch.Tensor | None = None
    """[2] replayed rows in which the router would have chosen another set, and all replayed rows."""

    def choose(self, own: torch.Tensor) -> torch.Tensor:
        """[rows, k] the experts to use, given the router's own in ascending order."""
        used = own
        if self.replayed is not None:
            given = self.replayed[:, :1] >= 0
            used = torch.where(given, self.replayed, own)
            different = (used != own).any(dim=-1).sum()  # equal where the router decided
            self.mismatches = torch.stack((different, given.sum())).double()
        # Assigned, not added: a layer that is recomputed for its gradient comes by twice.
        self.chosen = used
        return used


@dataclass
class Routing:
    """The routing of one forward pass over T packed tokens."""

    replayed: torch.Tensor | None
    """[T, layers, k] int64 expert numbers, `FREE` where the router decides."""
    layers: dict[int, tuple[LayerRouting, torch.Tensor | None]] = field(default_factory=dict)
    """What each layer used, and which rows of the T it computed; None: all."""

    def of_layer(self, layer: int, rows: torch.Tensor | None) -> LayerRouting:
        """For layer number `layer`, which computes `rows` only, or all with None."""
        if layer not in self.layers:
            replayed = None
            if self.replayed is not None:
                replayed = self.replayed[:, layer] if rows is None else self.replayed[rows, layer]
                replayed = replayed.sort(dim=-1).values
            self.layers[layer] = LayerRouting(replayed), rows
        return self.layers[layer][0]

    def used(self, num_tokens: int, num_layers: int, per_token: int) -> torch.Tensor:
        """[T, layers, k] the experts used, `FREE` where a layer has none or did not compute the token."""
        result = torch.full((num_tokens, num_layers, per_token), FREE, dtype=torch.int64)
        for number, (layer, rows) in self.layers.items():
            assert layer.chosen is not None, "the pass is over"
            where = slice(None) if rows is None else rows.cpu()
            result[where, number] = layer.chosen.cpu()
        return result

    def mismatches(self) -> torch.Tensor:
        """[2] float64: replayed (token, layer) pairs whose router would have chosen another set, and all of them."""
        found = [layer.mismatches for layer, _ in self.layers.values() if layer.mismatches is not None]
        return torch.stack(found).sum(0) if found else torch.zeros(2, dtype=torch.float64)
