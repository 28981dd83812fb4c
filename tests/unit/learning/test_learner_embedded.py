"""The learner on the real embedded trainer: samples in, updated weights out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_commands.sft.loss import SFTLoss
from slime_embedded.models.decoder import init_weights
from slime_embedded.trainer.trainer import EmbeddedTrainer

from slime_core.config import Args
from slime_core.estimator import EstimatorBase
from slime_core.learning.learner import Learner
from slime_core.learning.loss import PolicyLoss
from slime_core.models.config import ModelConfig
from slime_core.models.hf_io import write_config, write_weights
from slime_core.ops import group_normalize
from slime_core.rollout.batch import make_batch
from slime_core.sample import Sample, SampleStatus, TrainBatch

torch.set_num_threads(1)

VOCAB = 23
HF: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}


class Centred(EstimatorBase):
    def shape_rewards(self, args: Any, inputs: Any) -> list[float]:
        return group_normalize(inputs.rewards, inputs.group_indices, True, inputs.rollout_ids)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    write_weights(directory, init_weights(ModelConfig.from_hf(HF, qk_norm=True), seed=0).items())
    write_config(directory, HF)
    return directory


def make_args(model_dir: Path, **changes: Any) -> Args:
    values = {
        "balance_by_flops": False,
        "balance_data": False,
        "calculate_per_token_loss": True,
        "compute_advantages_and_returns": True,
        "device": "cpu",
        "entropy_coef": 0.01,
        "eps_clip": 0.2,
        "eps_clip_c": None,
        "eps_clip_high": 0.28,
        "global_batch_size": 8,
        "hf_checkpoint": str(model_dir),
        "kl_coef": 0.0,
        "kl_loss_coef": 0.05,
        "kl_loss_type": "low_var_kl",
        "loss_type": "policy_loss",
        "lr": 1e-2,
        "lr_decay_style": "constant",
        "max_tokens_per_gpu": 64,
        "micro_batch_size": 1,
        "normalize_advantages": False,
        "ref_load": str(model_dir),
        "ref_update_interval": None,
        "use_routing_replay": False,
        "use_rollout_routing_replay": False,
        "reward_key": None,
        "save_debug_train_data": None,
        "use_dynamic_batch_size": True,
        "use_kl_loss": True,
        "use_opd": False,
        "use_rollout_entropy": False,
        "true_on_policy_mode": False,
        "keep_old_actor": False,
        "use_rollout_logprobs": False,
        "use_unbiased_kl": False,
        "proximal_policy": "recompute",
        "use_opsm": False,
        "opsm_delta": 1e-4,
    }
    return Args(**{**values, **changes})


def make_groups(good: int = 5) -> list[list[Sample]]:
    """Two groups of eight random responses; the reward counts the token `good`."""
    generator = torch.Generator().manual_seed(3)
    groups = []
    for group in range(2):
        members = []
        for _ in range(8):
            length = int(torch.randint(1, 9, (), generator=generator))
            response = torch.randint(0, 8, (length,), generator=generator).tolist()
            reward = response.count(good) / length
            status = SampleStatus.COMPLETED
            members.append(
                Sample(group, tokens=[20 + group, *response], response_length=length, reward=reward, status=status)
            )
        groups.append(members)
    # One sample failed before it had a token: the update goes on without it.
    groups[1][3] = Sample(group_index=1, status=SampleStatus.FAILED)
    return groups


def scored(args: Args, trainer: EmbeddedTrainer) -> TrainBatch:
    """The groups as a batch whose engine log-probs are the trainer's own, computed one sample at a time."""
    batch = make_batch(args, 0, make_groups(), Centred(args))
    log_probs = trainer.log_probs(batch, [[i] for i in range(len(batch))])
    batch.rollout_log_probs = [part.tolist() for part in log_probs]
    return batch


def run(model_dir: Path, rollouts: int = 1, **changes: Any) -> tuple[list[dict[str, float]], EmbeddedTrainer]:
    args = make_args(model_dir, **changes)
    trainer = EmbeddedTrainer(args)
    learner = Learner(args, trainer, Centred(args), PolicyLoss(args, Centred(args)))
    batch = scored(args, trainer)
    return [learner.train(i, batch) for i in range(rollouts)], trainer


def test_first_update(model_dir: Path) -> None:
    (metrics,), _ = run(model_dir)
    assert metrics["train/steps"] == 2.0
    assert metrics["train/train_rollout_logprob_abs_diff_max"] < 1e-4
    assert 0 < metrics["train/entropy_loss"] <= math.log(VOCAB)
    assert metrics["rollout/ref_log_probs"] == pytest.approx(metrics["rollout/log_probs"], abs=1e-6)
    assert metrics["rollout/masked_samples"] == 1.0
    assert metrics["train/skipped_steps"] == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"use_dynamic_batch_size": False, "micro_batch_size": 1},
        {"max_tokens_per_gpu": 20},
        {"max_tokens_per_gpu": 20, "balance_by_flops": True},
    ],
)
def test_micro_batches_do_not_change_the_update(model_dir: Path, changes: dict[str, Any]) -> None:
    (expected,), whole = run(model_dir)
    (metrics,), split = run(model_dir, **changes)
    for name, value in expected.items():
        if not name.startswith("perf/"):
            assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    for (_, a), (_, b) in zip(whole.named_weights(), split.named_weights(), strict=True):
        # Adam's first steps are about lr * sign(gradient), which magnifies rounding where the gradient is tiny.
        assert (a - b).abs().max() < 1e-2
        assert (a - b).abs().mean() < 1e-4


def test_the_same_inputs_give_the_same_bits(model_dir: Path) -> None:
    first, one = run(model_dir, rollouts=2)
    second, other = run(model_dir, rollouts=2)
    for a, b in zip(first, second, strict=True):
        names = [name for name in a if not name.startswith("perf/")]
        assert [a[name] for name in names] == [b[name] for name in names]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one.named_weights(), other.named_weights(), strict=True))


def test_the_rewarded_token_becomes_likely(model_dir: Path) -> None:
    args = make_args(model_dir, use_kl_loss=False, entropy_coef=0.0)
    trainer = EmbeddedTrainer(args)
    learner = Learner(args, trainer, Centred(args), PolicyLoss(args, Centred(args)))
    probe = make_batch(args, 0, [[Sample(0, tokens=[20, 5, 5], response_length=2, reward=0.0)]], None)
    before = trainer.log_probs(probe, [[0]])[0].sum().item()
    for rollout_id in range(8):
        learner.train(rollout_id, scored(args, trainer))
    assert trainer.log_probs(probe, [[0]])[0].sum().item() > before + 1.0


def test_sft(model_dir: Path) -> None:
    args = make_args(model_dir, loss_type="sft_loss", use_kl_loss=False, global_batch_size=16)
    trainer = EmbeddedTrainer(args)
    learner = Learner(args, trainer, None, SFTLoss(args, Centred(args)))
    batch = make_batch(args, 0, make_groups(), None)
    losses = [learner.train(i, batch)["train/loss"] for i in range(10)]
    assert losses[-1] < losses[0] - 0.5
