"""Whole runs of the learner, on the embedded trainer and on Megatron's ranks: settings, plugins and losses are real.

`test_parity_*.py` call `train` in their own process for the embedded trainer, and on a `RankPool` for Megatron's. A
case is built anew from its flags, model included, but the process groups of a job stay open over all its cases, which
share the layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from slime_core.config import load_settings
from slime_core.launch.prepare import Prepared, prepare
from slime_core.learning.learner import Learner
from slime_core.ops import response_log_probs
from slime_core.rollout.batch import make_batch
from slime_core.sample import Sample, SampleStatus, TrainBatch
from slime_core.sample.provenance import TurnSpan

VOCABULARY = 61
ROLLOUTS = (8, 4)
"""Prompts' samples of each rollout, siblings counted once: two optimizer steps, then one."""
Tensors = dict[str, torch.Tensor]


calls: list[tuple[Any, ...]] = []
"""What the hooks below were told in this process."""


def groups(rollout: int) -> list[list[Any]]:
    """Groups of two random samples: uneven lengths, masks with holes, siblings of one rollout, one sample removed.

    Each has two turns, the first of them empty in a response of one token, and a reward of two parts. The removed
    sample leaves a group of one. In the larger rollout a turn is masked, and the rewards of the last group are equal.
    """
    generator = torch.Generator().manual_seed(17 + rollout)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def sample(group: int, rollout_id: int) -> Sample:
        prompt, response = number(1, 10), number(1, 13)
        mask = (torch.rand(response, generator=generator) > 0.25).int().tolist()
        engine = (-4.0 + 0.5 * torch.randn(response, generator=generator)).tolist()
        tokens = torch.randint(0, VOCABULARY, (prompt + response,), generator=generator).tolist()
        # What tokens were sampled among: 1 to 5 ids of all parts of the vocabulary, or all of it (none is named).
        kept = [sorted({t, *range(t % 7, VOCABULARY, 19)}) if t % 4 else [] for t in tokens[-response:]]
        return Sample(
            group_index=group,
            rollout_id=rollout_id,
            tokens=tokens,
            response_length=response,
            loss_mask=mask if any(mask) else [1] * response,
            reward=float(number(0, 5)) / 4,
            rollout_log_probs=engine,
            rollout_top_p_token_ids=[i for ids in kept for i in ids],
            rollout_top_p_token_offsets=list(accumulate(map(len, kept), initial=0)),
            reward_components={"length": response / 10, "even": float(tokens[-1] % 2 == 0)},
            turns=[
                TurnSpan(0, response // 2, tokens[0] % 3 / 4, state="start"),
                TurnSpan(response // 2, response, state="start" if tokens[-1] % 2 else "middle"),
            ],
            train_metadata={
                "teacher_prompt": [*tokens[:prompt], 3, 4] if prompt % 2 else None,
                "teacher": "far" if response % 3 == 0 else None,
            },
            status=SampleStatus.TRUNCATED if number(0, 4) == 0 else SampleStatus.COMPLETED,
        )

    found: list[list[Any]] = [[sample(i // 2, i), sample(i // 2, i + 1)] for i in range(0, ROLLOUTS[rollout], 2)]
    found[1].append(sample(1, found[1][1].rollout_id))
    found[0][1].remove_sample = True
    if len(found) == 4:
        masked, (first, second) = next(s for s in found[2] if s.response_length > 1), found[3]
        end = masked.turns[0].last
        masked.loss_mask = [0] * end + [1] * (masked.response_length - end)
        second.reward, second.reward_components = first.reward, first.reward_components
        second.turns[0] = second.turns[0]._replace(reward=first.turns[0].reward)
    return found


def rollouts(run: Prepared, estimator: Any) -> list[TrainBatch]:
    """What the rollout stage would give."""
    return [make_batch(run.args, i, groups(i), estimator) for i in range(len(ROLLOUTS))]


def train(cases: dict[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Case -> what this rank saw of a run with these flags."""
    held: list[Any] = []
    try:
        return {name: _train(flags, held) for name, flags in cases.items()}
    finally:
        for groups_of_job in held:
            groups_of_job.close()


def resumed(cases: dict[str, Sequence[str]], folder: str) -> dict[str, list[dict[str, Any]]]:
    """Case -> a run that saves after its first rollout, and one that goes on from there."""
    held: list[Any] = []
    try:
        return {
            name: [_train(flags, held, save=Path(folder, name)), _train(flags, held, load=Path(folder, name))]
            for name, flags in cases.items()
        }
    finally:
        for groups_of_job in held:
            groups_of_job.close()


def _train(
    flags: Sequence[str], held: list[Any], *, save: Path | None = None, load: Path | None = None
) -> dict[str, Any]:
    calls.clear()
    run = prepare(load_settings(flags, command="train", env={}), make=False)
    trainers = run.parts.build_trainers(run.args)
    if not held and hasattr(trainers.actor, "groups"):
        from slime_trainer_megatron.process_groups import ProcessGroups

        made: Any = trainers.actor
        settings = made.settings
        held.append(ProcessGroups(settings.layout, settings.device, settings.timeout_minutes, seed=run.args.seed))
    seen: dict[str, Any] = {"rank": trainers.actor.rank, "metrics": []}
    try:
        estimator = run.parts.build_estimator(run.args)
        loss = run.parts.build_loss(run.args, estimator)
        learner = Learner(run.args, trainers.actor, estimator, loss, critic=trainers.critic)
        with contextlib.ExitStack() as stack:
            for role, trainer in (("actor", trainers.actor), ("critic", trainers.critic)):
                if trainer is not None:
                    seen[f"{role} gradients"] = stack.enter_context(gradients_kept(trainer))
            if load is not None:
                trainers.load(load)
            for number, batch in enumerate(rollouts(run, estimator)):
                if load is not None and number == 0:
                    continue
                metrics = learner.train(number, batch)
                if save is not None and number == 0:
                    trainers.save(save)
                # Each rank looks at other elements of the weights.
                metrics.pop("train/update_ratio", None)
                seen["metrics"].append({k: v for k, v in metrics.items() if not k.startswith("perf/")})
        for role, trainer in (("actor", trainers.actor), ("critic", trainers.critic)):
            if trainer is not None:
                weights = {name: tensor.detach().clone() for name, tensor in trainer.named_weights()}
                seen[f"{role} weights"] = weights
        seen["calls"] = [call for call in calls if call[0] != "init"]
        seen["inits"] = [joined for kind, joined, *_ in calls if kind == "init"]
    finally:
        trainers.close()
    return seen


@contextlib.contextmanager
def gradients_kept(trainer: Any) -> Iterator[list[Tensors]]:
    """The list gets the summed gradients of every step, under HF names, before they are clipped."""
    kept: list[Tensors] = []
    optimizer, step = trainer.optimizer, trainer.optimizer.step

    def kept_step() -> dict[str, float]:
        kept.append(_gradients(trainer))
        found: dict[str, float] = step()
        return found

    optimizer.step = kept_step
    try:
        yield kept
    finally:
        del optimizer.step


def _gradients(trainer: Any) -> Tensors:
    if not hasattr(trainer, "chunks"):
        model = trainer.model
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    from slime_trainer_megatron.weights.weights_out import hf_weights

    with trainer._on_device():
        for chunk in trainer.chunks:
            _whole_gradients(chunk)
        exported = hf_weights(
            trainer.models.chunks, trainer.models.family, bucket_bytes=1 << 20, what=lambda p: _main_gradient(p)
        )
        return {name: tensor.float().clone() for name, tensor in exported}


def _main_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    return getattr(parameter, "main_grad", None)


def _whole_gradients(chunk: Any) -> None:
    """With the distributed optimizer each rank has the sum of its share of a bucket; put them together."""
    if not chunk.ddp_config.use_distributed_optimizer:
        return
    for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
        peers = group.intra_distributed_optimizer_instance_group
        size, rank = torch.distributed.get_world_size(peers), torch.distributed.get_rank(peers)
        for bucket in group.buckets:
            own = bucket.grad_data.chunk(size)[rank].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=peers)


# -- functions that flags name ---------------------------------------------------------------------------


def init(args: Any) -> None:
    """For --custom-megatron-init-path."""
    calls.append(("init", torch.distributed.is_initialized(), args))


def before_log_prob(args: Any, model: Any, store_prefix: str) -> None:
    """For --custom-megatron-before-log-prob-hook-path."""
    total = sum(p.detach().double().sum().item() for chunk in model for p in chunk.parameters())
    calls.append(("log_probs", args.hf_checkpoint, len(model), store_prefix, total))


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> None:
    """For --custom-megatron-before-train-step-hook-path."""
    cleared = not any(p.main_grad.any() for chunk in model for p in chunk.parameters())
    lr = opt_param_scheduler.get_lr(optimizer.param_groups[0])
    calls.append(("step", args.hf_checkpoint, rollout_id, step_id, len(model), cleared, lr))


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
    """For --custom-model-provider-path: the family's model, built by hand; its settings come through `init`."""
    from megatron.core.models.gpt import GPTModel
    from slime_trainer_megatron.arguments.config import padded_vocab_size, transformer_config
    from slime_trainer_megatron.families import load_megatron_model
    from slime_trainer_megatron.layout import Layout
    from slime_trainer_megatron.model.specs import block_spec

    args = next(args for kind, _, args in calls if kind == "init")
    calls.append(("provider", pre_process, post_process, vp_stage))
    family, device = load_megatron_model(args.hf_checkpoint), torch.device("cpu")
    architecture = family.architecture
    layout = Layout.from_args(args, architecture.num_layers)
    config = transformer_config(args, architecture, layout, device=device)
    return GPTModel(
        config,
        block_spec(config, family, device=device, vp_stage=vp_stage),
        vocab_size=padded_vocab_size(args, architecture.vocab_size, layout),
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=architecture.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rotary_base,
        vp_stage=vp_stage,
    )


def loss_of_logits(args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    """For --custom-loss-function-path: REINFORCE on the logits of the responses, and a term of all logits."""
    lengths, temperature = batch["response_lengths"], args.rollout_temperature
    found, entropies = response_log_probs(logits, batch["unconcat_tokens"], lengths, temperature, with_entropy=True)
    assert entropies is not None
    policy = -sum_of_sample_mean(torch.cat(found) * torch.cat(batch["advantages"]))
    entropy = sum_of_sample_mean(torch.cat(entropies))
    loss = policy - 0.01 * entropy + 1e-4 * logits.square().mean(-1).sum()
    return loss, {"policy": policy, "entropy": entropy}


def loss_with_a_broken_gradient(args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    """The same with a gradient that is NaN where rollout id 7 is in the micro-batch: in the second of three steps."""
    loss, metrics = loss_of_logits(args, batch, logits, sum_of_sample_mean)
    return loss + (torch.sqrt(logits.sum() * 0.0) if 7 in batch["rollout_ids"] else 0.0), metrics
