"""HF tokenizer directory -> tokenizer, and prompt (text or chat messages) -> token ids.

The data source, generate functions and the SFT rollout call this, so that a prompt has one spelling in ids everywhere.
`--apply-chat-template` decides about *text* prompts only. Chat messages have no spelling but the template's, with or
without the flag.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from slime_core.data.control_tokens import quoted, quoted_messages, spelled
from slime_core.errors import ConfigError, DataError
from slime_core.protocols import Args

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]]
"""Text, or chat messages."""


def load_tokenizer(directory: str | Path) -> Any:
    """The HF tokenizer of a local directory; nothing is downloaded and no code of the directory is run.

    Raises:
        ConfigError: There is no such directory, or transformers cannot make a tokenizer of it.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; --hf-checkpoint names a local HF-layout directory")
    from transformers import AutoTokenizer

    if not any((Path(directory) / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(f"--hf-checkpoint {directory}: no tokenizer there (none of {', '.join(_TOKENIZER_FILES)})")
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{directory}: cannot load a tokenizer: {error}") from error


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
    """Ids of a plain prompt, with the tokenizer's own leading token (BOS) unless the text already begins with it."""
    bos = tokenizer.bos_token
    first, *rest = spelled(tokenizer, text)
    ids = list(tokenizer.encode(first, add_special_tokens=not (bos and text.startswith(bos))))
    return ids + [token for piece in rest for token in tokenizer.encode(piece, add_special_tokens=False)]


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

    try:
        text = tokenizer.apply_chat_template(
            [dict(m) for m in messages], tools=list(tools) if tools else None, tokenize=False, **(template_kwargs or {})
        )
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise DataError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error
    return str(text)
