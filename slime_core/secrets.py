"""Collect the keys, tokens and passwords given to this process, and remove them from printed and saved text.

`learn` receives every value of the command line, the environment and the files with its name. `hidden` filters every
text that is saved. Standard output and error are `Masked`, which filters all printed text. The output of user code's
processes is filtered by the processes that forward it (`workers/guard.py`, which reads the secrets from `in_memory`).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

from slime_core.errors import ConfigError

MARK = "<not kept>"
"""Text that replaces a secret."""
_NAMED = re.compile(
    r"(^|[._-])((api|access|private|secret|wandb|auth|admin)[_-]?keys?|(hf|hub|api|auth|access|bearer|refresh)[_-]?tokens?"
    r"|pass(word|wd|phrase)|secrets?|credentials?|pats?)$|(^|\.)token$",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"_(TOKEN|PWD)$")
"""Further secret names, of environment variables only; in settings, "token" may mean a vocabulary token."""
_FORM = re.compile(
    r"\b(?:gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}"
    r"|xox[a-z]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})"
)
"""Values that are secret under any name: tokens of GitHub, GitLab, Hugging Face, OpenAI, Anthropic, Slack, AWS,
Google, npm and PyPI, and JSON web tokens (formats as published by secretlint and GitHub's secret scanning)."""
_IN_URL = re.compile(r"\b\w+://[^\s/@:]*:([^\s/]+)@")
_known: set[str] = set()


def learn(name: str, value: object, shortest: int = 4) -> None:
    """Remember the secrets in a value: the whole value if its name is secret, else tokens and passwords in URLs.

    `shortest`: minimum length in characters; a shorter value is no secret, since it would match inside other words.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            learn(str(key), inner, shortest)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            learn(name, inner, shortest)
    elif isinstance(value, (str, int)) and not isinstance(value, bool):
        text = str(value)
        found = [text] if _NAMED.search(name) else [*_IN_URL.findall(text), *_FORM.findall(text)]
        for secret in (s for s in found if len(s) >= shortest and s != MARK):
            _known.update((secret, json.dumps(secret)[1:-1], repr(secret)[1:-1]))
        if text.startswith("{"):
            with suppress(ValueError, RecursionError):
                learn(name, json.loads(text), shortest)


def learn_flags(argv: Sequence[str]) -> None:
    """Learn from a command line: `--wandb-key KEY`, `--url=https://user:password@host`, `--set plugins.a.token=T`."""
    for before, word in zip(["", *argv], argv):
        name, _, value = word.partition("=")
        learn(name, value)
        learn(before if before.startswith("-") else "", word)


def learn_environment(env: Mapping[str, str]) -> None:
    """Learn from the environment; skip short values such as EMPTY, which stand for a missing key."""
    for name, value in env.items():
        learn("token" if _VARIABLE.search(name) and not name.startswith("SLIME_") else name, value, shortest=8)


def known() -> list[str]:
    """Return the secrets, longest first."""
    return sorted(_known, key=len, reverse=True)


def hidden(text: str) -> str:
    """Return the text without secrets."""
    for secret in known():
        text = text.replace(secret, MARK)
    return text


_ERASED = "\r\x1b[K"


class Masked:
    """A text stream that removes secrets."""

    written = 0.0
    """Time of the last write to any masked stream (`time.monotonic`)."""
    _status: TextIO | None = None

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, replacing a status line; return the number of characters."""
        if Masked._status is not None:
            status, Masked._status = Masked._status, None
            status.write(_ERASED)
            status.flush()
        Masked.written = time.monotonic()
        self._stream.write(hidden(text))
        return len(text)

    def show_status(self, text: str) -> None:
        """Write a status line; the next text on any masked stream replaces it."""
        Masked._status = self._stream
        self._stream.write(_ERASED + hidden(text))
        self._stream.flush()

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the lines as one text."""
        self.write("".join(lines))


def in_memory() -> int:
    """Return a descriptor of an in-memory file with all secrets, for `workers.guard.relay`; the caller closes it."""
    descriptor = os.memfd_create("hidden")
    os.pwrite(descriptor, b"".join(secret.encode() + b"\0" for secret in _known), 0)
    return descriptor


def hidden_values(value: Any) -> Any:
    """Return a setting's value without secrets."""
    if isinstance(value, Mapping):
        return {key: hidden_values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [hidden_values(inner) for inner in value]
    return hidden(value) if isinstance(value, str) else value


def refuse_marks(name: str, value: object, origin: object) -> None:
    """Raise ConfigError for a value of a saved `config.yaml` whose secret was removed."""
    if MARK in str(value):
        raise ConfigError(f"{name} ({origin}): the file does not keep secrets; give it again")
