"""Images of a sample, and a processor's output for training, in forms that JSON, pickle and copies keep.

The data source (`slime_data.images`) makes them, `Sample` stores them, generate functions hand `Sample.image_data` to
the engine and the trainer gets `TrainInputs` with its batch. Only the standard library is imported until a value is
read.
`Sample.multimodal_inputs["images"]` holds texts, a path or a `data:` URL each, never pixels. An image named by path is
read again whenever it is needed, so the file must not move. A web address, which a user's function may put there, is
stored and sent unchanged; neither slime nor a server that it starts fetches it.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

IMAGES = "images"
"""The key of `Sample.multimodal_inputs`, as in THUDM/slime."""
_TYPES = {"float32": "<f4", "int64": "<i8"}
_WEB = ("http://", "https://")
_MAGIC = ((b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"), (b"BM", "bmp"), (b"RIFF", "webp"))


class Array:
    """A read-only array that `numpy.asarray` reads without a copy."""

    def __init__(self, dtype: str, shape: tuple[int, ...], data: bytes) -> None:
        self.dtype = dtype
        """"float32" or "int64"."""
        self.shape = shape
        self._data = data

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"version": 3, "shape": self.shape, "typestr": _TYPES[self.dtype], "data": self._data}


class TrainInputs(Mapping[str, Array]):
    """Inputs of a vision-language model besides token ids: names -> arrays, float32 or int64.

    Immutable, so that the samples of a group can share one object. Arrays like `pixel_values` have the shapes that the
    model's own processor gives them for one sample.
    """

    def __init__(self, packed: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> None:
        """`packed`: name -> dtype ("float32" or "int64"), shape, the little-endian bytes."""
        self._packed = dict(packed)

    @classmethod
    def of(cls, value: Any) -> TrainInputs:
        """Return inputs from a mapping of arrays, tensors on the CPU or nested lists, or from the JSON form.

        Raises:
            ValueError: `value` has another form.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"multimodal_train_inputs is {type(value).__name__}; expected a mapping of arrays")
        return cls({str(name): _packed(str(name), array) for name, array in value.items()})

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `of` is the inverse, bit for bit."""
        return {
            name: {"dtype": dtype, "shape": list(shape), "base64": base64.b64encode(data).decode()}
            for name, (dtype, shape, data) in self._packed.items()
        }

    def __getitem__(self, name: str) -> Array:
        return Array(*self._packed[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainInputs) and self._packed == other._packed

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> TrainInputs:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> TrainInputs:
        return self

    def __repr__(self) -> str:
        return f"TrainInputs({', '.join(f'{name} {list(shape)}' for name, (_, shape, _d) in self._packed.items())})"


def _packed(name: str, value: Any) -> tuple[str, tuple[int, ...], bytes]:
    if isinstance(value, Mapping):
        try:
            shape = tuple(int(n) for n in value["shape"])
            data = base64.b64decode(value["base64"], validate=True)
            dtype = str(value["dtype"])
        except (KeyError, TypeError, binascii.Error) as error:
            raise ValueError(f"multimodal_train_inputs[{name!r}]: not the JSON form of an array: {error}") from error
        size = {"float32": 4, "int64": 8}.get(dtype)
        if size is None or size * math.prod(shape) != len(data):
            raise ValueError(f"multimodal_train_inputs[{name!r}]: {len(data)} bytes are no {dtype} of shape {shape}")
        return dtype, shape, data
    if hasattr(value, "detach"):  # a tensor; numpy has no bfloat16
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value.long()).numpy()
    if not (hasattr(value, "astype") and hasattr(value, "tobytes")):
        return _of_lists(name, value)
    if value.dtype.kind not in "fiub":
        raise ValueError(f"multimodal_train_inputs[{name!r}]: an array of {value.dtype}; numbers are needed")
    dtype = "float32" if value.dtype.kind == "f" else "int64"
    return dtype, tuple(value.shape), value.astype(_TYPES[dtype]).tobytes()


def _of_lists(name: str, value: Any) -> tuple[str, tuple[int, ...], bytes]:
    shape: list[int] = []
    flat = [value]
    while flat and isinstance(flat[0], list | tuple):
        shape.append(len(flat[0]))
        if any(not isinstance(part, list | tuple) or len(part) != shape[-1] for part in flat):
            raise ValueError(f"multimodal_train_inputs[{name!r}]: lists of different lengths")
        flat = [item for part in flat for item in part]
    if any(not isinstance(item, int | float) for item in flat):
        raise ValueError(f"multimodal_train_inputs[{name!r}]: no array of numbers can be made of it")
    dtype = "float32" if any(isinstance(item, float) for item in flat) else "int64"
    try:
        data = struct.pack(f"<{len(flat)}{'f' if dtype == 'float32' else 'q'}", *flat)
    except (struct.error, OverflowError):
        raise ValueError(f"multimodal_train_inputs[{name!r}]: a number is too large for {dtype}") from None
    return dtype, tuple(shape), data


def image_ref(value: object, folder: Path | None = None, *, fetched: bool = True) -> str:
    """Return an image as a text: the absolute path of a file, or a `data:` URL that holds the image.

    Args:
        value: A path, a `data:` URL, base64 text or bytes of an image file, a PIL image, or the Hugging Face data sets'
            `{"bytes": ..., "path": ...}`.
        folder: Base directory of relative paths.
        fetched: True if the pixels are needed on this machine; otherwise a text that names no local image is kept.

    Raises:
        ValueError: The value is not an image, the file is missing, or the pixels of a web address are needed.
    """
    if isinstance(value, Mapping):
        inner = value.get("bytes") or value.get("path") or value.get("url")
        if inner is None:
            raise ValueError(f"an image as a mapping needs 'bytes' or 'path'; it has {', '.join(map(str, value))}")
        return image_ref(inner, folder, fetched=fetched)
    if isinstance(value, bytes | bytearray | memoryview):
        return _data_url(bytes(value))
    if hasattr(value, "save") and hasattr(value, "mode"):  # a PIL image
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        return _data_url(buffer.getvalue())
    if not isinstance(value, str | Path):
        raise ValueError(f"an image is a path, bytes or base64, not {type(value).__name__}")
    try:
        return _text_ref(str(value), folder)
    except ValueError:
        if fetched:
            raise
        return str(value)


def _text_ref(text: str, folder: Path | None) -> str:
    if text.startswith("data:"):
        return _data_url(image_bytes(text))
    if text.startswith(_WEB):
        raise ValueError(f"{text}: images are not fetched from the web; save it and name the file")
    text = text.removeprefix("file://")
    path = (folder or Path()) / text if len(text) < 4096 else None
    if path is not None and path.is_file():
        return str(path.resolve())
    try:
        return _data_url(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        raise ValueError(f"{text[:200]!r} is neither an image file nor base64 of one") from None


def image_bytes(ref: str) -> bytes:
    """Return the image file's content. Raises ValueError if it cannot be read."""
    if ref.startswith("data:"):
        try:
            return base64.b64decode(ref.partition("base64,")[2], validate=True)
        except binascii.Error as error:
            raise ValueError(f"{ref[:40]}...: not base64: {error}") from error
    try:
        return Path(ref).read_bytes()
    except OSError as error:
        raise ValueError(f"{ref}: the image cannot be read: {error.strerror or error}") from error


def image_url(ref: str) -> str:
    """Return the image as a `data:` URL, which a server on any host can read. Raises ValueError."""
    return ref if ref.startswith("data:") else _data_url(image_bytes(ref))


def image_token_of(checkpoint: str | None) -> int | None:
    """Return the token id that is repeated for an image, from a HF checkpoint's config.json; None if not stated."""
    try:
        config = json.loads((Path(checkpoint or "") / "config.json").read_text(encoding="utf-8"))
        found = config.get("image_token_id", config.get("image_token_index"))
        return found if type(found) is int else None
    except (OSError, ValueError, AttributeError):
        return None


def images_of(inputs: Mapping[str, object] | None) -> list[object]:
    """Return the images in `Sample.multimodal_inputs` unchanged; a value that is not a list is one image."""
    found = (inputs or {}).get(IMAGES)
    return [] if found is None else list(found) if isinstance(found, list | tuple) else [found]


def has_images(prompt: str | Sequence[Mapping[str, object]]) -> bool:
    """Return whether chat messages hold image parts."""
    contents = [] if isinstance(prompt, str) else [m.get("content") for m in prompt]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") in ("image", "image_url") for part in parts)


def inputs_to_json(inputs: Mapping[str, object]) -> dict[str, object]:
    """Return `Sample.multimodal_inputs` with every image as a text. Raises ValueError for a value that is no image."""
    refs = [image_ref(image, fetched=False) for image in images_of(inputs)]
    return {k: refs if k == IMAGES and v is not None else v for k, v in inputs.items()}


def _data_url(data: bytes) -> str:
    kind = next((name for magic, name in _MAGIC if data.startswith(magic)), None)
    if kind is None:
        raise ValueError(f"{len(data)} bytes that are no PNG, JPEG, GIF, BMP or WebP file")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
