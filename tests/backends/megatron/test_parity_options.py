"""What changes how the Megatron trainer works, but not what it learns: the embedded trainer is the measure of it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.backends.megatron import parity_jobs as jobs
from tests.backends.megatron.parity import CP2, DP2, DP4, OVERLAP, PP2, SP, TP2, VPP2, Parity, assert_equal

pytestmark = pytest.mark.backends

NO_DISTRIBUTED = "--no-use-distributed-optimizer"
FULL, BLOCK = "--recompute-granularity full", "--recompute-method block --recompute-num-layers 1"
HOOKS = " ".join(
    f"--custom-{name.replace('_', '-')}-path {jobs.__name__}.{function}"
    for name, function in (
        ("megatron_init", "init"),
        ("megatron_before_log_prob_hook", "before_log_prob"),
        ("megatron_before_train_step_hook", "before_train_step"),
        ("model_provider", "model_provider"),
    )
)
OPTIMIZER = ("clipped", "stateless", "reset", "only some", "frozen", "not finite")
LAYOUTS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "TP2": (2, TP2, (*OPTIMIZER, "logits", "reducer")),
    "PP2": (2, PP2, (*OPTIMIZER, "logits", "static packing")),
    "CP2": (2, CP2, ("logits", "not finite", "static packing", "reducer")),
    "DP2": (2, DP2, ("not finite", "reset", "stateless", "only some", "balanced", "static packing")),
    "VPP2": (2, VPP2, ("static packing", "only some", "not finite")),
    "TP2+SP, all recomputed": (2, f"{SP} {FULL}", ("grpo", "ppo", "frozen", "experts")),
    "TP2, attention recomputed": (2, f"{TP2} --recompute-granularity selective", ("grpo",)),
    "PP2, one layer of each recomputed": (2, f"{PP2} {FULL} {BLOCK}", ("grpo", "only some")),
    "DP2, plain optimizer": (2, f"{DP2} {NO_DISTRIBUTED}", ("grpo", "reset", "not finite")),
    "CP2, plain optimizer": (2, f"{CP2} {NO_DISTRIBUTED}", ("grpo",)),
    "DP2, overlapped gradients": (2, f"{DP2} --overlap-grad-reduce", ("grpo", "only some")),
    "DP2, all overlapped": (2, f"{DP2} {OVERLAP}", ("grpo", "kl in reward", "old actor", "only some", "not finite")),
    "DP2 x VPP2, all overlapped": (4, f"{VPP2} {DP4} {OVERLAP}", ("grpo",)),
}
ALL = [(layout, case) for layout, (_, _, cases) in LAYOUTS.items() for case in cases]


@pytest.mark.parametrize(("layout", "case"), ALL, ids=[f"{layout}-{case}" for layout, case in ALL])
def test_three_steps(parity: Parity, layout: str, case: str) -> None:
    world_size, flags, cases = LAYOUTS[layout]
    results, expected = parity.megatron(world_size, flags, cases)[case], parity.embedded(case)
    assert_equal(results, expected)
    if case == "not finite":
        assert [metrics["train/skipped_steps"] for metrics in results[0]["metrics"]] == [1.0, 0.0]
    if case == "clipped":
        assert all(metrics["train/grad_norm"] > 0.5 for metrics in results[0]["metrics"])


@pytest.mark.parametrize("layout", ["TP2", "PP2", "VPP2", "DP2", "DP2, all overlapped"])
def test_what_is_frozen_keeps_its_bits(parity: Parity, layout: str) -> None:
    world_size, flags, cases = LAYOUTS[layout]
    results = parity.megatron(world_size, flags, cases)["only some"]
    before, after = load_file(parity.paths["dense"] / "model.safetensors"), results[0]["actor weights"]
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if "mlp" not in name and "lm_head" not in name}


@pytest.mark.parametrize("layout", [TP2, PP2, DP2], ids=["TP2", "PP2", "DP2"])
def test_bfloat16_stays_near_float32(parity: Parity, layout: str) -> None:
    """Weights of half the bits: what is logged is near, and the update goes the same way."""
    results = parity.megatron(2, f"{layout} --dtype bfloat16 --attention-softmax-in-fp32", ["grpo", "ppo"])
    for case, ranks in results.items():
        expected = parity.embedded(case)
        assert ranks[0]["metrics"] == ranks[1]["metrics"]
        for found, wanted in zip(ranks[0]["metrics"], expected["metrics"], strict=True):
            assert found.keys() == wanted.keys()
            for name in ("rollout/log_probs", "train/entropy_loss", "train/grad_norm"):
                assert found[name] == pytest.approx(wanted[name], rel=0.05), name
        assert {tensor.dtype for tensor in ranks[0]["actor weights"].values()} == {torch.bfloat16}
        start = load_file(parity.paths["dense"] / "model.safetensors")
        moved, wanted = (_moved(result["actor weights"], start) for result in (ranks[0], expected))
        assert torch.cosine_similarity(moved, wanted, dim=0) > 0.9


def _moved(weights: jobs.Tensors, start: jobs.Tensors) -> torch.Tensor:
    return torch.cat([(weights[name].float() - start[name]).flatten() for name in start])


@pytest.mark.parametrize(("layout", "chunks"), [(TP2, 1), (PP2, 1), (VPP2, 2)], ids=["TP2", "PP2", "VPP2"])
def test_hooks_on_every_rank(parity: Parity, layout: str, chunks: int) -> None:
    """THUDM/slime's arguments, in its order; the provider's model learns as the family's own."""
    case = "kl in reward"
    results = parity.megatron(2, f"{layout} {HOOKS}", [case])[case]
    assert_equal(results, parity.embedded(case))
    dense = str(parity.paths["dense"])
    for rank, result in enumerate(results):
        assert result["inits"] == [True]
        ends = [(True, True)] * 2 if layout == TP2 else [(True, False), (False, True)]
        providers = [call[1:] for call in result["calls"] if call[0] == "provider"]
        if chunks == 1:
            assert providers == [(*ends[rank], None)]
        else:
            assert providers == [(rank == 0, False, 0), (False, rank == 1, 1)]
        passes = [call for call in result["calls"] if call[0] == "log_probs"]
        assert [call[3] for call in passes] == ["", "ref_", "", "ref_"]
        assert {call[1:3] for call in passes} == {(dense, chunks)}
        sums = [call[4] for call in passes]
        assert sums[0] != sums[1]
        assert sums[2] == sums[3], "--ref-update-interval 1 made the reference the actor"
        steps = [call for call in result["calls"] if call[0] == "step"]
        assert [call[2:4] for call in steps] == [(0, 0), (0, 1), (1, 0)]
        assert {(call[1], call[4], call[5]) for call in steps} == {(dense, chunks, True)}
        assert steps[2][6] == pytest.approx(result["metrics"][1]["train/lr"])
        assert [call[0] for call in result["calls"] if call[0] != "provider"] == [
            *("log_probs", "log_probs", "step", "step"),
            *("log_probs", "log_probs", "step"),
        ]
