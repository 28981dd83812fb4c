"""The contract of launchers: what they say of themselves, before they start anything."""

from __future__ import annotations

from slime_core.launch.launchers import load
from slime_core.protocols.launcher import Launcher
from slime_testing_contracts.base import Contract


class LauncherContract(Contract):
    """`--launcher`: asked what it can do and what it lacks by every run under `--launcher auto`."""

    kind = "launchers"

    def load(self) -> None:
        """Also built, with traits."""
        _ = self.launcher

    @property
    def launcher(self) -> Launcher:
        """A new one."""
        return load(self.component, f"{type(self).__name__}.component")

    def test_what_is_missing_is_said_in_words(self) -> None:
        """With what to type; empty when all is there."""
        missing = self.launcher.missing(self.settings)
        assert isinstance(missing, str), f"missing(args) returned {missing!r}; expected text, empty when all is there"
