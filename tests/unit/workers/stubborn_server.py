"""A server that is hard to end: it forks descendants that ignore signals and leave its process group and session.

`python stubborn_server.py PIDS [exit]` writes their process ids to PIDS, one per line, and its own first. They have a
file of SGLang's in shared memory.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time


def deaf(*, new_session: bool = False, new_group: bool = False, orphan: bool = False) -> int:
    """A process that ignores what can be ignored; the read returns once it does so."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        if new_session:
            os.setsid()
        if new_group:
            os.setpgid(0, 0)
        if orphan and os.fork() > 0:
            os._exit(0)
        os.write(write, str(os.getpid()).encode())
        os.close(write)
        while True:
            time.sleep(60)
    os.close(write)
    made = int(os.read(read, 100))
    if orphan:
        os.waitpid(pid, 0)
    return made


if __name__ == "__main__":
    path = f"/dev/shm/sglang_loads_{os.getpid()}.shm"
    with open(path, "w+b") as shared:
        shared.write(b"SLNS")
        shared.flush()
        mapped = mmap.mmap(shared.fileno(), 4)
    pids = [os.getpid(), deaf(), deaf(new_group=True), deaf(new_session=True), deaf(new_session=True, orphan=True)]
    with open(sys.argv[1] + ".partial", "w") as file:
        file.write("\n".join(map(str, pids)))
    os.replace(sys.argv[1] + ".partial", sys.argv[1])
    if "exit" in sys.argv:
        os._exit(3)
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)
