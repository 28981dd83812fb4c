"""`slime doctor`: find what is wrong with the installation and its plugins, and say what to type."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from slime_core.protocols import Command
from slime_core.text import json_text


def add_parser(subparsers: Any) -> None:
    """Define `slime doctor`."""
    text = "print what is broken, conflicting, shadowed or incompatible in this environment, and what to type"
    parser = subparsers.add_parser("doctor", description=f"{text}. Exit status: 1 if something would stop a run.")
    parser.add_argument("run", nargs="?", metavar="RUN", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plugin-dir", action="append", default=[], metavar="DIR", help="also look here")
    parser.add_argument("--no-plugins", action="store_true", help="safe mode: slime's own plugins only")


def run(namespace: argparse.Namespace) -> int:
    """Print the findings; exit status 1 if one of them would stop a run."""
    from slime_commands.plugins.doctor import examine
    from slime_core.distributions import enter_safe_mode
    from slime_core.errors import ConfigError
    from slime_core.plugins.discovery import add_plugin_directories
    from slime_core.plugins.manager import current_registry

    if namespace.run is not None:
        raise ConfigError(f"slime doctor examines the installation; for a run: slime why --learning {namespace.run}")
    if namespace.no_plugins:
        enter_safe_mode()
    add_plugin_directories(namespace.plugin_dir)
    registry = current_registry()
    findings = examine(registry)
    if namespace.json:
        print(json_text([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            stops = f"\n  stops: {finding.stops}" if finding.stops else ""
            print(f"{finding.level}: {finding.topic}: {finding.what}{stops}\n  way out: {finding.way_out}")
        refs = list(registry)
        distributions = {ref.distribution for ref in refs if ref.distribution}
        errors = sum(finding.level == "error" for finding in findings)
        print(
            f"{len(refs)} plugins of {len(distributions)} distributions: {errors} errors,"
            f" {len(findings) - errors} warnings"
        )
    return int(any(finding.level == "error" for finding in findings))


command = Command(run, add_parser, only_prints=True)
