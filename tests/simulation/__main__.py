"""`python -m tests.simulation`: replay one seed, or look through many."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.simulation.faults import Fault
from tests.simulation.run import explore, shrink, simulate
from tests.simulation.settings import MODES


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the run, or the first of them")
    parser.add_argument("--count", type=int, default=1, help="how many seeds, one after another")
    parser.add_argument("--mode", choices=MODES, default="sync", help="kind of training loop")
    parser.add_argument("--faults", nargs="*", type=Fault.parse, metavar="PLACE[NUMBER]=KIND", help="instead of drawn")
    parser.add_argument("--trace", action="store_true", help="print everything that happened")
    args = parser.parse_args(argv)
    if args.count == 1:
        report = simulate(args.seed, faults=args.faults, mode=args.mode)
        if args.trace:
            print("\n".join(report.trace))
        print(report)
        return 0 if report.ok else 1
    started, failed, lives, turns = time.perf_counter(), 0, 0, 0
    for report in explore(range(args.seed, args.seed + args.count), mode=args.mode):
        lives, turns = lives + report.lives, turns + report.turns
        if not report.ok:
            failed += 1
            print(shrink(report), flush=True)
    seconds = time.perf_counter() - started
    print(
        f"{args.count} seeds of mode {args.mode}: {failed} failed; {lives} lives, {turns} callbacks, {seconds:.1f} s"
        f" ({1000 * seconds / args.count:.1f} ms a run)"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
