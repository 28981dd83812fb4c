"""Throw-away plugins in a temporary directory, and a process that forgets them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.strangers import forgotten

WritePlugin = Callable[..., Path]


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SLIME_PLUGIN_DIR", "")  # setenv, so that what a test adds is undone too
    monkeypatch.delenv("SLIME_PLUGINS", raising=False)
    monkeypatch.setenv("SLIME_NO_PLUGINS", "0")
    monkeypatch.delenv("SLIME_TRACE_PLUGINS", raising=False)
    with forgotten():
        yield


@pytest.fixture
def plugin_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "plugins"
    directory.mkdir()
    return directory


@pytest.fixture
def write_plugin(plugin_dir: Path) -> WritePlugin:
    """`write_plugin(distribution, entry_points, body)` -> the plugin's folder."""

    def write(
        distribution: str,
        entry_points: dict[str, dict[str, str]],
        body: str,
        *,
        version: str = "1.0",
        requires: tuple[str, ...] = ("slime-rl-core",),
        module: str = "",
    ) -> Path:
        module = module or "plug_" + distribution.replace("-", "_")
        folder = plugin_dir / distribution
        (folder / module).mkdir(parents=True)
        (folder / module / "__init__.py").write_text(body)
        tables = "".join(
            f'[project.entry-points."{group}"]\n' + "".join(f'{k} = "{v}"\n' for k, v in table.items())
            for group, table in entry_points.items()
        )
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "{distribution}"\nversion = "{version}"\n'
            f"dependencies = [{', '.join(map(repr, requires))}]\n{tables}"
        )
        return folder

    return write
