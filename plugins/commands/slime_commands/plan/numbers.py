"""Find the shape and the parameters of a run's model, from its files, or from a preset if it has no files yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_commands.plan.memory import Parameters
from slime_core.errors import ConfigError
from slime_core.models.family import DecoderShape, decoder_shape
from slime_core.protocols import Args


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
