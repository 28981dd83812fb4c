"""`slime pull-weights` (serve): apply weight deltas beside engines.

It keeps an engine's host supplied with the weights of a run that sends deltas.

slime starts it beside the engines it launches; beside engines of your own you start it, one per host. Loads no torch.
SIGTERM and ctrl-C end it cleanly.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from slime_core.protocols import Command


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "pull-weights",
        help="apply weight deltas beside engines",
        description="Bring a local copy of the model to each new weight version and have the engines load it"
        " (slime train --update-weight-mode delta --update-weight-puller-addrs HOST:PORT).",
    )
    add_arguments(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--source", required=True, metavar="DIR", help="the run's --update-weight-disk-dir")
    parser.add_argument("--local-dir", required=True, metavar="DIR", help="the local copy; new, or one of before")
    parser.add_argument(
        "--engine-url",
        nargs="+",
        default=[],
        metavar="URL",
        help="http://HOST:PORT of the engines that load it (default: those that a request names)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=30100, help="port, 0 for a free one (default %(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for a version (default %(default)s)")


def run(namespace: argparse.Namespace) -> int:
    """Serve until SIGTERM or ctrl-C. Raises ConfigError, EngineError."""
    import asyncio
    import contextlib
    import signal

    from slime_core.errors import ConfigError, EngineError
    from slime_weight_transport_delta.puller import Puller, serve

    for url in namespace.engine_url:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--engine-url {url!r}: expected http://HOST:PORT")
    if not 0 < namespace.timeout < math.inf:
        raise ConfigError(f"--timeout {namespace.timeout}: expected seconds, more than 0")

    def ready(port: int) -> None:
        print(f"slime: pulling weights of {namespace.source} on http://{namespace.host}:{port}", flush=True)

    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        puller = Puller(
            Path(namespace.source), Path(namespace.local_dir), namespace.engine_url, timeout=namespace.timeout
        )
        with contextlib.suppress(asyncio.CancelledError):
            await serve(puller, namespace.host, namespace.port, ready)

    try:
        asyncio.run(main())
    except (OSError, OverflowError) as error:
        raise EngineError(
            f"cannot listen on {namespace.host}:{namespace.port} ({error}); choose another --port, 0 for a free one"
        ) from error
    return 0


command = Command(run, add_parser)
