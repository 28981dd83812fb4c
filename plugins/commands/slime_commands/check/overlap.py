"""Training and evaluation data of a run -> whether prompts that it trains on are among those it is evaluated on."""

from __future__ import annotations

import json
import time
import unicodedata
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from slime_core.data.dataset import Rows, has_row, open_rows, split_path
from slime_core.data.rows import Columns, recognised
from slime_core.errors import DataError
from slime_core.protocols import Args
from slime_core.protocols.command import Finding, Level

_SECONDS = 3.0
"""How long rows are read at most; what is left is not compared."""
_DISTINCT = 0.5
"""Share of prompts that differ, below which the prompt is not what tells rows apart."""


def overlap(args: Args) -> Iterator[Finding]:
    """Warn for each evaluation data set whose prompts are in `--prompt-data`, equal but for case and spaces.

    Prompts with images are not compared, nor are data sets in which most prompts are the same text.
    """
    if not args.prompt_data or args.multimodal_keys:
        return
    until = time.monotonic() + _SECONDS
    try:
        sets = {d.name: (d, _prompts(d.path, Columns.of_eval(d, args), until)) for d in args.eval_datasets or []}
        held = {name: (d, set(read)) for name, (d, read) in sets.items() if len(set(read)) >= _DISTINCT * len(read) > 0}
        trained = set(_prompts(args.prompt_data, Columns.of_run(args), until)) if held else set()
    except (DataError, OSError):
        return  # the check of the data set itself says what is wrong with it
    for name, (dataset, prompts) in held.items():
        if shared := sorted(prompts & trained):
            same = split_path(args.prompt_data)[0].resolve() == split_path(dataset.path)[0].resolve()
            yield Finding(
                "data",
                Level.WARNING,
                f"{len(shared)} of the {len(prompts)} prompts of evaluation data set {name!r} ({dataset.path}) are in"
                f" --prompt-data {args.prompt_data}{', the same file' if same else ''}, such as {shared[0]!r:.60}: its"
                f" scores will not tell what the model can do on new prompts; take them out of one of the two",
            )


def _prompts(spec: str, columns: Columns, until: float) -> list[str]:
    """Return the prompts in normal form, as far as they can be read until then."""
    with closing(open_rows(spec, stream=split_path(spec)[1] == slice(None))) as rows:
        return [_normal(prompt) for prompt in _read(rows, columns, until)]


def _read(rows: Rows, columns: Columns, until: float) -> Iterator[Any]:
    layout, index = recognised(rows, columns), 0
    key = layout.prompt if layout is not None else columns.input
    while has_row(rows, index) and time.monotonic() < until:
        prompt = rows[index].get(str(key))
        if prompt:
            yield prompt
        index += 1


def _normal(prompt: Any) -> str:
    """Return text, or the messages of the user, without case and differences in spaces and in how letters are coded."""
    if isinstance(prompt, list):
        said = [m for m in prompt if isinstance(m, dict) and m.get("role", "user") == "user"]
        contents = [m.get("content", "") for m in said]
        prompt = "\n".join(c if isinstance(c, str) else json.dumps(c, sort_keys=True) for c in contents)
    return " ".join(unicodedata.normalize("NFKC", str(prompt)).casefold().split())
