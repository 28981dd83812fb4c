"""Reward 1.0 if the response follows every verifiable instruction of its prompt, else 0.0.

The instructions are those of IFEval (Zhou et al., 2023) and of IFBench (Pyatkin et al., 2025), in their schema:
`instruction_id_list` and `kwargs`, one mapping per instruction, in `metadata` or in the label (a mapping, JSON of one,
or the Python text of open-instruct's sets). The checks are written from the instructions' descriptions, in `ifeval.py`,
`ifbench_words.py` and `ifbench_formats.py`.

Sentences and words are split by the rules of `text.py`, not by NLTK's models, so counts may differ from the benchmarks'
at some abbreviations. Text up to the last `</think>` and end-of-turn tokens are not scored.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from slime_core import Args, PluginOptions, RewardTraits, Sample, declares, options
from slime_rewards.ifbench import ifbench_formats, ifbench_words, ifeval

CHECKS: Mapping[str, Callable[..., bool]] = {**ifeval.CHECKS, **ifbench_words.CHECKS, **ifbench_formats.CHECKS}
"""Instruction id -> check(response, **kwargs)."""
NOT_CHECKED = (
    "count:person_names", "ratio:stop_words", "words:start_verb", "words:odd_even_syllables", "custom:reverse_newline",
    "custom:european_capitals_sort",
)  # fmt: skip
"""IFBench instructions that need taggers, word lists or an atlas; using one is an error."""

_IDS = {"instruction_id_list", "instruction_id"}
_END_TOKEN = re.compile(r"(?:<\|[^<>|]{1,40}\|>|</s>|<eos>|<end_of_turn>)\Z")


class Options(PluginOptions):
    """Options under `plugins: {ifbench: {...}}`."""

    score: Literal["all", "fraction"] = "all"
    """all: 1.0 if every instruction is followed, else 0.0; fraction: the share of followed instructions."""
    loose: bool = False
    """IFEval's loose criterion: also without the first line, the last line, and asterisks, in any combination."""


@declares(RewardTraits(execution="process"))  # language detection and regular expressions on odd text
def reward(args: Args, sample: Sample) -> float:
    """Return a score in [0, 1]; 0.0 for an empty response.

    Raises:
        ValueError: The instructions are missing or cannot be read, an instruction is unknown, or its kwargs do not fit.
    """
    ids, kwargs = instructions(sample)
    wanted = options(args, "ifbench", Options)
    checks = [_bound(ident, given) for ident, given in zip(ids, kwargs)]
    response = _without_end_tokens(sample.response.rpartition("</think>")[2])
    if not response.strip():
        return 0.0
    texts = _loosened(response) if wanted.loose else [response]
    followed = [any(text.strip() and check(text) for text in texts) for check in checks]
    return sum(followed) / len(followed) if wanted.score == "fraction" else float(all(followed))


def instructions(sample: Sample) -> tuple[list[str], list[dict[str, Any]]]:
    """Return ids and kwargs of the sample's instructions, of which there is at least one.

    Raises:
        ValueError: Ids or kwargs are missing, cannot be read, or are not lists of the same length.
    """
    given: Any = sample.metadata if _IDS & sample.metadata.keys() else sample.label
    source = _read(given)
    if isinstance(source, list) and len(source) == 1:
        source = _read(source[0])  # open-instruct's label is a list of one
    if not isinstance(source, Mapping) or not _IDS & source.keys():
        raise ValueError(
            f"the label holds no instructions: {given!r:.120}; expected instruction_id_list (or instruction_id) and"
            " kwargs, in a mapping or in JSON or Python text of one"
        )
    ids = _read(source.get("instruction_id_list", source.get("instruction_id")))
    ids = [ids] if isinstance(ids, str) else ids
    kwargs = _read(source.get("kwargs"))
    kwargs = [kwargs] if isinstance(kwargs, Mapping) else kwargs or [{}] * len(ids or [])
    if not isinstance(ids, list) or not ids or not isinstance(kwargs, list) or len(ids) != len(kwargs):
        raise ValueError(f"instruction_id_list and kwargs must be lists of the same length; got {ids!r} and {kwargs!r}")
    read = [_read(each) or {} for each in kwargs]
    if unfit := [each for each in read if not isinstance(each, Mapping)]:
        raise ValueError(f"kwargs of an instruction must be a mapping; got {unfit[0]!r:.80}")
    return [str(ident) for ident in ids], [dict(each) for each in read]


def _bound(ident: str, given: Mapping[str, Any]) -> Callable[[str], bool]:
    """Bind a check to its kwargs; a kwarg of None belongs to other instructions of the data set and is dropped."""
    check = CHECKS.get(ident.strip().lower())
    if check is None:
        why = "is not implemented" if ident in NOT_CHECKED else "is unknown"
        raise ValueError(f"instruction {ident!r} {why}; known: {', '.join(sorted(CHECKS))}")
    types = {name: parameter.annotation for name, parameter in inspect.signature(check).parameters.items()}
    values = {name: _typed(value, types.get(name)) for name, value in given.items() if value is not None}
    try:
        inspect.signature(check).bind("", **values)
    except TypeError as error:
        raise ValueError(f"instruction {ident!r} with kwargs {values!r}: {error}") from None
    return lambda text: check(text, **values)


def _typed(value: Any, annotation: Any) -> Any:
    """Return a kwarg as its check takes it: tables hold counts as floats or text, and lists as text."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    read = _read(value)
    if annotation == "int":
        if isinstance(read, int) or (isinstance(read, float) and read.is_integer()):
            return int(read)
        raise ValueError(f"an instruction's count is {value!r:.80}; expected a whole number")
    if annotation == "Sequence[str]":
        return read if isinstance(read, list) else [value]  # a text alone would be read as its letters
    return value


def _read(value: Any) -> Any:
    """Return the value of JSON or Python text, arrays as lists; other text stays text."""
    if isinstance(value, tuple) or hasattr(value, "tolist"):
        return list(value)
    if not isinstance(value, str):
        return value
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(value.strip())
    return value


def _without_end_tokens(text: str) -> str:
    while match := _END_TOKEN.search(text.rstrip()[-50:]):
        text = text.rstrip()[: -len(match[0])].rstrip()
    return text


def _loosened(response: str) -> list[str]:
    lines = response.split("\n")
    texts = []
    for first, last, stars in itertools.product((0, 1), (0, 1), (False, True)):
        text = "\n".join(lines[first : len(lines) - last]).strip() if first or last else response
        texts.append(text.replace("*", "") if stars else text)
    return texts
