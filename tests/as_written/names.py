"""Names of THUDM/slime that code can import here, and how each differs: `NAMES`, by dotted name, from `names.tsv`.

`test_names.py` imports and calls them; a table of the documentation is made of them. A new name of `slime-compat` has
its line in the file.
"""

from __future__ import annotations

from pathlib import Path

from tests.as_written.verdict import Verdict


def _read() -> dict[str, Verdict]:
    lines = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    return {name: Verdict(kind, why) for name, kind, why in rows}


NAMES = _read()
