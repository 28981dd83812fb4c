"""A plan's numbers -> seconds of a rollout on GPUs: floating point operations and bytes, divided by a GPU's rates.

A bound for samples of full length, not a measurement: shorter responses take less time, and gaps between kernels,
processes and steps take more. Training's operations are 2 per parameter and token forward, twice that backward
(Kaplan et al., 2020, "Scaling Laws for Neural Language Models"); decoding reads all weights and the cache once a token
(Pope et al., 2022, "Efficiently Scaling Transformer Inference").
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_commands.plan.memory import Parameters
from slime_core.errors import ConfigError
from slime_core.models.family import DecoderShape, decoder_shape
from slime_core.protocols import Args

GPU = "H100"
_FLOPS, _BYTES = 989e12, 3.35e12
"""Peak rates of an H100 SXM: bfloat16 FLOP/s without sparsity, and memory bandwidth in bytes/s."""
_OF_FLOPS, _OF_BYTES = 0.4, 0.6
"""Fractions of the peak rates that well-tuned trainers and engines reach."""


@dataclass(frozen=True)
class Seconds:
    """Seconds for one rollout of full length."""

    generate: float
    train: float

    def describe(self, overlap: bool) -> str:
        """Return the times as one readable line."""
        total = max(self.generate, self.train) if overlap else self.generate + self.train
        return (
            f"generate {_text(self.generate)}, train {_text(self.train)}, a rollout {_text(total)}: a roofline with"
            f" every sample at full length, {_OF_FLOPS:.0%} of {GPU}'s operations and {_OF_BYTES:.0%} of its bandwidth"
        )


def seconds(
    shape: DecoderShape,
    parameters: int,
    *,
    samples: int,
    prompt: int,
    response: int,
    running: int,
    trainers: int,
    engines: int,
    engine_size: int,
    extra_passes: int,
) -> Seconds:
    """Bound a rollout's time.

    Args:
        shape: Shape of the model; its operations count the experts that a token passes through.
        parameters: Number of elements that an engine reads for a token.
        samples: Samples of the rollout.
        prompt: Tokens of each prompt.
        response: Tokens of each response.
        running: Concurrent samples in an engine.
        trainers: GPUs for training.
        engines: Number of engines, of `engine_size` GPUs each.
        engine_size: GPUs of an engine.
        extra_passes: Forward passes besides the passes of the steps: old policy, reference, teacher.
    """
    forward = shape.forward_flops(prompt + response)
    train = samples * forward * (3 + extra_passes) / (max(1, trainers) * _FLOPS * _OF_FLOPS)
    per_token = 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    each = -(-samples // max(1, engines))
    together = max(1, min(running, each))
    waves = -(-each // together)
    read = 2 * parameters + together * per_token * (prompt + response / 2)
    decode = waves * response * read / (engine_size * _BYTES * _OF_BYTES)
    prefill = each * shape.forward_flops(prompt) / (engine_size * _FLOPS * _OF_FLOPS)
    return Seconds(decode + prefill, train)


def _text(value: float) -> str:
    return f"{value:.2g} s" if value < 100 else f"{value:,.0f} s"


def model_numbers(args: Args, trainer: Any) -> tuple[DecoderShape, Parameters, str]:
    """Return shape, parameters, and the source of the numbers (empty for the checkpoint's files).

    Raises:
        SlimeError, OSError, ValueError: The model does not exist, and neither `--model` nor the end of --hf-checkpoint
            names a preset; or its files cannot be read.
    """
    directory = Path(args.hf_checkpoint or "")
    parameters = Parameters.of_directory(directory)
    if parameters.total:
        return decoder_shape(directory, trainer), parameters, ""
    from slime_commands.models.presets import find_preset, model_presets

    if args.model:
        preset = find_preset(args.model)
    else:
        ends = {ending: one for one in model_presets().values() for ending in (one.name, one.hub.split("/")[-1])}
        known = {ending.lower(): one for ending, one in ends.items()}
        if directory.name.lower() not in known:
            why = "has no *.safetensors" if directory.is_dir() else "is not there"
            raise ConfigError(f"{directory} {why}; --model NAME plans without it (slime models list prints the names)")
        preset = known[directory.name.lower()]
    return *_of_preset(preset), f"{directory} has no weights yet: numbers of the preset {preset.name}"


def _of_preset(preset: Any) -> tuple[DecoderShape, Parameters]:
    """Return shape and parameters of a preset; the shape counts the experts per token, averaged over the layers."""
    from slime_commands.models.count import parameters

    n, experts, inner = preset.numbers, 0, preset.numbers.ffn_size
    if e := n.experts:
        experts = n.expert_layers * e.number * 3 * n.hidden_size * e.ffn_size
        inner += n.expert_layers * (e.per_token * e.ffn_size + e.shared_size - inner) // n.layers
    shape = DecoderShape(n.hidden_size, inner, n.vocab_size, n.layers, n.heads, n.kv_groups, n.head_size)
    return shape, Parameters(parameters(n), n.vocab_size * n.hidden_size * (1 if n.tied else 2), experts)
