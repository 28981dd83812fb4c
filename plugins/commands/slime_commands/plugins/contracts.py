"""Run the contract suites of plugins with pytest, in a process of its own, and read the results.

Called by `slime plugins check`. Only the pytest process imports the test kit, so that a missing pytest is a note and
not an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from slime_core.plugins.kinds import HOOK_GROUP
from slime_core.plugins.registry import ComponentRef

_BARE = ("-p", "slime_testing_contracts.pytest_plugin", "--pyargs", "slime_testing_contracts.components")

DEADLINE_S = 600.0
"""Deadline in seconds for all suites of one folder, and for all bare suites together."""


@dataclass
class Outcome:
    """The result of the suites for one plugin."""

    note: str
    failures: list[str] = field(default_factory=list)
    passed: int = 0


Spec = tuple[str, str, ComponentRef | None]


def run_contracts(specs: list[Spec]) -> dict[Spec, Outcome]:
    """Return the outcome of each plugin; a spec is (kind, spec, registered component or None)."""
    if find_spec("pytest") is None:
        return {spec: Outcome("not run, since pytest is not installed: pip install 'slime-rl[dev]'") for spec in specs}
    outcomes: dict[Spec, Outcome] = {}
    by_folder: dict[Path, list[Spec]] = {}
    for spec in specs:
        ref = spec[2]
        if ref is not None and ref.folder is not None and (ref.folder / "tests" / "test_contract.py").is_file():
            by_folder.setdefault(ref.folder, []).append(spec)
    for folder, inside in by_folder.items():
        found = _pytest(["tests/test_contract.py"], folder)
        outcomes.update({spec: _outcome(found, "") for spec in inside})
    bare = [spec for spec in specs if spec not in outcomes]
    if bare:
        named = [f"{'hooks' if kind == HOOK_GROUP else kind}:{spec}" for kind, spec, _ in bare]
        found = _pytest(
            [*_BARE, *(word for name in named for word in ("--slime-component", name))], Path.cwd(), bare=True
        )
        outcomes.update({spec: _outcome(found, f"Test{number}_") for number, spec in enumerate(bare, start=1)})
    return outcomes


@dataclass(frozen=True)
class _Case:
    suite: str
    name: str
    failure: str | None
    skipped: bool


def _pytest(arguments: list[str], folder: Path, *, bare: bool = False) -> list[_Case] | str:
    """Run pytest and return the cases, or the reason for a failure; `bare` ignores the folder's pytest settings."""
    with tempfile.TemporaryDirectory(prefix="slime-check-") as scratch:
        report = Path(scratch, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
        command += [f"--rootdir={scratch}", "-c", os.devnull] if bare else []
        command += [f"--junitxml={report}", *arguments]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, env=_environment(folder)
            )
        except subprocess.TimeoutExpired:
            return f"the suite did not end within {DEADLINE_S:g} s"
        if not report.is_file():
            return f"pytest ended with {done.returncode}: {_last_line(done.stdout + done.stderr)}"
        return [_case(element) for element in ElementTree.parse(report).getroot().iter("testcase")]


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment with slime_core's parent directory, perhaps the working directory, on PYTHONPATH."""
    import slime_core

    home = str(Path(slime_core.__file__).parents[1])
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*inherited, home])}


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


def _case(element: ElementTree.Element) -> _Case:
    wrong = element.find("failure")
    wrong = element.find("error") if wrong is None else wrong
    failure = None if wrong is None else _reason(wrong)
    suite = element.get("classname", "").rpartition(".")[2]
    return _Case(suite, element.get("name", ""), failure, element.find("skipped") is not None)


def _reason(wrong: ElementTree.Element) -> str:
    """Return the error: pytest's message, or for a file that cannot be collected the last line marked "E"."""
    marked = [line[1:].strip() for line in (wrong.text or "").splitlines() if line.startswith("E ")]
    message = (wrong.get("message") or "failed").splitlines()[0]
    return marked[-1] if marked and message == "collection failure" else message


def _outcome(cases: list[_Case] | str, suite: str) -> Outcome:
    """Return the outcome of the cases whose class begins with `suite`; an empty `suite` selects all."""
    if isinstance(cases, str):
        return Outcome("", [cases])
    mine = [case for case in cases if case.suite.startswith(suite)]
    broken = [case for case in cases if case.failure is not None and not case.suite]
    failures = [f"{case.name}: {case.failure}" for case in mine if case.failure is not None]
    if not mine:
        if suite and broken:
            return Outcome("", [f"{case.name}: {case.failure}" for case in broken])
        return Outcome("its tests/test_contract.py has no tests")
    passed = sum(case.failure is None and not case.skipped for case in mine)
    return Outcome(f"{passed} tests passed", failures, passed)
