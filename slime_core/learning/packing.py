"""Assign samples to optimizer steps, ranks and micro-batches.

The learner calls it on every rank with the whole batch. The result depends only on the batch, so all ranks agree
without communication.
`RankSchedule` counts positions in the rank's *local* batch, `Step` counts positions in the whole one.

    steps          rollouts in order of appearance, `global_batch_size` at a time; siblings stay together
    micro-batches  of one step: first-fit under `max_tokens_per_gpu`, or up to `micro_batch_size` samples each
    ranks          the same number of micro-batches each: every dp-th one, or balanced by FLOPs (Karmarkar-Karp);
                   a multiple of the trainer's `micro_batch_multiple`

Rollouts that do not fill a step are never dropped. They form a last, smaller step. If this step had fewer samples than
the ranks need (one for each micro-batch), its rollouts join the step before. A batch with too few samples is an error.

The learner runs the steps by `take_steps`: a loss that is not finite ends the run before its backward pass. A gradient
norm that is not finite ends the run unless the trainer skipped the step (`skipped_steps` 1).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from slime_core.errors import TrainError, rollout_name
from slime_core.protocols import Args, LossFn, MicroBatchOutput, StepResult, Trainer
from slime_core.sample import TrainBatch

Cost = Callable[[int], float]
"""Tokens of a sample -> its cost (forward FLOPs)."""


@dataclass(frozen=True)
class Step:
    """The samples of an optimizer step, by rank and micro-batch."""

    micro_batches: list[list[list[int]]]
    """[rank][micro-batch] -> positions in the whole batch."""
    num_rollouts: int
    """Number of distinct rollout ids."""

    @property
    def samples(self) -> list[int]:
        """Positions in the whole batch of all samples in this step."""
        return [i for rank in self.micro_batches for micro_batch in rank for i in micro_batch]


@dataclass(frozen=True)
class RankSchedule:
    """The share of one data-parallel rank."""

    indices: list[int]
    """Positions in the whole batch of the samples in the rank's local batch, in order."""
    steps: list[list[list[int]]]
    """[step][micro-batch] -> positions in the local batch; laid end to end they count 0, 1, 2, ..."""


@dataclass(frozen=True)
class Schedule:
    """The optimizer steps of one rollout."""

    steps: list[Step]

    def for_rank(self, rank: int) -> RankSchedule:
        """Return the share of data-parallel rank `rank`."""
        indices: list[int] = []
        steps: list[list[list[int]]] = []
        for step in self.steps:
            steps.append([])
            for micro_batch in step.micro_batches[rank]:
                steps[-1].append(list(range(len(indices), len(indices) + len(micro_batch))))
                indices.extend(micro_batch)
        return RankSchedule(indices=indices, steps=steps)


@dataclass(frozen=True)
class PackingPolicy:
    """The settings that decide how micro-batches are formed."""

    world_size: int
    global_batch_size: int
    """Number of rollouts per optimizer step."""
    micro_batch_size: int = 1
    """Maximum number of samples per micro-batch without `max_tokens`."""
    max_tokens: int | None = None
    """Maximum number of tokens per micro-batch; a longer sample gets a micro-batch of its own."""
    balance: bool = False
    """Give every rank about the same cost, not just the same number of micro-batches."""
    balance_by_flops: bool = False
    """Also form the micro-batches by equal cost; they may then exceed `max_tokens`."""
    multiple: int = 1
    """Divisor of the number of micro-batches that a rank gets in a step."""

    @property
    def unit(self) -> int:
        """Divisor of the number of micro-batches in a step, over all ranks."""
        return self.world_size * self.multiple

    @classmethod
    def from_args(
        cls, args: Args, world_size: int, *, multiple: int = 1, context_parallel_size: int = 1
    ) -> PackingPolicy:
        """Read THUDM/slime's flags.

        Args:
            args: The run's settings.
            world_size: Data-parallel ranks.
            multiple: See the field `multiple`.
            context_parallel_size: Processes, and so GPUs, that share the tokens of a micro-batch.
        """
        max_tokens = None
        if args.use_dynamic_batch_size:
            assert args.max_tokens_per_gpu is not None, "the rules of the settings see to it"
            max_tokens = args.max_tokens_per_gpu * context_parallel_size
        return cls(
            world_size=world_size,
            global_batch_size=args.global_batch_size,
            micro_batch_size=args.micro_batch_size or 1,
            max_tokens=max_tokens,
            balance=args.balance_data or args.balance_by_flops,
            balance_by_flops=args.balance_by_flops,
            multiple=multiple,
        )


def build_schedule(batch: TrainBatch, policy: PackingPolicy, cost: Cost = float) -> Schedule:
    """Schedule every sample of the batch exactly once.

    Args:
        batch: The whole rollout.
        policy: Sizes and switches.
        cost: Cost of a sample by its number of tokens; used by the two balancing switches.

    Raises:
        TrainError: The batch has fewer samples than every rank needs for its micro-batches.
    """
    lengths = [len(tokens) for tokens in batch.tokens]
    steps = []
    for samples in _step_samples(batch.rollout_ids, policy):
        bins = _micro_batches([lengths[i] for i in samples], policy, cost)
        ranks = _distribute(bins, [cost(lengths[i]) for i in samples], policy)
        micro_batches = [[[samples[i] for i in micro_batch] for micro_batch in rank] for rank in ranks]
        steps.append(Step(micro_batches, num_rollouts=len({batch.rollout_ids[i] for i in samples})))
    return Schedule(steps)


def _step_samples(rollout_ids: Sequence[int], policy: PackingPolicy) -> list[list[int]]:
    members: dict[int, list[int]] = {}
    for position, rollout in enumerate(rollout_ids):
        members.setdefault(rollout, []).append(position)
    rollouts = list(members.values())
    size = policy.global_batch_size
    starts = range(0, len(rollouts), size)
    steps = [[i for rollout in rollouts[start : start + size] for i in rollout] for start in starts]
    if len(steps) > 1 and len(steps[-1]) < policy.unit:
        trailing = steps.pop()
        steps[-1] += trailing
    for samples in steps:
        if len(samples) < policy.unit:
            each = f", each with {policy.multiple} micro-batches at least" if policy.multiple > 1 else ""
            raise TrainError(
                f"an optimizer step of {len(samples)} sample(s) cannot be shared by {policy.world_size} data-parallel"
                f" ranks{each}; raise --global-batch-size ({size}) or --rollout-batch-size, or use fewer ranks"
            )
    return steps


def _micro_batches(lengths: Sequence[int], policy: PackingPolicy, cost: Cost) -> list[list[int]]:
    """Return bins of positions in `lengths`; their number is a multiple of the policy's unit.

    If there are too few samples for the next multiple, the smallest bins are joined down to the previous multiple, even
    above the cap: a rank without work would wait, and a rank with a missing micro-batch would hang its peers.
    """
    n, unit = len(lengths), policy.unit
    most = n // unit * unit
    if policy.max_tokens is None:
        bins = [list(range(s, min(s + policy.micro_batch_size, n))) for s in range(0, n, policy.micro_batch_size)]
    elif policy.balance_by_flops:
        count = min(_round_up(-(-sum(lengths) // policy.max_tokens), unit), most)
        bins = karmarkar_karp([cost(length) for length in lengths], count, equal_size=False)
    else:
        bins = first_fit(lengths, policy.max_tokens)
    target = min(_round_up(len(bins), unit), most)
    return split_bins(_join_bins(bins, lengths, target), lengths, target)


def _distribute(bins: list[list[int]], costs: Sequence[float], policy: PackingPolicy) -> list[list[list[int]]]:
    """Return the bins of each rank, in their order."""
    dp = policy.world_size
    if not policy.balance:
        return [bins[rank::dp] for rank in range(dp)]
    bin_costs = [sum(costs[i] for i in members) for members in bins]
    return [[bins[b] for b in chosen] for chosen in karmarkar_karp(bin_costs, dp, equal_size=True)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


Bin = list[int]
"""Positions in the list of sizes. Ties go to the lower position, so results are deterministic."""


def first_fit(sizes: Sequence[int], capacity: int) -> list[Bin]:
    """Put each item, in order, into the first bin with room; an item above `capacity` gets a bin of its own."""
    bins: list[Bin] = []
    room: list[int] = []
    for item, size in enumerate(sizes):
        target = next((b for b, free in enumerate(room) if size <= free), None)
        if target is None:
            bins.append([item])
            room.append(capacity - size)
        else:
            bins[target].append(item)
            room[target] -= size
    return bins


def split_bins(bins: Sequence[Bin], sizes: Sequence[int], count: int) -> list[Bin]:
    """Split the largest bin of several items in two until there are `count` bins.

    Items go to the halves longest first, each into the lighter half. The heavier half keeps the bin's place, the other
    half goes to the end. Of equally large bins, the bin with more items is split. `count` must not exceed the number of
    items.
    """
    out = [list(members) for members in bins]
    while len(out) < count:
        divisible = [b for b, members in enumerate(out) if len(members) > 1]
        largest = max(divisible, key=lambda b: (_total(out[b], sizes), len(out[b]), -b))
        first, second = _halves(out[largest], sizes)
        out[largest] = first
        out.append(second)
    return out


def _join_bins(bins: Sequence[Bin], sizes: Sequence[int], count: int) -> list[Bin]:
    """Join the two smallest bins until there are at most `count`."""
    out = [list(members) for members in bins]
    while len(out) > count:
        second, first = sorted(range(len(out)), key=lambda b: (_total(out[b], sizes), b))[:2]
        low, high = min(first, second), max(first, second)
        out[low] = sorted(out[low] + out.pop(high))
    return out


def _total(members: Bin, sizes: Sequence[int]) -> int:
    return sum(sizes[i] for i in members)


def _halves(members: Bin, sizes: Sequence[int]) -> tuple[Bin, Bin]:
    halves: tuple[Bin, Bin] = ([], [])
    for item in sorted(members, key=lambda i: (-sizes[i], i)):
        lighter = 0 if _total(halves[0], sizes) <= _total(halves[1], sizes) else 1
        halves[lighter].append(item)
    return sorted(halves[0]), sorted(halves[1])


def karmarkar_karp(costs: Sequence[float], count: int, *, equal_size: bool) -> list[Bin]:
    """Split the items into `count` bins of nearly equal cost by the largest differencing method (Karmarkar, Karp 1982).

    Every item starts as a partial solution with one filled bin. With `equal_size`, every run of `count` items in order
    of cost starts as a partial solution with an item per bin. The two partial solutions with the largest spread are
    merged, heaviest bin onto lightest, until one is left.

    Args:
        costs: Cost of each item, >= 0.
        count: Number of bins; at most the number of items, and a divisor of it with `equal_size`.
        equal_size: All bins get the same number of items.

    Returns:
        Bins by falling cost, items in order.
    """
    assert 1 <= count <= len(costs), f"{len(costs)} items cannot fill {count} bins"
    assert not equal_size or len(costs) % count == 0, f"{len(costs)} items in {count} equal bins"
    order = sorted(range(len(costs)), key=lambda i: (costs[i], i))
    stride = count if equal_size else 1
    states = [
        _State([(costs[i], [i]) for i in order[start : start + stride]], count)
        for start in range(0, len(order), stride)
    ]
    heapq.heapify(states)
    while len(states) > 1:
        widest = heapq.heappop(states)
        heapq.heappush(states, widest.merged(heapq.heappop(states)))
    return [sorted(members) for _, members in states[0].bins]


class _State:
    """A partial solution: `count` bins, heaviest first."""

    def __init__(self, bins: list[tuple[float, Bin]], count: int) -> None:
        empty: list[tuple[float, Bin]] = [(0.0, []) for _ in range(count - len(bins))]
        self.bins = sorted(bins + empty, key=lambda b: (b[0], len(b[1]), b[1]), reverse=True)
        self.spread = self.bins[0][0] - self.bins[-1][0]

    def merged(self, other: _State) -> _State:
        pairs = zip(self.bins, reversed(other.bins))
        return _State([(a + b, items + more) for (a, items), (b, more) in pairs], len(self.bins))

    def __lt__(self, other: _State) -> bool:
        """Order states by widest spread, then by heaviest bin."""
        if self.spread != other.spread:
            return self.spread > other.spread
        mine, theirs = self.bins[0], other.bins[0]
        return (mine[0], len(mine[1]), mine[1]) > (theirs[0], len(theirs[1]), theirs[1])


def take_steps(
    trainer: Trainer,
    local: TrainBatch,
    share: RankSchedule,
    loss_of_step: Callable[[int], LossFn],
    *,
    with_entropy: bool = False,
    with_logits: bool = False,
) -> list[StepResult]:
    """Run the optimizer steps and return the result of each.

    Args:
        trainer: Trainer of the actor or the critic.
        local: This rank's samples.
        share: This rank's part of the schedule.
        loss_of_step: Number of the step -> its loss function.
        with_entropy: See `protocols.Trainer.train_step`.
        with_logits: See `protocols.Trainer.train_step`.

    Raises:
        TrainError: A loss or gradient is not finite.
    """
    results = []
    for number, micro_batches in enumerate(share.steps):
        loss_fn = _checked(loss_of_step(number), local)
        found = trainer.train_step(local, micro_batches, loss_fn, with_entropy=with_entropy, with_logits=with_logits)
        norm = found.metrics.get("grad_norm", 0.0)
        if not math.isfinite(norm) and not found.metrics.get("skipped_steps"):
            raise TrainError(f"{rollout_name(local.rollout_id)}, optimizer step {number}: gradient norm {norm}")
        results.append(found)
    return results


def over_steps(results: Sequence[StepResult]) -> dict[str, float]:
    """Return the mean of each metric over the steps, the last `lr`, and the sum of `skipped_steps`."""
    sums = {name: sum(result.metrics[name] for result in results) for name in results[-1].metrics}
    means = {name: total / (1 if name == "skipped_steps" else len(results)) for name, total in sums.items()}
    return means | ({"lr": results[-1].metrics["lr"]} if "lr" in sums else {})


def _checked(loss_fn: LossFn, local: TrainBatch) -> LossFn:
    """Return the function with a check that raises TrainError for a loss that is NaN or infinite."""

    def checked(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = loss_fn(output)
        if not torch.isfinite(loss.detach()):
            raise TrainError(_complaint(loss.item(), output, local))
        return loss, metrics

    return checked


def _complaint(loss: float, output: MicroBatchOutput, local: TrainBatch) -> str:
    samples = [local.sample_indices[p] for p in output.positions]
    what, values = ("log-probs", output.log_probs) if output.values is None else ("values", output.values)
    bad = int((~torch.isfinite(values.detach())).sum())
    return (
        f"{rollout_name(local.rollout_id)}: the loss of a micro-batch is {loss} (samples {samples[:16]}; {bad} of"
        f" {values.numel()} {what} not finite)"
    )
