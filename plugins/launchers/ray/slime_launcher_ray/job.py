"""`python -m slime_launcher_ray.job`: the program of a Ray job of `slime submit`, run in the job's folder.

`submit.py` made the folder. Another job with the same folder may read it at the same time, so files are changed by
replacing them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

HERE = "/@the-job-s-folder@"
"""Placeholder for the folder's path; the same as in `submit.py`, which is not imported because it imports Ray."""


def main() -> int:
    """Run the command and return its exit status."""
    folder = Path.cwd()
    for file in folder.rglob("*.y*ml"):
        text = file.read_text(encoding="utf-8")
        if HERE in text:
            changed = file.with_name(f"{file.name}.{os.getpid()}")
            changed.write_text(text.replace(HERE, str(folder)), encoding="utf-8")
            changed.replace(file)
    order = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    try:
        os.chdir(order["directory"])
    except OSError as error:
        print(f"slime: error: {error}; the nodes need the directory of `slime submit`, or --directory", file=sys.stderr)
        return 2
    from slime_core.cli.main import main as slime

    return slime([order["command"], "--config", str(folder / "run.yaml")])


if __name__ == "__main__":
    sys.exit(main())
