"""Routing and experts against a case worked out by hand in float64, and against autograd of a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from slime_embedded.models.batch_invariant import by_tile
from slime_embedded.models.feed_forward import MixtureOfExperts
from slime_embedded.models.routing import FREE, LayerRouting, Routing

from slime_core.models.config import MoEConfig


def mixture(normalizes: bool = True, *, hidden: int = 8, number: int = 5, per_token: int = 2) -> MixtureOfExperts:
    torch.manual_seed(0)
    module = MixtureOfExperts(hidden, MoEConfig(number, per_token, 6, normalizes, (0,)))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
    return module


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-np.float64(x))))


@pytest.mark.parametrize("normalizes", [True, False])
def test_a_case_by_hand(normalizes: bool) -> None:
    """Hidden size 1, three experts that scale: expert e makes silu(g_e x) * u_e x * d_e of x."""
    module = MixtureOfExperts(1, MoEConfig(3, 2, 1, normalizes, (0,)))
    gates, ups, downs, router = (1.0, 2.0, -1.0), (1.0, 0.5, 3.0), (2.0, 1.0, 1.0), (0.0, 1.0, 2.0)
    with torch.no_grad():
        module.gate.weight.copy_(torch.tensor(router)[:, None])
        for expert, g, u, d in zip(module.experts, gates, ups, downs, strict=True):
            for projection, value in ((expert.gate_proj, g), (expert.up_proj, u), (expert.down_proj, d)):
                projection.weight.fill_(value)
    x = 0.7

    def expert_of(e: int) -> float:
        return gates[e] * x * sigmoid(gates[e] * x) * ups[e] * x * downs[e]

    weights = np.exp(np.array(router) * x) / np.exp(np.array(router) * x).sum()

    def mixed(first: int, second: int) -> float:
        total = weights[first] + weights[second] if normalizes else 1.0
        return (weights[first] * expert_of(first) + weights[second] * expert_of(second)) / total

    rows = torch.full((3, 1), x)
    # Free: experts 2 and 1 have the largest probabilities. Replayed: 0 and 2 whatever the router says, in any order.
    given = torch.tensor([[FREE, FREE], [0, 2], [1, 2]])
    routing = LayerRouting(given)
    found = module(rows, routing)[:, 0].tolist()
    assert found == pytest.approx([mixed(1, 2), mixed(0, 2), mixed(1, 2)], rel=1e-6)
    assert found[1] != pytest.approx(found[0], rel=1e-3)
    assert routing.chosen is not None
    assert routing.chosen.tolist() == [[1, 2], [0, 2], [1, 2]]
    assert routing.mismatches is not None
    assert routing.mismatches.tolist() == [1.0, 2.0], "one of two replayed rows is not the router's own"
    assert module(rows)[:, 0].tolist() == pytest.approx([mixed(1, 2)] * 3, rel=1e-6)


def plain(module: MixtureOfExperts, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """One token at a time."""
    probabilities = torch.softmax(x @ module.gate.weight.T, -1)
    rows = []
    for row, probability, experts in zip(x, probabilities, chosen.tolist(), strict=True):
        weights = probability[experts] / (probability[experts].sum() if module.normalizes else 1.0)
        rows.append(sum(w * module.experts[e](row[None])[0] for w, e in zip(weights, experts, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("normalizes", [True, False])
def test_gradients_of_replayed_experts_are_those_of_a_plain_loop(normalizes: bool) -> None:
    module = mixture(normalizes).double()
    x = torch.randn(17, 8, dtype=torch.float64, requires_grad=True)
    chosen = torch.rand(17, 5).topk(2).indices
    grad = torch.randn(17, 8, dtype=torch.float64)
    inputs = [x, *module.parameters()]
    found = module(x, LayerRouting(chosen.sort(-1).values))
    expected = plain(module, x, chosen)
    # Router probabilities are taken in float32, as transformers does.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(y, inputs, grad, allow_unused=True) for y in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        if b is None:
            assert a is None or not a.any()
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_same_experts_give_the_same_bits_whoever_chose_them() -> None:
    module, x = mixture(), torch.randn(40, 8)
    noted = LayerRouting(None)
    free = module(x, noted)
    assert noted.chosen is not None
    again = Routing(noted.chosen.flip(-1)[:, None])
    assert torch.equal(module(x, again.of_layer(0, None)), free)
    assert again.mismatches().tolist() == [0.0, 40.0]


def test_in_tiles_a_row_does_not_depend_on_the_others() -> None:
    def in_tiles(function: object, rows: torch.Tensor) -> torch.Tensor:
        return by_tile(lambda tile: (function(tile),), rows)[0]  # type: ignore[operator]

    module, x = mixture(hidden=64, number=8), torch.randn(70, 64)
    whole = module(x, None, in_tiles)
    for rows in ([3], [69, 0, 11], list(range(33))):
        assert torch.equal(module(x[rows], None, in_tiles), whole[rows])
    torch.testing.assert_close(whole, module(x), rtol=1e-5, atol=1e-5)
