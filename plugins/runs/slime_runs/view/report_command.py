"""`slime report RUN` (look at a run): write one HTML file about a run, to send.

It is the page of `slime view` with the answers that it would ask for written into it; it loads nothing and runs no
script but that page's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slime_core.protocols import Command
from slime_core.text import json_text, plain


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    text = "one HTML file about a run, to send"
    parser = subparsers.add_parser("report", help=text, description=text)
    parser.add_argument("run", metavar="RUN", help="run directory; the run may be going on")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: report.html in the working directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rollouts", type=int, default=5, metavar="N", help="the newest N (default: %(default)s)")
    parser.add_argument(
        "--samples", type=int, default=16, metavar="N",
        help="of each rollout, best, worst and failed ones (default: %(default)s)",
    )  # fmt: skip


def run(namespace: argparse.Namespace) -> int:
    """Write the file. Raises RunError, ConfigError."""
    from slime_core.errors import ConfigError
    from slime_core.files import replace_file
    from slime_runs.view.report import is_report, report
    from slime_runs.view.server import warn_if_unbuilt
    from slime_runs.view.watched import WatchedRun

    output = Path(namespace.output or "report.html")
    if output.exists() and not (output.is_file() and is_report(output)):
        raise ConfigError(f"{output} is there already and is no report of slime's; name another file with --output")
    warn_if_unbuilt()
    content = report(WatchedRun(namespace.run), namespace.rollouts, namespace.samples).encode()
    try:
        replace_file(output.resolve(), content)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror}") from error
    said = f"wrote {output} ({len(content) / 1e6:.1f} MB)"
    print(json_text({"output": str(output), "bytes": len(content)}) if namespace.json else plain(said))
    return 0


command = Command(run, add_parser)
