"""What a launcher is: it builds the stages of a run and decides in which process each one lives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from slime_core.protocols.traits import LauncherTraits

if TYPE_CHECKING:
    from slime_core.config import Settings
    from slime_core.protocols.functions import Args


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
