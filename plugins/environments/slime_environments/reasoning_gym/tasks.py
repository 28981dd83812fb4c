"""A task of reasoning-gym -> rows by index, and a row's entry back for its verifier.

The data source, the recipe and the reward use it. A row holds the whole entry, since generating the entry again may
take seconds. Entries contain tuples and tables with other keys than text, which JSON cannot hold, so `pack` marks them:
several verifiers distinguish tuples from lists (arc_agi gives 0.05 instead of 1 for a list).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError, did_you_mean

HASH_SEEDED = frozenset(
    {"codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Tasks of 0.1.25 whose items depend on Python's hash seed: they iterate over sets of strings."""
_TUPLE, _PAIRS = "__tuple__", "__pairs__"


class TaskRows:
    """Rows 0 to `size` - 1 of a task, each generated on access (`slime_core.data.dataset.Rows`)."""

    def __init__(self, spec: Mapping[str, Any], columns: Mapping[str, str], system_prompt: str | None) -> None:
        """
        Args:
            spec: {"name", "config"}, `config` with seed and size; "composite" has "datasets" in it.
            columns: Names of the row's columns "input", "label" and "metadata".
            system_prompt: Text before the question; the prompt is then chat messages. None: the prompt is text.

        Raises:
            ConfigError: There is no such task, or its configuration is wrong.
        """
        self.spec: dict[str, Any] = {"name": str(spec["name"]), "config": dict(spec["config"])}
        self.identity: dict[str, Any] = self.spec
        """Spec that a resumed run must share."""
        self.path = Path(f"reasoning_gym-{self.spec['name']}")
        self._columns, self._system_prompt = columns, system_prompt
        self._dataset = dataset_of(json.dumps(self.spec, sort_keys=True))
        check_hash_seed(self.spec)

    def __len__(self) -> int:
        return int(self.spec["config"]["size"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        entry = self._dataset[index]
        question = str(entry["question"])
        prompt: Any = question
        if self._system_prompt is not None:
            prompt = [{"role": "system", "content": self._system_prompt}, {"role": "user", "content": question}]
        facts = {"spec": self.spec, "index": index, "entry": pack(entry)}
        answer = entry.get("answer")
        return {
            self._columns["input"]: prompt,
            self._columns["label"]: None if answer is None else str(answer),
            self._columns["metadata"]: {"reasoning_gym": facts},
        }

    def where(self, index: int) -> str:
        """Return the name of a row for messages."""
        return f"reasoning_gym task {self.spec['name']!r}, item {index}"

    def fingerprint(self) -> dict[str, Any]:
        """Return the facts that a resumed run compares: task, configuration, version of reasoning-gym."""
        version = metadata.version("reasoning-gym")
        facts = {"spec": self.identity, "system_prompt": self._system_prompt, "version": version}
        text = json.dumps(facts, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return {"path": str(self.path), "size": len(text), "num_rows": len(self), "sha256": digest}

    def close(self) -> None:
        """Do nothing: no files are open."""


@functools.lru_cache(maxsize=64)
def dataset_of(spec: str) -> Any:
    """Return the package's data set for a spec in JSON. Raises ConfigError."""
    try:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError('reasoning_gym needs its package; type pip install "slime-rl[reasoning-gym]"') from error

    facts = json.loads(spec)
    name, config = facts["name"], facts["config"]
    if name not in DATASETS:
        hint = did_you_mean(name, DATASETS, form="{!r}")
        raise ConfigError(
            f"plugins.reasoning_gym.task {name!r}: reasoning-gym {metadata.version('reasoning-gym')} has no such task."
            f"{hint} It has: {', '.join(sorted(DATASETS))}"
        )
    if name == "composite":
        config = {**config, "datasets": [DatasetSpec(**part) for part in config["datasets"]]}
    try:
        return reasoning_gym.create_dataset(name, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"plugins.reasoning_gym: task {name!r}: {type(error).__name__}: {error}") from error


def check_hash_seed(spec: Mapping[str, Any]) -> None:
    """Raise ConfigError if a task's items depend on Python's hash seed and the seed is not set."""
    parts = spec["config"].get("datasets") or [spec]
    named = sorted({part["name"] for part in parts} & HASH_SEEDED)
    if named and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
        raise ConfigError(
            f"plugins.reasoning_gym: the items of {', '.join(named)} depend on Python's hash seed, so a resumed run"
            " would draw others; type PYTHONHASHSEED=0 before the command"
        )


def score(facts: Mapping[str, Any], answer: str | None) -> tuple[float, str | None]:
    """Return the verifier's score of an answer, and its error or None; an answer with an error has score 0."""
    dataset = dataset_of(json.dumps(facts["spec"], sort_keys=True))
    try:
        return float(dataset.score_answer(answer, unpack(facts["entry"]))), None
    except Exception as error:  # verifiers parse what the model wrote, and several raise on what they cannot parse
        return 0.0, f"{type(error).__name__}: {error}"


def pack(value: Any) -> Any:
    """Return a JSON value from which `unpack` restores tuples and non-text keys; Numpy scalars become Python's."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in (_TUPLE, _PAIRS) for key in value):
            return {str(key): pack(item) for key, item in value.items()}
        return {_PAIRS: [[pack(key), pack(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [pack(item) for item in value]}
    if isinstance(value, list):
        return [pack(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ConfigError(f"plugins.reasoning_gym: an entry holds a {type(value).__name__}, which cannot be stored")


def unpack(value: Any) -> Any:
    """Inverse of `pack`."""
    if isinstance(value, Mapping):
        if _TUPLE in value:
            return tuple(unpack(item) for item in value[_TUPLE])
        if _PAIRS in value:
            return {unpack(key): unpack(item) for key, item in value[_PAIRS]}
        return {key: unpack(item) for key, item in value.items()}
    return [unpack(item) for item in value] if isinstance(value, list) else value
