"""`--model NAME` -> what a distribution knows of that model: its architecture numbers, as flags of other programs.

Models come from the entry-point group `slime.named_models`: name -> callable without arguments that returns the models
by name. Only installed distributions are asked, and only where a run names a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from slime_core.distributions import BUNDLE, AllowList, entry_points, installed
from slime_core.errors import ConfigError, did_you_mean

GROUP = "slime.named_models"


class NamedModel(Protocol):
    """One published model."""

    @property
    def name(self) -> str:
        """What `--model` calls it; it may have other names too."""

    @property
    def model_type(self) -> str:
        """HF's name of the family."""

    def flags(self) -> Mapping[str, Any]:
        """Its numbers: flag of another program, without dashes -> value; True for a switch."""

    def contradictions(self, hf: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        """(flag, how it differs, for a message) of every number that a `config.json` of the family states otherwise."""


M = TypeVar("M", bound=NamedModel)


def named_model(name: str, origin: str, argv: Sequence[str]) -> NamedModel:
    """The model of that name.

    Args:
        name: As in `slime models list`; upper and lower case are told apart.
        origin: Where the name came from, for the message.
        argv: The command line, which may leave plugins out.

    Raises:
        ConfigError: There is none.
    """
    allow = AllowList.of(argv)
    found: dict[str, NamedModel] = {}
    for entry_name, entry, distribution in entry_points(GROUP):
        if allow.allows(entry_name, distribution):
            found = {**entry.load()(), **found}
    return pick(found, name, origin)


def pick(models: Mapping[str, M], name: str, origin: str = "") -> M:
    """The model of that name; `named_model` says what it raises."""
    if name in models:
        return models[name]
    more = "`slime models list` prints them all." if installed(BUNDLE) else f"slime's: pip install {BUNDLE}"
    cited = f"--model {name!r}" + (f" ({origin})" if origin else "")
    raise ConfigError(f"{cited}: no model preset of that name.{did_you_mean(name, models, 0.5)} {more}")
