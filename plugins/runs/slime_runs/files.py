"""Files of samples: JSON lines in zstd frames, one frame for each prompt's group, so that a group is read alone.

A complete file is written under another name and moved into place, so a kill leaves no torn file. A file that was cut
otherwise is read up to its last complete frame. `zstdcat` shows a file, and `slime_data.saved.read_samples` reads it.
Both skip the last frame, a zstd skippable frame with the footer that `index.py` reads.
"""

from __future__ import annotations

import glob
import itertools
import logging
import math
import os
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson
import zstandard
from slime_data.saved import most_unpacked

from slime_core.data.dumps import to_json
from slime_core.errors import DataError, RolloutError
from slime_core.files import open_regular, read_regular, replace_file
from slime_core.secrets import MARK, known

logger = logging.getLogger(__name__)

FOLDER = "samples"
_NAME = re.compile(r"(rollout|eval)_(\d+)\.jsonl\.zst")
_LEVEL = 1
_SKIPPED = (0x184D2A5E).to_bytes(4, "little")
"""First bytes of the footer's frame; then come the length of the rest, the footer, the footer's length, `_FOOTER`."""
_FOOTER = b"slim"
_TAIL = 1 << 16
"""Bytes of a file's end that are read at once: a footer is rarely longer."""
MOST_BYTES = 256 << 20
"""Maximum unpacked bytes of a frame: guards against zstd bombs in files of unknown origin."""
MOST_PARSED = 512 << 20
"""Maximum bytes of one frame, line or object as Python objects (`parsed_size`)."""
MOST_LINE = 64 << 20
"""Maximum bytes of a line: orjson needs 12 times as much address space."""
_BYTES_OF_ROW = 256
"""Maximum bytes of a footer per row."""
_STEP = 256
"""Packed bytes that are unpacked at once; they become 8 MB at most."""
_TOO_MUCH = f"unpacks to more than {MOST_BYTES >> 20} MB"

Row = dict[str, Any]
"""A sample in the form of `Sample.to_dict`, and under "kept" its use in the run."""


class Frame(NamedTuple):
    """Position of a group in its file, in bytes."""

    offset: int
    size: int


def file_name(rollout_id: int, *, evaluation: bool = False) -> str:
    """Return `rollout_0000012.jsonl.zst`, or `eval_...` for the evaluations after that many rollouts."""
    return f"{'eval' if evaluation else 'rollout'}_{rollout_id:07}.jsonl.zst"


def trained_name(rollout_id: int) -> str:
    """Return `trained_0000012.jsonl.zst`, the file of the optimizer's input for the rollout's samples."""
    return f"trained_{rollout_id:07}.jsonl.zst"


def shadow_name(rollout_id: int) -> str:
    """Return `shadow_0000012.jsonl.zst`, the file of the shadow components' results for the rollout's samples."""
    return f"shadow_{rollout_id:07}.jsonl.zst"


def parse_name(name: str) -> tuple[int, bool] | None:
    """Return (rollout, whether it is an evaluation) of a name made by `file_name`; None for another name."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[2]), found[1] == "eval")


def sample_files(folder: Path) -> list[Path]:
    """Return the sample files in the folder, in the order of rollouts."""
    return [folder / name for name in file_names(folder)]


def file_names(folder: Path) -> list[str]:
    """Return the names of the sample files, in the order of rollouts."""
    names = os.listdir(folder) if folder.is_dir() else ()
    parsed = {name: found for name in names if (found := parse_name(name)) is not None}
    return sorted(parsed, key=parsed.__getitem__)


def json_lines(rows: Iterable[Row]) -> bytes:
    """Return a frame's content. Values without a JSON form, which user code may leave in metadata, become text.

    Secrets known to this process are masked: a reward may leave a secret in its sample.
    """
    return _without_secrets(b"\n".join((*map(_line, rows), b"")))


def _without_secrets(content: bytes) -> bytes:
    """Return lines of JSON without secrets; words and numbers stay, which may be names or values of other fields."""
    for secret in known():
        if len(secret) >= 8 and not secret.isalpha() and not secret.replace(".", "").replace("-", "").isdecimal():
            content = content.replace(secret.encode(), MARK.encode())
    return content


def _line(row: Row) -> bytes:
    try:
        return to_json(row, "")
    except RolloutError:
        return to_json(_as_text(row), f"sample {row.get('index')}")


def _as_text(value: Any) -> Any:
    """Return the value, with parts without a JSON form as abridged `repr`; a user's own `repr` may even raise."""
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
    """Write the frames, each of JSON lines, and the footer that `footer` makes from their positions.

    Raises:
        OSError: Writing failed; the old file is unchanged.
    """
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    packed = [compressor.compress(frame) for frame in frames]
    if footer is not None:
        starts = itertools.accumulate(map(len, packed), initial=0)
        content = compressor.compress(footer([Frame(start, len(one)) for start, one in zip(starts, packed)]))
        length = len(content).to_bytes(4, "little")
        packed.append(_SKIPPED + (len(content) + 8).to_bytes(4, "little") + content + length + _FOOTER)
    path.parent.mkdir(exist_ok=True)
    replace_file(path, packed)


def read_footer(path: Path) -> bytes:
    """Return the content of the footer; empty without one, or if it is damaged or too large. Raises OSError."""
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        tail = file.read(_TAIL)
        length = int.from_bytes(tail[-8:-4], "little") + 16
        if not tail.endswith(_FOOTER) or length > min(size, MOST_BYTES):
            return b""
        if length > len(tail):
            file.seek(size - length)
            tail = file.read(length)
    try:
        content = memoryview(tail)[-length + 8 : -8]
        if zstandard.get_frame_parameters(content).content_size > _BYTES_OF_ROW * most_unpacked(size)[1]:
            return b""
        return zstandard.ZstdDecompressor().decompress(content)
    except zstandard.ZstdError:
        return b""


def read_frame(path: Path, frame: Frame) -> list[Row]:
    """Return the samples of one group. Raises OSError, or ValueError if something else lies there."""
    with open_regular(path) as file:
        file.seek(frame.offset)
        lines, size = _unpacked(file, most_unpacked(frame.size)[0])
    if size != frame.size:
        raise ValueError(f"the frame there has {size} bytes, not {frame.size}")
    return _parsed_frame(lines, f"{path}: {frame.size} bytes from {frame.offset} on")


def read_frames(path: Path, starts: tuple[bytes, ...] | None = None) -> Iterator[tuple[Frame, list[Row]]]:
    """Yield every complete frame of a file in order, with its lines, or the lines that begin with `starts`.

    Log and skip: lines that are no samples, a frame that exceeds `MOST_BYTES` or `MOST_PARSED`, and the rest of a file
    once its frames together unpack to far more bytes than the file has, or to more rows than half of its bytes.

    Raises:
        OSError: The file cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        most, left = most_unpacked(size)
        for frame, lines in _frames(path, file, most):
            try:
                rows = _parsed_frame(lines, f"{path}: {frame.size} bytes from {frame.offset} on", starts)
            except ValueError as error:
                logger.warning("%s", error)
                rows = []
            left -= len(rows)
            if left < 0:
                logger.warning("%s: the rest from byte %d on is left out: too many rows", path, frame.offset)
                return
            yield frame, rows


def _parsed_frame(content: bytes | None, where: str, starts: tuple[bytes, ...] | None = None) -> list[Row]:
    """Parse a frame. Raises ValueError if the content (None: larger than `MOST_BYTES`) is too large."""
    if content is None:
        raise ValueError(f"{where} are left out: what is there {_TOO_MUCH}")
    if (size := parsed_size(content)) > MOST_PARSED:
        raise ValueError(f"{where} are left out: parsed they may take {size >> 20} MB, more than {MOST_PARSED >> 20}")
    wanted = [line for line in content.split(b"\n") if line and (starts is None or line.startswith(starts))]
    rows = list(parsed_lines(wanted))
    if len(rows) < len(wanted):
        logger.warning("%s: %d lines are left out: they are no JSON objects", where, len(wanted) - len(rows))
    return rows


def _frames(path: Path, file: BinaryIO, most: float) -> Iterator[tuple[Frame, bytes | None]]:
    """Yield place and lines of whole frames (None: too many), until they exceed `most` bytes together."""
    offset, size, end = 0, 0, os.fstat(file.fileno()).st_size
    while offset < end:
        file.seek(offset)
        try:
            lines, size = _unpacked(file, most)
        except TooMuchError as error:
            logger.warning("%s: the rest from byte %d on is left out: %s", path, offset, error)
            return
        except ValueError:
            return
        most -= len(lines or b"")
        yield Frame(offset, size), lines
        offset += size


class TooMuchError(ValueError):
    """A file unpacks to far more bytes than it has."""


def _unpacked(file: BinaryIO, most: float) -> tuple[bytes | None, int]:
    """Return the lines of the next frame, None if they exceed `MOST_BYTES`, and the frame's size.

    Raises:
        TooMuchError: The lines exceed `most` bytes.
        ValueError: The frame is torn.
    """
    start = file.tell()
    head = file.read(8)
    if head[:4] != _SKIPPED:
        file.seek(start)
        return _decompressed(file, most)
    size = 8 + int.from_bytes(head[4:], "little")
    _decompressed(file, most)
    file.seek(start + size - 4)
    if file.read(4) != _FOOTER:
        raise ValueError("it ends too early")
    return b"", size


def _decompressed(file: BinaryIO, most: float) -> tuple[bytes | None, int]:
    start, reader = file.tell(), zstandard.ZstdDecompressor().decompressobj()
    pieces, unpacked = list[bytes](), 0
    while packed := file.read(_STEP):
        try:
            pieces.append(reader.decompress(packed))
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        unpacked += len(pieces[-1])
        if unpacked > MOST_BYTES:
            pieces.clear()
        if unpacked > most:
            raise TooMuchError(f"it unpacks to more than {int(most) >> 20} MB, far more than its size")
        if reader.eof:
            size = file.tell() - start - len(reader.unused_data)
            return b"".join(pieces) if unpacked <= MOST_BYTES else None, size
    raise ValueError("it ends too early")


def numbered(rows: list[Row]) -> list[Row]:
    """Return the rows of whole groups; number the rows of an execution with several samples, which share one index.

    Rows that have numbers keep them, since a thinned file does not have all rows. A thinned file without numbers shows
    only how many rows are left, not which, so they get the trainer's data of the first ones.
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


def parsed_size(text: bytes) -> int:
    """Return how many bytes JSON takes as Python objects, at most: `{}` becomes 64, `{"a":1}` 230."""
    values = text.count(b",") + text.count(b":") + text.count(b"\n")
    return len(text) + 80 * values + 200 * text.count(b"{") + 64 * text.count(b"[")


def parsed_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the lines that are JSON objects; skip others: torn by a kill, not yet written to the end, or too large."""
    for line in lines:
        try:
            found = orjson.loads(line) if len(line) <= MOST_LINE and parsed_size(line) <= MOST_PARSED else None
        except orjson.JSONDecodeError:
            continue
        if isinstance(found, dict):
            yield found


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a file of JSON lines that may be growing; none without a file that can be read."""
    try:
        with open_regular(path) as file:
            yield from parsed_lines(whole_lines(path, file))
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s: left out: %s", path, error.strerror or error)


def whole_lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines from the file's position on, the last one if an object ends there, up to one of over 64 MB."""
    while line := file.readline(MOST_LINE):
        if line.endswith((b"\n", b"}")):
            yield line
        else:
            if len(line) == MOST_LINE:
                logger.warning("%s: left out from byte %d on: a line has no end", path, file.tell() - len(line))
            return


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing, incomplete, too large or holds something else."""
    try:
        text = read_regular(path, MOST_LINE)
        found = orjson.loads(text) if parsed_size(text) <= MOST_PARSED else None
    except (OSError, ValueError):  # not written yet, or being replaced
        return None
    return found if isinstance(found, dict) else None


def read_text(path: Path, most: int = 16 << 20) -> str:
    """Return the text of a small file of a run; empty if it is missing or (with a warning) cannot be read."""
    try:
        return read_regular(path, most).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        logger.warning("%s: left out: %s", path, error.strerror or error)
        return ""


def damage(path: Path) -> str | None:
    """Return why a file cannot be read whole, in words; every frame has a checksum."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            end = max((frame.offset + frame.size for frame, _ in _frames(path, file, math.inf)), default=0)
    except OSError as error:
        return str(error)
    return None if end == size else f"of its {size} bytes those from {end} on cannot be read"


def saved_files(sources: Iterable[str]) -> Iterator[Path]:
    """Yield sample files in order; for a run those of `slime rollout`, else of training. Raises DataError if none."""
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
        names = [*folder.glob("rollout_[0-9]*.jsonl"), *folder.glob("rollout_[0-9]*.jsonl.zst")]
        if found := sorted(path for path in names if path.is_file() and not path.is_symlink()):
            return found
    return []
