"""`data/*.json` -> `ModelPreset`, one per published model.

Used by `--model`, `slime models` and the script that writes `scripts/models/*.sh`. A file has one HF `model_type`:

    shared     what its models have in common of their config.json
    models     name -> {"hub": "owner/name", "config": the rest of its config.json,
                        "like": a model above whose config it has otherwise, "also": its other names}
    megatron   flags for what the family always does, which its config.json does not say
    norms_per_layer   when it is not two

A preset holds the numbers that describe a model, not all of its config.json, and nobody fetches anything from the hub:
`hub` only says which checkpoint the numbers belong to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from slime_command_models.contradictions import contradictions
from slime_command_models.megatron_flags import megatron_flags
from slime_command_models.numbers import Numbers, read_numbers
from slime_core.config.named_models import pick


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

    def flags(self) -> dict[str, Any]:
        """Its numbers as Megatron's flags."""
        return megatron_flags(self)

    def contradictions(self, hf: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(flag, how it differs) of every number that a `config.json` of the family states otherwise."""
        return [(found.flag, found.text) for found in contradictions(self, hf)]


@cache
def model_presets() -> Mapping[str, ModelPreset]:
    """Every preset by name, families in alphabetical order, models as in their file."""
    found: dict[str, ModelPreset] = {}
    folder = files("slime_command_models").joinpath("data")
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


def named_models() -> dict[str, ModelPreset]:
    """What `--model` may name: every preset under each of its names."""
    return {name: preset for preset in model_presets().values() for name in (preset.name, *preset.also)}


def find_preset(name: str) -> ModelPreset:
    """The preset of that name. Raises ConfigError where there is none."""
    return pick(named_models(), name)


def _merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` over `shared`; of a nested model (`text_config`) key by key."""
    out = {**shared, **own}
    for key in shared.keys() & own.keys():
        if key.endswith("_config"):
            out[key] = {**shared[key], **own[key]}
    return out
