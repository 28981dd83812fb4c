"""Note connections to other machines; Python imports this module in every process of a rehearsal (`connections.py`).

Uses the standard library only and is no part of a package, since it comes before anything of the run.
"""

import os
import socket
import sys

_FILE = os.environ.get("SLIME_SCRIPT_CONNECTIONS", "")
_OWN = {"", "localhost", "0.0.0.0", "::", "::1", socket.gethostname()}


def _note(event: str, args: tuple[object, ...]) -> None:
    if event == "socket.getaddrinfo":
        host = args[0]
    elif event == "socket.connect":
        used, address = args
        if isinstance(used, socket.socket) and used.type == socket.SOCK_DGRAM:
            return  # sends nothing; vLLM asks so for this machine's address
        host = address[0] if isinstance(address, tuple) else ""
    else:
        return
    name = host.decode() if isinstance(host, bytes) else str(host or "")
    if name in _OWN or name.startswith("127."):
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and "/lib/python" in frame.f_code.co_filename:
        frame = frame.f_back
    with open(_FILE, "a", encoding="utf-8") as file:
        file.write(f"{name}\t{frame.f_code.co_filename}:{frame.f_lineno}\n")


if _FILE:
    sys.addaudithook(_note)
