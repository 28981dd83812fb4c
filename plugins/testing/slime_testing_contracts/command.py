"""The contract of commands: a description line, and a help option that starts nothing."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from slime_core.errors import ConfigError
from slime_core.launch.launchers import load
from slime_core.plugins.commands import first_line
from slime_core.protocols import Args
from slime_core.protocols.launcher import Launcher
from slime_testing_contracts.base import Contract
from slime_testing_contracts.tiny import tiny_model


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


class RecipeContract(Contract):
    """`--prepare-path`: called before any input of a run is read, perhaps for the second time."""

    kind = "recipes"
    default_args: ClassVar[Mapping[str, Any]] = {"input_key": "input", "label_key": "label", "seed": 1}

    @property
    def settings(self) -> Args:
        """Data files that do not exist, and a model that does; set `hf_checkpoint` for a recipe that makes models."""
        folder = Path(str(self.folder))
        files = {"prompt_data": str(folder / "data" / "train.jsonl"), "hf_checkpoint": str(tiny_model())}
        return super().settings.model_copy(update={**files, **self.args})

    def test_a_second_call_changes_nothing(self) -> None:
        """Every file is as the first call left it: nothing is written again, added or removed."""
        self.resolved.obj(self.settings)
        before = self._files()
        self.resolved.obj(self.settings)
        after = self._files()
        changed = sorted(str(path) for path in {*before, *after} if before.get(path) != after.get(path))
        assert not changed, f"the second call wrote or removed {', '.join(changed[:5])}; leave alone what is there"

    def test_what_the_user_has_is_left_alone(self) -> None:
        """A data file of the user's own."""
        path = Path(str(self.settings.prompt_data))
        path.parent.mkdir(parents=True)
        path.write_text('{"input": "mine", "label": "mine"}\n')
        self.resolved.obj(self.settings)
        assert path.read_text() == '{"input": "mine", "label": "mine"}\n', f"{path} existed, and was written over"

    def test_a_directory_without_a_model_is_left_alone(self) -> None:
        """`--hf-checkpoint` names a directory with other files: they stay, and no model is put among them."""
        directory = Path(str(self.folder)) / "thesis"
        (directory / "chapters").mkdir(parents=True)
        (directory / "chapters" / "one.tex").write_text("mine")
        with contextlib.suppress(ConfigError):
            self.resolved.obj(self.settings.model_copy(update={"hf_checkpoint": str(directory)}))
        left = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
        assert left == ["chapters", "chapters/one.tex"], f"the recipe changed {directory}: it now holds {left}"

    def test_files_appear_whole(self) -> None:
        """Nothing half-written is left beside them."""
        self.resolved.obj(self.settings)
        left = [path.name for path in self._files() if path.name.endswith((".partial", ".tmp"))]
        assert not left, f"temporary files are left: {', '.join(left)}"

    def _files(self) -> dict[Path, tuple[bytes, int]]:
        paths = [path for path in Path(str(self.folder)).rglob("*") if path.is_file()]
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}
