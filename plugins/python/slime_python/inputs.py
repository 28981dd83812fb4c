"""Write data and models that were given as Python objects into files, which a run and its resume read.

A run that resumes reads its data again, in another process, so an object in memory becomes a file of the run: rows as
JSONL under a name with their hash, a model as a directory in Hugging Face layout.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
from slime_runs.new_directory import new_directory

from slime_core.errors import ConfigError


def data_file(name: str, data: Any, folder: Path) -> str:
    """Return the path of the data: of a path itself, else of a file that the rows are written into.

    Args:
        name: The argument's name, for messages.
        data: A path; a pandas DataFrame; a `datasets.Dataset` or `IterableDataset`; or an iterable of rows, each a
            mapping of columns or the prompt's text. An iterable is read to its end.
        folder: Directory to write into.

    Raises:
        ConfigError: The data has no rows, or a row that is no mapping or that JSON cannot hold.
    """
    if isinstance(data, (str, Path)):
        return str(data)
    lines = [_line(name, number, row) for number, row in enumerate(_rows(name, data))]
    if not lines:
        raise ConfigError(f"argument {name}: no rows; give a path, a list of dicts, a DataFrame or a Dataset with rows")
    text = b"".join(lines)
    path = folder / f"{re.sub(r'[^a-zA-Z0-9_.-]+', '-', name)}-{hashlib.sha256(text).hexdigest()[:12]}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return str(path)


def _rows(name: str, data: Any) -> Iterator[Any]:
    if isinstance(data, Mapping):
        raise ConfigError(f"argument {name}: one mapping; expected a list of rows, each a mapping of columns")
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # a pandas DataFrame
        return iter(data.to_dict("records"))
    if not isinstance(data, Iterable):
        kinds = "a path, a list of dicts, a DataFrame, a Dataset or another iterable of rows"
        raise ConfigError(f"argument {name} {data!r:.80}: expected {kinds}; got {type(data).__name__}")
    return iter(data)


def _line(name: str, number: int, row: Any) -> bytes:
    row = {"input": row} if isinstance(row, str) else row
    if not isinstance(row, Mapping):
        raise ConfigError(f"argument {name}: row {number} is {type(row).__name__}; expected a mapping of columns")
    try:
        return orjson.dumps(dict(row), default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
    except orjson.JSONEncodeError as error:
        raise ConfigError(f"argument {name}: row {number} cannot be written as JSON: {error}") from error


def _plain(value: Any) -> Any:
    """Return a JSON value for what orjson does not know: numpy scalars and arrays, sets, paths."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__}")


def model_directory(model: Any, tokenizer: Any, folder: Path, *, resume: bool) -> str:
    """Return the path of the model: of a path itself, else of a directory that model and tokenizer are saved into.

    Raises:
        ConfigError: The object has no `save_pretrained`, a model came without its tokenizer, the directory cannot be
            written, or `folder` exists and the run is not resumed; a resumed run has its model there.
    """
    if isinstance(model, (str, Path)):
        if tokenizer is not None:
            raise ConfigError("argument tokenizer: the model is a directory, which has its own; leave tokenizer out")
        return str(model)
    if not hasattr(model, "save_pretrained"):
        kinds = "a directory in Hugging Face layout or a transformers model"
        raise ConfigError(f"argument model {model!r:.80}: expected {kinds}; got {type(model).__name__}")
    if tokenizer is None:
        raise ConfigError("argument model: a transformers model needs its tokenizer; add tokenizer=...")
    if folder.exists() and not resume:
        raise ConfigError(
            f"argument model: {folder} exists already; name another save, or resume=True to go on with it"
        )
    if folder.exists():
        return str(folder)
    with new_directory(folder) as partial:
        for part in (model, tokenizer):
            part.save_pretrained(str(partial))
    return str(folder)
