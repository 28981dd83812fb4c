"""The Python that workers of pytest-xdist start: a fork of the process of `tests.zygote`, whose imports are done.

Called as `python -u -c CODE`. Each worker would import torch, transformers and Megatron for seconds to collect tests.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

SHARED = "SLIME_TEST_ZYGOTE"
"""Environment variable with the path of the shared process's socket."""
START_S = 180.0
"""For the imports, on a machine with much else to do."""
IMPORTED = ("tests.light_megatron", "anthropic", "mcp", "openai", "starlette.testclient")
"""Modules that tests import besides those of commands.

Ray is not among them, which is untried in forks, and no plugin of pytest, whose assertions are rewritten on import.
"""


def connection_to(path: str) -> socket.socket:
    """Connect to the shared process, once it listens."""
    until, connection = time.monotonic() + START_S, socket.socket(socket.AF_UNIX)
    while True:
        try:
            connection.connect(path)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            assert time.monotonic() < until, "the process that forks has not started"
            time.sleep(0.05)


def main() -> int:
    """Run the code as a fork that reads and writes as this process does, and return its exit status."""
    here = f"/proc/{os.getpid()}/fd"
    order = {"program": "-c", "argv": sys.argv[-1:], "env": dict(os.environ), "cwd": os.getcwd()}
    order |= {"in": f"{here}/0", "out": f"{here}/1", "err": f"{here}/2"}
    with connection_to(os.environ[SHARED]) as connection:
        connection.sendall("".join(f"{json.dumps(line)}\n" for line in (IMPORTED, order)).encode())
        with connection.makefile() as answers:
            next(answers)
            return int(next(answers))


if __name__ == "__main__":
    sys.exit(main())
