"""`slime models` (train): list the architecture numbers of published models, for --model; import a GGUF file.

Only the import loads torch. A preset is no checkpoint. It saves stating numbers by hand and is compared with
config.json when a run starts. A column for each trainer and server says whether it takes the family.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.protocols import Command
from slime_core.text import json_text, plain

if TYPE_CHECKING:
    from slime_commands.models.presets import ModelPreset

_KINDS = ("models", "megatron_models")
"""Kinds of the plugins that describe a family to slime's own decoder, and to Megatron."""
_TRAINERS = ("embedded", "fsdp", "megatron")
"""Columns of `slime models list`, before those of the servers; "embedded" is the engine, too."""
_NOTE = """
embedded (trainer and engine) and fsdp: `slime` has a decoder of its own, `transformers` runs the class of transformers
(--model-impl). Engines with servers: {engines} have a model of the architecture."""


def add_parser(subparsers: Any) -> None:
    """Define `slime models` and its sub-commands."""
    text = "the architecture numbers of published models; import a GGUF file"
    parser = subparsers.add_parser("models", help=text, description=text)
    commands = parser.add_subparsers(dest="models_command", required=True, metavar="COMMAND")
    listed = commands.add_parser(
        "list", help="every preset", description="every preset, and which trainers and engines know it"
    )
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
    from slime_commands.models.presets import ENGINES
    from slime_core.plugins.manager import current_registry
    from slime_core.text import table

    own, megatron = ({ref.name for ref in current_registry() if ref.kind == kind} for kind in _KINDS)
    transformers = _families_of_transformers()
    engines = json.loads(ENGINES.read_text(encoding="utf-8"))
    rows = []
    for preset in presets:
        n, family = preset.numbers, preset.model_type
        run_by = "slime" if family in own else "transformers" if family in transformers else None
        known = dict(zip(_TRAINERS, (run_by, run_by, family in megatron), strict=True))
        known |= {name: preset.architecture in told["architectures"] for name, told in engines.items()}
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
    header = ("NAME", "FAMILY", "SIZE", "ACTIVE", "LAYERS", "EXPERTS", *map(str.upper, (*_TRAINERS, *engines)))
    cells = [
        (
            preset.name,
            preset.model_type,
            _billions(size),
            _billions(active),
            str(preset.numbers.layers),
            str(experts or ""),
            *("yes" if found is True else found or "" for found in known.values()),
        )
        for preset, size, active, experts, known in rows
    ]
    note = _NOTE.format(engines=", ".join(f"{name} {told['version']}" for name, told in engines.items()))
    print("\n".join(table([header, *cells])), note, sep="\n")


def _families_of_transformers() -> set[str]:
    """Return the families of the installed transformers, without importing it."""
    found = importlib.util.find_spec("transformers")
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
