"""A stored sample in readable form: its reward, and the conversation in pieces by their source."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.sample.provenance import Source
from slime_core.text import plain
from slime_runs.files import Row
from slime_runs.numbering import shown_place
from slime_runs.run import Run, StoredSample
from slime_runs.shadows import in_words
from slime_runs.text import number, one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

COLOURS = {
    Source.SYSTEM: "35",
    Source.USER: "36",
    Source.TEMPLATE: "2",
    Source.TOOL: "33",
    Source.SAMPLED: "32",
    Source.DEMONSTRATION: "34",
    Source.TEXT: "34",
}
"""Terminal colour codes by the source of a piece."""


def pieces(run: Run, found: StoredSample) -> Iterator[tuple[Source, bool, str]]:
    """Yield (source, whether it is trained on, text) in order; from the tokens if their tokenizer is available."""
    tokenizer, sample = tokenizer_of(run), found.sample
    if tokenizer is None or not sample.tokens:
        for message in found.messages:
            role = str(message.get("role"))
            source = {"system": Source.SYSTEM, "tool": Source.TOOL}.get(role, Source.USER)
            yield source, False, f"{message.get('content')}\n"
        yield Source.SAMPLED, not sample.remove_sample, found.text
        return
    start = 0
    for span in sample.known_spans():
        ids = sample.tokens[start : start + span.length]
        start += span.length
        yield span.source, span.trained and not sample.remove_sample, tokenizer.decode(ids, skip_special_tokens=False)


def question(row: Row, tokenizer: Tokenizer | None) -> str:
    """Return the newest message of the prompt, without the chat template if the sample's tokens tell it apart."""
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        content = prompt[-1].get("content") if prompt and isinstance(prompt[-1], dict) else ""
        return content if isinstance(content, str) else in_parts(content)
    tokens, spans = row.get("tokens"), row.get("spans")
    if tokenizer is not None and isinstance(tokens, list) and isinstance(spans, list):
        at, places = 0, list[tuple[int, int]]()
        for source, length, *_ in spans:
            if source == Source.SAMPLED:
                break
            places += [(at, at + length)] * (source == Source.USER)
            at += length
        if places:
            return tokenizer.decode(tokens[slice(*places[-1])], skip_special_tokens=False)
    return "" if prompt is None else str(prompt)


def in_parts(content: Any) -> str:
    """Return the text of a message whose content is a list of parts; other parts are named by their type."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "".join(
        str(part.get("text", f"[{part.get('type')}]")) if isinstance(part, dict) else str(part) for part in content
    )


def tokenizer_of(run: Run) -> Tokenizer | None:
    """Return the tokenizer of the newest commit, or of the initial model; None if neither can be read."""
    commits = sorted(run.checkpoints.glob("rollout_*/tokenizer.json"), reverse=True)
    begun = run.settings().get("hf_checkpoint", (None, ""))[0]
    for path in [*commits, *([Path(begun) / "tokenizer.json"] if begun else [])]:
        if path.is_file() and (found := _tokenizer(str(path))) is not None:
            return found
    return None


@lru_cache(maxsize=4)
def _tokenizer(path: str) -> Tokenizer | None:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # half-written, or of another version; the library raises no other class
        logger.warning("%s: no tokenizer: %s", path, error)
        return None


def header(found: StoredSample) -> str:
    """Return a line with the sample's origin, reward, status and fate."""
    entry = found.entry
    place = shown_place(entry.rollout, entry.data_set)
    reason = (found.row.get("kept") or {}).get("reason")
    versions = {entry.oldest_version, entry.newest_version} - {None}
    parts = [
        f"{place}, group {entry.group_index}, sample {entry.sample_index}" + f", part {entry.part}" * (entry.part > 0),
        f"reward {number(entry.score)}",
        f"{entry.status}, {entry.fate}" + (f" ({reason})" if reason else ""),
        f"{entry.prompt_tokens} + {entry.response_tokens} tokens, {entry.trained_tokens} trained",
        f"weights {'-'.join(str(v) for v in sorted(versions, key=str))}" if versions else "",
    ]
    return one_line("; ".join(part for part in parts if part), 2000)


def lines(run: Run, found: StoredSample, *, colour: bool, limit: int | None = None) -> list[str]:
    """Return the sample as lines for a terminal, with at most `limit` characters of each piece."""
    label = found.row.get("label")
    text = [_painted(header(found), "1", colour)]
    if label is not None:
        text.append(f"label: {one_line(str(label), 500)}")
    if isinstance(found.row.get("reward"), dict):
        paid = (f"{one_line(key, 80)} {_value(value)}" for key, value in found.row["reward"].items())
        text.append(f"reward: {', '.join(paid)}")
    if found.entry.fate == "trained" and (row := run.trained(found.entry.rollout).get(found.entry.key)):
        text.append(f"advantage {_mean(row.get('advantages'))}")
    if found.entry.data_set is None and (shadow := run.shadow(found.entry.rollout).get(found.entry.key)):
        text.append(one_line(in_words(shadow, number), 500))
    if found.entry.failure:
        text.append(f"failed in {one_line(found.entry.failure, 500)}")
    shown = [(source, plain(piece, limit)) for source, _, piece in pieces(run, found)]
    if colour:
        return [*text, "".join(_painted(piece, COLOURS[source], colour) for source, piece in shown), ""]
    return [*text, *(f"[{source.value}] {piece.rstrip()}" for source, piece in shown), ""]


def _mean(values: Any) -> str:
    if isinstance(values, list):
        return f"{number(sum(values) / len(values))} on average" if values else "-"
    return number(values)


def _value(value: Any) -> str:
    return number(value) if isinstance(value, (int, float)) else one_line(str(value), 200)


def _painted(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text
