"""Run the commands of `summary.txt`, and write their ratios into `table.md` (`make benchmarks`).

python benchmarks/summary.py
python benchmarks/summary.py --device cuda

With `--device NAME` the files are `summary-NAME.txt` and `table-NAME.md`. Each command gets all other flags.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Run every command. Raises CalledProcessError for the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", metavar="NAME")
    own, rest = parser.parse_known_args()
    name = f"-{own.device}" if own.device else ""
    table = HERE / f"table{name}.md"
    table.unlink(missing_ok=True)
    environment = {**os.environ, "BENCH_TABLE": str(table)}
    for line in (HERE / f"summary{name}.txt").read_text(encoding="utf-8").splitlines():
        print(f"== {line}", flush=True)
        script, *words = shlex.split(line)
        command = [sys.executable, str(HERE / script), *words, *rest]
        subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main()
