"""`data/*.json` -> `ModelPreset`, one per published model.

Used by `--model`, `slime models` and the script that writes `scripts/models/*.sh`. A file has one HF `model_type`:

    shared     what its models have in common of their config.json
    models     name -> {"hub": "owner/name", "config": the rest of its config.json,
                        "like": a model above whose config it has otherwise, "also": its other names}
    megatron   flags for what the family always does, which its config.json does not say
    norms_per_layer   when it is not two

What a reader would get wrong: a preset holds the numbers that describe a model, not all of its config.json, and
nobody fetches anything from the hub: `hub` only says which checkpoint the numbers belong to.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from slime_core.errors import ConfigError
from slime_core.model_presets.numbers import Numbers, read_numbers


@dataclass(frozen=True)
class ModelPreset:
    """One published model."""

    name: str
    """As THUDM/slime's `scripts/models/NAME.sh`."""
    hub: str
    """Hugging Face repository of the checkpoint."""
    config: Mapping[str, Any]
    """Like its `config.json`: the family plugin and transformers' configuration class read it."""
    megatron: Mapping[str, Any]
    """Megatron flags, without dashes, that `config` does not imply; True for a switch."""
    also: tuple[str, ...]
    """Other names for it, each with a script of its own."""
    numbers: Numbers
    """The same numbers under one name each, whatever the family calls them."""

    @property
    def model_type(self) -> str:
        """HF's name of the family."""
        return str(self.config["model_type"])


@cache
def model_presets() -> Mapping[str, ModelPreset]:
    """Every preset by name, families in alphabetical order, models as in their file."""
    found: dict[str, ModelPreset] = {}
    folder = files("slime_core.model_presets").joinpath("data")
    for path in sorted(folder.iterdir(), key=lambda entry: entry.name):
        family = json.loads(path.read_text(encoding="utf-8"))
        for name, model in family["models"].items():
            assert name not in found, f"two presets are called {name}"
            base = found[model["like"]].config if "like" in model else family["shared"]
            config = _merged(base, model["config"])
            numbers = read_numbers(config, family["megatron"], family.get("norms_per_layer", 2))
            also = tuple(model.get("also", ()))
            found[name] = ModelPreset(name, model["hub"], config, family["megatron"], also, numbers)
    return MappingProxyType(found)


def find_preset(name: str, origin: str = "") -> ModelPreset:
    """The preset of that name.

    Args:
        name: As in `slime models list`; upper and lower case are told apart.
        origin: Where the name came from, for the message.

    Raises:
        ConfigError: There is none.
    """
    presets = model_presets()
    by_name = {known: preset for preset in presets.values() for known in (preset.name, *preset.also)}
    if name in by_name:
        return by_name[name]
    by_lower = {known.lower(): known for known in by_name}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.5)
    hint = f" Did you mean {by_lower[close[0]]}?" if close else ""
    cited = f"--model {name!r}" + (f" ({origin})" if origin else "")
    raise ConfigError(f"{cited}: no model preset of that name.{hint} `slime models list` prints them all.")


def _merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` over `shared`; of a nested model (`text_config`) key by key."""
    out = {**shared, **own}
    for key in shared.keys() & own.keys():
        if key.endswith("_config"):
            out[key] = {**shared[key], **own[key]}
    return out
