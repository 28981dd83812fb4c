"""Write the list of megatron-core's fields that slime ships; `--check` only says whether it is up to date.

python scripts/snapshot_megatron_flags.py [--check]
"""

from __future__ import annotations

import sys

from slime_trainer_megatron.arguments.fields import SNAPSHOT, core_directory, core_version, read_fields, to_json


def main(argv: list[str]) -> int:
    """Write or check; 1 when the list is out of date or there is no megatron-core to make it from."""
    root = core_directory()
    if root is None:
        print("no megatron-core is installed here", file=sys.stderr)
        return 1
    text = to_json(read_fields(root), core_version(root))
    if "--check" not in argv:
        SNAPSHOT.write_text(text, encoding="utf-8")
        return 0
    if not SNAPSHOT.exists() or SNAPSHOT.read_text(encoding="utf-8") != text:
        print(f"{SNAPSHOT} is out of date; run python scripts/snapshot_megatron_flags.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
