"""Copy tensors of safetensors files into a live model; names and shapes are checked first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from slime_core.errors import CheckpointError


def read_into(
    files: Sequence[Path], into: Mapping[str, torch.Tensor], name_of: Callable[[str], str] = str, ignore: str = ""
) -> None:
    """Copy every tensor of the files into its namesake; names and shapes are checked before anything is changed.

    Args:
        files: Safetensors files.
        into: Live tensors; the files must have each of them.
        name_of: Stored name -> name in `into`.
        ignore: A name that `into` may lack.

    Raises:
        CheckpointError: A file cannot be read, or tensors are missing, unknown or of another shape.
    """
    try:
        found: dict[str, tuple[Path, str]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path in files:
            with safe_open(path, framework="pt") as file:
                for stored in file.keys():  # noqa: SIM118 -- safe_open is no mapping
                    name = name_of(stored)
                    if name in into or name != ignore:
                        found[name], shapes[name] = (path, stored), tuple(file.get_slice(stored).get_shape())
        check_shapes({name: tuple(t.shape) for name, t in into.items()}, shapes, ", ".join(map(str, files)))
        for path in files:
            with safe_open(path, framework="pt") as file, torch.no_grad():
                for name, (place, stored) in found.items():
                    if place == path:
                        into[name].copy_(file.get_tensor(stored))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{files[0]}: cannot be read: {error}") from error


def check_shapes(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], origin: str) -> None:
    """Raise CheckpointError with every tensor that is missing, unknown or of another shape."""
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"unknown {name}" for name in found if name not in expected]
    problems += [
        f"{name} has shape {list(found[name])}, the model needs {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        shown = "\n  ".join(problems[:20]) + (f"\n  ... {len(problems) - 20} more" if len(problems) > 20 else "")
        raise CheckpointError(f"{origin}: the tensors do not fit the model:\n  {shown}")
