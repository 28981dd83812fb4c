"""Write the list of SGLang's flags that slime ships; `--check` only says whether it is up to date.

python scripts/snapshot_sglang_flags.py --engine-python /path/to/venv/bin/python [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from slime_engine_sglang.environment import engine_python
from slime_engine_sglang.flag_list import SNAPSHOT, introspected


def snapshot_text(found: dict[str, Any]) -> str:
    """Return the output of `introspect` with one flag a line, so that a new version gives a readable diff."""
    rows = {
        part: "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in found[part]) + "\n]"
        for part in ("server", "router")
    }
    head = f'"schema":{found["schema"]},\n"versions":{json.dumps(found["versions"])}'
    return "{" + head + "".join(f',\n"{part}":{text}' for part, text in rows.items()) + "}\n"


def main(argv: list[str]) -> int:
    """Write or check the list; return 1 if it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-python", type=Path, help="interpreter of the environment that SGLang is installed in")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    text = snapshot_text(introspected(engine_python(options)))
    if not options.check:
        SNAPSHOT.write_text(text, encoding="utf-8")
        return 0
    if SNAPSHOT.read_text(encoding="utf-8") != text:
        print(f"{SNAPSHOT} is out of date; run python scripts/snapshot_sglang_flags.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
