"""The Python environment of a server program, which need not be slime's own: its interpreter and its versions.

The servers' packages are not imported here. Versions are read from names of directories, which is fast enough for every
start.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from slime_core.errors import ConfigError
from slime_core.protocols import Args

PYTHON_VARIABLE = "SLIME_ENGINE_PYTHON"
_ASK_DEADLINE_S = 60
_ASK = (
    "import importlib.metadata as m, json, sys; print(json.dumps({d.name: d.version for d in m.distributions()"
    " if (d.name or '').lower().replace('_', '-') in sys.argv[1:]}))"
)


class Environment:
    """The environments in which one server program may be installed."""

    def __init__(self, program: str, module: str, servers: Sequence[str], pip: str, others: Sequence[str] = ()) -> None:
        """Describe the program.

        Args:
            program: Its name in messages, such as "SGLang".
            module: Its top-level module.
            servers: Distributions that have the module; one of them is needed.
            pip: The words after `pip install` that install it.
            others: Further distributions whose versions are of interest.
        """
        self._program, self._module, self._servers, self._pip = program, module, tuple(servers), pip
        self._names = (*servers, *others)

    def find_python(self, args: Args) -> Path | None:
        """Return the program's interpreter; None if none is named and this environment lacks the program.

        Raises:
            ConfigError: The named path is no interpreter, or its environment lacks the program.
        """
        named, where = args.engine_python, f"--engine-python / {PYTHON_VARIABLE}"
        if not named:
            named = os.environ.get(PYTHON_VARIABLE)
        if not named:
            here = importlib.util.find_spec(self._module) and self.has_server(_in(sys.path, self._names))
            return Path(sys.executable) if here else None
        python = Path(os.path.abspath(os.path.expanduser(str(named))))
        if python.is_dir():
            python = python / "bin" / "python"
        if not (python.is_file() and os.access(python, os.X_OK)):
            raise ConfigError(
                f"{where} {str(named)!r}: no Python interpreter; expected that of the environment {self._program} is"
                " installed in, such as /path/to/venv/bin/python."
            )
        if not self.has_server(self.installed_versions(python)):
            raise ConfigError(
                f"{where} {str(named)!r}: {self._program} is not installed there. Type: {python} -m pip install"
                f" {self._pip}"
            )
        return python

    def engine_python(self, args: Args) -> Path:
        """Return the interpreter: --engine-python, else SLIME_ENGINE_PYTHON, else this one if it has the program.

        Symbolic links are not resolved, since the interpreter of a virtual environment is a link.

        Raises:
            ConfigError: No environment has the program, or the named path is no interpreter or its environment lacks
                it. The message contains the command to type.
        """
        python = self.find_python(args)
        if python is None:
            raise ConfigError(self.missing(args))
        return python

    def missing(self, args: Args) -> str:
        """Return an error that no environment has the program, with the commands to type; empty if one has it.

        Raises:
            ConfigError: The named path is no interpreter, or its environment lacks the program.
        """
        if self.find_python(args) is not None:
            return ""
        return (
            f"{self._program} is not installed beside slime ({sys.executable} cannot import {self._module}). It gets an"
            f" environment of its own: python -m venv {self._module}-env && {self._module}-env/bin/pip install"
            f" {self._pip}. Then type --engine-python {self._module}-env/bin/python, or set {PYTHON_VARIABLE}."
        )

    def installed_versions(self, python: Path) -> dict[str, str]:
        """Return the versions of the program's distributions in the interpreter's environment, if installed.

        Raises:
            ConfigError: The interpreter does not run.
        """
        return dict(_installed(python, self._names, self._servers))

    def has_server(self, versions: Mapping[str, str]) -> bool:
        """Return whether one of the distributions that have the module is among the versions."""
        return any(name in versions for name in self._servers)


@cache
def _installed(python: Path, names: tuple[str, ...], servers: tuple[str, ...]) -> dict[str, str]:
    if str(python) == sys.executable:
        return _in(sys.path, names)
    found = _in_directories(python, names)
    return found if any(name in found for name in servers) else _asked(python, names)


def has_package(python: Path, package: str) -> bool:
    """Return whether a virtual environment has a package; False if its directories do not show this."""
    return any(python.parent.parent.glob(f"lib*/python3*/site-packages/{package}/__init__.py"))


def _in_directories(python: Path, names: Sequence[str]) -> dict[str, str]:
    """Return versions from the interpreter's directories; empty unless it belongs to a virtual environment."""
    prefix = python.parent.parent
    known = (prefix / "pyvenv.cfg").is_file()
    return _in([str(path) for path in prefix.glob("lib*/python3*/site-packages")] if known else [], names)


def _in(places: list[str], names: Sequence[str]) -> dict[str, str]:
    found = {name: next(iter(metadata.distributions(name=name, path=places)), None) for name in names}
    return {name: distribution.version for name, distribution in found.items() if distribution is not None}


def _asked(python: Path, names: Sequence[str]) -> dict[str, str]:
    try:
        safe = {**os.environ, "PYTHONSAFEPATH": "1"}
        done = subprocess.run(
            [str(python), "-c", _ASK, *names], capture_output=True, text=True, timeout=_ASK_DEADLINE_S, env=safe
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--engine-python / {PYTHON_VARIABLE} {str(python)!r} does not run: {error}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ConfigError(f"--engine-python / {PYTHON_VARIABLE} {str(python)!r} does not run: {last}")
    return {name.lower().replace("_", "-"): version for name, version in json.loads(done.stdout).items()}
