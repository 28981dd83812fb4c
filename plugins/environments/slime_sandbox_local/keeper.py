"""Start a sandbox (`inside/main.py`) under a guard of `slime_core.workers` and read what it could isolate. Blocks.

`local.py` and `isolation.py` call `start_keeper`, in a thread. The sandbox inherits nothing of the run but the
descriptor of its socket: its environment is empty, and what it is to do comes over the socket.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slime_core.waits import waiting
from slime_core.workers import guard
from slime_core.workers.process import Guarded
from slime_sandbox_local.inside import messages
from slime_sandbox_local.protocol import SandboxError, SandboxLimits

START_SECONDS = 60.0
"""Seconds for the sandbox to start; it takes a tenth of a second on an idle machine."""
END_SECONDS = 10.0
"""Seconds for the sandbox to end by itself and remove its files; then it is killed."""
# Importing the real packages would cost more than the rest of the guard.
_PATHS = {"slime_core": str(Path(guard.__file__).parents[1]), "slime_sandbox_local": str(Path(__file__).parent)}
_GUARD = f"""
import sys, types
for name, path in {_PATHS!r}.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from slime_core.workers.guard import main
from slime_sandbox_local.inside.main import run
sys.exit(main(sys.argv[1:], run))
"""


@dataclass
class Keeper:
    """A started sandbox."""

    process: Guarded
    control: socket.socket
    missing: dict[str, str]
    """Reason for each isolation that is not available, by its name."""
    work: str
    """Path of the working directory for programs in the sandbox."""

    def ask_to_end(self) -> None:
        """Begin to end the sandbox and everything in it; `process` lives until all has ended."""
        self.control.close()
        self.process.ask_to_stop()


def start_keeper(limits: SandboxLimits, env: Mapping[str, str]) -> Keeper:
    """Start the sandbox. Raises SandboxError if it does not start."""
    if sys.platform != "linux":
        raise SandboxError("local sandboxes are made of means that only Linux has")
    program = ["-c", _GUARD]
    process = Guarded("a sandbox", stop_s=END_SECONDS, leftover_s=0.0, program=program, error=SandboxError)
    ours, theirs = socket.socketpair()
    with theirs:
        control = theirs.fileno()
        process.start([str(control)], {}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, only=[control])
    try:
        with waiting("the start of a sandbox", deadline=START_SECONDS, then="it is given up"):
            hello = _greet(ours, limits, env)
    except BaseException:
        ours.close()
        process.stop()
        raise
    if "failed" in hello:
        ours.close()
        process.stop()
        raise SandboxError(
            f"the sandbox could not be set up: {hello['failed']} (missing: {hello['missing'] or 'nothing'})"
        )
    return Keeper(process, ours, hello["missing"], hello["work"])


def _greet(control: socket.socket, limits: SandboxLimits, env: Mapping[str, str]) -> dict[str, Any]:
    control.settimeout(START_SECONDS)
    settings = {
        "limits": asdict(limits), "env": {**_environment(), **env}, "temporary": tempfile.gettempdir(),
        "readable": readable_paths(limits),
    }  # fmt: skip
    buffer = bytearray()
    try:
        control.sendall(messages.pack(settings))
        while (message := messages.take(buffer, 1 << 20)) is None:
            part = control.recv(65_536)
            if not part:
                raise SandboxError("the sandbox's process ended before it was set up")
            buffer += part
    except TimeoutError:
        raise SandboxError(f"the sandbox was not set up within {START_SECONDS:.0f} s") from None
    except OSError as error:
        raise SandboxError(f"the sandbox's process ended before it was set up: {error}") from error
    return message[0]


def readable_paths(limits: SandboxLimits) -> list[str]:
    """Return the host directories besides the system's: this Python's, and the requested ones."""
    given = [sys.base_prefix, sys.prefix, *limits.read_only]
    return [path for path in dict.fromkeys(map(os.path.abspath, given)) if path not in ("/", "/usr")]


def _environment() -> dict[str, str]:
    """Return the environment for programs, without any variables of the run."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", **threads}
