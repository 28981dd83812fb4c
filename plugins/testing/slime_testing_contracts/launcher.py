"""The contract of launchers: the facts that a launcher reports before it starts anything."""

from __future__ import annotations

from slime_core.launch.launchers import load
from slime_core.protocols.launcher import Launcher
from slime_testing_contracts.base import Contract


class LauncherContract(Contract):
    """Tests of a launcher, whose traits and missing requirements are read by every run under `--launcher auto`."""

    kind = "launchers"

    def load(self) -> None:
        """Load and build the launcher, and check its traits."""
        _ = self.launcher

    @property
    def launcher(self) -> Launcher:
        """A new launcher."""
        return load(self.component, f"{type(self).__name__}.component")

    def test_what_is_missing_is_said_in_words(self) -> None:
        """Missing requirements are reported as text, with a command to type; empty if nothing is missing."""
        missing = self.launcher.missing(self.settings)
        assert isinstance(missing, str), f"missing(args) returned {missing!r}; expected text, empty when all is there"
