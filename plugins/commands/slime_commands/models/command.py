"""`slime models` (train): list the architecture numbers of published models, for --model; import a GGUF file.

Only the import loads torch. A preset is no checkpoint. It saves stating numbers by hand and is compared with
config.json when a run starts; the columns "embedded" and "megatron" say which trainer has a plugin for the family, and
"transformers" that the embedded trainer and engine take it from there.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.protocols import Command
from slime_core.text import json_text, plain

if TYPE_CHECKING:
    from slime_commands.models.presets import ModelPreset

_KINDS = {"embedded": "models", "megatron": "megatron_models"}
"""Column of `slime models list` -> kind of the plugins that describe a family to such a trainer."""
_TRANSFORMERS = "transformers"
"""Column for families that the embedded trainer and engine take from transformers (`--model-impl`)."""


def add_parser(subparsers: Any) -> None:
    """Define `slime models` and its sub-commands."""
    text = "the architecture numbers of published models; import a GGUF file"
    parser = subparsers.add_parser("models", help=text, description=text)
    commands = parser.add_subparsers(dest="models_command", required=True, metavar="COMMAND")
    listed = commands.add_parser("list", help="every preset", description="every preset, and which trainers know it")
    listed.add_argument("--json", action="store_true", help="print JSON")
    shown = commands.add_parser("show", help="one preset's numbers, parameters and FLOPs")
    shown.add_argument("name")
    shown.add_argument("--length", type=int, default=4096, metavar="TOKENS", help="for FLOPs (default %(default)s)")
    shown.add_argument("--json", action="store_true", help="print JSON")
    printed = commands.add_parser("args", help="Megatron's flags of one preset, as the bash array MODEL_ARGS")
    printed.add_argument("name")
    text = "a GGUF file as a model directory in Hugging Face layout"
    imported = commands.add_parser("import", help=text, description=f"{text}; quantized weights are dequantized")
    imported.add_argument("file", metavar="FILE.gguf", help="of a family that transformers reads")
    imported.add_argument("directory", metavar="DIR", help="new directory")
    dtypes = ("float32", "bfloat16", "float16")
    imported.add_argument("--dtype", choices=dtypes, default="float32", help="of the weights (default %(default)s)")


def run(namespace: argparse.Namespace) -> int:
    """Print, or import. Raises ConfigError for a name without preset and a file that cannot be read."""
    from slime_commands.models.megatron_flags import bash_array, megatron_flags
    from slime_commands.models.presets import find_preset, model_presets
    from slime_core.errors import ConfigError

    if namespace.models_command == "list":
        _print_list(list(model_presets().values()), as_json=namespace.json)
        return 0
    if namespace.models_command == "import":
        from slime_commands.models.gguf_import import import_gguf

        print(plain(import_gguf(Path(namespace.file), Path(namespace.directory), namespace.dtype)))
        return 0
    preset = find_preset(namespace.name)
    if namespace.models_command == "args":
        print(bash_array(megatron_flags(preset)), end="")
        return 0
    if namespace.length < 1:
        raise ConfigError(f"slime models show: --length {namespace.length} must be at least 1")
    facts = _facts(preset, namespace.length)
    if namespace.json:
        print(json_text(facts, indent=2))
    else:
        width = max(map(len, facts))
        print("\n".join(f"{key:<{width}}  {_text(value)}" for key, value in facts.items() if value is not None))
    return 0


def _print_list(presets: list[ModelPreset], *, as_json: bool) -> None:
    from slime_commands.models.count import active_parameters, parameters
    from slime_core.plugins.manager import current_registry
    from slime_core.text import table

    names = {trainer: {ref.name for ref in current_registry() if ref.kind == kind} for trainer, kind in _KINDS.items()}
    names[_TRANSFORMERS] = _families_of_transformers()
    rows = []
    for preset in presets:
        n = preset.numbers
        known = {trainer: preset.model_type in families for trainer, families in names.items()}
        rows.append((preset, parameters(n), active_parameters(n), n.experts.number if n.experts else None, known))
    if as_json:
        found = [
            {
                "name": preset.name,
                "family": preset.model_type,
                "parameters": size,
                "active_parameters": active,
                "layers": preset.numbers.layers,
                "experts": experts,
                "hub": preset.hub,
                **known,
            }
            for preset, size, active, experts, known in rows
        ]
        print(json_text(found, indent=2))
        return
    header = ("NAME", "FAMILY", "SIZE", "ACTIVE", "LAYERS", "EXPERTS", *map(str.upper, names))
    cells = [
        (
            preset.name,
            preset.model_type,
            _billions(size),
            _billions(active),
            str(preset.numbers.layers),
            str(experts or ""),
            *("yes" if known[trainer] else "" for trainer in names),
        )
        for preset, size, active, experts, known in rows
    ]
    print("\n".join(table([header, *cells])))


def _families_of_transformers() -> set[str]:
    """Return the families of the installed transformers, without importing it."""
    found = importlib.util.find_spec(_TRANSFORMERS)
    if found is None or found.origin is None:
        return set()
    return {folder.name for folder in (Path(found.origin).parent / "models").iterdir() if folder.is_dir()}


def _facts(preset: ModelPreset, length: int) -> dict[str, Any]:
    from slime_commands.models.count import active_parameters, forward_flops_per_token, parameters

    n = preset.numbers
    return {
        "name": preset.name,
        "family": preset.model_type,
        "hub": preset.hub,
        "parameters": parameters(n),
        "active_parameters": active_parameters(n),
        "forward_flops_per_token": forward_flops_per_token(n, length),
        "train_flops_per_token": 3 * forward_flops_per_token(n, length),
        "flops_at_length": length,
        **asdict(n),
    }


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {_text(entry)}" for key, entry in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) and value >= 10**6 else str(value)


def _billions(number: int) -> str:
    return f"{number / 1e9:.3g}B" if number < 1e12 else f"{number / 1e12:.3g}T"


command = Command(run, add_parser, only_prints=True)
