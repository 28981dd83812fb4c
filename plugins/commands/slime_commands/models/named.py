"""`--model NAME`: the architecture numbers of a published model as flags, compared with the checkpoint before a run.

Models come from the entry-point group `slime.named_models`: name -> callable without arguments that returns models by
name. The core calls `flags_of_named_model` and `check_named_model` by the group `slime.api`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from slime_core.config.foreign import ForeignFlags, find_foreign
from slime_core.config.settings import Entry, Origin
from slime_core.distributions import BUNDLE, AllowList, entry_points, installed
from slime_core.errors import ConfigError, did_you_mean
from slime_core.models.config import read_hf_config

if TYPE_CHECKING:
    from slime_core.config import Settings


def flags_of_named_model(named: Entry, argv: Sequence[str], foreign: Sequence[ForeignFlags]) -> list[tuple[str, Entry]]:
    """Return the architecture numbers of the model that `--model` names, as flags read from a file.

    A file, an environment variable or a flag overrides a number; the trainer later checks that the number agrees with
    the checkpoint.

    Args:
        named: The value of `--model`.
        argv: The command line.
        foreign: Owners of pass-through flags; a flag that no owner knows is skipped.

    Raises:
        ConfigError: There is no such model.
    """
    model = named_model(str(named.value), str(named.origin), argv)
    origin = Origin("preset", f"--model {model.name}")
    given = [(flag.replace("-", "_"), Entry(value, origin)) for flag, value in model.flags().items()]
    return [(name, entry) for name, entry in given if find_foreign(foreign, name)]


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
    more = "`slime models list` prints them all." if installed(BUNDLE) else f"slime's come with: pip install {BUNDLE}"
    cited = f"--model {name!r}" + (f" ({origin})" if origin else "")
    raise ConfigError(f"{cited}: no model preset of that name.{did_you_mean(name, models, 0.5)} {more}")


def check_named_model(settings: Settings) -> None:
    """Raise ConfigError if `--model` names another model than the checkpoint, if that has a `config.json`."""
    args = settings.args
    if args.model is None or not (Path(str(args.hf_checkpoint)) / "config.json").is_file():
        return
    model = named_model(str(args.model), str(settings.origins.get("model", "")), settings.argv)
    model.check(settings, read_hf_config(str(args.hf_checkpoint)))
