#!/usr/bin/env python
"""`python -m pytest ...`, and each test that failed once more, alone: was it the code, or the moment?

A test that passes alone is flaky. The first time that is said, entered into `tests/flaky.md`, and fails nothing. One
that stands there already has had its chance: it fails the run until it is mended or removed, and its line with it.
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
"""Failed tests that are run again; more than these were no moment."""


def pytest(*argv: str) -> int:
    """Its exit status."""
    return subprocess.run([sys.executable, "-m", "pytest", "-o", f"cache_dir={CACHE}", *argv], cwd=ROOT).returncode


def failed(grouped: bool) -> list[str]:
    """Node ids of what failed in the last run, without the groups that `--dist loadgroup` puts behind them."""
    tests = json.loads((CACHE / "v" / "cache" / "lastfailed").read_text(encoding="utf-8"))
    return sorted(test.rpartition("@")[0] if grouped and "@" in test else test for test in tests)


def main(argv: list[str]) -> int:
    """Run pytest; the exit status of the whole."""
    status = pytest("--cache-clear", *argv)
    tests = failed("loadgroup" in argv) if status == 1 else []  # anything but failed tests, as an interrupt, stands
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
