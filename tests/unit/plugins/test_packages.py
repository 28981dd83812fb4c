"""Plugins on a package index, which this machine serves; `tests/integration/test_outside.py` installs with real pip."""

from __future__ import annotations

import io
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from slime_commands.plugins import installing, packages, uninstalling

from slime_core import __version__ as VERSION
from slime_core.cli.main import main
from tests.package_index import Index, serving, write_wheel

REWARD = "[slime.rewards]\nnear = slime_reward_near:reward\n"


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    folder = tmp_path / "wheels"
    write_wheel(folder, "slime-reward-near", "0.1.0", entry_points=REWARD, summary="nearness of numbers")
    write_wheel(folder, "slime-reward-near", "0.2.0", entry_points=REWARD, summary="nearness of numbers")
    write_wheel(folder, "slime-reward-near", "0.3.0rc1", entry_points=REWARD)
    write_wheel(folder, "slime-hook-far", "2.0", keywords="rl,slime-plugin", requires=("slime-rl-core>=99",))
    write_wheel(folder, "slime-mould", keywords="biology")
    write_wheel(folder, "other-plugin")
    with serving(folder) as found:
        yield found


@pytest.fixture(autouse=True)
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip have no settings, which it would print after half a second."""
    if "index_with_a_password" not in request.node.name:
        monkeypatch.setattr(packages, "pip", lambda *words: subprocess.CompletedProcess(words, 0, "", ""))


def search(capfd: Any, *words: str) -> tuple[int, str, str]:
    status = main(["plugins", "search", *words])
    said = capfd.readouterr()
    return status, said.out, said.err


@pytest.mark.parametrize("form", ["json", "html", "plain"])
def test_what_has_the_name_and_the_keyword_is_found(form: str, index: Index, capfd: Any) -> None:
    index.form = form
    status, said, errors = search(capfd, "--index-url", index.url)
    assert (status, errors) == (0, "")
    rows = [line.split() for line in said.splitlines()]
    assert rows[0] == ["NAME", "VERSION", "HERE", "DESCRIPTION"]
    assert rows[1:] == [
        ["slime-hook-far", "2.0", "-", "(needs", "slime-rl-core>=99,", "and", VERSION, "is", "installed)"],
        ["slime-reward-near", "0.2.0", "-", "nearness", "of", "numbers"],
    ]
    assert not [path for path in index.asked if "other" in path], "only names of slime's are asked about"
    index.yanked.add("slime_reward_near-0.2.0-py3-none-any.whl")
    status, said, _ = search(capfd, "--json", "Nearness", "reward", "--index-url", index.url + "/")
    assert [(row["name"], row["version"], row["unmet"]) for row in json.loads(said)] == [
        ("slime-reward-near", "0.1.0", None)
    ]
    assert search(capfd, "nothing of the sort", "--index-url", index.url)[1].endswith("keyword slime-plugin\n")


def test_a_long_list_is_announced_and_spared_for_whole_names(
    index: Index, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_TOLD", 10)
    status, _, errors = search(capfd, "near", "--index-url", index.url, "--timeout", "50")
    assert (status, errors.count("\n")) == (0, 1)
    assert re.search(rf"list of all projects of {index.url}/ \(.*\), at most 50 s; a whole name \(slime-", errors)
    index.asked.clear()
    status, said, errors = search(capfd, "slime-reward-near", "slime-no", "--index-url", index.url)
    assert (status, [line.split()[0] for line in said.splitlines()]) == (1, ["NAME", "slime-reward-near"])
    assert errors.startswith("not read: slime-no: ")
    assert [path for path in index.asked if path.strip("/") == "simple"] == []
    status, said, _ = search(capfd, "slime-reward", "--index-url", index.url)  # the beginning of a name
    assert (status, [line.split()[0] for line in said.splitlines()]) == (0, ["NAME", "slime-reward-near"])


def test_an_index_with_a_password(index: Index, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    index.user = "me:secret/word"
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("://", "://me:secret%2Fword@"))  # as pip's settings have it
    assert search(capfd)[0] == 0
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("://", "://me:wrongword@"))
    status, said, errors = search(capfd)
    assert (status, said) == (2, "")
    assert "answers 401" in errors
    assert "wrongword" not in errors


def test_without_a_network_it_says_so(capfd: Any) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/simple"
        status, _, errors = search(capfd, "--index-url", url)
    assert status == 2
    assert f"cannot read the package index {url}/: [Errno 111] Connection refused. Without a network" in errors
    assert search(capfd, "--index-url", "pypi.org")[2].startswith("slime: error: --index-url pypi.org: no address")


def test_an_index_that_does_not_answer_is_left(index: Index, capfd: Any) -> None:
    index.delay_s = 3
    started = time.monotonic()
    status, _, errors = search(capfd, "--index-url", index.url, "--timeout", "0.3")
    assert status == 2
    assert "cannot read the package index" in errors
    assert time.monotonic() - started < 2.5


def test_a_project_that_cannot_be_read_is_named(index: Index, capfd: Any) -> None:
    (index.folder / "slime_torn-1.0-py3-none-any.whl").write_bytes(b"no archive")
    index.form = "plain"
    status, said, errors = search(capfd, "--index-url", index.url)
    assert status == 1
    assert "slime-reward-near" in said
    assert errors.startswith("not read: slime-torn: ")
    assert errors.endswith("slime_torn-1.0-py3-none-any.whl is no wheel\n")


def test_pages_that_are_no_index(index: Index, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Index, "page", lambda self, path: (b"[]", "application/json"))
    assert "is no page of a package index" in search(capfd, "--index-url", index.url)[2]
    monkeypatch.setattr(packages, "_LARGEST", 1)
    assert "has more than 0 MB" in search(capfd, "--index-url", index.url)[2]


def answers(monkeypatch: pytest.MonkeyPatch, *, status: int = 1, said: str = "") -> list[tuple[str, ...]]:
    """Let pip answer so; return the list of its calls."""
    called: list[tuple[str, ...]] = []

    def pip(*words: str) -> subprocess.CompletedProcess[str]:
        called.append(words)
        return subprocess.CompletedProcess(words, status, "", said)

    for module in (installing, uninstalling):
        monkeypatch.setattr(module, "pip", pip)
    return called


def test_why_pip_could_not_get_it(index: Index, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answers(monkeypatch, said="ERROR: many\nERROR: more\n[notice] a newer pip\n")
    install = ["plugins", "install", "--index-url", index.url]
    (tmp_path / "slime-reward-here").mkdir()
    for target, reason in (
        ("slime-gone", f"{index.url}/ has no slime-gone; slime plugins search lists plugins"),
        ("slime-reward-here", f"{index.url}/ has no slime-reward-here; for the folder: ./slime-reward-here"),
        ("slime-reward-near", "pip cannot get slime-reward-near: many"),
        ("./slime-reward-here", "pip cannot get ./slime-reward-here: many"),
    ):
        assert main([*install, target]) == 2
        assert capfd.readouterr().err == f"slime: error: {reason}\n"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("slime-rl-core", "is slime's own"),
        ("slime-reward-math", "is slime's own"),
        ("pytest", "is no plugin of slime; to remove it: pip uninstall pytest"),
        ("slime-reward-mth", "is not installed"),
    ],
)
def test_only_strangers_plugins_are_uninstalled(
    name: str, reason: str, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = answers(monkeypatch)
    assert main(["plugins", "uninstall", "--yes", name]) == 2
    assert reason in capfd.readouterr().err
    assert called == []


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two plugins on `sys.path`, of which one needs the other."""
    site = tmp_path / "site"
    wheels = [
        write_wheel(tmp_path, "slime-reward-near", entry_points=REWARD),
        write_wheel(
            tmp_path,
            "slime-hook-far",
            entry_points="[slime.plugins]\nfar = slime_hook_far\n",
            requires=("slime-reward-near", 'pytest; extra == "t"'),
        ),
    ]
    for wheel in wheels:
        ZipFile(wheel).extractall(site)
    monkeypatch.syspath_prepend(str(site))
    return site


def test_it_asks_and_names_what_goes(there: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called = answers(monkeypatch, status=0)
    assert main(["plugins", "uninstall", "slime_reward.near", "--yes"]) == 2
    assert "slime-reward-near is needed by slime-hook-far; uninstall it too" in capfd.readouterr().err
    monkeypatch.setattr(uninstalling, "_needed_by", lambda name: set())
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(["plugins", "uninstall", "slime-reward-near"]) == 2
    said = capfd.readouterr()
    assert said.out == "slime-reward-near 1.0: rewards/near\n"
    assert "this is no terminal; add --yes" in said.err
    assert called == []
    assert main(["plugins", "uninstall", "slime_reward.near", "--yes"]) == 0
    assert called == [("uninstall", "--yes", "slime-reward-near")]


def test_an_environment_without_pip(there: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    assert main(["plugins", "uninstall", "--yes", "slime-hook-far"]) == 2
    assert f"{sys.executable} has no pip; type: " in capfd.readouterr().err
