r"""Control tokens in message text: text that the tokenizer would read as the end of a message.

A tool, a page or an environment may say `<|im_end|>`. Between quoting and encoding, one private-use character (here %)
stands for each such text; templates carry it through::

    "4<|im_end|>"  --quoted-->  "4%"  --template-->  "<|im_start|>tool\n4%<|im_end|>"
                   --spelled-->  ["<|im_start|>tool\n4<|im_", "end|><|im_end|>"], each encoded separately

The ids decode to the same text, but no id in the message's text ends the message or begins another. `encode_rendered`
and `turns` call `spelled`; code that adds text from outside calls `quoted`. Raw prompts have no messages, so they are
not changed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, MutableMapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

from slime_core.errors import DataError
from slime_core.protocols import Args
from slime_core.sample.provenance import Source, source_of

logger = logging.getLogger(__name__)

_LAST = 0x10FFFD
"""Highest private-use character used; one character per control token, counting down from here."""


class _Controls(NamedTuple):
    stand_ins: Mapping[str, str]
    """Mapping from the text of a control token to its private-use character."""
    tokens: re.Pattern[str]
    marks: re.Pattern[str]


@lru_cache(maxsize=8)
def _controls(tokenizer: Any, template: str) -> _Controls:
    """Collect the special tokens, and the added tokens that the template writes.

    Both are needed: DeepSeek's role tokens are not special, and Gemma's added tokens include HTML and white space.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {str(token) for token in added if getattr(token, "special", True) or str(token) in template}
    texts |= set(getattr(tokenizer, "all_special_tokens", ()))
    found = sorted((text for text in texts if len(text.strip()) > 1), key=lambda text: (-len(text), text))
    stand_ins = {text: chr(_LAST - number) for number, text in enumerate(found)}
    tokens, marks = "|".join(map(re.escape, found)), "".join(stand_ins.values())
    never = "(?!)"
    return _Controls(stand_ins, re.compile(tokens or never), re.compile(f"([{marks}])" if marks else never))


def quoted(tokenizer: Any, said: Any, args: Args | None = None, noted: MutableMapping[str, Any] | None = None) -> Any:
    """Replace each control token in the text of an environment, a tool or a page by a private-use character.

    Templates keep these characters, and `spelled` writes each token out again, cut in two. The ids then decode to the
    same text, but no id ends the message or begins another. With `--content-special-tokens keep` nothing changes.

    Args:
        tokenizer: HF tokenizer.
        said: Text, or a message, in which every text is replaced.
        args: Settings, read for `content_special_tokens`.
        noted: Metadata of a sample, which counts the tokens for `rollout/content_special_tokens`.

    Raises:
        DataError: The text contains a control token, and `--content-special-tokens` is `refuse`.
    """
    mode = args.content_special_tokens if args else "neutralise"
    if mode == "keep":
        return said
    changed, found = _replaced(tokenizer, said)
    if found and mode == "refuse":
        raise DataError(f"the control token {found[0]!r} is in what was answered (--content-special-tokens refuse)")
    if found and noted is not None:
        metrics = noted.setdefault("sample_metrics", {})
        metrics["content_special_tokens"] = metrics.get("content_special_tokens", 0) + len(found)
    return changed


def quoted_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    args: Args | None = None,
    noted: MutableMapping[str, Any] | None = None,
    *,
    environment: bool = False,
) -> list[Mapping[str, Any]]:
    """Return messages ready to be rendered: quote tool messages, and warn once of control tokens in other messages.

    With `environment`, user and system messages come from an environment, so they are quoted as well.
    """
    ready = []
    for message in messages:
        source = source_of(str(message.get("role")))
        if source == Source.TOOL or (environment and source != Source.DEMONSTRATION):
            message = quoted(tokenizer, message, args, noted)
        elif source != Source.DEMONSTRATION and not (args and args.content_special_tokens == "keep"):
            for token in _replaced(tokenizer, message.get("content"))[1][:1]:
                _warn(source, token)
        ready.append(message)
    return ready


@cache
def _warn(source: Source, token: str) -> None:
    logger.warning(
        "a message of the %s holds the control token %s, which ends or begins a message wherever it stands; it is kept."
        " Take it out where others wrote that text (--content-special-tokens keep: no warning)",
        *(source, ascii(token)),
    )


def _replaced(tokenizer: Any, said: Any) -> tuple[Any, list[str]]:
    """Return the value with control tokens replaced by private-use characters, and the tokens found."""
    controls, found = _controls(tokenizer, str(tokenizer.chat_template)), []

    def stand_in(match: re.Match[str]) -> str:
        found.append(match[0])
        return controls.stand_ins[match[0]]

    def change(value: Any) -> Any:
        if isinstance(value, str):
            return controls.tokens.sub(stand_in, value)
        if isinstance(value, Mapping):
            return {key: change(inner) for key, inner in value.items()}
        return [change(inner) for inner in value] if isinstance(value, list) else value

    return change(said), found


def spelled(tokenizer: Any, text: str) -> list[str]:
    """Split a rendered text into pieces to encode separately; each token that `quoted` replaced is cut in two."""
    controls = _controls(tokenizer, str(tokenizer.chat_template))
    parts = controls.marks.split(text)
    tokens = dict(zip(controls.stand_ins.values(), controls.stand_ins)) if len(parts) > 1 else {}
    pieces, begun = [], ""
    for words, mark in zip(parts[::2], [*parts[1::2], ""]):
        token = tokens.get(mark, "")
        pieces.append(begun + words + token[: len(token) // 2])
        begun = token[len(token) // 2 :]
    return pieces
