"""Build one HTML file for a run: the page, its styles, and stored responses to the page's requests."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from slime_runs.index import Entry, Filter
from slime_runs.reading import tokenizer_of
from slime_runs.view import run_pages, sample_page, samples_page, server
from slime_runs.view.watched import WatchedRun

_FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'strict-dynamic' {digests}; style-src 'unsafe-inline'; img-src data:">
<title>slime</title><style>{styles}</style>
<script type="application/json" id="stored">{answers}</script></head>
<body>{scripts}</body></html>
"""


_START = """const main = document.createElement("script");
Object.assign(main, { type: "module", textContent: 'import "main";' });
document.head.append(main);"""
"""Script that inserts the main module; with 'strict-dynamic' only scripts inserted by a trusted script load modules."""


class _Answers:
    """Stored responses by request; the key is the one that `page/api.js` computes for a request."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def add(self, what: str, answer: Any, **parameters: Any) -> None:
        pairs = [
            [name, str(one)]
            for name, value in sorted(parameters.items())
            if value is not None and value != ""
            for one in (value if isinstance(value, list) else [value])
        ]
        self._found[orjson.dumps([what, pairs]).decode()] = answer

    def text(self) -> str:
        """Return the responses as JSON that is safe in a script element."""
        return orjson.dumps(self._found).decode().replace("<", "\\u003c")


def report(run: WatchedRun, rollouts: int, samples: int) -> str:
    """Return the text of the HTML file."""
    scripts = [(kind, code.replace("</script", "<\\/script")) for kind, code in _scripts()]
    digests = (base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for _, code in scripts)
    return _FRAME.format(
        digests=" ".join(f"'sha256-{digest}'" for digest in digests),
        styles=(server.static_folder() / "app.css").read_text(encoding="utf-8"),
        answers=_answers(run, rollouts, samples).text(),
        scripts="".join(f'<script type="{kind}">{code}</script>' for kind, code in scripts),
    )


def is_report(path: Path) -> bool:
    """Return whether a file is a report that may be written again."""
    with path.open(encoding="utf-8", errors="replace") as file:
        start = file.read(2000)
    return start.startswith(_FRAME[:60]) and "<title>slime</title>" in start


def _scripts() -> list[tuple[str, str]]:
    """Return the (type, text) of the page's script elements; an unbuilt page has each source as a data URL module."""
    folder = server.static_folder()
    if folder.name == "built":
        return [("module", (folder / "main.js").read_text(encoding="utf-8"))]
    modules = {}
    for path in sorted(folder.glob("*.js")):
        code = re.sub(r'from "\./(\w+)\.js"', r'from "\1"', path.read_text(encoding="utf-8"))
        modules[path.stem] = "data:text/javascript;base64," + base64.b64encode(code.encode()).decode()
    return [("importmap", orjson.dumps({"imports": modules}).decode()), ("module", _START)]


def _answers(run: WatchedRun, rollouts: int, samples: int) -> _Answers:
    answers, page, index = _Answers(), run_pages.run_page(run), run.index()
    newest: dict[str, int] = {total.data_set or "": total.rollout for total in index.evaluations()}
    places = [(total.rollout, "") for total in index.rollouts()[-rollouts:]]
    places += [(rollout, data_set) for data_set, rollout in newest.items()]
    for side in ("rollouts", "evaluated"):
        columns = page[side]
        kept = [i for i, place in enumerate(zip(columns["rollout"], columns["data_set"])) if _is_in(place, places)]
        page[side] = {name: [column[i] for i in kept] for name, column in columns.items()}
    tokenizer = tokenizer_of(run)
    chosen = {place: _chosen(run, *place, samples) for place in places}
    for order, entries in run_pages.ends(index).items():
        page[order]["text"] = [samples_page.start_of(one.row, tokenizer) for one in run.stored(entries)]
        for entry in entries:
            _add_sample(answers, run, entry)
    answers.add("runs", run_pages.runs({".": run}))
    answers.add("run", page, run=".")
    answers.add("metrics", run_pages.metrics(run, [], -1), run=".", since=-1)
    answers.add("shadows", run_pages.shadow(run, 0), run=".")
    answers.add("profile", run_pages.profiled(run), run=".")
    for (rollout, data_set), entries in chosen.items():
        table = samples_page.rollout(run, rollout, data_set)
        here = {(entry.group_index, entry.sample_index, entry.part) for entry in entries}
        of_rows = [table["columns"][name] for name in ("group_index", "sample_index", "part")]
        table["columns"]["stored"] = [place in here for place in zip(*of_rows)]
        says = {
            (e.group_index, e.sample_index, e.part): samples_page.start_of(one.row, tokenizer)
            for e, one in zip(entries, run.stored(entries))
        }
        table["columns"]["text"] = [says.get(place) for place in zip(*of_rows)]
        answers.add("rollout", table, run=".", rollout=rollout, data_set=data_set)
        for entry in entries:
            _add_sample(answers, run, entry)
    return answers


def _is_in(place: tuple[int, str | None], places: Sequence[tuple[int, str]]) -> bool:
    return (place[0], place[1] or "") in places


def _chosen(run: WatchedRun, rollout: int, data_set: str, count: int) -> list[Entry]:
    """Return up to `count` entries: failed samples first, then best and worst in turn."""
    entries = run.index().find(Filter(rollout=rollout, data_set=data_set), order="best")
    ends = [entry for pair in zip(entries, reversed(entries)) for entry in pair]
    failed = [entry for entry in entries if entry.status == "failed"]
    return list(dict.fromkeys([*failed[: count // 3], *ends]))[:count]


def _add_sample(answers: _Answers, run: WatchedRun, entry: Entry) -> None:
    rollout, data_set, group = entry.rollout, entry.data_set or "", entry.group_index
    sample, part = entry.sample_index, entry.part
    wanted = Filter(rollout=rollout, data_set=data_set, group_index=group, sample_index=sample, part=part)
    place = {"run": ".", "rollout": rollout, "data_set": data_set, "group": group}
    # The page leaves out a part of 0 in its requests.
    answers.add("sample", sample_page.sample(run, wanted, None), **place, sample=sample, part=part or None)
    if group is not None:
        answers.add("group", samples_page.group(run, rollout, data_set, group), **place)
