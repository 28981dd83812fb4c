"""Token positions -> rotary cosines and sines, and their application to queries and keys.

Both the embedded engine and the embedded trainer call this, so their rotations agree bit for bit.
The layout is the "half rotation" of HF transformers: coordinate `i` is paired with `i + head_dim / 2`, not with
its neighbour, and the cosines of the first half are repeated for the second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from slime_core.errors import ConfigError
from slime_core.models.config import ModelConfig

ROPE_TYPES = ("default", "linear", "llama3")


def rope_frequencies(config: ModelConfig, device: torch.device | str = "cpu") -> torch.Tensor:
    """[head_dim / 2] float32 angular frequencies in radians per position, `theta ** (-2 i / head_dim)` scaled.

    Raises:
        ConfigError: `rope_scaling` is of an unknown type or lacks a number its type needs.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    kind = "default" if scaling is None else str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind == "default":
        return frequencies
    assert scaling is not None
    if kind == "linear":
        return frequencies / _number(scaling, kind, "factor")
    if kind == "llama3":
        return llama3_frequencies(frequencies, scaling)
    raise ConfigError(f"config.json: rope_type {kind!r} is not supported; allowed: {', '.join(ROPE_TYPES)}")


def rope_cos_sin(
    config: ModelConfig,
    positions: torch.Tensor,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for `apply_rope`.

    Args:
        config: The architecture.
        positions: [T] int64 positions, counted from 0 in each sequence.
        device: Where the result lives.
        dtype: Of the result; the angles are always computed in float32.

    Returns:
        `(cos, sin)`, each [T, head_dim], second half equal to the first.
    """
    angles = positions.to(device).float()[:, None] * rope_frequencies(config, device)[None, :]
    return angles.cos().to(dtype).repeat(1, 2), angles.sin().to(dtype).repeat(1, 2)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys.

    Args:
        x: [..., T, heads, head_dim]; packed sequences are [T, heads, head_dim].
        cos: [..., T, head_dim] from `rope_cos_sin`, shared by all heads.
        sin: Like `cos`.

    Returns:
        Tensor of the shape of `x`: `x * cos + rotate_half(x) * sin` with `rotate_half(a, b) = (-b, a)`.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(-2) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(-2)


def llama3_frequencies(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1's rule: divide low frequencies by the factor, keep high ones, blend in between.

    Args:
        frequencies: Of plain rotary positions.
        scaling: HF's `rope_parameters` of type "llama3".

    Raises:
        ConfigError: A number is missing.
    """
    factor = _number(scaling, "llama3", "factor")
    low = _number(scaling, "llama3", "low_freq_factor")
    high = _number(scaling, "llama3", "high_freq_factor")
    context = _number(scaling, "llama3", "original_max_position_embeddings")
    wavelengths = 2 * math.pi / frequencies
    # 0 where a wavelength is longer than context / low (scaled), 1 where it is shorter than context / high (kept).
    kept = ((context / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies


def _number(scaling: Mapping[str, Any], kind: str, key: str) -> float:
    value = scaling.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"config.json: rope_type {kind!r} needs the number {key!r} in rope_parameters, got {value!r}")
    return float(value)
