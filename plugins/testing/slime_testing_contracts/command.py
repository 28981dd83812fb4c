"""The contract of commands: a description line, and a help option that starts nothing."""

from __future__ import annotations

import argparse
import contextlib
import io

from slime_core.plugins.commands import first_line
from slime_testing_contracts.base import Contract


class CommandContract(Contract):
    """The suite of a command `slime NAME`."""

    kind = "commands"
    name = ""
    """Name of the command after `slime`; by default the component's name with hyphens."""

    def test_its_module_says_what_it_does(self) -> None:
        """Check the first line of the module's docstring, which `slime --help` shows."""
        file = self.resolved.ref.source_file
        assert file is not None
        assert first_line(file.read_bytes())[1], f"{file} has no docstring; `slime --help` shows its first line"

    def test_help_is_printed(self) -> None:
        """Check that `slime NAME --help` prints text and exits with status 0."""
        name = self.name or self.resolved.ref.name.replace("_", "-")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            status = self._help(name)
        assert not status, f"slime {name} --help ended with {status!r}"
        assert out.getvalue().strip(), f"slime {name} --help printed nothing"

    def _help(self, name: str) -> int | str | None:
        command, parser = self.resolved.obj, argparse.ArgumentParser(prog="slime")
        try:
            if command.add_parser is None:
                return int(command.run(["--help"]))
            command.add_parser(parser.add_subparsers())
            parser.parse_args([name, "--help"])
        except SystemExit as stop:
            return stop.code
        return f"no command {name}"
