"""A sample token by token: text, author, mask, log-probs of engine and trainer, advantage, weight version.

The data are columns of at most `SLICE` tokens at a time, so that a page reads a very long response in pieces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

from slime_core.checkpoint.store import rollout_of
from slime_core.multimodal import image_url, images_of
from slime_core.text import plain
from slime_runs.index import Filter
from slime_runs.reading import tokenizer_of
from slime_runs.run import RunError, StoredSample
from slime_runs.view.renderers import renderer_names
from slime_runs.view.samples_page import answer, label, message
from slime_runs.view.watched import WatchedRun

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SLICE = 10_000
_LONGEST = 100_000
"""Maximum characters of a text without tokens, and of raw metadata."""
_LONGEST_CHARACTER = 8
"""Maximum number of tokens of one character."""
_MOST_IMAGES = 32
_LARGEST_IMAGE = 8 << 20
"""Maximum bytes of an image file."""
_PICTURES = tuple(f"data:image/{kind};" for kind in ("png", "jpeg", "webp", "gif"))
_OF_ENGINE = {"rollout_log_probs": "engine", "token_weight_versions": "version", "teacher_log_probs": "teacher"}
_OF_TRAINER = {
    "log_probs": "trainer", "ref_log_probs": "reference", "advantages": "advantage", "returns": "return",
    "values": "value", "entropy": "entropy",
}  # fmt: skip
"""Stored column, one number per response token -> its name on the page."""


def find_sample(run: WatchedRun, wanted: Filter) -> StoredSample:
    """Return the first sample that passes the filter. Raises RunError if none does."""
    entries = run.index().find(wanted, limit=1)
    if not entries:
        raise RunError("the run has no such sample, or no longer: old rollouts are thinned to stay in the budget")
    return next(run.stored(entries))


def sample(run: WatchedRun, wanted: Filter, start: int | None) -> dict[str, Any]:
    """Return the page's JSON.

    Args:
        run: Run of the sample.
        wanted: Rollout, data set, group, sample and part.
        start: First token of the slice; None: choose it so that the slice has the response's first token.
    """
    found = find_sample(run, wanted)
    entry = found.entry
    given = run.trained(entry.rollout, {entry.key[0]}).get(entry.key) if entry.fate == "trained" else None
    group = Filter(rollout=entry.rollout, data_set=entry.data_set or "", group_index=entry.group_index)
    siblings = [] if entry.group_index is None else run.index().find(group, limit=1000)
    return {
        **answer(run, found, given),
        "prompt": [message(one) for one in found.messages],
        "label": label(found),
        "siblings": [[one.sample_index, one.part, one.score] for one in siblings],
        "tokens": tokens_of(run, found, given or {}, start),
        "metadata": plain(json.dumps(found.row.get("metadata"), indent=1, ensure_ascii=False), _LONGEST),
        "images": _images(found.row.get("multimodal_inputs")),
        "renderers": renderer_names(),
        "kept_weights": _kept_weights(run),
    }


def _kept_weights(run: WatchedRun) -> list[int]:
    """Return the numbers of rollouts after which weights are still saved."""
    commits = run.checkpoints.glob("rollout_*/model*.safetensors")
    return sorted({0, *(rollout_of(path.parent) + 1 for path in commits)})


def tokens_of(run: WatchedRun, found: StoredSample, given: dict[str, Any], start: int | None) -> dict[str, Any]:
    """Return a slice of the sample's tokens with the data of engine and trainer (`given`) for each."""
    one = found.sample
    total, prompt = len(one.tokens), len(one.tokens) - one.response_length
    start = max(0, min(total - 1, prompt - SLICE // 2 if start is None else start))
    end = min(total, start + SLICE)
    tokenizer = tokenizer_of(run)
    mask = one.loss_mask if one.loss_mask is not None else [1] * one.response_length
    columns = {name: _of_response(found.row.get(stored), one.response_length) for stored, name in _OF_ENGINE.items()}
    columns |= {name: _of_response(given.get(stored), one.response_length) for stored, name in _OF_TRAINER.items()}
    first, last = max(start - prompt, 0), max(end - prompt, 0)
    spans = [[span.source.value, span.length, span.withheld] for span in one.known_spans()]
    return {
        "total": total,
        "prompt": prompt,
        "start": start,
        "ids": one.tokens[start:end],
        "texts": None if tokenizer is None else [plain(text) for text in decoded(tokenizer, one.tokens[start:end])],
        "text": plain(found.text, _LONGEST) if tokenizer is None else None,
        "spans": _cut(spans, start, end),
        "turns": [[plain(str(v), 200) if isinstance(v, str) else v for v in turn] for turn in one.known_turns()],
        "first": first,
        "mask": [] if one.remove_sample else [int(bool(m)) for m in mask[first:last]],
        "columns": {name: column[first:last] for name, column in columns.items() if column is not None},
    }


def _of_response(values: Any, length: int) -> list[Any] | None:
    """Return one value per response token; None if the values are missing or have another length."""
    if values is None:
        return None
    if not isinstance(values, list):
        return [values] * length
    return values if len(values) == length else None


def _cut(spans: Sequence[Sequence[Any]], start: int, end: int) -> list[list[Any]]:
    """Return the spans of a slice."""
    found: list[list[Any]] = []
    at = 0
    for source, length, withheld in spans:
        inside = min(at + length, end) - max(at, start)
        if inside > 0:
            found.append([source, inside, withheld])
        at += length
    return found


def decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; a character of several tokens belongs to the last token."""
    from tokenizers.decoders import DecodeStream

    stream, texts, waiting = DecodeStream(skip_special_tokens=False), list[str](), list[int]()
    for one in ids:
        text = stream.step(tokenizer, one)
        waiting = [] if text is not None else [*waiting, one]
        if len(waiting) == _LONGEST_CHARACTER:  # they make none: without end, each step would try all again
            text, waiting = tokenizer.decode(waiting, skip_special_tokens=False), []
            stream = DecodeStream(skip_special_tokens=False)
        texts.append(text or "")
    if waiting:
        texts[-1] = tokenizer.decode(waiting, skip_special_tokens=False)
    return texts


def _images(inputs: Any) -> list[dict[str, str | None]]:
    """Return name and data URI of each image; None for an image neither in the sample nor in a local file."""
    images = [image for image in images_of(inputs) if isinstance(image, str)][:_MOST_IMAGES]
    return [{"name": plain(image, 200), "source": _picture(image)} for image in images]


def _picture(image: str) -> str | None:
    try:
        if not image.startswith("data:") and not _is_small_file(Path(image).stat()):
            return None
        found = image_url(image)
    except (OSError, ValueError):  # on another machine, or a web address, which is not fetched
        return None
    return found if found.startswith(_PICTURES) else None


def _is_small_file(state: os.stat_result) -> bool:
    """Return True for a small regular file; devices and pipes may be endless."""
    return S_ISREG(state.st_mode) and state.st_size <= _LARGEST_IMAGE
