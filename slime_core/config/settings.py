"""`Settings`: the checked values of a command with their origins, and a YAML file that loads as the same settings.

The origin of a value is the second half of every message about a setting.

`load.load_settings` creates the object; rules read and complete it.
"""

from __future__ import annotations

import json
import os.path
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from slime_core.config.schema import Args
from slime_core.config.spec import flag_specs
from slime_core.config.yaml_file import dump_value, rebase
from slime_core.files import HEADER
from slime_core.secrets import hidden, hidden_values


@dataclass(frozen=True)
class Origin:
    """Source of a value; `str()` gives its form in messages and `slime config show`."""

    kind: Literal["default", "file", "env", "flag", "argument", "derived", "auto", "preset"]
    where: str = ""
    """Detail by kind. file: "run.yaml:14"; env: "SLIME_LR"; argument: "argument lr"; derived: the other settings;
    auto: the reason for the value of a setting at "auto", e.g. "because of --rollout-num-gpus";
    preset: "default of --advantage-estimator dapo", "--model qwen3-4B"."""

    def __str__(self) -> str:
        if self.kind == "env":
            return f"{self.where} env"
        if self.kind == "derived":
            return f"derived: {self.where}"
        if self.kind == "auto" and self.where:
            return f"auto: {self.where}"
        return self.where or self.kind

    def of(self, key: str) -> str:
        """Return the name of a setting that this source gave under `key`, for messages."""
        return self.where if self.kind in ("env", "argument") else f"{self.where}: {key}"


DEFAULT = Origin("default")
FLAG = Origin("flag")


@dataclass(frozen=True)
class Entry:
    """A value on its way into `Args`, still as its source spelled it."""

    value: object
    origin: Origin
    named: str = ""
    """Name of another program's flag in messages: `--no-rope-fusion` or `run.yaml:3: sglang_ep`."""


CUSTOM_KEY = "custom"
"""YAML key whose entries become attributes of `args`."""
_NOT_STORED = ("config", "custom_config_path")
"""Settings that name files; the keys of these files are stored instead."""
_NAME = re.compile(r"\{(\w+)\}")


def left_out(cited: str) -> str:
    """Return the warning about a missing file, which `cited` names."""
    return f"{cited}: no such file here, so its settings are left out"


@dataclass
class Settings:
    """The settings of a command, with the origin of each."""

    args: Args
    origins: dict[str, Origin]
    command: str = "train"
    warnings: list[str] = field(default_factory=list)
    argv: tuple[str, ...] = ()
    """Flags of the command, which processes of the same run read again."""
    foreign: tuple[str, ...] = ()
    """Names of attributes set by pass-through flags."""
    custom: tuple[str, ...] = ()
    """Names of the user's own attributes."""
    files: bool = True
    """False if configuration files that are not on this machine are left out."""
    names: dict[str, object] = field(default_factory=dict)
    """Setting -> name of a remote model or data set, which files keep instead of the path of the local copy."""
    _typed: dict[str, object] = field(default_factory=dict)
    """Paths before `settle_paths`, which commits keep, so that a moved run has the same settings."""

    def is_given(self, name: str) -> bool:
        """Return whether a file, the environment, a flag or a Python argument set the value."""
        return self.origins[name].kind in ("file", "env", "flag", "argument")

    def is_absent(self, name: str) -> bool:
        """Return whether to leave out the configuration file that a setting names, and warn if so."""
        path = getattr(self.args, name)
        absent = bool(path) and not self.files and not os.path.isfile(path)
        if absent:
            self.warnings.append(left_out(self.cite(name)))
        return absent

    def cite(self, name: str) -> str:
        """Return the setting as messages show it: `--lr 0.1 (run.yaml:3)`."""
        return f"{flag_specs()[name].show(getattr(self.args, name))} ({self.origins[name]})"

    def cited(self, text: str) -> str:
        """Return a text with `{lr}` and the like replaced by the result of `cite`."""
        return _NAME.sub(lambda match: self.cite(match[1]), text)

    def derive(self, name: str, value: object, why: str) -> None:
        """Fill in a value that was not given; `why` names what it follows from."""
        setattr(self.args, name, value)
        self.origins[name] = Origin("derived", why)

    def settle_paths(self, directory: str) -> None:
        """Make paths relative to `directory` absolute, because user code may change the working directory."""
        for name, spec in flag_specs().items():
            if spec.holds in ("path", "pairs"):
                self._typed.setdefault(name, getattr(self.args, name))
                setattr(self.args, name, spec.located(self._typed[name], directory))
        for dataset in self.args.eval_datasets:
            dataset.path = rebase(directory, dataset.path)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values without secrets: settings and pass-through flags by name, the user's under "custom"."""
        values = {name: getattr(self.args, name) for name in [*flag_specs(), *self.foreign]}
        values |= self._typed | self.names
        if self.custom:
            values[CUSTOM_KEY] = {name: getattr(self.args, name) for name in self.custom}
        return {name: hidden_values(value) for name, value in values.items()}

    def to_yaml(self, *, changed: bool = False, directory: str = "", whole: bool = False) -> str:
        """Return YAML with every value and its origin; passing the text to `--config` gives the same settings.

        Derived values, flags set by --model, and the names of the files read are written as comments, because loading
        computes them again.

        Args:
            changed: Leave out default values.
            directory: Base of relative paths, which become absolute so that the text can be read in another
                directory; by default paths stay as they are.
            whole: Include secrets, which are redacted otherwise.
        """
        lines, section = [HEADER], ""
        for name, spec in flag_specs().items():
            if changed and self.origins[name].kind == "default":
                continue
            if spec.section != section:
                section = spec.section
                lines += ["", f"# {section}"]
            lines.append(self._yaml_line(name, directory))
        if self.foreign:
            lines += ["", "# Pass-through", *(self._yaml_line(name) for name in self.foreign)]
        if self.custom:
            lines += ["", f"{CUSTOM_KEY}:", *(f"  {self._yaml_line(name)}" for name in self.custom)]
        text = "\n".join(lines) + "\n"
        return text if whole else hidden(text)

    def _yaml_line(self, name: str, directory: str = "") -> str:
        value, origin = self.names.get(name, getattr(self.args, name)), self.origins[name]
        value = flag_specs()[name].located(value, directory) if directory and name in flag_specs() else value
        key = name if name.isidentifier() else json.dumps(name, ensure_ascii=False)
        line = f"{key}: {dump_value(value)}  # {origin}"
        again = origin.kind == "derived" or (origin.kind == "preset" and name in self.foreign)
        return f"# {line}" if again or name in _NOT_STORED else line
