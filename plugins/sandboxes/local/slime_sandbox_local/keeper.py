"""Starts the keeper of a sandbox (`inside/main.py`) and hears what it could isolate. Blocks; called in a thread.

`local.py` and `isolation.py` call `start_keeper`. The keeper inherits nothing of the run but the descriptor of its
socket: its environment is empty, and what it is to do comes over the socket.
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
from slime_sandbox_local.inside import messages
from slime_sandbox_local.limits import SandboxLimits
from slime_sandbox_local.protocol import SandboxError

START_SECONDS = 60.0
"""For the keeper to say hello; it takes tens of milliseconds on an idle machine."""
_PACKAGE = Path(__file__).parent
# Importing the real package would cost more than everything else the keeper does.
_START = """
import sys, types
package = sys.modules["slime_sandbox_local"] = types.ModuleType("slime_sandbox_local")
package.__path__ = [sys.argv[3]]
from slime_sandbox_local.inside.main import start
start()
"""


@dataclass
class Keeper:
    """A started sandbox."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    missing: dict[str, str]
    """What could not be isolated -> why."""
    work: str
    """The working directory, as programs see it."""

    def kill(self) -> None:
        """End it, now, and everything that it keeps; the caller reaps `process`."""
        self.control.close()
        self.process.kill()


def start_keeper(limits: SandboxLimits, env: Mapping[str, str]) -> Keeper:
    """Start it. Raises SandboxError: it did not come up."""
    if sys.platform != "linux":
        raise SandboxError("local sandboxes are made of means that only Linux has")
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, str(theirs.fileno()), str(os.getpid()), str(_PACKAGE)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={}, cwd="/",
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            ours.close()
            raise SandboxError(f"the sandbox's process could not be started: {error}") from error
    try:
        with waiting("the start of a sandbox", deadline=START_SECONDS, then="it is given up"):
            hello = _greet(ours, limits, env)
    except BaseException:
        Keeper(process, ours, {}, "").kill()
        process.wait(timeout=START_SECONDS)
        raise
    if "failed" in hello:
        Keeper(process, ours, {}, "").kill()
        process.wait(timeout=START_SECONDS)
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
    """Host directories beside the system's: this Python's, and those asked for."""
    given = [sys.base_prefix, sys.prefix, *limits.read_only]
    return [path for path in dict.fromkeys(map(os.path.abspath, given)) if path not in ("/", "/usr")]


def _environment() -> dict[str, str]:
    """Nothing of the run's: only what programs need."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", **threads}
