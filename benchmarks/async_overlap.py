"""Measure the gain of asynchrony at an equal budget of workers, next to the closed form `(1/eta + rho) / (1 + rho)`.

    python benchmarks/async_overlap.py [--virtual] [--rho 0.25 0.5 1] [--workers 30] [--rollouts 12]

Responses have a long tail (log-normal, capped), so a synchronous rollout waits for its longest responses while most
workers idle. eta is the mean work of a synchronous rollout over its makespan, measured here in the synchronous run. rho
is training work over generation work. The same W workers serve every mode::

    sync            W generate until the last response is there, then W train       step = work (1/eta + rho) / W
    async           W / (1 + rho) generate, the others train, both all the time     step = work (1 + rho) / W

so their ratio is the gain of asynchrony if no worker idles. One step ahead still waits for the longest response of each
rollout. Loops, stages and flags are slime's; engine and trainer only take time (`_long_tail.py`), in real time or, with
--virtual, under the simulation's clock. `planner` is the prediction of the model behind `slime plan --trace` for the
same settings. Step times are those of the middle rollouts, because the first rollouts overlap with no training and the
last ones with no generation. Exits with 1 if --async-mode full is not within 10% of the closed form. A busy machine
adds delays to every real step, so raise --token-ms there. `sync` has all workers in both phases. If each phase has its
own workers (a disaggregated run without --async), the gain is larger, because more workers idle in the synchronous run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from _harness import table
from _long_tail import Case, Trace, long_tail, run_case
from slime_commands.plan.simulate import Plan, Prediction, simulate
from slime_commands.plan.workload import GroupWork, Speed, Workload

TOLERANCE = 0.10
EDGE = 2
"""Number of rollouts at either end that are left out of step times."""
PLANNED = 100
"""Number of rollouts of the planner's run, large enough to make its edges negligible."""
GROUP_SIZE = 4
MODES: dict[str, tuple[str, ...]] = {
    "sync": (),
    "sync, partial rollouts": ("--partial-rollout", "--over-sampling-batch-size", "{more}"),
    "one-step": ("--async", "--async-mode", "one-step"),
    "full, staleness <= 1": ("--async", "--async-mode", "full", "--max-staleness", "1"),
    "full": ("--async", "--async-mode", "full"),
}
"""Name -> flags; `{more}` is one and a half times the batch."""
USUAL = ("sync", "one-step", "full")


@dataclass(frozen=True)
class Sizes:
    """The sizes that all runs share."""

    workers: int
    batch: int
    rollouts: int
    lengths: Sequence[int]
    token_seconds: float


@dataclass(frozen=True)
class Measured:
    """The measurements of the middle of a run."""

    step: float
    """Seconds from the end of one rollout's training to the end of the next one's."""
    tokens_per_second: float
    """Trained tokens per second."""
    generators_idle: float
    trainer_idle: float
    idle: float
    """Share of all worker-seconds in which a worker neither generates nor trains."""
    ages: Counter[int]
    wasted: float
    """Wasted share of all tokens."""


def split(workers: int, rho: float, *, asynchronous: bool) -> tuple[int, int]:
    """Return the numbers of generating and of training workers. Raises SystemExit if they are not integers."""
    if not asynchronous:
        return workers, workers
    generating = workers / (1 + rho)
    if abs(generating - round(generating)) > 1e-9:
        raise SystemExit(f"{workers} workers do not split as 1 : {rho:g}; choose --workers so that they do")
    return round(generating), workers - round(generating)


def flags_of(mode: str, batch: int) -> list[str]:
    """Return the flags of `slime train` for a mode."""
    return [flag.format(more=batch + batch // 2) for flag in MODES[mode]]


def case_of(mode: str, rho: float, sizes: Sizes) -> Case:
    """Return the run of a mode."""
    generating, training = split(sizes.workers, rho, asynchronous="--async" in MODES[mode])
    return Case(
        flags=flags_of(mode, sizes.batch), lengths=sizes.lengths, num_rollout=sizes.rollouts,
        rollout_batch_size=sizes.batch, group_size=GROUP_SIZE, slots=generating, token_seconds=sizes.token_seconds,
        train_token_seconds=rho * sizes.token_seconds / training,
    )  # fmt: skip


def predicted(mode: str, rho: float, sizes: Sizes) -> Prediction:
    """Return the planner's prediction for the run of a mode."""
    case, flags = case_of(mode, rho, sizes), MODES[mode]
    lengths = list(sizes.lengths)
    groups = [GroupWork(tuple(lengths[i : i + GROUP_SIZE])) for i in range(0, len(lengths), GROUP_SIZE)]
    workload = Workload(tuple(groups), Speed(case.token_seconds), train_per_token=case.train_token_seconds)
    partial = "--partial-rollout" in flags
    return simulate(
        workload,
        Plan(
            mode="sync" if "--async" not in flags else "full" if "full" in flags else "one-step",
            rollouts=PLANNED, rollout_batch_size=sizes.batch, concurrency=case.slots, partial=partial,
            over_sampling_batch_size=sizes.batch + sizes.batch // 2 if partial else None,
            staleness=1 if "--max-staleness" in flags else None,
        ),
    )  # fmt: skip


def middle(trace: Trace, case: Case, workers: int) -> Measured:
    """Return the measurements of a run without its edges."""
    first, last = EDGE - 1, len(trace.trained) - EDGE - 1
    within = trace.trained[first + 1 : last + 1]
    seconds = trace.trained[last][1] - trace.trained[first][1]
    tokens = sum(count for _, _, count in within)
    training = sum(end - begin for begin, end, _ in within)
    generating = trace.busy[last] - trace.busy[first]
    asynchronous = "--async" in case.flags
    work = generating + training * (workers - case.slots if asynchronous else workers)
    return Measured(
        step=seconds / len(within),
        tokens_per_second=tokens / seconds,
        generators_idle=1 - generating / (case.slots * seconds),
        trainer_idle=1 - training / seconds,
        idle=1 - work / (workers * seconds),
        ages=sum(trace.ages[first + 1 : last + 1], Counter()),
        wasted=trace.wasted / (trace.wasted + sum(count for _, _, count in trace.trained)),
    )


def tail_efficiency(trace: Trace, case: Case) -> float:
    """Return eta of a synchronous run: mean work of a slot over the makespan."""
    within = slice(EDGE, len(trace.trained) - EDGE)
    work = sum(count for _, _, count in trace.trained[within]) * case.token_seconds / case.slots
    return work / sum(trace.generated[within])


def compare(rho: float, modes: Sequence[str], sizes: Sizes, *, virtual: bool) -> float:
    """Print the table of one rho; how far `full` is from the closed form."""
    cases = {mode: case_of(mode, rho, sizes) for mode in modes}
    traces = {mode: run_case(case, virtual=virtual) for mode, case in cases.items()}
    found = {mode: middle(traces[mode], cases[mode], sizes.workers) for mode in modes}
    plans = {mode: predicted(mode, rho, sizes) for mode in modes}
    eta = tail_efficiency(traces["sync"], cases["sync"])
    closed = (1 / eta + rho) / (1 + rho)
    generating, training = split(sizes.workers, rho, asynchronous=True)
    rows = []
    for mode in modes:
        m, is_async = found[mode], "--async" in MODES[mode]
        gain = m.tokens_per_second / found["sync"].tokens_per_second
        planned = plans["sync"].step_seconds / plans[mode].step_seconds
        workers = f"{generating} + {training}" if is_async else f"{sizes.workers}, in turns"
        sides = [f"{m.generators_idle:.0%}", f"{m.trainer_idle:.0%}"] if is_async else ["", ""]
        samples = m.ages.total()
        ages = " ".join(f"{age}:{count / samples:.0%}" for age, count in sorted(m.ages.items()))
        rows.append(
            [mode, workers, f"{m.step:.3f}", f"{gain:.2f}x", f"{closed:.2f}x" if mode == "full" else "",
             f"{planned:.2f}x", f"{m.idle:.0%}", *sides, ages, f"{m.wasted:.1%}"]
        )  # fmt: skip
    header = [f"rho {rho:g}, eta {eta:.2f}", "workers", "step s", "speed-up", "closed form", "planner", "idle",
              "generators", "trainers", "staleness", "wasted"]  # fmt: skip
    print(table(header, rows))
    gain = found["full"].tokens_per_second / found["sync"].tokens_per_second
    late, mean = statistics.fmean(traces["full"].late), statistics.fmean(sizes.lengths) * sizes.token_seconds
    print(f"full / closed form: {gain / closed:.3f}; responses came {late / mean:.1%} of their time late\n", flush=True)
    return abs(gain / closed - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--virtual", action="store_true", help="under the simulation's clock: exact, in seconds")
    parser.add_argument("--rho", type=float, nargs="+", default=[0.25, 0.5, 1.0], help="train / generation work")
    parser.add_argument("--workers", type=int, default=30)
    parser.add_argument("--rollouts", type=int, default=12)
    parser.add_argument("--per-worker", type=int, default=4, help="samples of a rollout per worker")
    parser.add_argument("--median", type=float, default=25.0, help="tokens of a response")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of the length")
    parser.add_argument("--cap", type=float, default=12.0, help="longest response over the median")
    parser.add_argument("--token-ms", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), help=f"default: {', '.join(USUAL)}; --virtual: all")
    options = parser.parse_args()
    chosen = options.modes or (MODES if options.virtual else USUAL)
    modes = [mode for mode in MODES if mode in ("sync", "full", *chosen)]
    if options.rollouts < 2 * EDGE + 1:
        parser.error(f"--rollouts: {2 * EDGE} at the edges do not count, so {2 * EDGE + 1} is the least")
    batch = options.workers * options.per_worker // GROUP_SIZE
    # Enough for what is drawn ahead, or given back at the end.
    num_samples = (options.rollouts + 4) * batch * GROUP_SIZE
    lengths = long_tail(num_samples, options.median, options.sigma, options.cap, options.seed)
    sizes = Sizes(options.workers, batch, options.rollouts, lengths, options.token_ms / 1e3)
    print(
        f"{options.workers} workers; {batch} groups x {GROUP_SIZE} samples a rollout, lengths log-normal (sigma"
        f" {options.sigma:g}, median {options.median:g} tokens, at most {options.cap:g} times that), a token every"
        f" {options.token_ms:g} ms, {'virtual' if options.virtual else 'real'} time\n"
    )
    off = [compare(rho, modes, sizes, virtual=options.virtual) for rho in options.rho]
    if max(off) > TOLERANCE:
        print(
            f"--async-mode full is {max(off):.0%} off the closed form; {TOLERANCE:.0%} is allowed. Responses come late"
            " where the machine is busy: a larger --token-ms makes that matter less, and --virtual not at all.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
