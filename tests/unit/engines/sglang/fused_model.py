"""A model that holds its weights as inference servers do: fused, sharded, padded, stacked, transposed, tied."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from slime_engine_sglang.environment import SERVER_SIDE


def _plugin(name: str) -> Any:
    """A module of the servers' plugin, without putting it on the path of the tests."""
    path = SERVER_SIDE / "plugin" / "slime_sglang_plugin" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"tests.servers_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


read_back = _plugin("read_back")


@dataclass(frozen=True)
class Shape:
    """Of the trained model, and how it is served."""

    tp: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 2
    hidden: int = 6
    ffn: int = 8
    experts: int = 2
    vocab: int = 10
    padding: int = 8
    """The vocabulary is padded to a multiple of this."""
    tied: bool = True
    turned: bool = False
    """Experts are held transposed."""
    dtype: torch.dtype = torch.float32

    def trained(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """HF names and random tensors."""
        generator = torch.Generator().manual_seed(seed)
        d, h = self.hidden, self.head_dim
        shapes = {
            "embed.weight": (self.vocab, d),
            "q.weight": (self.heads * h, d),
            "k.weight": (self.kv_heads * h, d),
            "v.weight": (self.kv_heads * h, d),
            "o.weight": (d, self.heads * h),
            "norm.weight": (d,),
            "scale": (1,),
        }
        for i in range(self.experts):
            shapes |= {f"experts.{i}.gate": (self.ffn, d), f"experts.{i}.up": (self.ffn, d)}
            shapes |= {f"experts.{i}.down": (d, self.ffn)}
        if not self.tied:
            shapes["head.weight"] = (self.vocab, d)
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Embedding(torch.nn.Module):
    """Rows of the vocabulary, a part of them per rank, padded with zeros."""

    def __init__(self, shape: Shape, rank: int) -> None:
        super().__init__()
        rows = -(-shape.vocab // (shape.padding * shape.tp)) * shape.padding
        self.weight = torch.nn.Parameter(torch.zeros(rows, shape.hidden, dtype=shape.dtype), requires_grad=False)
        self.first, self.end = min(rank * rows, shape.vocab), min((rank + 1) * rows, shape.vocab)

    def load(self, loaded: torch.Tensor) -> None:
        """As vocabulary-parallel embeddings do."""
        loaded = loaded.narrow(0, self.first, self.end - self.first)
        self.weight[: loaded.shape[0]].data.copy_(loaded)
        self.weight[loaded.shape[0] :].data.fill_(0)


class FusedModel(torch.nn.Module):
    """One rank."""

    def __init__(self, shape: Shape, rank: int = 0) -> None:
        super().__init__()
        self.shape, self.rank = shape, rank

        def parameter(*size: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(size, dtype=shape.dtype), requires_grad=False)

        d, h, ffn = shape.hidden, shape.head_dim, shape.ffn // shape.tp
        self.q_rows = shape.heads // shape.tp * h
        self.kv_rows = max(1, shape.kv_heads // shape.tp) * h
        self.embed = Embedding(shape, rank)
        self.head = self.embed if shape.tied else Embedding(shape, rank)
        self.qkv = parameter(self.q_rows + 2 * self.kv_rows, d)
        self.o = parameter(d, self.q_rows)
        self.norm = parameter(d)
        self.scale = parameter(1)
        self.w13 = parameter(shape.experts, d, 2 * ffn) if shape.turned else parameter(shape.experts, 2 * ffn, d)
        self.w2 = parameter(shape.experts, ffn, d) if shape.turned else parameter(shape.experts, d, ffn)
        self.ready: torch.Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """In any order, any part of them."""
        tp, rank = self.shape.tp, self.rank
        for name, loaded in weights:
            part = name.split(".")[0]
            if part == "embed":
                self.embed.load(loaded)
            elif part == "head":
                if not self.shape.tied:
                    self.head.load(loaded)
            elif part == "q":
                self.qkv.data.narrow(0, 0, self.q_rows).copy_(loaded.narrow(0, rank * self.q_rows, self.q_rows))
            elif part in ("k", "v"):
                copies = max(1, tp // self.shape.kv_heads)
                begin = self.q_rows + (part == "v") * self.kv_rows
                mine = loaded.narrow(0, rank // copies * self.kv_rows, self.kv_rows)
                self.qkv.data[begin : begin + self.kv_rows] = mine
            elif part == "o":
                self.o.data.copy_(loaded.chunk(tp, dim=1)[rank].to(self.o.dtype).contiguous())
            elif part == "norm":
                self.norm.data.copy_(loaded)
            elif part == "scale":
                self.scale.data.fill_(loaded.item())
            elif part == "experts":
                self._load_expert(name, loaded)
        self.ready = self.norm.data * 2

    def _load_expert(self, name: str, loaded: torch.Tensor) -> None:
        _, number, kind = name.split(".")
        tp, rank, ffn = self.shape.tp, self.rank, self.shape.ffn // self.shape.tp
        place = (self.w2 if kind == "down" else self.w13).data[int(number)]
        if self.shape.turned:
            place = place.t()
        if kind == "down":
            place.copy_(loaded.chunk(tp, dim=1)[rank])
        else:
            place.narrow(0, (kind == "up") * ffn, ffn).copy_(loaded.narrow(0, rank * ffn, ffn))

    def contents(self) -> dict[str, Any]:
        """Everything that a load could change."""
        held = {f"parameter {n}": (p.data_ptr(), p.clone()) for n, p in self.named_parameters()}
        return held | {"ready": None if self.ready is None else (id(self.ready), self.ready.clone())}


def ranks(shape: Shape, trained: dict[str, torch.Tensor]) -> list[FusedModel]:
    """The processes of a server that serves the trained tensors."""
    models = [FusedModel(shape, rank) for rank in range(shape.tp)]
    for model in models:
        model.load_weights(iter(trained.items()))
    return models


def unchanged(model: FusedModel, before: dict[str, Any]) -> Iterator[bool]:
    """Whether each thing is what it was, at the place where it was."""
    for name, now in model.contents().items():
        then = before[name]
        yield now is then if now is None or then is None else now[0] == then[0] and torch.equal(now[1], then[1])
