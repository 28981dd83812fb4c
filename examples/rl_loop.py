r"""GRPO from top to bottom in one file: slime's engine, trainer and estimator, without its command line and its loop.

    python examples/rl_loop.py                        warm up a tiny model (cached below outputs/), then train it
    python examples/rl_loop.py --rollouts 20 --seed 1

It does what `slime train --config demo.yaml` does, with one optimizer step per rollout instead of two and no KL term,
and leaves out what a real run needs on top: a data cursor, filters, failed samples, packing by cost, several processes,
checkpoints, metrics files. The engine and the trainer hold two copies of the model; `push_weights` is what keeps them
equal.

    prompts -> engine.generate -> reward -> estimator.shape_rewards -> estimator.advantages
        ^                                                                       |
        +---- push_weights <---- trainer.train_step(estimator.policy_loss) <----+
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from typing import Any

import torch
from slime_commands.init.prepare import prepare
from slime_embedded.engine.engine import EmbeddedEngine
from slime_embedded.trainer.trainer import EmbeddedTrainer

from slime_core import AdvantageInputs, EstimatorBase, Group, LossInputs, RewardInputs, Sample, SampleStatus, TrainBatch
from slime_core.config import load_settings
from slime_core.data.tokenizer import encode_prompt, load_tokenizer
from slime_core.ops import per_token_weights, weighted_sum
from slime_core.plugins.resolve import resolve
from slime_core.protocols import MicroBatchOutput
from slime_core.rollout.generate import sampling_seed

MICRO_BATCH = 64
"""Samples per forward and backward pass; the gradients of a step are summed over them."""


def main(argv: list[str] | None = None) -> float:
    """Train, print one line per rollout, and return the last held-out accuracy."""
    parser = argparse.ArgumentParser(description="GRPO in one file, on slime's embedded engine and trainer.")
    parser.add_argument("--inputs", type=Path, default=Path("outputs/rl_loop"), help="model and data; made if missing")
    parser.add_argument("--rollouts", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=32, help="prompts per rollout")
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt")
    parser.add_argument("--seed", type=int, default=0)
    own = parser.parse_args(argv)
    args = make_args(own)
    prepare(args)  # the recipe `addition`: writes data set, tokenizer and warmed-up model if missing
    random.seed(args.seed)
    return asyncio.run(train(args))


def make_args(own: argparse.Namespace) -> Any:
    """Every setting of slime as an attribute, defaults filled in and cross-checked; plugins get this object."""
    flags = {
        "hf-checkpoint": own.inputs / "model",
        "prompt-data": own.inputs / "train.jsonl",
        "eval-prompt-data": ("addition", own.inputs / "heldout.jsonl"),
        "label-key": "label",
        "rm-type": "exact",
        "num-rollout": own.rollouts,
        "rollout-batch-size": own.prompts,
        "n-samples-per-prompt": own.samples,
        "rollout-max-response-len": 24,
        "advantage-estimator": "grpo",
        "eps-clip": 0.2,
        "eps-clip-high": 0.28,
        "lr": 1e-4,
        "lr-decay-style": "constant",
        "lr-warmup-iters": 5,
        "adam-beta2": 0.95,
        "weight-decay": 0.0,
        "seed": own.seed,
        "num-threads": 1,
    }
    argv = ["--apply-chat-template"]
    for name, value in flags.items():
        argv += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return load_settings(argv, command="train", env={}).args


# -- the loop --------------------------------------------------------------------------------------------


async def train(args: Any) -> float:
    """Rollout, optimizer step, weight push; evaluation before, every 10 rollouts, and at the end."""
    tokenizer = load_tokenizer(args.hf_checkpoint)
    problems, held_out = read_rows(args.prompt_data), read_rows(args.eval_prompt_data[1])
    estimator: EstimatorBase = resolve("estimators", args.advantage_estimator).obj(args)
    trainer = EmbeddedTrainer(args)
    engine = EmbeddedEngine(args)
    await engine.start()
    try:
        version = await push_weights(trainer, engine, version=0)
        accuracy = await evaluate(args, engine, tokenizer, held_out)
        print(f"held-out accuracy {accuracy:.3f} before training", flush=True)
        for rollout_id in range(args.num_rollout):
            rows = random.sample(problems, args.rollout_batch_size)
            groups = await rollout(args, engine, tokenizer, rows, rollout_id)
            batch = make_batch(args, rollout_id, groups, estimator)
            metrics = optimize(args, trainer, estimator, batch)
            version = await push_weights(trainer, engine, version)
            if (rollout_id + 1) % 10 == 0 or rollout_id + 1 == args.num_rollout:
                accuracy = await evaluate(args, engine, tokenizer, held_out)
            reward = sum(batch.raw_rewards) / len(batch)
            print(
                f"rollout {rollout_id + 1}/{args.num_rollout}  reward {reward:.3f}  held-out {accuracy:.3f}"
                f"  loss {metrics['loss']:.4f}  gradient {metrics['grad_norm']:.2f}",
                flush=True,
            )
        return accuracy
    finally:
        await engine.stop()
        trainer.close()


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """Read JSON lines with `input` and `label`."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


# -- generation and reward -------------------------------------------------------------------------------


async def rollout(
    args: Any, engine: EmbeddedEngine, tokenizer: Any, rows: list[dict[str, str]], rollout_id: int
) -> list[Group]:
    """Return a group of `n_samples_per_prompt` scored samples per row; all samples run in the engine together."""
    groups: list[Group] = []
    for position, row in enumerate(rows):
        tokens = encode_prompt(tokenizer, row["input"], args)
        group_index = rollout_id * args.rollout_batch_size + position
        group = [
            Sample(
                group_index=group_index,
                index=group_index * args.n_samples_per_prompt + member,
                prompt=row["input"],
                label=row["label"],
                tokens=list(tokens),
            )
            for member in range(args.n_samples_per_prompt)
        ]
        groups.append(group)
    await asyncio.gather(*(generate(args, engine, s, args.rollout_temperature) for group in groups for s in group))
    for group in groups:
        for sample in group:
            sample.reward = reward(sample)
    return groups


async def generate(args: Any, engine: EmbeddedEngine, sample: Sample, temperature: float) -> None:
    """Let the engine continue `sample.tokens`; tokens, log-probs, mask and weight version are appended together."""
    params = {
        "temperature": temperature,
        "max_new_tokens": args.rollout_max_response_len,
        "sampling_seed": sampling_seed(args.rollout_seed, sample.index),
    }
    output = await engine.generate(sample.tokens, params)
    sample.append_response_tokens(
        args, output.token_ids, output.log_probs, meta_info=output.meta_info, text=output.text
    )


def reward(sample: Sample) -> float:
    r"""Return 1 if the model ended its answer and the last `\boxed{...}` holds the label, else 0."""
    boxed = sample.response.rpartition(r"\boxed{")[2].partition("}")[0]
    return float(sample.status == SampleStatus.COMPLETED and boxed == sample.label)


async def evaluate(args: Any, engine: EmbeddedEngine, tokenizer: Any, rows: list[dict[str, str]]) -> float:
    """Return the mean reward of one greedy answer per row."""
    samples = [
        Sample(index=i, prompt=row["input"], label=row["label"], tokens=encode_prompt(tokenizer, row["input"], args))
        for i, row in enumerate(rows)
    ]
    await asyncio.gather(*(generate(args, engine, sample, temperature=0.0) for sample in samples))
    return sum(map(reward, samples)) / len(samples)


# -- learning --------------------------------------------------------------------------------------------


def make_batch(args: Any, rollout_id: int, groups: list[Group], estimator: EstimatorBase) -> TrainBatch:
    """Turn samples into columns. `shape_rewards` applies GRPO's r -> (r - mean) / std within each group."""
    samples = [sample for group in groups for sample in group]
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    group_indices = [sample.group_index or 0 for sample in samples]
    indices = [sample.index or 0 for sample in samples]
    masks = [sample.loss_mask or [] for sample in samples]
    truncated = [sample.status == SampleStatus.TRUNCATED for sample in samples]
    inputs = RewardInputs(raw, group_indices, indices, [sum(mask) for mask in masks], truncated)
    return TrainBatch(
        rollout_id=rollout_id,
        tokens=[sample.tokens for sample in samples],
        response_lengths=[sample.response_length for sample in samples],
        loss_masks=masks,
        rewards=estimator.shape_rewards(args, inputs),
        raw_rewards=raw,
        truncated=[int(cut) for cut in truncated],
        sample_indices=indices,
        group_indices=group_indices,
        rollout_ids=indices,
        rollout_mask_sums=[sum(mask) for mask in masks],
        rollout_log_probs=[sample.rollout_log_probs or [] for sample in samples],
    )


def optimize(args: Any, trainer: EmbeddedTrainer, estimator: EstimatorBase, batch: TrainBatch) -> dict[str, float]:
    """Run one optimizer step over the whole batch, in micro-batches."""
    device = trainer.device
    masks = [torch.tensor(mask, dtype=torch.float32, device=device) for mask in batch.loss_masks]
    result = estimator.advantages(
        args,
        AdvantageInputs(
            rewards=torch.tensor(batch.rewards, dtype=torch.float32, device=device),
            response_lengths=batch.response_lengths,
            group_indices=batch.group_indices,
            rollout_ids=batch.rollout_ids,
            loss_masks=masks,
            kl=[torch.zeros_like(mask) for mask in masks],  # no reference model here
        ),
    )
    num_tokens = float(sum(batch.rollout_mask_sums))

    def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return this micro-batch's share of the mean loss over all trained tokens of the step."""
        positions = output.positions
        inputs = LossInputs(
            log_probs=output.log_probs,
            # The weights have not moved since these tokens were sampled, so the old policy is the present one: the
            # ratio is 1, but its gradient is the policy gradient.
            old_log_probs=output.log_probs.detach(),
            advantages=torch.cat([result.advantages[p] for p in positions]),
            loss_mask=torch.cat([masks[p] for p in positions]),
            sample_lengths=[batch.response_lengths[p] for p in positions],
        )
        per_token = estimator.policy_loss(args, inputs).loss
        loss = weighted_sum(per_token, per_token_weights(inputs.loss_mask, num_tokens))
        return loss, {"loss": loss.detach()}

    positions = sorted(range(len(batch)), key=lambda p: len(batch.tokens[p]))  # neighbours of similar length pad less
    micro_batches = [positions[i : i + MICRO_BATCH] for i in range(0, len(positions), MICRO_BATCH)]
    return trainer.train_step(batch, micro_batches, loss_fn).metrics


async def push_weights(trainer: EmbeddedTrainer, engine: EmbeddedEngine, version: int) -> int:
    """Copy the trained weights into the engine under the next version, which every later token carries."""
    await engine.update_weights_from_tensor(trainer.named_weights(), version + 1)
    return version + 1


if __name__ == "__main__":
    main()
