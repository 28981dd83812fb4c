"""The servers' half of weight verification, run in this process on a model with fused and sharded parameters."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from slime_core.weights.checksum import tensor_checksum
from tests.unit.engines.sglang.fused_model import FusedModel, Shape, ranks, read_back, unchanged


def ask(model: torch.nn.Module, trained: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    wanted = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in trained.items()]
    found = {name: json.loads(text) for name, text in read_back.read_back(model, wanted).items()}
    return found, found.pop(read_back.FACTS)


def refusal(model: torch.nn.Module, trained: dict[str, torch.Tensor]) -> str:
    found, facts = ask(model, trained)
    assert not found
    return str(facts["refused"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (4, 1, 3)])
def test_checksums_are_those_of_slime(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).mul(9).to(dtype)
    assert read_back.checksum(tensor) == tensor_checksum(tensor)
    turned = tensor.permute(tuple(reversed(range(tensor.dim()))))
    assert read_back.checksum(turned) == tensor_checksum(turned)


def test_pieces_say_which_elements_are_held() -> None:
    shape = Shape(tp=2)
    trained = shape.trained()
    found, facts = ask(ranks(shape, trained)[1], trained)
    (size, stride, offset, checksum), *more = found["k.weight"]
    assert more == []
    rows = trained["k.weight"][2:]
    assert (size, stride, offset, checksum) == ([2, 6], [6, 1], 12, tensor_checksum(rows))
    ((size, stride, offset, checksum),) = found["o.weight"]
    assert (size, stride, offset) == ([6, 4], [8, 1], 4)
    assert checksum == tensor_checksum(trained["o.weight"][:, 4:])
    assert facts["parameters"]["qkv"] == facts["written"]["qkv"] == (4 + 2 + 2) * 6
    assert facts["stale"] == []


def test_nothing_is_changed() -> None:
    shape = Shape()
    (model,) = ranks(shape, shape.trained())
    before = model.contents()
    ask(model, shape.trained(seed=1))
    assert all(unchanged(model, before))


def test_what_the_loader_replaces_is_put_back() -> None:
    class Replacing(FusedModel):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(weights)
            self.norm.data = self.norm.data.clone()
            self.o = torch.nn.Parameter(self.o.data.t().contiguous(), requires_grad=False)
            self.cache = torch.ones(3)
            del self.qkv

    shape = Shape()
    model = Replacing(shape)
    before = model.contents()
    found, _ = ask(model, shape.trained())
    assert found["norm.weight"]
    assert all(unchanged(model, before))
    assert not hasattr(model, "cache")


def test_writes_to_anything_the_model_holds_are_held_back() -> None:
    class Deriving(FusedModel):
        def __init__(self, shape: Shape) -> None:
            super().__init__(shape)
            self.derived = torch.full((shape.hidden,), 7.0)
            self.register_buffer("kept", torch.full((shape.hidden,), 8.0))

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(weights)
            self.derived.copy_(self.norm.data * 2)
            self.kept.zero_()

    model = Deriving(Shape())
    _, facts = ask(model, Shape().trained())
    assert model.derived.tolist() == [7.0] * 6
    assert model.kept.tolist() == [8.0] * 6
    # What the loader derives from the weights is no longer what it would derive now, and that is said.
    assert facts["stale"] == ["derived"]


def test_a_tied_layer_answers_under_its_own_name() -> None:
    shape = Shape()
    trained = shape.trained()
    (model,) = ranks(shape, trained)
    found, _ = ask(model, trained | {"head.weight": trained["embed.weight"]})
    assert found["head.weight"] == found["embed.weight"] != []


def test_a_copy_inside_the_model_is_compared_with_its_origin() -> None:
    class Copying(FusedModel):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(weights)
            self.head.weight.data.copy_(self.embed.weight.data)

    shape = Shape(tied=False)
    trained = {k: v for k, v in shape.trained().items() if k != "head.weight"}
    model = Copying(shape)
    model.load_weights(iter(trained.items()))
    assert ask(model, trained)[1]["stale"] == []
    model.head.weight.data[0, 0] += 1
    assert ask(model, trained)[1]["stale"] == ["head.weight"]


def test_quantized_weights_are_refused_by_name() -> None:
    model = FusedModel(Shape())
    model.o = torch.nn.Parameter(torch.zeros(2, 2).to(torch.float8_e4m3fn), requires_grad=False)
    assert "parameter o is float8_e4m3fn: quantized" in refusal(model, {})


def test_reordered_weights_are_refused() -> None:
    model = FusedModel(Shape())
    model.embed.use_intel_amx_backend = True
    assert "embed holds its weights packed for AMX" in refusal(model, {})
    model.embed.use_intel_amx_backend = False
    model.embed.quant_method = type("Method", (), {"w13_swiglu_interleaved": True})()
    assert "reordered (w13_swiglu_interleaved)" in refusal(model, {})


class Odd(torch.nn.Module):
    """A loader that does one odd thing."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.how = how

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `how` says."""
        for _, loaded in weights:
            if self.how == "computes":
                self.w.data.copy_(loaded + 1)
            elif self.how == "in place":
                self.w.data.mul_(2)
            elif self.how == "the given":
                loaded.mul_(2)
            else:
                raise KeyError("no such layer")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("computes", "computes what it writes to w from the trained tensors"),
        ("in place", "computes in place on w (aten.mul_.Tensor)"),
        ("the given", "changes the tensors it is given"),
        ("raises", "its load_weights failed: KeyError: 'no such layer'"),
    ],
)
def test_loaders_that_cannot_be_followed_are_refused(how: str, said: str) -> None:
    model = Odd(how)
    assert said in refusal(model, {"w": torch.zeros(2, 2)})
    assert torch.equal(model.w, torch.ones(2, 2))
