"""`Settings`: the checked values of one command with their origins, and the file that loads back as the same.

Made by `load.load_settings`; rules read and complete it.
"""

from __future__ import annotations

import json
import os.path
import re
from dataclasses import dataclass, field
from typing import Any

from slime_core.config.origins import Origin
from slime_core.config.run_files import HEADER
from slime_core.config.schema import Args
from slime_core.config.spec import flag_specs
from slime_core.config.yaml_file import dump_value, rebase
from slime_core.secrets import hidden, hidden_values

CUSTOM_KEY = "custom"
"""YAML key whose entries become attributes of `args`."""
_NOT_STORED = ("config", "custom_config_path")
"""Files whose keys are part of what is stored."""
_NAME = re.compile(r"\{(\w+)\}")


def left_out(cited: str) -> str:
    """The warning about a file that is not there, which `cited` names."""
    return f"{cited}: no such file here, so what it says is not looked at"


@dataclass
class Settings:
    """The settings of one command, with where each came from."""

    args: Args
    origins: dict[str, Origin]
    command: str = "train"
    warnings: list[str] = field(default_factory=list)
    argv: tuple[str, ...] = ()
    """The flags it was read from, for processes of the same run that read them again."""
    foreign: tuple[str, ...] = ()
    """Attributes set by pass-through flags."""
    custom: tuple[str, ...] = ()
    """Attributes of the user's own."""
    files: bool = True
    """False: configuration files that are not on this machine are left out."""
    _typed: dict[str, Any] = field(default_factory=dict)
    """Paths before `settle_paths`, which commits keep: a run that is moved has the same settings."""

    def is_given(self, name: str) -> bool:
        """Whether a file, the environment, a flag or an argument of Python set it."""
        return self.origins[name].kind in ("file", "env", "flag", "argument")

    def is_absent(self, name: str) -> bool:
        """Whether the configuration file that a setting names is one to leave out; warns of it."""
        path = getattr(self.args, name)
        absent = bool(path) and not self.files and not os.path.isfile(path)
        if absent:
            self.warnings.append(left_out(self.cite(name)))
        return absent

    def cite(self, name: str) -> str:
        """The setting as messages show it: `--lr 0.1 (run.yaml:3)`."""
        return f"{flag_specs()[name].show(getattr(self.args, name))} ({self.origins[name]})"

    def cited(self, text: str) -> str:
        """A text with `{lr}` and the like replaced by what `cite` says."""
        return _NAME.sub(lambda match: self.cite(match[1]), text)

    def derive(self, name: str, value: Any, why: str) -> None:
        """Fill in a value that was not given; `why` names what it follows from."""
        setattr(self.args, name, value)
        self.origins[name] = Origin("derived", why)

    def settle_paths(self, directory: str) -> None:
        """Make paths absolute that are relative to `directory`: functions of the run may change the working one."""
        for name, spec in flag_specs().items():
            if spec.holds in ("path", "pairs"):
                self._typed.setdefault(name, getattr(self.args, name))
                setattr(self.args, name, spec.located(self._typed[name], directory))
        for dataset in self.args.eval_datasets:
            dataset.path = rebase(directory, dataset.path)

    def to_dict(self) -> dict[str, Any]:
        """Plain values without secrets: settings and pass-through flags by name, the user's own under "custom"."""
        values = {name: getattr(self.args, name) for name in [*flag_specs(), *self.foreign]} | self._typed
        if self.custom:
            values[CUSTOM_KEY] = {name: getattr(self.args, name) for name in self.custom}
        return {name: hidden_values(value) for name, value in values.items()}

    def to_yaml(self, *, changed: bool = False, directory: str = "", whole: bool = False) -> str:
        """Every value with its origin; `--config` on the text gives the same settings.

        Derived values, flags that --model brings, and the names of the files read are comments: loading has them
        again.

        Args:
            changed: Leave out values nobody gave or derived.
            directory: What relative paths are relative to, for a text that is read elsewhere, where they are absolute;
                by default they stay as they are.
            whole: With the secrets that are left out otherwise.
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
        value, origin = getattr(self.args, name), self.origins[name]
        value = flag_specs()[name].located(value, directory) if directory and name in flag_specs() else value
        key = name if name.isidentifier() else json.dumps(name, ensure_ascii=False)
        line = f"{key}: {dump_value(value)}  # {origin}"
        again = origin.kind == "derived" or (origin.kind == "preset" and name in self.foreign)
        return f"# {line}" if again or name in _NOT_STORED else line
