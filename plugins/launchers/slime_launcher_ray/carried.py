"""Find files that the settings name and nodes may lack, copy them into one folder, and rename them on arrival.

    driver   `find` -> `stage` -> Ray's runtime environment (py_modules, or a job's working directory)
    actor    `root_of` -> `Carried.localized(args)`: the same settings with the paths that this node has

Called by `launcher`, `shell` and `submit`. Carried are plugins given as files, with the modules and packages next to
them, directories of `--plugin-dir`, and small YAML files and chat templates. Models, data and run directories are not
carried. A value is replaced only if it is the whole string of a setting or of an evaluation data set. A node's own file
of the same path is then not read.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel

from slime_core.errors import ConfigError
from slime_core.plugins.discovery import PLUGIN_DIR_VARIABLE
from slime_core.plugins.resolve import absolute_spec
from slime_core.protocols import Args

PREFIX = "slime_carried_"
"""Beginning of the folder's name; the rest is a digest of what is in it."""
LIMIT = 64 << 20
"""Maximum bytes to carry, far below Ray's limit."""
_PLUGIN = re.compile(r"(?P<file>.+\.py)(?P<attr>:[A-Za-z_][\w.]*)?")
_SMALL = (".yaml", ".yml", ".jinja", ".jinja2")
_LEFT_OUT = ("__pycache__", "node_modules", "site-packages")
_DIRECTORIES = "plugin_dir"
"""Setting whose values are directories; other processes read them from the environment."""


@dataclass(frozen=True)
class Carried:
    """A folder on its way to the nodes."""

    package: str
    """Name of the folder."""
    moved: Mapping[str, str]
    """A setting's value -> the value relative to the folder: `0/rm.py:reward`."""
    origins: Mapping[str, str]
    """Path relative to the folder -> the driver's absolute path."""

    def localized(self, value: Any, root: Path) -> Any:
        """Return a copy of the value, which may be nested, with carried paths replaced by paths below `root`."""
        if isinstance(value, str):
            return str(root / self.moved[value]) if value in self.moved else value
        if isinstance(value, BaseModel):
            copy = value.model_copy()
            for name, inner in list(vars(copy).items()):
                setattr(copy, name, self.localized(inner, root))
            for name, inner in list((copy.model_extra or {}).items()):
                setattr(copy, name, self.localized(inner, root))
            return copy
        if isinstance(value, dict):
            return {key: self.localized(inner, root) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.localized(inner, root) for inner in value)
        return value

    def localized_environment(self, variables: Mapping[str, str], root: Path) -> dict[str, str]:
        """Return the environment variables with plugin directories replaced by paths below `root`."""
        changed = dict(variables)
        if parts := changed.get(PLUGIN_DIR_VARIABLE):
            local = [self.localized(part, root) for part in parts.split(os.pathsep)]
            changed[PLUGIN_DIR_VARIABLE] = os.pathsep.join(dict.fromkeys(local))
        return changed

    def originally(self, root: Path) -> dict[str, str]:
        """Return localized value -> the driver's absolute path."""
        return {str(root / there): here for there, here in self.origins.items()}


def strings(value: Any) -> Iterator[str]:
    """Yield all strings in a nested value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, BaseModel):
        yield from strings([*vars(value).values(), *(value.model_extra or {}).values()])
    elif isinstance(value, dict):
        yield from strings(list(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings(inner)


def find(args: Args) -> dict[str, Path]:
    """Return the files to carry: a setting's value -> the file or directory that it names on this machine."""
    found: dict[str, Path] = {}
    for value in dict.fromkeys(strings(args)):
        match = _PLUGIN.fullmatch(value.strip())
        name = match["file"] if match else value
        if (match or name.endswith(_SMALL)) and "\n" not in name:
            path = _absolute(name)
            if path.is_file():
                found[value] = path
    directories = [*getattr(args, _DIRECTORIES, ()), *os.environ.get(PLUGIN_DIR_VARIABLE, "").split(os.pathsep)]
    return found | {value: path for value in directories if value and (path := _absolute(value)).is_dir()}


def stage(found: Mapping[str, Path], folder: Path) -> tuple[Carried, Path]:
    """Copy the found files into a new folder below `folder`. Return its description and its path.

    Raises:
        ConfigError: The files exceed `LIMIT`, or cannot be read.
    """
    building = folder / PREFIX
    numbers: dict[Path, str] = {}
    moved: dict[str, str] = {}
    for value, path in found.items():
        top = path if path.is_dir() else path.parent
        number = numbers.setdefault(top, str(len(numbers)))
        if path.is_dir():
            _copy(_below(path), path, building / number)
            moved[value] = moved[str(path)] = number
            continue
        match = _PLUGIN.fullmatch(value.strip())
        _copy(_beside(path) if match else [path], top, building / number)
        attr = (match["attr"] or "") if match else ""
        # The path as written, and the resolved path.
        moved[value] = moved[f"{path}{attr}"] = f"{number}/{path.name}{attr}"
    files = sorted(p for p in building.rglob("*") if p.is_file())
    size = sum(p.stat().st_size for p in files)
    if size > LIMIT:
        raise ConfigError(
            f"{', '.join(map(repr, found))}: with the modules beside them they are {size / (1 << 20):.0f} MiB, and at"
            f" most {LIMIT >> 20} MiB go to the nodes; put the files into a folder of their own"
        )
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(building)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    origins = {there: absolute_spec(value) for value, there in moved.items()}
    carried = Carried(PREFIX + digest.hexdigest()[:16], moved, origins)
    return carried, building.rename(folder / carried.package)


@contextmanager
def carrying(args: Args, wanted: bool) -> Iterator[tuple[Carried | None, Path | None]]:
    """Yield what goes to the nodes and its folder, which lives until the block ends; None if there are no files."""
    found = find(args) if wanted else {}
    if not found:
        yield None, None
        return
    with TemporaryDirectory(prefix="slime-") as folder:
        yield stage(found, Path(folder))


def root_of(carried: Carried) -> Path:
    """Return the path at which the folder arrived: Ray adds unpacked files to `sys.path`.

    Raises:
        ConfigError: The folder was not found.
    """
    for place in [os.getcwd(), *sys.path]:
        root = Path(place, carried.package)
        if root.is_dir():
            return root
    raise ConfigError(f"Ray's runtime environment did not bring {carried.package}: {', '.join(carried.moved)}")


def _absolute(name: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(name)))


def _beside(file: Path) -> list[Path]:
    """Return a module, and the modules and packages in its directory, which it may import."""
    found = [p for p in file.parent.iterdir() if p.suffix == ".py" and p.is_file()]
    for folder in file.parent.iterdir():
        if (folder / "__init__.py").is_file() and folder.name not in _LEFT_OUT:
            found += _below(folder)
    return found


def _below(folder: Path) -> list[Path]:
    found = []
    for directory, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if f not in _LEFT_OUT and not f.startswith(".")]
        found += [Path(directory, f) for f in files if not f.startswith(".") and not f.endswith(".pyc")]
    return found


def _copy(files: list[Path], top: Path, target: Path) -> None:
    for file in files:
        place = target / file.relative_to(top)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            if file.stat().st_size <= LIMIT:
                shutil.copyfile(file, place)
            else:
                raise ConfigError(f"{file} has more than {LIMIT >> 20} MiB, and its folder would go to the nodes")
        except OSError as error:
            raise ConfigError(f"{file} cannot be sent to the nodes: {error}") from error
