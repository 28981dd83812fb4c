"""Routing of tokens to experts: given by the caller (routing replay), and recorded for the caller.

The trainer makes a `Routing` for a forward pass over packed tokens; every mixture-of-experts layer calls its
`LayerRouting`. Replaying the engine's experts in the trainer is "Rollout Routing Replay" (R3, Ma et al. 2025). Without
replay, if the two sides choose differently, log-probs of the same token differ by whole experts, not by rounding.

`FREE` marks a token of a layer without a given choice. The router chooses its experts, and this is no error (prompt
tokens without routing, tool output, dense layers).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

FREE = -1
"""Value in place of each expert number of a token whose experts the router chooses."""


@dataclass
class LayerRouting:
    """The routing of the rows that a layer computes."""

    replayed: torch.Tensor | None
    """Experts to replay, [rows, k] in ascending order; `FREE` in rows that the router decides; None: all rows."""
    chosen: torch.Tensor | None = None
    """Experts that were used, [rows, k], set by `choose`."""
    mismatches: torch.Tensor | None = None
    """[2]: number of replayed rows in which the router would choose another set, and of all replayed rows."""

    def choose(self, own: torch.Tensor) -> torch.Tensor:
        """Return the experts to use, [rows, k], given the router's own experts in ascending order."""
        used = own
        if self.replayed is not None:
            given = self.replayed[:, :1] >= 0
            used = torch.where(given, self.replayed, own)
            different = (used != own).any(dim=-1).sum()  # equal where the router decided
            self.mismatches = torch.stack((different, given.sum())).double()
        # Assigned, not added: a layer that is recomputed for its gradient calls this twice.
        self.chosen = used
        return used


@dataclass
class Routing:
    """The routing of a forward pass over T packed tokens."""

    replayed: torch.Tensor | None
    """Expert numbers to replay, [T, layers, k] int64; `FREE` where the router decides."""
    layers: dict[int, tuple[LayerRouting, torch.Tensor | None]] = field(default_factory=dict)
    """Layer number -> its routing, and the rows of the T that it computed; None: all rows."""

    def of_layer(self, layer: int, rows: torch.Tensor | None) -> LayerRouting:
        """Return the routing of layer number `layer`, which computes only `rows`, or all rows if None."""
        if layer not in self.layers:
            replayed = None
            if self.replayed is not None:
                replayed = self.replayed[:, layer] if rows is None else self.replayed[rows, layer]
                replayed = replayed.sort(dim=-1).values
            self.layers[layer] = LayerRouting(replayed), rows
        return self.layers[layer][0]

    def used(self, num_tokens: int, num_layers: int, per_token: int) -> torch.Tensor:
        """Return the used experts, [T, layers, k]; `FREE` if a layer has no experts or did not compute the token."""
        result = torch.full((num_tokens, num_layers, per_token), FREE, dtype=torch.int64)
        for number, (layer, rows) in self.layers.items():
            assert layer.chosen is not None, "the pass is over"
            where = slice(None) if rows is None else rows.cpu()
            result[where, number] = layer.chosen.cpu()
        return result

    def mismatches(self) -> torch.Tensor:
        """Return [2] float64: replayed (token, layer) pairs with another choice of the router, and all of them."""
        found = [layer.mismatches for layer, _ in self.layers.values() if layer.mismatches is not None]
        return torch.stack(found).sum(0) if found else torch.zeros(2, dtype=torch.float64)
