"""`slime.utils.ppo_utils` and `slime.backends.megatron_utils`: numbers verified on THUDM/slime, and closed forms."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from slime.backends.megatron_utils import loss
from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
from slime.utils import ppo_utils
from slime_estimators.cispo import cispo_surrogate

from slime_core import ops

torch.set_num_threads(1)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_approximate_kl(kind: str) -> None:
    new, base, ratio = t(-0.5, -1, -9, -0.1), t(-0.7, -0.6, 0, -3.1), t(2, 1, 1, 0.5)
    expected = ops.kl_estimate(new, base, kind)
    torch.testing.assert_close(ppo_utils.compute_approx_kl(new, base, kind), expected)
    weighted = ppo_utils.compute_approx_kl(new, base, kind, importance_ratio=ratio)
    torch.testing.assert_close(weighted, ops.kl_estimate(new, base, kind, importance_log_ratio=ratio.log()))


def test_policy_loss_and_cispo() -> None:
    ratio, log_probs, advantages = t(1.5, 0.5, 1.5, 0.5, 5), t(-1, -2, -1, -2, -3), t(1, 1, -1, -1, -2)
    found = ppo_utils.compute_policy_loss(-ratio.log(), advantages, 0.2, 0.28, 3.0)
    torch.testing.assert_close(found, ops.clipped_surrogate(-ratio.log(), advantages, 0.2, 0.28, 3.0))
    found = ppo_utils.compute_cispo_loss(-ratio.log(), log_probs, advantages, 0.2, 0.28)
    torch.testing.assert_close(found, cispo_surrogate(-ratio.log(), log_probs, advantages, 0.2, 0.28))


def test_sequence_kl_and_masking() -> None:
    new, old = [t(-0.5, -1, -0.2), t(-1, -2)], [t(-0.6, -1.2, -0.1), t(-1.5, -2)]
    masks = [t(1, 1, 0), t(1, 1)]
    kl = ppo_utils.compute_gspo_kl(new, old, new, masks)
    assert kl.tolist() == pytest.approx([-0.15] * 3 + [-0.25] * 2)
    args = SimpleNamespace(opsm_delta=0.1)
    old = [t(-0.1, -0.1, 9), t(-1.5, -2)]  # the first sequence has moved by (0.4 + 0.9) / 2
    kept, share = ppo_utils.compute_opsm_mask(args, new, old, [t(-1, 1, -1), t(-1, -1)], masks)
    assert kept.tolist() == [0, 1, 0, 1, 1]
    assert share.item() == pytest.approx(2 / 2)


def test_log_probs_and_entropy() -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(5, 7, dtype=torch.float64, requires_grad=True), torch.tensor([0, 6, 3, 3, 1])
    expected = logits.log_softmax(-1)
    found = ppo_utils.compute_log_probs(logits, tokens)
    assert found.shape == (5, 1)
    torch.testing.assert_close(found[:, 0], expected.gather(1, tokens[:, None])[:, 0])
    entropy = -(expected.exp() * expected).sum(-1)
    torch.testing.assert_close(ppo_utils.compute_entropy_from_logits(logits), entropy)
    both = ppo_utils.calculate_log_probs_and_entropy(logits, tokens, None, with_entropy=True, chunk_size=2)
    torch.testing.assert_close(both, (found, entropy))
    assert ppo_utils.calculate_log_probs_and_entropy(logits, tokens)[1] is None
    wanted = torch.autograd.grad(entropy.sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(both[1].sum(), logits)[0], wanted)
    keep = torch.rand(5, 7) < 0.5
    assert not keep.gather(1, tokens[:, None]).all(), "a row's own token counts all the same"
    masked = logits.masked_fill(~keep.scatter(1, tokens[:, None], True), float("-inf")).log_softmax(-1)
    found, entropies = ppo_utils.calculate_log_probs_and_entropy(
        logits, tokens, None, True, 2, log_prob_keep_mask=keep, with_entropy_grad=False
    )
    torch.testing.assert_close(found[:, 0], masked.gather(1, tokens[:, None])[:, 0])
    torch.testing.assert_close(entropies, entropy.detach())
    assert not entropies.requires_grad
    wanted = torch.autograd.grad(masked.gather(1, tokens[:, None]).sum(), logits)[0]
    torch.testing.assert_close(torch.autograd.grad(found.sum(), logits)[0], wanted)


def _rank_of_a_vocabulary(rank: int, store: str, results: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    part = torch.randn(4, 6).chunk(2, dim=1)[rank].clone().requires_grad_()
    found, entropy = ppo_utils.calculate_log_probs_and_entropy(part, torch.tensor([0, 5, 3, 2]), with_entropy=True)
    (found.sum() + entropy.sum()).backward()
    torch.save((found.detach(), entropy.detach(), part.grad), f"{results}.{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_vocabulary_that_is_split_over_processes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank_of_a_vocabulary, (str(tmp_path / "store"), str(tmp_path / "rank")), nprocs=2)
    torch.manual_seed(0)
    logits = torch.randn(4, 6).requires_grad_()
    found, entropy = ppo_utils.calculate_log_probs_and_entropy(logits, torch.tensor([0, 5, 3, 2]), with_entropy=True)
    (found.sum() + entropy.sum()).backward()
    ranks = [torch.load(f"{tmp_path / 'rank'}.{rank}") for rank in range(2)]
    for rank in ranks:
        torch.testing.assert_close(rank[:2], (found.detach(), entropy.detach()))
    torch.testing.assert_close(torch.cat([rank[2] for rank in ranks], 1), logits.grad)


def test_returns() -> None:
    found = ppo_utils.chunked_discounted_returns(t(1, 2, 3)[None], 0.5, chunk_size=2)
    assert found.tolist() == [pytest.approx([2.75, 3.5, 3])]
    kl, masks = [t(0.1, 0.2, 0.3)], [t(1, 1, 0)]
    (found,) = ppo_utils.get_reinforce_plus_plus_returns(t(1), kl, masks, [3], [5], 0.1, 0.9)
    assert found.tolist() == pytest.approx([0.872, 0.98, 0])
    (none,) = ppo_utils.get_reinforce_plus_plus_returns(t(1), kl, [t(0, 0, 0)], [3], [5], 0.1, 0.9)
    assert none.tolist() == [0, 0, 0]
    (found,) = ppo_utils.get_reinforce_plus_plus_baseline_advantages(t(1), kl, masks, 0.1)
    assert found.tolist() == pytest.approx([0.99, 0.98, 0.97])
    assert [r.tolist() for r in ppo_utils.get_grpo_returns([0.5, -1], [t(0, 0), t(0)])] == [[0.5, 0.5], [-1]]


def test_generalised_advantages() -> None:
    values, rewards = t(0.1, 0.2, 0.3), t(0, 0, 1)
    advantages, returns = ppo_utils.get_advantages_and_returns(5, 3, values, rewards, 0.9, 0.8)
    assert advantages.tolist() == pytest.approx([0.49328, 0.574, 0.7])
    assert returns.tolist() == pytest.approx([0.59328, 0.774, 1.0])
    many = ppo_utils.get_advantages_and_returns_batch([5, 3], [3, 1], [values, t(0.5)], [rewards, t(2)], 0.9, 0.8)
    torch.testing.assert_close(many[0], [advantages, t(1.5)])
    torch.testing.assert_close(many[1], [returns, t(2)])
    for scan in (ppo_utils.vanilla_gae, lambda *a: ppo_utils.chunked_gae(*a, chunk_size=2)):
        torch.testing.assert_close(scan(rewards[None], values[None], 0.9, 0.8)[0][0], advantages)


# -- custom losses ---------------------------------------------------------------------------------------


@pytest.fixture
def batch() -> dict[str, Any]:
    """Two samples of 2 + 2 and 1 + 3 tokens."""
    torch.manual_seed(1)
    return {
        "logits": torch.randn(1, 8, 11, dtype=torch.float64, requires_grad=True),
        "unconcat_tokens": [torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 7, 8])],
        "total_lengths": [4, 4],
        "response_lengths": [2, 3],
    }


def test_log_probs_of_responses(batch: dict[str, Any]) -> None:
    args = SimpleNamespace(rollout_temperature=0.7)
    found = loss.get_log_probs_and_entropy(args=args, with_entropy=True, **batch)
    table = (batch["logits"][0] / 0.7).log_softmax(-1)
    expected = [table[[1, 2], [3, 4]], table[[4, 5, 6], [6, 7, 8]]]
    torch.testing.assert_close(found["log_probs"], expected)
    empty, columns = found
    assert empty.shape == (0,)
    assert columns["log_probs"] is found["log_probs"]
    assert "entropy" in found
    assert [len(e) for e in found.get("entropy")] == [2, 3]
    assert found.get("values") is None
    assert "entropy" not in loss.get_log_probs_and_entropy(args=args, **batch)
    chunks = list(loss.get_responses(args=args, **batch))
    for (logits, tokens), log_probs in zip(chunks, expected):
        torch.testing.assert_close(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], log_probs)


def test_other_layouts_are_refused(batch: dict[str, Any]) -> None:
    args = SimpleNamespace(rollout_temperature=1.0)
    with pytest.raises(ValueError, match="max_seq_lens"):
        loss.get_log_probs_and_entropy(args=args, max_seq_lens=[8], **batch)
    with pytest.raises(ValueError, match="total_lengths"):
        loss.get_log_probs_and_entropy(args=args, **{**batch, "total_lengths": [4, 5]})


def test_sums_of_sample_means() -> None:
    masks, values = [t(1, 0), t(1, 1, 1), t(0)], t(2, math.nan, 1, 2, 6, 5)
    lengths = [2, 3, 1]
    assert get_sum_of_sample_mean([9] * 3, lengths, masks)(values).item() == 2 + 3
    assert get_sum_of_sample_mean([9] * 3, lengths, masks, [4, 4, 4])(values).item() == (2 + 9) / 4
    assert get_sum_of_sample_mean([9] * 3, lengths, masks, calculate_per_token_loss=True)(values).item() == 11


@pytest.mark.parametrize(
    ("name", "expected"), [("vanilla_tis_function", [0.5, 2.0, 1.0]), ("icepop_function", [0, 0, 1])]
)
def test_corrections(name: str, expected: list[float]) -> None:
    args = SimpleNamespace(tis_clip_low=0.5, tis_clip=2.0)
    ratio = t(0.25, 4.0, 1.0)
    masks = [t(1, 1), t(1)]
    engine = [t(-3, -3), t(-3)]
    trainer = [engine[0] + ratio[:2].log(), engine[1] + ratio[2:].log()]
    found, kept, metrics = getattr(loss, name)(
        args=args, pg_loss=t(1, 1, 1), train_log_probs=trainer, rollout_log_probs=engine, loss_masks=masks,
        total_lengths=[4, 3], response_lengths=[2, 1],
    )  # fmt: skip
    assert found.tolist() == pytest.approx(expected)
    assert kept is masks
    assert metrics["tis"].tolist() == pytest.approx([0.25, 4, 1])
    assert metrics["tis_clipfrac"].tolist() == [1, 1, 0]
    assert metrics["tis_abs"].tolist() == pytest.approx([0.75, 3, 0])
