"""`slime plugins doctor`: what is wrong in this environment, and what to type about it."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from slime_core.text import json_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(namespace: argparse.Namespace) -> int:
    """Print the findings; exit status 1 when one of them would stop a run."""
    from slime_commands.plugins.doctor import examine
    from slime_core.plugins.manager import current_registry

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
