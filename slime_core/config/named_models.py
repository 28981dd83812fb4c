"""`--model NAME` -> the model's architecture numbers, which a distribution has as flags of other programs.

Models come from the entry-point group `slime.named_models`: name -> callable without arguments that returns the models
by name. Only installed distributions are searched, and only if a run names a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from slime_core.distributions import BUNDLE, AllowList, entry_points, installed
from slime_core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from slime_core.config.settings import Settings

GROUP = "slime.named_models"


class NamedModel(Protocol):
    """A published model that `--model` can name."""

    @property
    def name(self) -> str:
        """The model's main name for `--model`; it may have other names too."""

    @property
    def model_type(self) -> str:
        """The `model_type` of its `config.json`."""

    def flags(self) -> Mapping[str, Any]:
        """Return the model's numbers: flag of another program, without dashes -> value; True for a switch."""

    def check(self, settings: Settings, hf: Mapping[str, Any]) -> None:
        """Raise ConfigError if `hf`, the `config.json` of the run's checkpoint, describes another model."""


M = TypeVar("M", bound=NamedModel)


def named_model(name: str, origin: str, argv: Sequence[str]) -> NamedModel:
    """Return the model called `name`.

    Args:
        name: A name from `slime models list`; case-sensitive.
        origin: Source of the name, for the message.
        argv: The command line, which may disable plugins.

    Raises:
        ConfigError: No model has this name.
    """
    return pick(named_models(argv), name, origin)


def named_models(argv: Sequence[str]) -> Mapping[str, NamedModel]:
    """Return every model by each of its names, without those of plugins that the command line disables."""
    found: dict[str, NamedModel] = {}
    for _, entry, _ in entry_points(GROUP, AllowList.of(argv)):
        found = {**entry.load()(), **found}
    return found


def pick(models: Mapping[str, M], name: str, origin: str = "") -> M:
    """Return the model called `name`. Raises the errors of `named_model`."""
    if name in models:
        return models[name]
    more = "`slime models list` prints them all." if installed(BUNDLE) else f"slime's: pip install {BUNDLE}"
    cited = f"--model {name!r}" + (f" ({origin})" if origin else "")
    raise ConfigError(f"{cited}: no model preset of that name.{did_you_mean(name, models, 0.5)} {more}")
