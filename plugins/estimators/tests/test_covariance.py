"""The losses `clip_cov` and `kl_cov`, by definition, and over ranks and micro-batches."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_estimators.covariance import ClipCov, KLCov

from slime_core.errors import ConfigError
from slime_core.estimator import EstimatorBase
from slime_core.learning.tensors import Denominators, TrainTensors
from slime_core.protocols import MicroBatchOutput
from slime_core.sample import TrainBatch
from tests.toy_trainer import learn, make_args, make_batch

torch.set_num_threads(1)
LOSSES = {"clip_cov": ClipCov, "kl_cov": KLCov}
CHOSEN = {"clip_cov": {"share": 0.3, "low": -0.1, "high": 0.5}, "kl_cov": {"share": 0.3, "coef": 0.7}}


def args_of(name: str, **changes: Any) -> Any:
    plugins = {name: CHOSEN[name] | changes.pop("chosen", {})}
    return make_args(loss_type=name, plugins=plugins, seed=3, num_steps_per_rollout=2, **changes)


def bound(name: str, tensors: TrainTensors, batch: TrainBatch, **chosen: Any) -> tuple[Any, Denominators]:
    args = args_of(name, chosen=chosen)
    step = Denominators.of(batch, range(len(batch)), per_token=True)
    step = Denominators(step.num_rollouts, step.num_tokens, True, tuple(range(len(batch))), lambda tensor: tensor)
    return LOSSES[name](args, EstimatorBase(args)).bind(batch, tensors, step), step


def columns(batch: TrainBatch, seed: int = 0) -> TrainTensors:
    generator = torch.Generator().manual_seed(seed)

    def column(shift: float) -> list[torch.Tensor]:
        return [torch.randn(n, generator=generator, dtype=torch.float64) + shift for n in batch.response_lengths]

    masks = [torch.tensor(mask, dtype=torch.float64) for mask in batch.loss_masks]
    return TrainTensors(masks, old_log_probs=column(-2), advantages=column(0), returns=column(0))


def covariances(batch: TrainBatch, tensors: TrainTensors) -> dict[tuple[int, int], float]:
    """(sample, token) -> covariance of the trained tokens, from plain sums."""
    assert tensors.advantages is not None
    assert tensors.old_log_probs is not None
    places = [(i, t) for i, mask in enumerate(batch.loss_masks) for t, m in enumerate(mask) if m]
    pairs = [(tensors.advantages[i][t].item(), tensors.old_log_probs[i][t].item()) for i, t in places]
    means = [sum(values) / len(pairs) for values in zip(*pairs)]
    return {place: (a - means[0]) * (p - means[1]) for place, (a, p) in zip(places, pairs)}


def gradients(name: str, batch: TrainBatch, tensors: TrainTensors, **chosen: Any) -> dict[tuple[int, int], float]:
    """(sample, token) -> derivative of the loss by a log-prob that is 0.1 above the old one, times the tokens."""
    loss_fn, step = bound(name, tensors, batch, **chosen)
    assert tensors.old_log_probs is not None
    log_probs = (torch.cat(tensors.old_log_probs) + 0.1).requires_grad_()
    loss, metrics = loss_fn(MicroBatchOutput(list(range(len(batch))), log_probs))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert metrics["loss"].item() == pytest.approx(loss.item())
    parts = torch.split(gradient * step.num_tokens, batch.response_lengths)
    return {(i, t): value for i, part in enumerate(parts) for t, value in enumerate(part.tolist())}


def test_kl_cov_adds_the_penalty_to_the_largest_covariances() -> None:
    batch = make_batch(8)
    tensors = columns(batch)
    cov, found = covariances(batch, tensors), gradients("kl_cov", batch, tensors)
    assert tensors.advantages is not None
    largest = sorted(cov, key=cov.__getitem__, reverse=True)[: int(0.3 * len(cov))]
    for place, value in found.items():
        advantage = tensors.advantages[place[0]][place[1]].item()
        clipped = advantage > 0 and 1.1051709180756477 > 1.28
        policy = 0.0 if place not in cov or clipped else -1.1051709180756477 * advantage
        assert value == pytest.approx(policy + 0.7 * (place in largest), abs=1e-9)


def test_clip_cov_leaves_out_random_tokens_inside_the_bounds() -> None:
    batch = make_batch(8)
    tensors = columns(batch)
    cov = covariances(batch, tensors)
    inside = {place for place, c in cov.items() if -0.1 < c < 0.5}
    left_out = {place for place, g in gradients("clip_cov", batch, tensors).items() if place in cov and g == 0}
    assert left_out < inside
    assert len(left_out) == int(0.3 * len(cov))
    batch.rollout_id = 1
    again = {place for place, g in gradients("clip_cov", batch, tensors).items() if place in cov and g == 0}
    assert again != left_out, "the next rollout draws other tokens"
    none = gradients("clip_cov", batch, tensors, low=1e6, high=1e7)
    assert all(none[place] != 0 for place in cov)
    everything = gradients("clip_cov", batch, tensors, low=-1e6, high=1e6, share=1.0)
    assert not any(everything[place] for place in cov)


@pytest.mark.parametrize("name", LOSSES)
def test_any_numbers_give_finite_losses(name: str) -> None:
    batch = make_batch(4)
    log_prob = st.one_of(st.floats(-1e4, 0.0), st.sampled_from([0.0, -1e-8, -1e4]))
    token = st.tuples(st.floats(-1e15, 1e15), log_prob, log_prob, st.booleans())
    total = sum(batch.response_lengths)

    @settings(max_examples=15, deadline=None)
    @given(st.lists(token, min_size=total, max_size=total).filter(lambda tokens: any(mask for *_, mask in tokens)))
    def check(tokens: list[tuple[float, float, float, bool]]) -> None:
        flat = torch.tensor(tokens, dtype=torch.float32)
        advantages, old, new, masks = ([*torch.split(column, batch.response_lengths)] for column in flat.T)
        batch.loss_masks = [[int(m) for m in mask] for mask in masks]
        loss_fn, _ = bound(name, TrainTensors(masks, old_log_probs=old, advantages=advantages, returns=old), batch)
        log_probs = torch.cat(new).requires_grad_()
        loss, metrics = loss_fn(MicroBatchOutput(list(range(len(batch))), log_probs))
        (gradient,) = torch.autograd.grad(loss, log_probs)
        assert torch.isfinite(gradient).all()
        assert all(torch.isfinite(value).all() for value in (loss, *metrics.values()))

    check()


@pytest.mark.parametrize("name", LOSSES)
def test_no_split_over_ranks_and_micro_batches_changes_the_choice(name: str) -> None:
    batch = make_batch(8, siblings=True)
    loss, common = LOSSES[name], {"global_batch_size": 4}
    whole, expected = learn(args_of(name, **common, micro_batch_size=8), batch, loss=loss)
    assert 0 < whole["train/cov_share"] < 1
    for world_size, size in ((1, 1), (4, 1)):
        found, other = learn(args_of(name, **common, micro_batch_size=size), batch, world_size, loss=loss)
        assert found == pytest.approx(whole, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(other.weight, expected.weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_equal_advantages_and_one_token(name: str) -> None:
    batch = make_batch(1)
    batch.loss_masks, batch.rollout_mask_sums = [[1] + [0] * (len(batch.loss_masks[0]) - 1)], [1]
    equal = make_batch(4)
    equal.rewards = [1.0] * 4
    for case in (batch, equal):
        metrics, trainer = learn(args_of(name), case, loss=LOSSES[name])
        assert all(math.isfinite(value) for value in metrics.values())
        assert torch.isfinite(trainer.weight).all()


def test_settings_that_cannot_work(caplog: pytest.LogCaptureFixture) -> None:
    args = args_of("kl_cov", proximal_policy="interpolate")
    with pytest.raises(ConfigError, match=r"--proximal-policy interpolate.* --loss-type kl_cov"):
        KLCov(args, EstimatorBase(args))
    args = args_of("kl_cov")
    args.num_steps_per_rollout = 1
    with caplog.at_level(logging.WARNING):
        KLCov(args, EstimatorBase(args))
    assert "--loss-type kl_cov with one optimizer step" in caplog.text
