"""The learner's algorithms on the Megatron trainer are those on the embedded one, however the model is laid out."""

from __future__ import annotations

import pytest
import torch

from tests.backends.megatron.parity import CASES, CP2, DP2, DP4, EP2, PP2, SP, TP2, VPP2, Parity, assert_equal

pytestmark = pytest.mark.backends

ALGORITHMS = (
    *("grpo", "gspo", "cispo", "per token", "ppo", "critic from elsewhere", "kl loss, entropy", "kl in reward"),
    *("kept tokens", "tis", "old actor", "teacher", "distillation", "own teacher"),
)
RATIOS = ("sapo", "gmpo", "dppo", "lambdas", "vapo", "clip_cov", "kl_cov")
REWARDS = ("opo", "gdpo", "gigpo", "mt_grpo", "turn_credit")
RESUMED = (*RATIOS, *REWARDS, "distillation", "own teacher")
EXPERTS = ("experts", "experts, ppo")
LAYOUTS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "one": (1, "", ("grpo", *EXPERTS)),
    "TP2": (2, TP2, ALGORITHMS),
    "TP2, ratios": (2, TP2, RATIOS),
    "TP2, rewards": (2, TP2, REWARDS),
    "DP2, ratios": (2, DP2, ("gmpo", "clip_cov", "kl_cov")),
    "TP2+SP": (2, SP, ("grpo", "tied", "ppo", "kl in reward", *EXPERTS)),
    "PP2": (2, PP2, (*ALGORITHMS, "tied", "experts")),
    "VPP2": (2, VPP2, ("grpo", "tied", "ppo", "teacher", "own teacher", "old actor", "experts")),
    "CP2": (2, CP2, (*ALGORITHMS, "a user's correction", "experts")),
    "DP2": (2, DP2, ("grpo", "gspo", "per token", "ppo", "tis", "kl in reward")),
    "EP2": (2, EP2, (*EXPERTS, "experts, teacher")),
    "EP2 x TP2+SP": (2, f"{SP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", EXPERTS),
    "EP2 x ETP2": (4, f"{SP} --expert-model-parallel-size 2 {DP4}", EXPERTS),
    "TP2+SP x PP2": (4, f"{SP} {PP2}", ("grpo", "tied", "gspo", "ppo")),
    "CP2 x TP2+SP": (4, f"{SP} {CP2}", ("grpo", "tied", "gspo", "ppo")),
    "DP2 x VPP2": (4, f"{VPP2} {DP4}", ("grpo",)),
    "EP2 x PP2": (4, f"--expert-model-parallel-size 2 {PP2} {DP4}", EXPERTS),
}
ALL = [(layout, case) for layout, (_, _, cases) in LAYOUTS.items() for case in cases]


@pytest.mark.parametrize(("layout", "case"), ALL, ids=[f"{layout}-{case}" for layout, case in ALL])
def test_three_steps(parity: Parity, layout: str, case: str) -> None:
    """Metrics, gradients and weights; metrics on every rank. The metrics' names are the same too."""
    world_size, flags, cases = LAYOUTS[layout]
    assert_equal(parity.megatron(world_size, flags, cases)[case], parity.embedded(case))


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_is_the_run(parity: Parity, case: str) -> None:
    """Bit for bit, on both ranks."""
    results = parity.megatron(2, TP2, RESUMED, job="resumed", folder=str(parity.root / "resumed"))[case]
    for whole, parts in results:
        assert [str(metrics) for metrics in parts["metrics"]] == [str(metrics) for metrics in whole["metrics"][1:]]
        for role in ("actor weights", "critic weights"):
            assert whole.get(role, {}).keys() == parts.get(role, {}).keys()
            assert all(torch.equal(parts[role][name], tensor) for name, tensor in whole.get(role, {}).items())


def test_a_critic_from_elsewhere_is_the_one_that_learns_first(parity: Parity) -> None:
    """`--critic-load`, `--num-critic-only-steps 1` and the critic's own learning rate."""
    case = "critic from elsewhere"
    world_size, flags, cases = LAYOUTS["PP2"]
    first, second = parity.megatron(world_size, flags, cases)[case][0]["metrics"]
    assert "--num-critic-only-steps 1" in CASES[case]
    assert first["rollout/values"] != 0.0
    assert "train/critic-value_loss" in first
    assert "train/loss" not in first
    assert second["train/lr"] != second["train/critic-lr"]
    assert second["train/steps"] == 1.0
