"""What a launcher is: it builds the stages of a run and decides in which process each one lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from slime_core.config import Settings
    from slime_core.protocols.functions import Args


@dataclass(frozen=True)
class LauncherTraits:
    """What `--launcher auto` takes for a wish for this launcher, and what it can do."""

    settings: tuple[str, ...] = ()
    """Settings that only this launcher acts on, such as `ray_address`: one that is given chooses it."""
    variables: tuple[str, ...] = ()
    """Environment variables that choose it, where no such setting does and torchrun has not started the process."""
    spans_nodes: bool = False
    """It starts the trainer's processes itself, on every node; torchrun has nothing to start."""
    restarts_trainer: bool = False
    """It acts on `--max-trainer-restarts`."""
    restarts_engines: bool = False
    """It starts an engine that lives in this framework's processes again (`--use-fault-tolerance`)."""


class Launcher(Protocol):
    """Built without arguments. Its module imports nothing heavy: `--launcher auto` looks at all of them."""

    traits: LauncherTraits

    def missing(self, args: Args) -> str:
        """What it needs and is not installed, with what to type; empty when all is there."""

    def train(self, settings: Settings) -> dict[str, Any]:
        """Train as `settings` say and return what `summary.json` holds.

        Raises:
            ConfigError: A setting is wrong; nothing has been started.
            SlimeError: What a stage raises, wherever it lives.
        """
