"""LoRA (Hu et al., 2021): which matrices of a model get adapters, their first values, and the merged weight.

Shared by the trainers; names are HF's, so an adapter is the same whatever trained it. A matrix W [out, in] becomes W +
scale * B A with A [rank, in], B [out, rank] and scale = alpha / rank; W is not trained. Engines and exports get the
merged weight, and `merged` is the one expression for it, so that what is served is bit for bit what
`true_on_policy_mode` trains with.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from slime_core.errors import ConfigError
from slime_core.protocols import Args

ALL_LINEAR = "all-linear"
_EXPERT = ".experts."


@dataclass(frozen=True)
class LoraSettings:
    """The flags `--lora-...`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Last parts of module names, such as "q_proj"; or `ALL_LINEAR` alone."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank

    @classmethod
    def from_args(cls, args: Args) -> LoraSettings | None:
        """Return the settings; None without `--lora-rank`."""
        if args.lora_rank is None:
            return None
        alpha = args.lora_rank if args.lora_alpha is None else args.lora_alpha
        return cls(args.lora_rank, float(alpha), tuple(args.lora_target_modules))

    def select(self, shapes: Mapping[str, Sequence[int]]) -> list[str]:
        """HF names of the weights that get adapters, in the order given.

        `ALL_LINEAR` is every projection that all tokens go through: of attention, of dense feed-forward blocks and of
        shared experts; not embeddings, output layer, routers and routed experts.

        Args:
            shapes: HF name -> shape of every parameter of the model.

        Raises:
            ConfigError: A target names nothing here, or routed experts.
        """
        weights = [name for name, shape in shapes.items() if len(shape) == 2 and is_projection(name)]
        usable = [name for name in weights if _EXPERT not in name]
        if self.targets == (ALL_LINEAR,):
            chosen = usable
        else:
            self._check(usable, weights)
            chosen = [name for name in usable if _module_word(name) in self.targets]
        for name in chosen:
            if self.rank > min(shapes[name]):
                raise ConfigError(f"--lora-rank {self.rank}: {name} is {list(shapes[name])}, of no larger rank")
        return chosen

    def _check(self, usable: Iterable[str], weights: Iterable[str]) -> None:
        known = sorted({_module_word(name) for name in usable})
        experts = {_module_word(name) for name in weights if _EXPERT in name}
        for target in self.targets:
            if target in experts:
                raise ConfigError(
                    f"--lora-target-modules {target}: this model has routed experts of that name, which get none;"
                    f" allowed: {', '.join(word for word in known if word not in experts)}, or {ALL_LINEAR} alone"
                )
            if target not in known:
                raise ConfigError(
                    f"--lora-target-modules {target}: no such module in this model; allowed:"
                    f" {', '.join(known)}, or {ALL_LINEAR} alone"
                )


def is_projection(name: str) -> bool:
    """Whether an HF weight is the matrix of a projection (`q_proj`, `kv_a_proj_with_mqa`, `in_proj_qkvz`, ...)."""
    return name.endswith(".weight") and "proj" in _module_word(name)


def module_of(name: str) -> str:
    """ "model.layers.0.self_attn.q_proj.weight" -> "model.layers.0.self_attn.q_proj"."""
    return name.removesuffix(".weight")


def _module_word(name: str) -> str:
    """ "model.layers.0.self_attn.q_proj.weight" -> "q_proj"."""
    return module_of(name).rpartition(".")[2]


def first_adapter(name: str, shape: Sequence[int], rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in] uniform within 1 / sqrt(in) (Kaiming's with a = sqrt(5), as PEFT), B [out, rank] zeros; float32.

    Each matrix has random numbers of its own by name, so that a trainer which holds only some of them, or only a part
    of one, gets those of a trainer that holds all.

    Args:
        name: HF name of the adapted weight.
        shape: [out, in] of the whole weight.
        rank: Of the adapter.
        seed: The run's.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    bound = 1 / math.sqrt(shape[1])
    down = torch.empty(rank, shape[1]).uniform_(-bound, bound, generator=generator)
    return down, torch.zeros(shape[0], rank)


def merged(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """W [out, in] + scale * B [out, rank] @ A [rank, in], as a new tensor."""
    return torch.addmm(weight, up, down, alpha=scale)


def same_weight(stored: torch.Tensor, here: torch.Tensor, *, adapted: bool) -> bool:
    """Whether a weight of a checkpoint is the one that this run has, as far as the narrower of their dtypes shows.

    What has no adapter must be equal. A merged weight may be a hundredth of its largest number away, since another
    layout of the model or another device sums in another order.
    """
    if stored.shape != here.shape:
        return False
    narrow = min(stored.dtype, here.dtype, key=lambda dtype: dtype.itemsize)
    stored, here = stored.to(narrow), here.to(stored.device, narrow)
    if not adapted:
        return torch.equal(stored, here)
    apart, largest = (stored.float() - here.float()).abs().max(), here.float().abs().max()
    return bool(apart <= 1e-2 * largest)
