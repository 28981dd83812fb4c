"""Host memory that SGLang's processes on this machine map, and the message that locates the memory.

SGLang unpickles the message with a list of allowed names. So the message consists of torch's own rebuild functions and
`types.SimpleNamespace`, which SGLang 0.5.20 and 0.5.23 allow; nothing of SGLang is imported here. With torch's default
way to share memory (file descriptors), such a message makes the SERVER DIE. So memory is always shared by name,
whichever strategy the process has set for its own use.

torch starts a process that removes a dead process's shared memory. If that helper was killed as well (batch systems
kill all processes of a job), up to a copy of the weights would stay until the machine restarts. So each name is
entered in a locked file next to it, and a run removes memory that an earlier run could not remove. A process id would
not identify the holder, since containers may share /dev/shm but not their processes. The kernel drops a file lock when
its holder ends.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import fcntl
import io
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import IO, Any

import torch
from torch.multiprocessing import reductions

from slime_core.errors import WeightSyncError

logger = logging.getLogger(__name__)
SHM = Path("/dev/shm")
_starting = threading.Lock()


class Register:
    """A locked file of names, next to the memory in `folder`; made for the first name, removed at a normal exit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._process = 0

    def enter(self, name: str) -> None:
        """Record a name as this process's; names of memory that no longer exists are harmless."""
        with self._lock:
            if self._file is None or self._process != os.getpid():  # a forked process has its parent's file
                remove_leftovers(self._folder)
                self._file, self._process = self._create(), os.getpid()
            self._file.write(name + "\n")
            self._file.flush()

    def _create(self) -> IO[str]:
        path = self._folder / f"slime-{os.getuid()}-{os.urandom(8).hex()}.names"
        made = path.with_suffix(".new")  # not visible to other runs before it is locked
        file = made.open("x")
        fcntl.flock(file, fcntl.LOCK_EX)
        made.rename(path)
        atexit.register(_forget, path, os.getpid())
        return file


def _forget(path: Path, process: int) -> None:
    if process == os.getpid():
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what processes of this user that are no more have entered."""
    for path in folder.glob(f"slime-{os.getuid()}-*.names"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            # Everyone may write to the folder: the file may be another user's, and name anything.
            if path.lstat().st_uid == os.getuid() and not path.is_symlink():
                _remove_entered(path)


def _remove_entered(path: Path) -> None:
    """Remove the memory that a file names, and the file. Raises BlockingIOError if its process lives."""
    folder = path.parent
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        names = [name for name in file.read().split() if "/" not in name]
        left = [folder / name for name in names if (folder / name).exists()]
        for segment in left:
            segment.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        if left:
            logger.info(
                "removed %d pieces of shared memory that a run left in %s when it was killed", len(left), folder
            )


_register = Register(SHM)


class SharedBuffer:
    """`size` bytes under a name in shared memory; after `free` they are gone, even if readers died."""

    def __init__(self, size: int) -> None:
        free = shutil.disk_usage(SHM).free
        too_little = (
            f"{SHM} has {free >> 20} MiB left and a bucket of weights takes {size >> 20}: give it more memory"
            " (docker --shm-size), lower --update-weight-buffer-size, or choose --update-weight-transport disk"
        )
        if size > free:
            raise WeightSyncError(too_little)
        try:
            with _no_inheritance():  # the first call starts torch's manager process
                storage = torch.UntypedStorage._new_using_filename_cpu(size)
        except RuntimeError as error:  # another process has taken the rest; torch reserves all of the memory here
            raise WeightSyncError(f"{too_little} ({error})") from error
        self._storage: torch.UntypedStorage | None = storage
        self._handle = bytes(storage._share_filename_cpu_()[1]).decode().lstrip("/")
        _register.enter(self._handle)
        self.tensor = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))

    @property
    def path(self) -> str:
        """Path of the file in which the memory appears."""
        return str(SHM / self._handle)

    @property
    def offset(self) -> int:
        """Number of torch's own bytes at the start of the file."""
        return os.stat(self.path).st_size - self.tensor.numel()

    def lend(self, readers: int) -> None:
        """Set how many processes will open it: each gives one use back, and the last removes the name."""
        assert self._storage is not None, "lent after free"
        for _ in range(readers):
            self._storage._shared_incref()  # type: ignore[no-untyped-call]

    def free(self) -> None:
        """Free the memory; the name is removed with its last user, not counting readers that died before they read.

        The name is never removed otherwise: torch ends a process that finds it missing when it closes the last use.
        """
        storage, self._storage = self._storage, None
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if storage is not None:
            for _ in range(self._uses() - 1):
                storage._shared_decref()

    def _uses(self) -> int:
        """Number of uses, which torch counts in the first bytes of the file."""
        try:
            with (SHM / self._handle).open("rb") as file:
                return int.from_bytes(file.read(4), "little", signed=True)
        except FileNotFoundError:
            return 0


def message(flat: torch.Tensor, metadata: list[Any]) -> str:
    """Return SGLang's `flattened_bucket` payload, base64. A CUDA tensor is sent as an IPC handle for one reader."""
    buffer = io.BytesIO()
    _Pickler(buffer, 4).dump({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(buffer.getvalue()).decode()


class _Pickler(ForkingPickler):
    """Pickle with torch's own reductions, except for memory: by name for the host, by device UUID for GPUs."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce storages and CUDA tensors; see `pickle.Pickler.reducer_override`."""
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            return reductions.rebuild_storage_filename, (torch.UntypedStorage, *obj._share_filename_cpu_())
        if isinstance(obj, torch.Tensor) and obj.is_cuda:
            # Device numbers differ between processes with other CUDA_VISIBLE_DEVICES; SGLang also takes the UUID.
            function, args = reductions.reduce_tensor(obj)  # type: ignore[no-untyped-call]
            uuid = str(torch.cuda.get_device_properties(obj.device).uuid)
            return function, (*args[:6], uuid, *args[7:])
        return NotImplemented


@contextlib.contextmanager
def _no_inheritance() -> Iterator[None]:
    """Make programs started inside the block inherit no open files except standard input.

    torch's manager briefly outlives the run. If it held this process's output, a pipe would stay open for its reader.
    """
    with _starting:
        open_files = [int(name) for name in os.listdir("/proc/self/fd")]
        inherited = []
        for number in open_files:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
                if number > 1 and os.get_inheritable(number):
                    inherited.append(number)
        for number in inherited:
            os.set_inheritable(number, False)
        try:
            yield
        finally:
            for number in inherited:
                with contextlib.suppress(OSError):  # closed meanwhile by another thread
                    os.set_inheritable(number, True)
