"""`slime view RUN_OR_DIR` (look at a run): show runs in the browser, down to a token, live or ended.

A page on this machine, behind a token; it reads the run directories. On this machine's own address it also writes the
user's notes, generates samples again and scores them with another reward. SIGTERM and ctrl-C end it cleanly.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.protocols import Command
from slime_core.text import plain

if TYPE_CHECKING:
    from fastapi import FastAPI


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "view",
        help="runs in the browser: curves, rollouts, what the model wrote token by token",
        description="Serve a page about a run, or about all runs of a directory; it is live while they go on.",
    )
    parser.add_argument("path", metavar="RUN_OR_DIR", nargs="?", default="outputs", help="default: outputs")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port (default: a free one)")
    parser.add_argument("--allowed-hosts", metavar="NAMES", help="in Host and Origin, besides this machine's; *: any")


def run(namespace: argparse.Namespace) -> int:
    """Serve until a signal. Raises RunError, EngineError."""
    import asyncio
    import secrets

    from slime_serving.http.guard import Access, is_local

    from slime_runs.view.server import make_app, warn_if_unbuilt

    hosts = {name.strip().lower() for name in (namespace.allowed_hosts or "").split(",") if name.strip()}
    # A page that gives its own name to this machine's address does not have the token.
    access = Access(hosts=frozenset(hosts | ({"*"} if not is_local(namespace.host) else set())))
    warn_if_unbuilt()
    app = make_app(Path(namespace.path), access, acts=is_local(namespace.host))
    return asyncio.run(_serve(app, namespace.host, namespace.port, secrets.token_urlsafe(24), namespace.path))


async def _serve(app: FastAPI, host: str, port: int, token: str, path: str) -> int:
    import asyncio
    import signal

    from slime_serving.http.application import bind, listen

    from slime_runs.view.access import TokenAccess

    sock = bind(host, port)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    app.add_middleware(TokenAccess, token=token, port=sock.getsockname()[1])
    bound, chosen, stop = await listen(app, sock)
    shown = f"[{bound}]" if ":" in bound else bound
    print(f"slime: {plain(path)} on http://{shown}:{chosen}/?token={token}", flush=True)
    await stopped.wait()
    await stop()
    return 0


command = Command(run, add_parser)
