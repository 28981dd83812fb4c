"""`published.json` -> `ModelPreset`, a preset per published model.

Used by `--model`, `slime models` and the script that writes `scripts/models/*.sh`. An entry has one HF `model_type`:

    shared     entries of config.json that its models have in common
    models     name -> {"hub": "owner/name", "config": the rest of its config.json,
                        "like": a model above whose config it has otherwise, "also": its other names}
    megatron   flags for features that the family always has and config.json does not state
    norms_per_layer   if it is not two

A preset holds the numbers that describe a model, not all of its config.json. Nothing is downloaded from the hub: `hub`
only names the checkpoint that the numbers belong to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from slime_commands.models.contradictions import check_model
from slime_commands.models.megatron_flags import megatron_flags
from slime_commands.models.named import pick
from slime_commands.models.numbers import Numbers, read_numbers

if TYPE_CHECKING:
    from slime_core.config import Settings


ENGINES = Path(__file__).with_name("engines.json")
"""Architectures of SGLang's and vLLM's servers, written by scripts/snapshot.py."""


@dataclass(frozen=True)
class ModelPreset:
    """A published model."""

    name: str
    """Name as in THUDM/slime's `scripts/models/NAME.sh`."""
    hub: str
    """Hugging Face repository of the checkpoint."""
    config: Mapping[str, Any]
    """Entries as in `config.json`, for the family plugin and transformers' configuration class."""
    megatron: Mapping[str, Any]
    """Megatron flags, without dashes, that `config` does not imply; True for a switch."""
    also: tuple[str, ...]
    """Other names of the model; each has its own script."""
    numbers: Numbers
    """The same numbers under names that do not depend on the family."""

    @property
    def model_type(self) -> str:
        """HF's name of the family."""
        return str(self.config["model_type"])

    @property
    def architecture(self) -> str:
        """Name of the model's class, by which servers find it."""
        return str(self.config["architectures"][0])

    def flags(self) -> dict[str, Any]:
        """Return the model's numbers as Megatron's flags."""
        return megatron_flags(self)

    def check(self, settings: Settings, hf: Mapping[str, Any]) -> None:
        """Raise ConfigError if `hf`, the checkpoint's `config.json`, describes another model."""
        check_model(self, settings, hf)


@cache
def model_presets() -> Mapping[str, ModelPreset]:
    """Return every preset by name, families and models as in the file."""
    found: dict[str, ModelPreset] = {}
    families = json.loads(files("slime_commands.models").joinpath("published.json").read_text(encoding="utf-8"))
    for family in families.values():
        for name, model in family["models"].items():
            assert name not in found, f"two presets are called {name}"
            base = found[model["like"]].config if "like" in model else family["shared"]
            config = _merged(base, model["config"])
            numbers = read_numbers(config, family["megatron"], family.get("norms_per_layer", 2))
            also = tuple(model.get("also", ()))
            found[name] = ModelPreset(name, model["hub"], config, family["megatron"], also, numbers)
    return MappingProxyType(found)


def named_models() -> dict[str, ModelPreset]:
    """Return every preset under each of its names, the values of `--model`."""
    return {name: preset for preset in model_presets().values() for name in (preset.name, *preset.also)}


def find_preset(name: str) -> ModelPreset:
    """Return the preset of that name. Raises ConfigError if no preset has the name."""
    return pick(named_models(), name)


def _merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `own` over `shared`; a nested model (`text_config`) is merged key by key."""
    out = {**shared, **own}
    for key in shared.keys() & own.keys():
        if key.endswith("_config"):
            out[key] = {**shared[key], **own[key]}
    return out
