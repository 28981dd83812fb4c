"""The launcher protocol: a launcher builds the stages of a run and decides in which process each stage lives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from slime_core.protocols.traits import LauncherTraits

if TYPE_CHECKING:
    from slime_core.config import Settings
    from slime_core.protocols.functions import Args


class Launcher(Protocol):
    """A launcher, built without arguments. Its module imports nothing heavy, since `--launcher auto` loads them all."""

    traits: LauncherTraits

    def missing(self, args: Args) -> str:
        """Return the missing requirements with the command to install them; empty if nothing is missing."""

    def train(self, settings: Settings) -> dict[str, Any]:
        """Train with `settings` and return the contents of `summary.json`.

        Raises:
            ConfigError: A setting is wrong; nothing has been started.
            SlimeError: A stage raised it, in any process.
        """
