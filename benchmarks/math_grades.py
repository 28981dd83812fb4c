r"""Grade pairs of answer and label with the rewards `math` and `deepscaler`, and with math-verify itself.

    python benchmarks/math_grades.py            # a row for each kind of pair
    python benchmarks/math_grades.py --show     # and every pair that a grader gets wrong

The pairs are in plugins/rewards/math/tests/pairs.jsonl: labels of many kinds, each with answers that say the same and
answers that do not. A false pass is a wrong answer that is paid, a false fail a right one that is not.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import math_verify
import slime_reward_math
import slime_rewards.deepscaler

from slime_core import Sample

PAIRS = Path(__file__).parents[1] / "plugins/rewards/math/tests/pairs.jsonl"


def math(answer: str, label: str) -> bool:
    """slime's reward `math`."""
    return slime_reward_math.reward(None, Sample(response=rf"so \boxed{{{answer}}}", label=label)) == 1.0


def deepscaler(answer: str, label: str) -> bool:
    """slime's reward `deepscaler`."""
    return slime_rewards.deepscaler.reward(None, Sample(response=rf"</think>\boxed{{{answer}}}", label=label)) == 1.0


def verified(answer: str, label: str) -> bool:
    """math-verify with its defaults."""
    gold, found = (math_verify.parse(rf"\boxed{{{text}}}") for text in (label, answer))
    return bool(math_verify.verify(gold, found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=Path, default=PAIRS)
    parser.add_argument("--show", action="store_true", help="print each pair that is graded wrongly")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = [json.loads(line) for line in args.pairs.read_text().splitlines()]
    pairs = [(row["kind"], text, row["label"], right) for row in rows for right in (True, False)
             for text in row["right" if right else "wrong"]]  # fmt: skip
    graders: dict[str, Callable[[str, str], bool]] = {"math": math, "deepscaler": deepscaler, "math-verify": verified}
    counts: dict[str, dict[str, list[int]]] = {name: defaultdict(lambda: [0, 0]) for name in graders}
    for name, grade in graders.items():
        grade("x+1", "1+x")  # grammars are built at the first call
        seconds = []
        for kind, answer, label, right in pairs:
            started = time.thread_time()
            passed = grade(answer, label)
            seconds.append(time.thread_time() - started)
            counts[name][kind][right] += passed != right
            if args.show and passed != right:
                print(f"{name:<12} {'false fail' if right else 'FALSE PASS'} {kind}: {answer}   for {label}")
        print(
            f"{name}: {statistics.median(seconds) * 1e3:.1f} ms of processor time (median), {max(seconds):.2f} s (most)"
        )
    print(f"\n{len(pairs)} pairs, {sum(right for *_, right in pairs)} right; false passes / false fails\n")
    print(f"| kind | pairs | {' | '.join(graders)} |\n|---|---|{'---|' * len(graders)}")
    kinds = list(dict.fromkeys(kind for kind, *_ in pairs))
    for kind in kinds:
        found = [f"{counts[name][kind][False]} / {counts[name][kind][True]}" for name in graders]
        print(f"| {kind} | {sum(pair[0] == kind for pair in pairs)} | {' | '.join(found)} |")
    totals = [[sum(found[right] for found in counts[name].values()) for right in (False, True)] for name in graders]
    print(f"| all | {len(pairs)} | {' | '.join(f'{passes} / {fails}' for passes, fails in totals)} |")


if __name__ == "__main__":
    main()
