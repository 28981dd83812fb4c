"""Tables of samples (a rollout, a data set of an evaluation, best and worst of the run), and one group side by side.

The functions return JSON values. Text from a model or a data set is escaped by `slime_core.text.plain`, so that no
character in it moves, hides or reorders the text around it; the page inserts it as text.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from statistics import fmean
from typing import TYPE_CHECKING, Any

from slime_core.sample.provenance import Source
from slime_core.text import plain
from slime_runs.files import FOLDER, Frame, Row, file_name, read_frame
from slime_runs.index import Entry, Filter, Key, Order
from slime_runs.reading import in_parts, pieces, question, tokenizer_of
from slime_runs.run import StoredSample
from slime_runs.view.watched import WatchedRun

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TEXTS_S = 0.15
_SEARCH_S = 2.0
_MOST_ROWS = 20_000
_SHOWN = 20_000
"""Limit on the characters of an answer in a group."""
_COLUMNS = (
    "rollout", "data_set", "group_index", "sample_index", "score", "status", "fate", "prompt_tokens", "response_tokens",
    "trained_tokens", "oldest_version", "newest_version", "failure", "data_row", "part", "offset", "size",
    "place",
)  # fmt: skip
_START = 160
"""Limit on the characters of a prompt and of an answer in a table."""


def table(run: WatchedRun, wanted: Filter, *, order: Order = "rollout", limit: int = _MOST_ROWS) -> dict[str, Any]:
    """Return the columns of matching samples; "cut" is True if there may be more samples."""
    entries = run.index().find(wanted, order=order, limit=limit)
    return {"columns": columns(entries), "count": len(entries), "cut": len(entries) == limit}


def columns(entries: Sequence[Entry]) -> dict[str, list[Any]]:
    """Return index entries as columns."""
    found: dict[str, list[Any]] = {name: [getattr(entry, name) for entry in entries] for name in _COLUMNS}
    found["failure"] = [plain(text, 300) if text else None for text in found["failure"]]
    return found


def rollout(run: WatchedRun, number: int, data_set: str) -> dict[str, Any]:
    """Return a rollout, or with `data_set` that data set of the evaluation after `number` rollouts."""
    found = table(run, Filter(rollout=number, data_set=data_set))
    all_totals = run.index().evaluations() if data_set else run.index().rollouts()
    totals = [total for total in all_totals if total.data_set == (data_set or None)]
    numbers = [total.rollout for total in totals]
    at = numbers.index(number) if number in numbers else None
    dropped = {
        group for group, fate in zip(found["columns"]["group_index"], found["columns"]["fate"]) if fate == "dropped"
    }
    reasons = run.ledger.dropped_for() if dropped else {}
    return {
        **found,
        "rollout": number,
        "data_set": data_set,
        "total": None if at is None else totals[at]._asdict(),
        "before": numbers[at - 1] if at else None,
        "after": numbers[at + 1] if at is not None and at + 1 < len(numbers) else None,
        "dropped_for": {str(group): reasons[group] for group in sorted(dropped & reasons.keys())},
        "filters": {name: value for name, value in _step(run, number).items() if "/dynamic_filter/" in name},
        "incidents": [i for i in run.incidents() if i.get("rollout_id") == number],
    }


def texts(run: WatchedRun, places: Sequence[str], text: str = "") -> list[list[str] | None]:
    """Return short [prompt, answer] of each place, around `text` if they contain it; None after the time limit.

    A place is "rollout.evaluation.offset.size.place" of a table row; evaluation is 0 or 1. A sample that has been
    deleted gives empty texts.
    """
    until, tokenizer = time.monotonic() + _TEXTS_S, tokenizer_of(run)
    frame: tuple[str, Frame] | None = None
    rows: list[Row] = []
    found: list[list[str] | None] = []
    for one in places:
        rollout, evaluation, offset, size, place = map(int, one.split("."))
        here = file_name(rollout, evaluation=bool(evaluation)), Frame(offset, size)
        if here != frame:
            if found and time.monotonic() > until:
                return [*found, *[None] * (len(places) - len(found))]
            frame, rows = here, _rows_of(run, *here)
        found.append(start_of(rows[place], tokenizer, text) if 0 <= place < len(rows) else ["", ""])
    return found


def _rows_of(run: WatchedRun, name: str, frame: Frame) -> list[Row]:
    try:
        return read_frame(run.path / FOLDER / name, frame)
    except (OSError, ValueError, MemoryError, OverflowError):  # the run has replaced the file
        return []


def start_of(row: Row, tokenizer: Tokenizer | None, text: str = "") -> list[str]:
    """Return a sample's question and answer in short, around `text` if they contain it."""
    prompt, whole = question(row, tokenizer), row.get("prompt")
    if text and isinstance(whole, str) and text.lower() not in prompt.lower():
        prompt = whole if text.lower() in whole.lower() else prompt
    return [_around(prompt, text), _around(str(row.get("response") or ""), text)]


def _around(whole: str, text: str) -> str:
    at = whole.lower().find(text.lower()) if text else -1
    first = max(0, at - _START // 3)
    part = " ".join(whole[first : first + _START].split())
    return "…" * (first > 0) + plain(part) + "…" * (first + _START < len(whole))


def _step(run: WatchedRun, rollout_id: int) -> Mapping[str, Any]:
    return next((line for line in run.metrics() if line["step"] == rollout_id + 1), {})


def search(run: WatchedRun, number: int, data_set: str, text: str) -> dict[str, Any]:
    """Find samples by text in prompt or response, ignoring case; return (group, sample, part), "cut" on timeout."""
    entries = run.index().find(Filter(rollout=number, data_set=data_set), limit=_MOST_ROWS)
    in_files = sorted(entries, key=lambda entry: (entry.file, entry.offset, entry.place))
    text, until, places = text.lower(), time.monotonic() + _SEARCH_S, list[list[int | None]]()
    for found in run.stored(in_files):
        if text in f"{found.row.get('prompt')}\n{found.text}".lower():
            places.append([found.entry.group_index, found.entry.sample_index, found.entry.part])
        if time.monotonic() > until:
            return {"found": places, "cut": True}
    return {"found": places, "cut": False}


def group(run: WatchedRun, number: int, data_set: str, index: int) -> dict[str, Any]:
    """Return all answers to a prompt."""
    wanted = Filter(rollout=number, data_set=data_set, group_index=index)
    stored = list(run.stored(run.index().find(wanted, limit=_MOST_ROWS)))
    trained = _given(run, stored)
    return {
        "rollout": number,
        "data_set": data_set,
        "group": index,
        "row": stored[0].entry.data_row if stored else None,
        "prompt": prompt_of(run, stored[0]) if stored else [],
        "label": label(stored[0]) if stored else None,
        "samples": [answer(run, found, trained.get(found.entry.key)) for found in stored],
        "events": [] if data_set else run.ledger.events([index])[index],
    }


def answer(run: WatchedRun, found: StoredSample, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a sample without its tokens."""
    return {
        **{name: column[0] for name, column in columns([found.entry]).items()},
        "text": plain(found.text, _SHOWN),
        "reward": parts_of(found.row.get("reward")),
        "components": parts_of(found.row.get("reward_components")),
        "advantage": _mean((given or {}).get("advantages")),
        "paid_by": paid_by(run, found),
        "outside_s": found.row.get("non_generation_time"),
        "shadow": _shadow(run, found.entry),
        "turns": len(found.row.get("weight_versions") or ()),
    }


def _shadow(run: WatchedRun, entry: Entry) -> dict[str, Any] | None:
    """Return the results of shadow components for a sample."""
    row = run.shadow(entry.rollout).get(entry.key) if entry.data_set is None else None
    return row and {name: row[name] for name in ("rewards", "filters", "kept")}


def _given(run: WatchedRun, stored: Iterable[StoredSample]) -> dict[Key, Row]:
    wanted = [found.entry for found in stored if found.entry.fate == "trained"]
    indices = {entry.sample_index for entry in wanted if entry.sample_index is not None}
    return run.trained(wanted[0].rollout, indices) if indices else {}


def paid_by(run: WatchedRun, found: StoredSample) -> list[dict[str, Any]]:
    """Return the reward that scored the sample, with version and digest of its source; all rewards if it is unknown.

    In a run without a reward, return the generate function, which scored the sample.
    """
    settings = run.settings()
    names = (
        found.row.get("custom_rm_path"),
        (found.row.get("metadata") or {}).get("rm_type"),
        settings.get("custom_rm_path", (None, ""))[0],
        settings.get("rm_type", (None, ""))[0],
        settings.get("custom_generate_function_path", (None, ""))[0],
    )
    name = next((str(name) for name in names if name), None)
    rewards = [plugin for plugin in run.plugins() if plugin.get("kind") == "rewards"]
    own = [plugin for plugin in rewards if name in (plugin.get("name"), plugin.get("target"))]
    keys = ("name", "target", "distribution", "version", "sha256")
    said = [{key: plugin.get(key) for key in keys} for plugin in own or rewards]
    return said or ([{"name": plain(name, 200)}] if name else [])


def label(found: StoredSample) -> str | None:
    """Return the data set's label as text, or None."""
    value = found.row.get("label")
    return None if value is None else plain(str(value), _SHOWN)


def prompt_of(run: WatchedRun, found: StoredSample) -> list[dict[str, str]]:
    """Return the prompt as messages. A prompt in the chat template is taken apart by the sources of its tokens."""
    if isinstance(found.row.get("prompt"), list):
        return [message(one) for one in found.messages]
    before = takewhile(lambda piece: piece[0] != Source.SAMPLED, pieces(run, found))
    return [{"role": source.value, "text": plain(text, _SHOWN)} for source, _, text in before]


def message(one: Mapping[str, Any]) -> dict[str, str]:
    """Return role and text of a prompt's message."""
    content = one.get("content")
    text = content if isinstance(content, str) else in_parts(content)
    return {"role": plain(str(one.get("role")), 40), "text": plain(text, _SHOWN)}


def parts_of(reward: Any) -> Any:
    """Return a reward, or its parts by name, with escaped text."""
    if isinstance(reward, Mapping):
        return {plain(str(name), 80): _plain(value) for name, value in reward.items()}
    return _plain(reward)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float | bool) else plain(str(value), 2000)


def _mean(value: Any) -> float | None:
    if isinstance(value, list):
        return fmean(value) if value else None
    return value if isinstance(value, int | float) else None
