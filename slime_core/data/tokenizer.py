"""HF tokenizer directory -> tokenizer, and prompt (text or chat messages) -> token ids.

The data source, generate functions and the SFT rollout call this, so that a prompt has one spelling in ids everywhere.
`--apply-chat-template` decides about *text* prompts only. Chat messages have no spelling but the template's, with or
without the flag.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from slime_core.config.sections.rollout import no_model
from slime_core.data.control_tokens import quoted, quoted_messages, spelled
from slime_core.errors import ConfigError, DataError
from slime_core.protocols import Args
from slime_core.waits import raise_in, take_late

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
_BELIEVED = ("llama", "qwen3", "qwen3_moe")

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]]
"""Text, or chat messages."""


def load_tokenizer(directory: str | Path) -> Any:
    """The HF tokenizer of a local directory; nothing is downloaded and no code of the directory is run.

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
        # AutoTokenizer would come to the same class, but reads what every model of transformers is called for it.
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
    """Whether the directory has any file that a tokenizer is read from."""
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)


def _is_generic(directory: Path) -> bool:
    """Whether `tokenizer.json` says all, by the directory's word and for models of which transformers believes it."""
    files = [directory / name for name in ("tokenizer.json", "tokenizer_config.json", "config.json")]
    if not all(file.is_file() for file in files):
        return False
    said, model = (json.loads(file.read_text(encoding="utf-8")) for file in files[1:])
    classes = ("PreTrainedTokenizerFast", "TokenizersBackend")
    return said.get("tokenizer_class") in classes and "auto_map" not in said and model.get("model_type") in _BELIEVED


def encode_prompt(
    tokenizer: Any,
    prompt: Prompt,
    args: Args | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    environment: bool = False,
    noted: MutableMapping[str, Any] | None = None,
) -> list[int]:
    """Token ids the policy continues.

    Args:
        tokenizer: HF tokenizer.
        prompt: Text or chat messages. Text becomes one user message when `args.apply_chat_template` is set.
        args: Read for `apply_chat_template`, `apply_chat_template_kwargs` and `content_special_tokens`.
        tools: Tool schemas given to the chat template.
        environment: Others than the user wrote the messages: control tokens in all of them are `quoted`.
        noted: The sample's metadata, where those are counted.

    Raises:
        DataError: The tokenizer has no chat template or the template refuses the messages.
    """
    if isinstance(prompt, str) and not (args and args.apply_chat_template):
        return encode_text(tokenizer, prompt)
    kwargs = args.apply_chat_template_kwargs if args else None
    messages = quoted_messages(tokenizer, as_messages(prompt), args, noted, environment=environment)
    return encode_rendered(tokenizer, render_prompt(tokenizer, messages, tools, kwargs))


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a plain prompt: the tokenizer's leading special tokens (BOS) once, and no trailing ones (EOS).

    A tokenizer may append EOS to every text (`add_eos_token`, left by fine-tuning); a prompt that ends with it is over.
    """
    ids = encode_rendered(tokenizer, text)
    bare, whole = (list(tokenizer.encode("a", add_special_tokens=added)) for added in (False, True))
    leading = next((whole[:at] for at in range(len(whole)) if whole[at : at + len(bare)] == bare), [])
    return ids if ids[: len(leading)] == leading else leading + ids


def encode_rendered(tokenizer: Any, text: str) -> list[int]:
    """Ids of text that holds its special tokens already (a template's output, a piece of a response)."""
    return [token for piece in spelled(tokenizer, text) for token in tokenizer.encode(piece, add_special_tokens=False)]


def encode_result(
    tokenizer: Any, template: str, result: str, args: Args | None, noted: MutableMapping[str, Any] | None
) -> list[int]:
    """Ids of text with `{result}` in it, and what was answered `quoted` there."""
    return encode_rendered(tokenizer, template.replace("{result}", quoted(tokenizer, result, args, noted)))


def render_prompt(
    tokenizer: Any,
    prompt: Prompt,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The chat template's text up to where the assistant begins; plain text is one user message. Raises DataError."""
    return render_messages(
        tokenizer, as_messages(prompt), tools, {"add_generation_prompt": True, **(template_kwargs or {})}
    )


def as_messages(prompt: Prompt) -> Sequence[Mapping[str, Any]]:
    """Chat messages; plain text is one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def render_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as the template writes it. Raises DataError."""
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
