"""Encodings of one tensor, checksums, and safetensors files without torch."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from slime_weight_transport_delta import format as delta_format
from slime_weight_transport_delta.format import changed_elements, checksum_function, decode, encode
from slime_weight_transport_delta.raw_safetensors import ITEM_BYTES, read_header, view, weight_files, write_safetensors

from slime_core.errors import ConfigError, WeightSyncError

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8, torch.float8_e4m3fn]


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


@given(
    item=st.sampled_from(sorted(set(ITEM_BYTES.values()))),
    encoding=st.sampled_from(["xor", "overwrite"]),
    size=st.integers(0, 300),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_any_bytes_come_back(item: int, encoding: str, size: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, size * item, dtype=np.uint8)
    new = old.copy()
    touched = rng.random(size) < share
    new.reshape(size, item)[touched] = rng.integers(0, 256, (int(touched.sum()), item), dtype=np.uint8)
    positions = changed_elements(old, new, item)
    assert positions.tolist() == [
        i for i in range(size) if bytes(old[i * item :][:item]) != bytes(new[i * item :][:item])
    ]
    payload = encode(old, new, item, encoding, positions)
    before = old.copy()
    assert np.array_equal(decode(payload, old, item, encoding), new)
    assert np.array_equal(old, before)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, encoding: str) -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(64, generator=generator).to(dtype)
    new = old.clone()
    new[::7] = torch.randn(10, generator=generator).to(dtype)
    item = dtype.itemsize
    positions = changed_elements(raw(old), raw(new), item)
    back = decode(encode(raw(old), raw(new), item, encoding, positions), raw(old), item, encoding)
    assert torch.equal(torch.from_numpy(back).view(torch.uint8), new.view(torch.uint8))


def test_the_layouts_are_those_documented() -> None:
    old, new = np.array([1, 2, 3, 4], np.uint8), np.array([1, 9, 3, 4], np.uint8)
    unpack = zstandard.ZstdDecompressor().decompress
    assert unpack(encode(old, new, 2, "xor", np.array([0]))) == bytes([0, 11, 0, 0])
    overwritten = unpack(encode(old, new, 2, "overwrite", np.array([0])))
    assert overwritten == (1).to_bytes(4, "little") + (0).to_bytes(4, "little") + bytes([1, 9])


@pytest.mark.parametrize(
    ("encoding", "data", "message"),
    [
        ("xor", bytes(5), "5 bytes|at most 4"),
        ("overwrite", (9).to_bytes(4, "little"), "9 elements"),
        ("overwrite", b"\1", "elements in 1"),
        ("overwrite", (1).to_bytes(4, "little") + (7).to_bytes(4, "little") + b"ab", "position 7"),
        ("xor", bytes(3), "3 bytes for a tensor of 4"),
    ],
)
def test_a_payload_of_another_tensor_is_refused(encoding: str, data: bytes, message: str) -> None:
    payload = zstandard.ZstdCompressor().compress(data)
    with pytest.raises(ValueError, match=message):
        decode(payload, np.zeros(4, np.uint8), 2, encoding)


def test_a_payload_that_would_fill_the_memory_is_not_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(10**6))
    with pytest.raises(ValueError, match="at most 4"):
        decode(bomb, np.zeros(4, np.uint8), 1, "xor")


def test_checksums() -> None:
    import blake3
    import xxhash

    data = np.frombuffer(b"slime", np.uint8)
    assert checksum_function("adler32")(data) == f"{zlib.adler32(b'slime'):08x}"
    assert checksum_function("blake3")(data) == blake3.blake3(b"slime").hexdigest()
    assert checksum_function("xxh3-128")(data) == xxhash.xxh3_128_hexdigest(b"slime")
    assert {len(checksum_function("xxh3-128")(np.empty(0, np.uint8)))} == {32}
    with pytest.raises(ConfigError, match="allowed: xxh3-128, blake3, adler32"):
        checksum_function("md5")


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(ConfigError, match=r"slime-rl\[blake3\]"):
        checksum_function("blake3")


def test_files_are_safetensors(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.randn(3, i, generator=generator).to(dtype) for i, dtype in enumerate(DTYPES)}
    tensors["scalar"] = torch.tensor(2.5)
    words = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int8: "I8",
             torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3"}  # fmt: skip
    rows = [(name, words[t.dtype], tuple(t.shape), raw(t)) for name, t in tensors.items()]
    size = write_safetensors(tmp_path / "ours.safetensors", rows, {"format": "pt"})
    assert size == (tmp_path / "ours.safetensors").stat().st_size
    back = load_file(tmp_path / "ours.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in back.items()} == {n: (t.dtype, t.shape) for n, t in tensors.items()}
    assert all(np.array_equal(raw(back[n]), raw(t)) for n, t in tensors.items())
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"a": "b"})
    entries, metadata = read_header(tmp_path / "theirs.safetensors")
    assert metadata == {"a": "b"}
    for name, tensor in tensors.items():
        assert entries[name].dtype == words[tensor.dtype]
        assert entries[name].shape == tuple(tensor.shape)
        assert np.array_equal(view(tmp_path / "theirs.safetensors", entries[name]), raw(tensor))


@pytest.mark.parametrize("content", [b"", b"abc", bytes(8), (10**9).to_bytes(8, "little") + b"{}"])
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(WeightSyncError, match=r"bad\.safetensors"):
        read_header(tmp_path / "bad.safetensors")


def test_a_header_that_points_outside_is_refused(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    (tmp_path / "bad.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    with pytest.raises(WeightSyncError, match="'a' lies outside"):
        read_header(tmp_path / "bad.safetensors")


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="no weights"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(WeightSyncError, match=r"gone\.safetensors"):
        weight_files(tmp_path)


def test_the_format_is_light() -> None:
    import subprocess

    names = [
        "slime_weight_transport_delta.apply",
        "slime_weight_transport_delta.puller",
        "slime_weight_transport_delta.__main__",
    ]
    code = f"import sys, importlib; [importlib.import_module(n) for n in {names}]; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
    assert delta_format.FORMAT == "slime-weights-1"
