"""GRPO's optimizer steps of one rollout by each trainer and implementation, against float64 written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from slime_embedded.fsdp.trainer import FsdpTrainer
from slime_embedded.hf.model import TransformersModel
from slime_embedded.trainer.trainer import EmbeddedTrainer
from slime_estimators.grpo import GRPO
from slime_testing_contracts.families import write_family

from slime_core import RewardInputs
from slime_core.learning.learner import Learner
from slime_core.learning.loss import PolicyLoss
from tests.batches import train_batch
from tests.toy_trainer import make_args

torch.set_num_threads(1)
LENGTHS = ((9, 4), (30, 11), (5, 3), (14, 9), (70, 5), (8, 7), (12, 2), (21, 8))
"""(tokens, response) of each sample; four samples are a group and an optimizer step."""
REWARDS = [1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.0, 0.2]
KL, ENTROPY, CLIP, LR, EPS, DECAY, NORM, TEMPERATURE = 0.1, 0.02, 0.02, 5e-3, 1e-3, 0.01, 0.5, 0.8
BOUND = 2e-5


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("grpo") / "qwen3", "qwen3")


def tokens() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 14, (length,), generator=generator).tolist() for length, _ in LENGTHS]


def model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    found: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, local_files_only=True)
    return found.eval()


def pass_of(model: Any, ids: list[int], response: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs and entropies of the response tokens of one sample."""
    row = torch.tensor(ids)
    scores = torch.log_softmax(model(input_ids=row[None], use_cache=False).logits[0] / TEMPERATURE, -1)[:-1]
    entropy = -(scores.exp() * scores).sum(-1)
    return scores.gather(1, row[1:, None])[-response:, 0], entropy[-response:]


def by_hand(directory: Path) -> tuple[Any, list[float]]:
    """Return the float64 model after two steps, and their gradient norms."""
    policy, reference = model(directory), model(directory)
    parts = [[p for p in policy.parameters() if (p.dim() > 1) == wide] for wide in (True, False)]
    groups = [{"params": part, "weight_decay": decay} for part, decay in zip(parts, (DECAY, 0.0))]
    optimizer, rows, norms = torch.optim.AdamW(groups, lr=LR, eps=EPS), tokens(), []
    with torch.no_grad():
        start = [pass_of(reference, ids, response)[0] for ids, (_, response) in zip(rows, LENGTHS)]
    for group in (range(4), range(4, 8)):
        rewards = torch.tensor([REWARDS[i] for i in group], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        optimizer.zero_grad()
        for i, advantage in zip(group, advantages):
            log_probs, entropy = pass_of(policy, rows[i], LENGTHS[i][1])
            ratio, apart = (log_probs - start[i]).exp(), start[i] - log_probs
            surrogate = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))
            loss = surrogate + KL * (apart.exp() - apart - 1) - ENTROPY * entropy
            (loss.mean() / 4).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(policy.parameters(), NORM)))
        optimizer.step()
    return policy, norms


@pytest.mark.parametrize("implementation", ["slime", "transformers"])
@pytest.mark.parametrize("kind", [EmbeddedTrainer, FsdpTrainer])
def test_the_steps_of_a_rollout_are_those_written_by_hand(
    kind: type[EmbeddedTrainer], implementation: str, directory: Path
) -> None:
    args = make_args(
        hf_checkpoint=str(directory), device="cpu", model_impl=implementation, lr=LR, lr_decay_style="constant",
        clip_grad=NORM, adam_eps=EPS, weight_decay=DECAY, rollout_temperature=TEMPERATURE, global_batch_size=4,
        micro_batch_size=2, use_kl_loss=True, kl_loss_coef=KL, kl_loss_type="low_var_kl", entropy_coef=ENTROPY,
        eps_clip=CLIP, eps_clip_high=CLIP,
    )  # fmt: skip
    grpo, responses = GRPO(args), [response for _, response in LENGTHS]
    groups = [0] * 4 + [1] * 4
    shaped = grpo.shape_rewards(args, RewardInputs(REWARDS, groups, list(range(8)), responses, [False] * 8))
    batch = train_batch([[1] * n for n in responses], tokens=tokens(), rewards=shaped, group_indices=groups)
    trainer = kind(args)
    try:
        assert isinstance(trainer.model, TransformersModel) == (implementation == "transformers")
        metrics = Learner(args, trainer, grpo, PolicyLoss(args, grpo)).train(0, batch)
        policy, norms = by_hand(directory)
        assert metrics["train/grad_norm"] == pytest.approx(sum(norms) / 2, rel=BOUND)
        found, expected, before = dict(trainer.named_weights()), policy.state_dict(), model(directory).state_dict()
        apart = max(float((found[name] - expected[name]).abs().max()) for name in found)
        moved = max(float((before[name] - expected[name]).abs().max()) for name in found)
        assert apart < BOUND < moved / 100
        again = trainer.log_probs(batch, [[0, 1, 2], [3, 4, 5, 6, 7]])
        for i, (ids, response) in enumerate(zip(tokens(), responses)):
            with torch.no_grad():
                assert float((pass_of(policy, ids, response)[0] - again[i]).abs().max()) < BOUND
    finally:
        trainer.close()
