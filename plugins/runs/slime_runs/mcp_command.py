"""`slime mcp DIR` (look at a run): let a coding agent read the runs in a directory, over the Model Context Protocol.

The tools are in `mcp_server.py`, which needs the extra `mcp`. Standard input and output carry the protocol.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slime_core.distributions import BUNDLE
from slime_core.errors import ConfigError
from slime_core.protocols import Command


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Define `slime mcp`."""
    parser = subparsers.add_parser(
        "mcp",
        help="tools for coding agents that read the runs in a directory (Model Context Protocol)",
        description="Serve tools that read the runs in a directory: runs, show, why, samples, compare; also check, for"
        " settings, and docs, a search in slime's documentation. A coding agent starts the command and talks to it over"
        " standard input and output. The tools write nothing and start nothing.",
    )
    parser.add_argument("folder", nargs="?", default="outputs", metavar="DIR", help="where runs lie (default: outputs)")


def run(namespace: argparse.Namespace) -> int:
    """Serve until standard input ends. Raises ConfigError if the extra is missing."""
    try:
        from slime_runs.mcp_server import make_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise ConfigError(f"slime mcp needs the package mcp; type: pip install '{BUNDLE}[mcp]'") from error
    make_server(Path(namespace.folder)).run("stdio")
    return 0


command = Command(run, add_parser)
