"""Names of models and data sets of the hub, as settings spell them.

    org/name[@revision]                                   a model
    hf:org/name[@revision]                                a model, also where a path of that name exists
    hf:org/name[@revision][:config][[split]][[a:b]]       a data set: its configuration, split and rows

The brackets of split and rows are literal: `hf:openai/gsm8k:main[train][:1000]`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_PREFIX = "hf:"
_REPO = r"[\w-][\w.-]*"
_MODEL = re.compile(rf"(?P<repo>{_REPO}/{_REPO})(?:@(?P<revision>[^\s@:\[\]]+))?")
_NAME = re.compile(
    rf"hf:(?P<repo>(?:{_REPO}/)?{_REPO})(?:@(?P<revision>[^\s@:\[\]]+))?(?::(?P<config>[^\s:\[\]]+))?"
    r"(?:\[(?P<split>[^\s:\[\]]+)\])?(?:\[(?P<rows>-?\d*:-?\d*)\])?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubName:
    """A name of the hub."""

    repo: str
    """`org/name`, or the name alone for the hub's oldest repositories."""
    revision: str | None = None
    """Branch, tag or commit; None for the default branch."""
    config: str | None = None
    split: str | None = None
    rows: str | None = None
    """First row and the row after the last one, `a:b`."""

    def __str__(self) -> str:
        parts = ((self.revision, "@{}"), (self.config, ":{}"), (self.split, "[{}]"), (self.rows, "[{}]"))
        return f"{_PREFIX}{self.repo}" + "".join(form.format(part) for part, form in parts if part)

    @property
    def is_commit(self) -> bool:
        """Return True if the revision is a whole commit hash, which names the same files at any time."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> HubName:
        """Return the name with this commit as its revision."""
        return replace(self, revision=commit)


def is_explicit(text: str) -> bool:
    """Return True if the text begins with `hf:`, so that it can be nothing but a name of the hub."""
    return text.startswith(_PREFIX)


def model_name(text: str) -> HubName | None:
    """Return the model that the text may name; None if it has another form."""
    match = _NAME.fullmatch(text) if is_explicit(text) else _MODEL.fullmatch(text)
    if match is None or (is_explicit(text) and any(match[part] for part in ("config", "split", "rows"))):
        return None
    return HubName(match["repo"], match["revision"])


def data_name(text: str) -> HubName | None:
    """Return the data set that a text with `hf:` names; None if it has another form."""
    match = _NAME.fullmatch(text)
    return None if match is None else HubName(**match.groupdict())
