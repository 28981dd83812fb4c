r"""HF tokenizer directory -> tokenizer, and prompt (text or chat messages) -> token ids.

The data source, generate functions and the SFT rollout call this, so that a prompt has one spelling in ids everywhere.
`--apply-chat-template` decides about *text* prompts only. Chat messages have no spelling but the template's, with or
without the flag.

Control tokens in message text: a tool, a page or an environment may say `<|im_end|>`. Between quoting and encoding, one
private-use character (here %) stands for each such text; templates carry it through::

    "4<|im_end|>"  --quoted-->  "4%"  --template-->  "<|im_start|>tool\n4%<|im_end|>"
                   --spelled-->  ["<|im_start|>tool\n4<|im_", "end|><|im_end|>"], each encoded separately

The ids decode to the same text, but no id in the message's text ends the message or begins another. `encode_rendered`
and `turns` call `spelled`; code that adds text from outside calls `quoted`. Raw prompts have no messages, so they are
not changed.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from slime_core.config.sections.rollout import no_model
from slime_core.errors import ConfigError, DataError
from slime_core.protocols import Args
from slime_core.sample.provenance import Source, source_of
from slime_core.waits import raise_in, take_late

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
_BELIEVED = ("llama", "qwen3", "qwen3_moe")

T = TypeVar("T")
Message: TypeAlias = Mapping[str, Any]
"""A chat message: `role`, `content` and what else the template reads."""
Prompt: TypeAlias = str | Sequence[Message]
"""Text, or chat messages."""
Tools: TypeAlias = Sequence[Mapping[str, object]] | None
"""Schemas for the chat template."""


class Tokenizer(Hashable, Protocol):
    """The part of an HF tokenizer that prompts need."""

    @property
    def chat_template(self) -> object:
        """The Jinja template; empty without one."""

    @property
    def name_or_path(self) -> str:
        """The model directory."""

    @property
    def is_fast(self) -> bool:
        """Whether it knows the characters of each token."""

    def __call__(self, text: str, **settings: Any) -> Mapping[str, Any]:
        """Return `input_ids`, and with `return_offsets_mapping` the characters of each."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Return the ids of a text."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **settings: Any) -> object:
        """Return the text of a conversation."""


def load_tokenizer(directory: str | Path) -> Any:
    """Return the HF tokenizer of a local directory; nothing is downloaded and no code of the directory is run.

    Raises:
        ConfigError: There is no such directory, or transformers cannot make a tokenizer of it.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ConfigError(no_model(str(directory)))
    if not has_tokenizer(directory):
        raise ConfigError(f"--hf-checkpoint {directory}: no tokenizer there (none of {', '.join(_TOKENIZER_FILES)})")
    import transformers

    try:
        # AutoTokenizer returns the same class, but first reads the names of all models of transformers.
        name = "PreTrainedTokenizerFast" if _is_generic(directory) else "AutoTokenizer"
        made = getattr(transformers, name)
        return made.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{directory}: cannot load a tokenizer: {without_advice(error)}") from error


def without_advice(error: Exception) -> str:
    """Return the message of transformers, without its advice to run code of the model directory."""
    if "trust_remote_code" in str(error):
        return (
            "it needs code from the model directory (auto_map), and slime runs none; use a model of transformers' own"
        )
    return str(error)


def has_tokenizer(directory: Path) -> bool:
    """Return whether the directory has any file that a tokenizer is read from."""
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)


def _is_generic(directory: Path) -> bool:
    """Return whether `tokenizer.json` alone defines the tokenizer: the directory and transformers agree on that."""
    files = [directory / name for name in ("tokenizer.json", "tokenizer_config.json", "config.json")]
    if not all(file.is_file() for file in files):
        return False
    said, model = (json.loads(file.read_text(encoding="utf-8")) for file in files[1:])
    classes = ("PreTrainedTokenizerFast", "TokenizersBackend")
    return said.get("tokenizer_class") in classes and "auto_map" not in said and model.get("model_type") in _BELIEVED


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt,
    args: Args | None = None,
    tools: Tools = None,
    *,
    environment: bool = False,
    noted: MutableMapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids that the policy continues.

    Args:
        tokenizer: HF tokenizer.
        prompt: Text or chat messages. Text becomes one user message when `args.apply_chat_template` is set.
        args: Read for `apply_chat_template`, `apply_chat_template_kwargs` and `content_special_tokens`.
        tools: Tool schemas given to the chat template.
        environment: Whether an environment wrote the messages: control tokens in all of them are `quoted`.
        noted: The sample's metadata, which counts the quoted tokens.

    Raises:
        DataError: The tokenizer has no chat template or the template refuses the messages.
    """
    if isinstance(prompt, str) and not (args and args.apply_chat_template):
        return encode_text(tokenizer, prompt)
    kwargs = args.apply_chat_template_kwargs if args else None
    messages = quoted_messages(tokenizer, as_messages(prompt), args, noted, environment=environment)
    return encode_rendered(tokenizer, render_prompt(tokenizer, messages, tools, kwargs))


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a plain prompt: the tokenizer's leading special tokens (BOS) once, and no trailing ones (EOS).

    A tokenizer may append EOS to every text (`add_eos_token`, left by fine-tuning); a prompt that ends with it is over.
    """
    ids = encode_rendered(tokenizer, text)
    bare, whole = (list(tokenizer.encode("a", add_special_tokens=added)) for added in (False, True))
    leading = next((whole[:at] for at in range(len(whole)) if whole[at : at + len(bare)] == bare), [])
    return ids if ids[: len(leading)] == leading else leading + ids


def encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of text that holds its special tokens already (a template's output, a piece of a response)."""
    return [token for piece in spelled(tokenizer, text) for token in tokenizer.encode(piece, add_special_tokens=False)]


def encode_result(
    tokenizer: Tokenizer, template: str, result: str, args: Args | None, noted: MutableMapping[str, Any] | None
) -> list[int]:
    """Return the ids of a template whose `{result}` is replaced by the `quoted` result."""
    return encode_rendered(tokenizer, template.replace("{result}", quoted(tokenizer, result, args, noted)))


def render_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt,
    tools: Tools = None,
    template_kwargs: Mapping[str, object] | None = None,
) -> str:
    """Return the chat template's text up to the assistant's turn; plain text is one user message. Raises DataError."""
    return render_messages(
        tokenizer, as_messages(prompt), tools, {"add_generation_prompt": True, **(template_kwargs or {})}
    )


def as_messages(prompt: Prompt) -> Sequence[Message]:
    """Return the chat messages; plain text is one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def render_messages(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Tools = None,
    template_kwargs: Mapping[str, object] | None = None,
) -> str:
    """Return the conversation as the template writes it. Raises DataError."""
    if not tokenizer.chat_template:
        raise DataError(
            f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template, which chat messages and"
            " --apply-chat-template need; add chat_template.jinja to the model directory, or use text prompts"
        )
    from jinja2 import TemplateError

    given = [dict(message) for message in messages]
    try:
        with _deadlines.kept():
            text = tokenizer.apply_chat_template(
                given, tools=list(tools) if tools else None, tokenize=False, **(template_kwargs or {})
            )
    except _TooSlow:
        raise DataError(f"the chat template took longer than {_TEMPLATE_S:g} s and was ended") from None
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise DataError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error
    return str(text)


_TEMPLATE_S = 10.0
"""Seconds that a chat template, which is a program, may take."""


class _TooSlow(BaseException):
    """Raised inside a template; no code that it calls is to catch it."""


class _Deadlines:
    """The deadlines of the templates that this process renders, in any thread, and the thread that keeps them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, float] = {}
        self._keeper: threading.Thread | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Raise `_TooSlow` in Python code of this thread after `_TEMPLATE_S`."""
        thread = threading.get_ident()
        with self._lock:
            self._ends[thread] = time.monotonic() + _TEMPLATE_S
            if self._keeper is None or not self._keeper.is_alive():  # a forked process has no threads
                self._keeper = threading.Thread(target=self._keep, daemon=True)
                self._keeper.start()
        try:
            yield
        finally:
            with self._lock:
                if self._ends.pop(thread, None) is None:
                    take_late(_TooSlow)

    def _keep(self) -> None:
        while self._keeper is not None:
            time.sleep(_TEMPLATE_S / 20)
            with self._lock:
                for thread in [thread for thread, end in self._ends.items() if end < time.monotonic()]:
                    del self._ends[thread]
                    raise_in(thread, _TooSlow)
                if not self._ends:
                    self._keeper = None


_deadlines = _Deadlines()


# -- control tokens in message text ----------------------------------------------------------------------

_LAST = 0x10FFFD
"""Highest private-use character used; one character per control token, counting down from here."""


class _Controls(NamedTuple):
    stand_ins: Mapping[str, str]
    """Mapping from the text of a control token to its private-use character."""
    tokens: re.Pattern[str]
    marks: re.Pattern[str]


@lru_cache(maxsize=8)
def _controls(tokenizer: Tokenizer, template: str) -> _Controls:
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


def quoted(tokenizer: Tokenizer, said: T, args: Args | None = None, noted: MutableMapping[str, Any] | None = None) -> T:
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
        raise DataError(f"the text contains the control token {found[0]!r} (--content-special-tokens refuse)")
    if found and noted is not None:
        metrics = noted.setdefault("sample_metrics", {})
        metrics["content_special_tokens"] = metrics.get("content_special_tokens", 0) + len(found)
    return changed


def quoted_messages(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    args: Args | None = None,
    noted: MutableMapping[str, Any] | None = None,
    *,
    environment: bool = False,
) -> list[Message]:
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


def _replaced(tokenizer: Tokenizer, said: T) -> tuple[T, list[str]]:
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


def spelled(tokenizer: Tokenizer, text: str) -> list[str]:
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
