#!/usr/bin/env python
"""Run `python -m pytest ...`, and run each failed test again, alone, to tell flaky tests from broken code.

A test that passes alone is flaky. The first time, the test is reported and entered into `tests/flaky.md`, and the run
does not fail. A test that `tests/flaky.md` has already fails the run, until the test is fixed or removed together with
its line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLAKY = ROOT / "tests" / "flaky.md"
CACHE = ROOT / ".pytest_cache" / "again"
MOST = 5
"""Largest number of failed tests to run again; more failures are not flaky tests."""


def pytest(*argv: str) -> int:
    """Run pytest and return its exit status."""
    return subprocess.run([sys.executable, "-m", "pytest", "-o", f"cache_dir={CACHE}", *argv], cwd=ROOT).returncode


def failed(grouped: bool) -> list[str]:
    """Return the node ids of tests that failed in the last run, without the groups that `--dist loadgroup` appends."""
    tests = json.loads((CACHE / "v" / "cache" / "lastfailed").read_text(encoding="utf-8"))
    return sorted(test.rpartition("@")[0] if grouped and "@" in test else test for test in tests)


def main(argv: list[str]) -> int:
    """Run pytest, run failed tests again, and return the exit status."""
    status = pytest("--cache-clear", *argv)
    tests = failed("loadgroup" in argv) if status == 1 else []  # keep other statuses, such as an interrupt
    if not tests or len(tests) > MOST:
        return status
    listed = FLAKY.read_text(encoding="utf-8")
    today = datetime.now(UTC).date().isoformat()
    fails = False
    for test in tests:
        print(f"\n=== again, alone: {test}", flush=True)
        if pytest("-p", "no:cacheprovider", test) != 0:
            fails, verdict = True, "failed again"
        elif f"`{test}`" in listed:
            fails, verdict = True, "passed, but tests/flaky.md has it already: mend or remove it"
        else:
            verdict = "passed: flaky. Entered into tests/flaky.md; commit that, and mend or move the test today"
            with FLAKY.open("a", encoding="utf-8") as file:
                file.write(f"- `{test}`: failed on {today}, and passed alone\n")
        print(f"=== {test}: {verdict}", flush=True)
    return int(fails)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
