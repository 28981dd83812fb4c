"""LoRA (Hu et al., 2021): which matrices of a model get adapters, their first values, and the merged weight.

Shared by the trainers; names are HF's, so an adapter is the same whatever trained it. A matrix W [out, in] becomes W +
scale * B A with A [rank, in], B [out, rank] and scale = alpha / rank; W is not trained. Engines and exports get the
merged weight, and `merged` is the one expression for it, so that what is served is bit for bit what
`true_on_policy_mode` trains with.

Adapters on disk have PEFT's format, `adapter_config.json` and `adapter_model.safetensors`. The trainers write them into
a checkpoint's `adapter/` and read them back on resume. `PeftModel.from_pretrained` loads the directory unchanged onto
the base model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from slime_core.errors import CheckpointError, ConfigError
from slime_core.models.hf_io import read_json
from slime_core.protocols import Args
from slime_embedded.models.stored import read_into

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


# -- files -----------------------------------------------------------------------------------------------

FOLDER = "adapter"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write_adapter(
    directory: Path, lora: LoraSettings, tensors: Mapping[str, torch.Tensor], modules: Iterable[str], base: str
) -> None:
    """Write both files.

    Args:
        directory: Created if missing.
        lora: Rank and alpha.
        tensors: float32 under `MODULE.lora_A` [rank, in] and `MODULE.lora_B` [out, rank].
        modules: Names of all modules of the model. `target_modules` lists the last parts of the adapted names if no
            other module has the same last part, else the whole names.
        base: The base model's directory or hub name.
    """
    directory.mkdir(parents=True, exist_ok=True)
    adapted = {name.rpartition(".")[0] for name in tensors}
    words = {name.rpartition(".")[2] for name in adapted}
    unique = all(name in adapted for name in modules if name.rpartition(".")[2] in words)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(words if unique else adapted),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    stored = {f"{_PREFIX}{name}.weight": tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    save_file(stored, directory / WEIGHTS, metadata={"format": "pt"})


def read_adapter(directory: Path, lora: LoraSettings, into: Mapping[str, torch.Tensor]) -> None:
    """Copy the stored adapters into `into`; names and shapes must match, and nothing is copied unless all do.

    Raises:
        CheckpointError: The adapters are missing, of other modules, or of another rank or alpha.
    """
    config = read_json(directory / CONFIG)
    pairs = (("--lora-rank", config.get("r"), lora.rank), ("--lora-alpha", config.get("lora_alpha"), lora.alpha))
    if problems := [f"{flag} was {then}, is {now}" for flag, then, now in pairs if then != now]:
        raise CheckpointError(f"{directory} does not fit this run: {', '.join(problems)}")
    read_into([directory / WEIGHTS], into, lambda stored: stored.removeprefix(_PREFIX).removesuffix(".weight"))
