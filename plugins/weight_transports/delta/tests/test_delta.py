"""Deltas: their files, writing, applying, and what is refused."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from slime_weight_transport_delta import apply as applying
from slime_weight_transport_delta import format as delta_format
from slime_weight_transport_delta import raw_safetensors
from slime_weight_transport_delta.apply import STATE, LocalState, apply, local_state
from slime_weight_transport_delta.format import (
    OWNER,
    changed_elements,
    checksum_function,
    decode,
    encode,
    read_version,
    versions_in,
)
from slime_weight_transport_delta.raw_safetensors import (
    INDEX,
    ITEM_BYTES,
    read_header,
    view,
    weight_files,
    write_safetensors,
)
from slime_weight_transport_delta.writer import DeltaWriter

from slime_core.errors import ConfigError, WeightSyncError
from slime_core.models.hf_io import read_weights

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
        ("xor", bytes(10**6), "at most 4"),  # would fill the memory
    ],
)
def test_a_payload_of_another_tensor_is_refused(encoding: str, data: bytes, message: str) -> None:
    payload = zstandard.ZstdCompressor().compress(data)
    with pytest.raises(ValueError, match=message):
        decode(payload, np.zeros(4, np.uint8), 2, encoding)


def test_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    import blake3
    import xxhash

    data = np.frombuffer(b"slime", np.uint8)
    assert checksum_function("adler32")(data) == f"{zlib.adler32(b'slime'):08x}"
    assert checksum_function("blake3")(data) == blake3.blake3(b"slime").hexdigest()
    assert checksum_function("xxh3-128")(data) == xxhash.xxh3_128_hexdigest(b"slime")
    assert {len(checksum_function("xxh3-128")(np.empty(0, np.uint8)))} == {32}
    with pytest.raises(ConfigError, match="allowed: xxh3-128, blake3, adler32"):
        checksum_function("md5")
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


OUTSIDE = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc", r"bad\.safetensors"),
        ((10**9).to_bytes(8, "little") + b"{}", r"bad\.safetensors"),
        (len(OUTSIDE).to_bytes(8, "little") + OUTSIDE + b"ab", "'a' lies outside"),
    ],
)
def test_what_is_no_file_of_weights_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(WeightSyncError, match="no weights"):
        weight_files(tmp_path)
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(WeightSyncError, match=message):
        read_header(tmp_path / "bad.safetensors")
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


Tensors = dict[str, torch.Tensor]
PARTS = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float32, "empty": torch.float32}


def model(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (6, 5), "b": (4, 9), "c": (2000,), "empty": (0, 3)}
    return {name: torch.randn(shape, generator=generator).to(PARTS[name]) for name, shape in shapes.items()}


def step(weights: Tensors, seed: int) -> Tensors:
    """A few elements of some tensors change."""
    generator = torch.Generator().manual_seed(seed)
    new = {name: tensor.clone() for name, tensor in weights.items()}
    for name in ("a", "b"):
        at = int(torch.randint(new[name].numel(), (1,), generator=generator))
        new[name].view(-1)[at] += 1
    return new


class Setting:
    """A checkpoint, a writer and the copy of a reader."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.checkpoint, self.source, self.local = root / "model", root / "run" / "weights", root / "local"
        self.run, self.options = str(root / "run"), options
        self.checkpoint.mkdir()
        self.weights = model(0)
        save_file(self.weights, self.checkpoint / "model.safetensors")
        (self.checkpoint / "config.json").write_text("{}")
        self.writer = self.new_writer()

    def new_writer(self, **options: Any) -> DeltaWriter:
        return DeltaWriter(self.source, self.checkpoint, run_dir=self.run, **{**self.options, **options})

    def write(self, weights: Tensors, version: int) -> Any:
        written = self.writer.write(weights.items(), version)
        self.weights = weights
        return written

    def apply(self, version: int) -> Any:
        return apply(self.source, self.local, version)

    def served(self) -> Tensors:
        return dict(read_weights(self.local))


def same(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and torch.equal(left[n], right[n]) for n in left
    )


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power cut happens here, and flushing takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


# -- the chain -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "checksum", "shard_bytes"),
    [("xor", "xxh3-128", 1), ("overwrite", "blake3", 10**6), ("overwrite", "adler32", 1)],
)
def test_every_version_arrives(tmp_path: Path, encoding: str, checksum: str, shard_bytes: int) -> None:
    s = Setting(tmp_path, encoding=encoding, checksum=checksum, shard_bytes=shard_bytes)
    s.write(s.weights, 1)
    for version in range(1, 5):
        if version > 1:
            written = s.write(step(s.weights, version), version)
            assert written.density == pytest.approx(2 / 2066)
            names = sorted(p.name for p in written.directory.glob("*.safetensors"))
            assert names == (
                ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
                if shard_bytes == 1
                else ["model-00001-of-00001.safetensors"]
            )
            assert written.wire_bytes == sum((written.directory / n).stat().st_size for n in names)
            index = json.loads((written.directory / INDEX).read_text())
            assert {k: index["metadata"][k] for k in ("version", "base_version", "delta_encoding")} == {
                "version": version, "base_version": version - 1, "delta_encoding": encoding
            }  # fmt: skip
            assert index["metadata"]["compression_format"] == "zstd"
            assert index["metadata"]["checksum_format"] == checksum
            assert set(index["weight_map"]) == {"a", "b"}
        applied = s.apply(version)
        assert applied.version == version
        assert applied.rebuilt == (version == 1)
        assert same(s.served(), s.weights)
    assert (s.local / "config.json").is_file()


def test_a_reader_that_is_behind_catches_up(setting: Setting) -> None:
    setting.write(setting.weights, 1)
    setting.apply(1)
    for version in (2, 3, 4):
        setting.write(step(setting.weights, version), version)
        setting.writer.prune()
    applied = setting.apply(4)
    assert not applied.rebuilt
    assert same(setting.served(), setting.weights)
    assert setting.apply(4).wire_bytes == 0
    fresh = apply(setting.source, setting.local.with_name("fresh"), 4)
    assert fresh.rebuilt
    assert same(dict(read_weights(setting.local.with_name("fresh"))), setting.weights)


def test_the_checkpoints_dtypes_are_served(setting: Setting) -> None:
    wide = {name: tensor.float() for name, tensor in setting.weights.items()}
    assert setting.writer.write(wide.items(), 1).wire_bytes == 0  # the same bits once narrowed
    wide = {name: tensor + 1e-7 for name, tensor in wide.items()}
    setting.writer.write(wide.items(), 2)
    setting.apply(2)
    assert same(setting.served(), {name: tensor.to(PARTS[name]) for name, tensor in wide.items()})


def test_weights_that_are_not_the_checkpoints_begin_with_a_full_version(setting: Setting) -> None:
    written = setting.write(model(5), 7)
    assert written.density == 1
    assert same(dict(read_weights(written.directory)), model(5))  # a plain model directory
    assert (written.directory / "config.json").is_file()
    setting.apply(7)
    assert same(setting.served(), model(5))


def test_a_sharded_checkpoint(tmp_path: Path) -> None:
    s = Setting(tmp_path)
    (s.checkpoint / "model.safetensors").unlink()
    files = {"x.safetensors": ["a", "b"], "y.safetensors": ["c", "empty"]}
    for file, names in files.items():
        save_file({n: s.weights[n] for n in names}, s.checkpoint / file)
    weight_map = {n: file for file, names in files.items() for n in names}
    (s.checkpoint / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    s.write(s.weights, 1)
    s.write(step(s.weights, 1), 2)
    s.apply(2)
    assert same(s.served(), s.weights)
    s.write(model(3), 3)
    s.apply(3)
    assert same(s.served(), model(3))


def test_the_chain_is_cut_when_it_outweighs_the_model(setting: Setting) -> None:
    setting.write(setting.weights, 1)
    kinds = []
    for version in range(2, 8):
        setting.write(model(version), version)
        kinds.append(read_version(setting.source, version).base_version)
        setting.writer.prune()
        setting.apply(version)
        assert same(setting.served(), setting.weights)
    assert kinds[0] == 1
    full = kinds.index(None, 1) + 2
    assert 2 < full < 7
    assert min(versions_in(setting.source)) == max(v for v in range(2, 8) if kinds[v - 2] is None)
    size = sum(p.stat().st_size for p in setting.source.rglob("*.safetensors"))
    assert size < 8 * sum(t.nbytes for t in setting.weights.values()) + 10_000


def test_a_version_of_other_tensors_is_refused_and_undone(setting: Setting) -> None:
    setting.write(setting.weights, 1)
    for wrong, message in (
        ({**step(setting.weights, 1), "d": torch.ones(1)}, "'d'"),
        ({**step(setting.weights, 1), "c": torch.ones(8)}, "'c'"),
        ({"a": setting.weights["a"] + 1}, "missing: b, c"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            setting.writer.write(wrong.items(), 2)
    setting.write(step(setting.weights, 9), 2)
    assert setting.apply(2).version == 2
    assert same(setting.served(), setting.weights)


# -- base checks, resumes, other runs ------------------------------------------------------------------


def test_a_missing_base_is_named(setting: Setting) -> None:
    for version in (1, 2, 3):
        setting.write(step(setting.weights, version) if version > 1 else setting.weights, version)
    shutil.rmtree(setting.source / "weight_v000001")
    with pytest.raises(WeightSyncError, match=r"version 2 needs version 1, but there is no local copy.*there: 2, 3"):
        setting.apply(3)
    with pytest.raises(WeightSyncError, match=r"weight version 9 is not in .* \(there: 2, 3\)"):
        setting.apply(9)


def test_the_same_number_of_another_part_of_the_run_is_no_base(setting: Setting) -> None:
    setting.write(setting.weights, 1)
    for version in (2, 3):
        setting.write(step(setting.weights, version), version)
    setting.apply(3)
    # Resumed from the commit of version 2: its number comes again, with the bits of another chain.
    setting.writer = setting.new_writer()
    setting.write(step(model(8), 0), 2)
    assert list(versions_in(setting.source)) == [2]
    setting.write(step(setting.weights, 1), 3)
    setting.write(step(setting.weights, 2), 4)
    applied = setting.apply(4)
    assert applied.rebuilt
    assert same(setting.served(), setting.weights)


def test_versions_of_another_run_are_never_touched(setting: Setting, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    first = DeltaWriter(shared, setting.checkpoint, run_dir="/runs/one")
    first.write(setting.weights.items(), 1)
    with pytest.raises(ConfigError, match=r"holds weight versions of /runs/one"):
        DeltaWriter(shared, setting.checkpoint, run_dir="/runs/two")
    (shared / OWNER).unlink()
    with pytest.raises(ConfigError, match="of something else"):
        DeltaWriter(shared, setting.checkpoint, run_dir="/runs/one")
    (shared / OWNER).write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        DeltaWriter(shared, setting.checkpoint, run_dir="/runs/one")
    assert list(versions_in(shared)) == [1]


def test_a_local_directory_of_somebody_else_is_never_touched(setting: Setting) -> None:
    setting.write(setting.weights, 1)
    with pytest.raises(WeightSyncError, match="no copy of slime's"):
        apply(setting.source, setting.checkpoint, 1)
    assert same(dict(read_weights(setting.checkpoint)), setting.weights)


def test_two_appliers_exclude_each_other(setting: Setting) -> None:
    setting.write(setting.weights, 1)
    with (
        applying._sole(setting.local),
        pytest.raises(WeightSyncError, match="another process applies weights there"),
    ):
        setting.apply(1)
    setting.apply(1)


# -- damage --------------------------------------------------------------------------------------------


def refusal(action: Callable[[], Any]) -> str:
    """What a WeightSyncError says; empty without one."""
    try:
        action()
    except WeightSyncError as error:
        return str(error)
    return ""


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
def test_every_flipped_byte_of_a_delta_is_refused_and_changes_nothing(setting: Setting) -> None:
    setting.write(setting.weights, 1)
    setting.apply(1)
    before = setting.weights
    directory = setting.write(step(setting.weights, 1), 2).directory
    files = [p for p in directory.iterdir() if p.suffix in (".safetensors", ".json") and p.name != "config.json"]
    assert len(files) == 2
    for path in files:
        intact = path.read_bytes()
        for at in range(len(intact)):
            _flip(path, at)
            # White space in the index means nothing, so a change there may pass; then the version is the right one.
            message = refusal(lambda: setting.apply(2))
            if message:
                assert "version 2" in message
                assert path.name in message or str(directory) in message
                assert same(setting.served(), before)
                assert local_state(setting.local) == LocalState(1, read_version(setting.source, 1).chain)
            else:
                assert path.name == INDEX
                assert same(setting.served(), setting.weights)
                shutil.rmtree(setting.local)
                setting.apply(1)
            path.write_bytes(intact)
    for path in files:
        intact = path.read_bytes()
        path.write_bytes(intact[:-3])
        with pytest.raises(WeightSyncError, match="corrupted"):
            setting.apply(2)
        path.unlink()
        with pytest.raises(WeightSyncError, match=r"cannot be read|is not in"):
            setting.apply(2)
        path.write_bytes(intact)
    setting.apply(2)
    assert same(setting.served(), setting.weights)


def test_a_flipped_byte_of_a_full_version_is_refused(setting: Setting) -> None:
    setting.write(setting.weights, 1)
    setting.apply(1)
    before = setting.weights
    setting.writer = setting.new_writer()
    path = setting.write(model(4), 2).directory / "model-00001-of-00001.safetensors"
    _flip(path, path.stat().st_size - 1)
    with pytest.raises(WeightSyncError, match="corrupted"):
        setting.apply(2)
    assert same(setting.served(), before)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_rotten_local_copy_is_rebuilt(tmp_path: Path, encoding: str) -> None:
    s = Setting(tmp_path, encoding=encoding)
    s.write(s.weights, 1)
    s.apply(1)
    path = s.local / "model.safetensors"
    entries, _ = raw_safetensors.read_header(path)
    for name in ("a", "b"):
        _flip(path, entries[name].start)
    s.write({**s.weights, "a": s.weights["a"].index_fill(0, torch.tensor([5]), 3.0)}, 2)
    applied = s.apply(2)
    assert applied.rebuilt
    assert same(s.served(), s.weights)


@pytest.mark.parametrize("damage", ["state", "weights"])
def test_a_local_copy_without_its_files_is_rebuilt(setting: Setting, damage: str) -> None:
    setting.write(setting.weights, 1)
    setting.apply(1)
    if damage == "state":
        (setting.local / STATE).write_text("{")
    else:
        (setting.local / "model.safetensors").unlink()
    setting.write(step(setting.weights, 1), 2)
    assert setting.apply(2).rebuilt
    assert same(setting.served(), setting.weights)


# -- kills and full disks ------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for the kernel taking the process away."""


CALLS = [(os, n) for n in ("open", "write", "pwrite", "fsync", "rename", "replace", "unlink", "mkdir")] + [
    (shutil, "copyfile"), (shutil, "rmtree"),
]  # fmt: skip


@contextlib.contextmanager
def failing(at: int, error: Callable[[], BaseException], *, once: bool = False) -> Iterator[dict[str, int]]:
    """The file-system call number `at` raises, half done where it writes, and with it all later ones unless `once`."""
    counter = {"calls": 0}

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            counter["calls"] += 1
            if counter["calls"] == at + 1 or (counter["calls"] > at and not once and name != "rmtree"):
                if name in ("write", "pwrite") and len(args[1]) > 1:
                    function(args[0], args[1][: len(args[1]) // 2], *args[2:])
                raise error()
            return function(*args, **kwargs)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in CALLS:
            patch.setattr(owner, name, wrap(name, getattr(owner, name)))
        yield counter


def _count(action: Callable[[], Any]) -> int:
    with failing(10**9, Killed) as counter:
        action()
    return counter["calls"]


def prepared(folder: Path, kind: str) -> tuple[Setting, Tensors, int]:
    """Return a run before the version that is cut, the weights of that version, and its number."""
    folder.mkdir()
    s = Setting(folder, shard_bytes=1)
    if kind == "seed":
        return s, s.weights, 1
    s.write(s.weights, 1)
    s.apply(1)
    if kind == "full":
        s.writer._whole = False
    return s, step(s.weights, 1), 2


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["seed", "delta", "full"])
def test_a_writer_killed_at_any_call_leaves_versions_whole(tmp_path: Path, kind: str) -> None:
    s, new, version = prepared(tmp_path / "count", kind)
    calls = _count(lambda: s.writer.write(new.items(), version))
    assert calls > 8
    for call in range(calls):
        s, new, version = prepared(tmp_path / str(call), kind)
        old = s.weights
        with failing(call, Killed), contextlib.suppress(Killed):
            s.writer.write(new.items(), version)
        visible = versions_in(s.source)
        assert set(visible) <= {1, version}
        if version in visible:
            assert s.apply(version).version == version
            assert same(s.served(), new)
        elif visible:
            s.apply(1)
            assert same(s.served(), old)
        # The run goes on in another process with what it had trained.
        s.writer = s.new_writer()
        s.write(step(new, 5), version)
        s.apply(version)
        assert same(s.served(), s.weights)
        assert not [p for p in s.source.iterdir() if p.name.startswith((".partial", ".replaced"))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["delta", "full"])
def test_a_disk_that_fills_up_anywhere_costs_one_push(tmp_path: Path, kind: str) -> None:
    s, new, _ = prepared(tmp_path / "count", kind)
    calls, failures = _count(lambda: s.writer.write(new.items(), 2)), 0
    for call in range(calls):
        s, new, _ = prepared(tmp_path / str(call), kind)
        old = s.weights
        with failing(call, no_space, once=True):
            message = refusal(lambda s=s, new=new: s.writer.write(new.items(), 2))
        if message:
            failures += 1
            assert "No space left" in message
            assert "weight version 2" in message
            assert not list(s.source.glob(".partial*"))
            assert same(s.served(), old)
        s.write(step(s.weights, 2), 3 if 2 in versions_in(s.source) else 2)
        s.apply(max(versions_in(s.source)))
        assert same(s.served(), s.weights)
    assert failures > 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["seed", "delta", "full"])
@pytest.mark.parametrize("error", [Killed, no_space])
def test_apply_cut_at_any_call_is_made_good(tmp_path: Path, kind: str, error: Callable[[], BaseException]) -> None:
    s, new, version = prepared(tmp_path / "count", kind)
    s.write(new, version)
    calls = _count(lambda: s.apply(version))
    assert calls > 5
    for call in range(calls):
        s, new, version = prepared(tmp_path / str(call), kind)
        s.write(new, version)
        with failing(call, error), contextlib.suppress(Killed):
            assert "No space left" in refusal(lambda s=s, version=version: s.apply(version))
        state = local_state(s.local)
        if state is not None:
            expected = s.weights if state.version == version else model(0)
            assert same(s.served(), expected)
        s.apply(version)
        assert same(s.served(), s.weights)
