"""Compute the prompts, samples, steps, micro-batches and epochs of a run, and the largest age of its samples.

For `slime plan`: arithmetic on settings that the rules of `slime_core.config` have checked and completed. With dynamic
sampling a rollout draws more prompts than it trains on, so epochs pass faster.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from slime_commands.plan.memory import micro_batch_tokens
from slime_core.config.schema import Given
from slime_core.errors import ConfigError
from slime_core.protocols import Args


@dataclass(frozen=True)
class BatchPlan:
    """The numbers of one rollout and of the whole run."""

    prompts: int
    samples_per_prompt: int
    samples: int
    steps: int
    """Optimizer steps per rollout."""
    samples_per_step: int
    data_parallel: int
    samples_per_rank: float
    """Samples of one step on each rank, on average."""
    micro_batch: str
    """Size limit of a micro-batch, in words."""
    micro_batch_tokens: int
    """Largest number of tokens in a micro-batch."""
    longest: int
    """Tokens of the longest possible sample, including the prompt."""
    rollouts: int | None
    rows: int | None
    """Rows of the data set."""
    epochs: float | None
    optimizer_steps: int | None
    """Optimizer steps of the whole run."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def describe(self) -> list[str]:
        """Return lines of text for the terminal."""
        lines = [
            f"{self.prompts} prompts x {self.samples_per_prompt} = {self.samples} samples a rollout",
            f"{self.steps} optimizer step{'s' * (self.steps != 1)} of {self.samples_per_step} samples a rollout",
            f"{self.data_parallel} data-parallel rank{'s' * (self.data_parallel != 1)}:"
            f" {self.samples_per_rank:g} samples each a step; micro-batches of {self.micro_batch}",
            f"a micro-batch has at most {self.micro_batch_tokens:,} tokens, a sample {self.longest:,}",
        ]
        if self.rollouts is not None:
            lines.append(f"{self.rollouts} rollouts, {self.optimizer_steps} optimizer steps")
        if self.rows is not None and self.epochs is not None:
            lines.append(
                f"{self.rows} rows of data: {self.epochs:.3g} epochs, {self.rows / self.prompts:.4g} rollouts each"
            )
        return lines


def plan_batches(args: Args, *, data_parallel: int, context: int = 1, rows: int | None = None) -> BatchPlan:
    """Compute the batch sizes of a training run.

    Args:
        args: The run's settings.
        data_parallel: Number of data-parallel ranks.
        context: Number of context-parallel ranks, which share the tokens of a micro-batch.
        rows: Rows of the data set, if known.

    Raises:
        ConfigError: A step has fewer samples than data-parallel ranks.
    """
    prompts, each = args.rollout_batch_size, args.n_samples_per_prompt
    samples, size = prompts * each, args.global_batch_size
    if size < data_parallel:
        raise ConfigError(
            f"--global-batch-size {size} gives {data_parallel} data-parallel ranks less than a sample each; at least"
            f" {data_parallel} is needed"
        )
    longest = longest_sample(args)
    dynamic = args.use_dynamic_batch_size and args.max_tokens_per_gpu
    bound = f"{args.max_tokens_per_gpu:,} tokens per GPU" if dynamic else f"{args.micro_batch_size or 1} samples"
    given: Given = args
    rollouts = given.num_rollout
    if rollouts is None and given.num_epoch and rows:
        rollouts = int(given.num_epoch * (rows // prompts))
    return BatchPlan(
        prompts=prompts,
        samples_per_prompt=each,
        samples=samples,
        steps=args.num_steps_per_rollout,
        samples_per_step=size,
        data_parallel=data_parallel,
        samples_per_rank=size / data_parallel,
        micro_batch=bound,
        micro_batch_tokens=micro_batch_tokens(args, longest, context),
        longest=longest,
        rollouts=rollouts,
        rows=rows,
        epochs=rollouts * prompts / rows if rollouts and rows else None,
        optimizer_steps=rollouts * args.num_steps_per_rollout if rollouts is not None else None,
    )


def longest_sample(args: Args) -> int:
    """Return the most tokens of prompt and response; a prompt without a limit counts as half the engine's context."""
    response = args.rollout_max_response_len or 0
    prompt = args.rollout_max_prompt_len or (args.engine_max_context_len or 2 * response) // 2
    longest = prompt + response
    context = args.rollout_max_context_len
    return int(min(longest, context) if context else longest)


def schedule_in_words(args: Args) -> list[str]:
    """Describe which weights generate each rollout, and how old samples may be."""
    if args.debug_train_only:
        return ["nothing is generated: saved samples are trained on"]
    if args.debug_rollout_only:
        return ["nothing is trained: every rollout is generated by the same weights"]
    interval = args.update_weights_interval
    partial = (
        ["interrupted samples go on in the next rollout (--partial-rollout): those have tokens of older weights"]
        if args.partial_rollout
        else []
    )
    if not args.async_training:
        return ["synchronous: generate, train, update weights; every sample is of the weights that it trains", *partial]
    every = f"every {interval} rollouts" if interval > 1 else "after every rollout"
    if args.async_mode == "one-step":
        return [
            f"one step ahead: rollout r + 1 is generated while r trains; weights are updated {every}, once it is there",
            "samples are one weight version old, the first rollout's none",
            *partial,
        ]
    size = args.async_buffer_groups or args.rollout_batch_size
    lines = [
        f"fully asynchronous: generation stops when {size} finished groups wait; in-flight updates {every}",
    ]
    if args.max_staleness is None:
        lines.append("no limit on staleness; --max-staleness K sets one")
    else:
        fate = {
            "recycle": f"regenerated, {args.staleness_max_retries} times at most",
            "drop": "dropped",
            "mask": "trained on with none of their tokens counting",
        }[args.staleness_policy]
        lines.append(f"groups over {args.max_staleness} weight versions old are {fate}")
    return [*lines, *partial]
