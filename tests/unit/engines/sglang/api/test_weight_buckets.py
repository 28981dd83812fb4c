"""Memory that other processes open, and the buckets of weights in it: what was written, and gone afterwards."""

from __future__ import annotations

import base64
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from slime_engine_http.weights.buckets import Buffers, group_tensors
from slime_engine_http.weights.shared_memory import SHM, Register, SharedBuffer, message, remove_leftovers

from slime_core.errors import WeightSyncError


def mine() -> list[str]:
    return [name for name in os.listdir(SHM) if name.startswith(f"torch_{os.getpid()}_")]


READER = """
import base64, pickle, sys
bucket = pickle.loads(base64.b64decode(sys.stdin.read()))
print(bucket["flattened_tensor"].tolist(), bucket["metadata"][0].name)
"""


@pytest.mark.slow
def test_another_process_reads_it_and_nothing_is_left() -> None:
    strategy = torch.multiprocessing.get_sharing_strategy()
    buffer = SharedBuffer(3)
    buffer.tensor.copy_(torch.tensor([1, 2, 3]))
    buffer.lend(1)
    text = message(buffer.tensor, [types.SimpleNamespace(name="w")])
    read = subprocess.run([sys.executable, "-c", READER], input=text, text=True, capture_output=True, check=True)
    assert read.stdout == "[1, 2, 3] w\n"
    assert mine()
    buffer.free()
    assert not mine()
    assert torch.multiprocessing.get_sharing_strategy() == strategy


def test_a_reader_may_outlive_it() -> None:
    buffer = SharedBuffer(3)
    buffer.tensor.fill_(7)
    buffer.lend(1)
    read = pickle.loads(base64.b64decode(message(buffer.tensor, [])))["flattened_tensor"]
    buffer.free()
    assert read.tolist() == [7, 7, 7]
    del read
    assert not mine()


def test_memory_that_is_not_there_is_an_error_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(SHM)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(WeightSyncError, match="--shm-size"):
        SharedBuffer(11)


def test_memory_that_another_process_takes_first_is_an_error() -> None:
    """It was there when it was asked for. A limit of this process's files stands for memory that is out."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(WeightSyncError, match=r"--shm-size.*File too large"):
            SharedBuffer(4 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for name in mine():  # torch's manager removes the name when this process ends
        assert (SHM / name).stat().st_blocks == 0
        (SHM / name).unlink()


HOLDER = """
import os, time
from slime_engine_http.weights.shared_memory import SharedBuffer
buffer = SharedBuffer(8)
buffer.lend(2)
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
(manager,) = [pid for pid in children if open(f"/proc/{pid}/comm").read().startswith("torch_shm")]
print(buffer._handle, manager, flush=True)
time.sleep(120)
"""


@pytest.mark.slow
@pytest.mark.parametrize("manager_too", [False, True])
def test_memory_of_a_killed_process_goes_at_once_or_with_the_next_run(manager_too: bool) -> None:
    """torch's manager removes it; when everything was killed, as by a batch system, the next run does."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        handle, manager = process.stdout.readline().split()
        assert (SHM / handle).exists()
        if manager_too:
            os.kill(int(manager), signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    if manager_too:  # unless another test of this moment was that next run
        remove_leftovers(SHM)
        assert not (SHM / handle).exists()
    else:
        deadline = time.monotonic() + 60
        while (SHM / handle).exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        remove_leftovers(SHM)


# -- names of dead processes --------------------------------------------------------------------------------


def enter(folder: Path, entered: Any) -> None:
    register = Register(folder)
    for name in ("first", "second"):
        (folder / name).touch()
        register.enter(name)
    entered.set()
    time.sleep(120)


def names(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if not name.startswith("slime-")}


def test_a_living_process_keeps_its_names_and_a_killed_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "foreign").touch()
    fork = multiprocessing.get_context("fork")
    holder = fork.Process(target=enter, args=(tmp_path, entered := fork.Event()), daemon=True)
    holder.start()
    assert entered.wait(60)
    remove_leftovers(tmp_path)
    assert names(tmp_path) == {"foreign", "first", "second"}
    holder.kill()
    holder.join(60)
    mine = Register(tmp_path)
    (tmp_path / "mine").touch()
    mine.enter("mine")
    assert names(tmp_path) == {"foreign", "mine"}
    remove_leftovers(tmp_path)
    assert names(tmp_path) == {"foreign", "mine"}


def test_a_file_of_names_removes_nothing_outside_and_another_users_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, kept = tmp_path / "shm", tmp_path / "kept"
    memory.mkdir()
    kept.touch()
    (memory / "segment").touch()
    listed = memory / f"slime-{os.getuid()}-planted.names"
    listed.write_text(f"../kept\n{kept}\nsegment\n")
    other_user = os.getuid() + 1
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: other_user)
        listed.rename(memory / f"slime-{os.getuid()}-planted.names")
        remove_leftovers(memory)
        assert (memory / "segment").exists()
        (memory / f"slime-{os.getuid()}-planted.names").rename(listed)
    remove_leftovers(memory)
    assert kept.exists()
    assert not (memory / "segment").exists()


# -- buckets ---------------------------------------------------------------------------------------------


def named(*sizes: int, dtype: torch.dtype = torch.uint8) -> list[tuple[str, torch.Tensor]]:
    return [(f"t{i}", torch.full((size,), i, dtype=dtype)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [((3, 3, 3), [2, 1]), ((6,), [1]), ((9, 1), [1, 1]), ((1, 9), [1, 1]), ((0, 2, 0, 2, 2), [3]), ((4, 4), [1, 1])],
)
def test_groups_hold_so_many_bytes(sizes: tuple[int, ...], groups: list[int]) -> None:
    found = list(group_tensors(named(*sizes), 6))
    assert [len(run) for run, _ in found] == groups
    assert [last for _, last in found] == [False] * (len(groups) - 1) + [True]
    assert [name for run, _ in found for name, _ in run] == [f"t{i}" for i, size in enumerate(sizes) if size]


def test_a_name_that_comes_again_is_an_error_wherever_it_does() -> None:
    with pytest.raises(WeightSyncError, match="tensor 't1' twice"):
        list(group_tensors([*named(3, 3, 3), ("t1", torch.ones(1))], 6))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.int64, torch.float16])
def test_dtypes_of_quantized_models_arrive_bit_by_bit(dtype: torch.dtype, shared: bool) -> None:
    raw = torch.arange(240, dtype=torch.uint8).reshape(5, 48)
    given = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
    buffers = Buffers(shared=shared, keep=False)
    bucket = buffers.fill([("odd", torch.ones(3, dtype=torch.uint8)), ("turned", given.t()), ("whole", given)])
    found = dict(bucket.named())
    assert found["whole"].dtype == dtype
    assert torch.equal(found["whole"].view(torch.uint8), given.view(torch.uint8))
    assert torch.equal(found["turned"].view(torch.uint8), given.t().contiguous().view(torch.uint8))
    del found, bucket
    buffers.free()
