"""Files of samples: JSON lines in zstd frames, one frame for each prompt's group, so that a group is read alone.

A file is written whole under another name and moved into place, so a kill leaves none that is torn; one that was cut by
something else is read up to its last whole frame. `zstdcat` shows a file, and `data.dumps.read_samples` reads it. Both
pass over its last frame, the footer that `index.py` reads: zstd calls that one skippable.
"""

from __future__ import annotations

import glob
import io
import itertools
import logging
import os
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import zstandard

from slime_core.data.dumps import to_json
from slime_core.errors import DataError, RolloutError

logger = logging.getLogger(__name__)

FOLDER = "samples"
_NAME = re.compile(r"(rollout|eval)_(\d+)\.jsonl\.zst")
_LEVEL = 1
_SKIPPED = (0x184D2A5E).to_bytes(4, "little")
"""First bytes of a frame that is not of lines: then come the length of the rest, the footer, its own, and `_FOOTER`."""
_FOOTER = b"slim"
_TAIL = 1 << 16
"""Bytes of a file's end that are read at once: a footer is seldom longer."""
MOST_BYTES = 256 << 20
"""What a frame may unpack to. A file of another hand may have a few bytes that become gigabytes."""
_STEP = 256
"""Bytes that are unpacked at once, which become 8 MB at most."""
_TOO_MUCH = f"unpacks to more than {MOST_BYTES >> 20} MB"

Row = dict[str, Any]
"""A sample as `Sample.to_dict` has it, and under "kept" what the run did with it."""


class Frame(NamedTuple):
    """Where a group lies in its file, in bytes."""

    offset: int
    size: int


def file_name(rollout_id: int, *, evaluation: bool = False) -> str:
    """`rollout_0000012.jsonl.zst`, or `eval_...` for the evaluations after so many rollouts."""
    return f"{'eval' if evaluation else 'rollout'}_{rollout_id:07}.jsonl.zst"


def trained_name(rollout_id: int) -> str:
    """`trained_0000012.jsonl.zst`: what the optimizer was given of the rollout's samples."""
    return f"trained_{rollout_id:07}.jsonl.zst"


def shadow_name(rollout_id: int) -> str:
    """`shadow_0000012.jsonl.zst`: what shadow components made of the rollout's samples."""
    return f"shadow_{rollout_id:07}.jsonl.zst"


def parse_name(name: str) -> tuple[int, bool] | None:
    """(rollout, whether it is an evaluation) of a name that `file_name` made."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[2]), found[1] == "eval")


def sample_files(folder: Path) -> list[Path]:
    """Those in the folder, in the order of rollouts."""
    return [folder / name for name in file_names(folder)]


def file_names(folder: Path) -> list[str]:
    """Their names."""
    names = os.listdir(folder) if folder.is_dir() else ()
    parsed = {name: found for name in names if (found := parse_name(name)) is not None}
    return sorted(parsed, key=parsed.__getitem__)


def json_lines(rows: Iterable[Row]) -> bytes:
    """A frame's content. What JSON has no form for, as user code leaves in metadata, is kept as text."""
    return b"\n".join((*map(_line, rows), b""))


def _line(row: Row) -> bytes:
    try:
        return to_json(row, "")
    except RolloutError:
        return to_json(_as_text(row), f"sample {row.get('index')}")


def _as_text(value: Any) -> Any:
    """The same, with an abridged `repr` where JSON has no form; that of a user's class may even raise."""
    if isinstance(value, Mapping):
        return {str(_as_text(key)): _as_text(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_text(one) for one in value]
    try:
        to_json(value, "")
    except RolloutError:
        return reprlib.repr(value)
    return value


def write_file(path: Path, frames: Iterable[bytes], footer: Callable[[Sequence[Frame]], bytes] | None = None) -> None:
    """Write the frames, each of JSON lines, and what `footer` makes of their places.

    Raises OSError; then the file is as it was.
    """
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    packed = [compressor.compress(frame) for frame in frames]
    if footer is not None:
        starts = itertools.accumulate(map(len, packed), initial=0)
        content = compressor.compress(footer([Frame(start, len(one)) for start, one in zip(starts, packed)]))
        length = len(content).to_bytes(4, "little")
        packed.append(_SKIPPED + (len(content) + 8).to_bytes(4, "little") + content + length + _FOOTER)
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(exist_ok=True)
    partial.write_bytes(b"".join(packed))
    os.replace(partial, path)


def read_footer(path: Path) -> bytes:
    """What `write_file` was given beside the lines; empty where there is none, or it is damaged. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        tail = file.read()
        length = int.from_bytes(tail[-8:-4], "little") + 16
        if not tail.endswith(_FOOTER) or length > size:
            return b""
        if length > len(tail):
            file.seek(size - length)
            tail = file.read()
    try:
        content = memoryview(tail)[-length + 8 : -8]
        if zstandard.get_frame_parameters(content).content_size > MOST_BYTES:
            return b""
        return zstandard.ZstdDecompressor().decompress(content)
    except zstandard.ZstdError:
        return b""


def read_frame(path: Path, frame: Frame) -> list[Row]:
    """The samples of one group. Raises OSError, ValueError where something else lies there."""
    with path.open("rb") as file:
        file.seek(frame.offset)
        lines, _ = _unpacked(memoryview(file.read(frame.size)))
    if lines is None:
        raise ValueError(f"what is there {_TOO_MUCH}")
    return list(parsed_lines(io.BytesIO(lines)))


def read_frames(path: Path, starts: tuple[bytes, ...] | None = None) -> Iterator[tuple[Frame, list[Row]]]:
    """Every whole frame of a file, first one first; of its lines all, or those that start so.

    None of a frame that unpacks to more than `MOST_BYTES`, nor of lines that are no samples, which is logged.
    """
    content = memoryview(path.read_bytes())
    offset = 0
    while offset < len(content):
        try:
            lines, size = _unpacked(content[offset:])
        except ValueError:
            return
        if lines is None:
            logger.warning("%s: %d bytes from %d on are left out: what is there %s", path, size, offset, _TOO_MUCH)
        wanted = [line for line in io.BytesIO(lines or b"") if starts is None or line.startswith(starts)]
        rows = list(parsed_lines(wanted))
        if len(rows) < len(wanted):
            logger.warning(
                "%s: %d lines from byte %d on are left out: they are no JSON", path, len(wanted) - len(rows), offset
            )
        yield Frame(offset, size), rows
        offset += size


def _unpacked(content: memoryview) -> tuple[bytes | None, int]:
    """Lines of the frame that comes first, None where they are too many, and its bytes. Raises ValueError: torn."""
    if content[:4] == _SKIPPED:
        size = 8 + int.from_bytes(content[4:8], "little")
        _unpacked(content[8 : size - 8])
        if bytes(content[size - 4 : size]) != _FOOTER:
            raise ValueError("it ends too early")
        return b"", size
    reader = zstandard.ZstdDecompressor().decompressobj()
    pieces, unpacked = list[bytes](), 0
    for start in range(0, len(content), _STEP):
        try:
            pieces.append(reader.decompress(content[start : start + _STEP]))
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        unpacked += len(pieces[-1])
        if unpacked > MOST_BYTES:
            pieces.clear()
        if reader.eof:
            size = min(start + _STEP, len(content)) - len(reader.unused_data)
            return b"".join(pieces) if unpacked <= MOST_BYTES else None, size
    raise ValueError("it ends too early")


def numbered(rows: list[Row]) -> list[Row]:
    """The rows of whole groups, numbered where an execution became several: they have one index.

    Those that have numbers keep them: a thinned file has not all. One that was thinned before there were numbers tells
    how many are there and not which, so their trainer's side is that of the first ones.
    """
    if len({row.get("index") for row in rows}) == len(rows) or any("part" in row.get("kept", ()) for row in rows):
        return rows
    seen = Counter[tuple[Any, ...]]()
    for row in rows:
        kept = row.setdefault("kept", {})
        one = kept.get("data_set"), row.get("group_index"), row.get("index")
        if part := seen[one]:
            kept["part"] = part
        seen[one] += 1
    return rows


def parsed_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Lines that are JSON objects, without others, as one that a kill tore, or that is not written to its end yet."""
    for line in lines:
        try:
            found = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(found, dict):
            yield found


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file of JSON lines that may be growing; none where there is no file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        yield from parsed_lines(file)


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is none, or it is not whole."""
    try:
        found = orjson.loads(path.read_bytes())
    except (OSError, ValueError):  # not written yet, or being replaced
        return None
    return found if isinstance(found, dict) else None


def damage(path: Path) -> str | None:
    """What is wrong with a file, in words; every frame has a checksum."""
    try:
        end = max((frame.offset + frame.size for frame, _ in read_frames(path, (b"\0",))), default=0)
        size = path.stat().st_size
    except OSError as error:
        return str(error)
    return None if end == size else f"of its {size} bytes those from {end} on cannot be read"


def saved_files(sources: Iterable[str]) -> Iterator[Path]:
    """In order; of a run, what `slime rollout` saved, or else what it kept of training. Raises DataError for none."""
    for source in sources:
        path = Path(source)
        if path.is_dir():
            files = _of_directory(path)
        else:
            files = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(source, recursive=True))]
        if not files:
            raise DataError(f"{source}: no samples there; runs keep them in RUN/samples, slime rollout in RUN/rollouts")
        yield from files


def _of_directory(path: Path) -> list[Path]:
    for folder in (path / "rollouts", path / "samples", path):
        if found := sorted([*folder.glob("rollout_[0-9]*.jsonl"), *folder.glob("rollout_[0-9]*.jsonl.zst")]):
            return found
    return []
