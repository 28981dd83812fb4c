"""Cases and layouts of `test_parity_*.py`, and what "equal" means there.

A case is a run of the learner by flags that both trainers know; a layout is flags that only Megatron's reads. The
embedded trainer's side of a case is computed once per model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.backends.megatron import parity_jobs as jobs
from tests.backends.megatron.ranks import RankPool
from tests.megatron_models import save_tiny

TP2, PP2, CP2, SP = (
    "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size 2",
    "--context-parallel-size 2",
    "--tensor-model-parallel-size 2 --sequence-parallel",
)
VPP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
DP2 = "--actor-num-gpus-per-node 2"
DP4 = "--actor-num-gpus-per-node 4"
EP2 = f"--expert-model-parallel-size 2 {DP2}"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"

BASE = """
    --hf-checkpoint {dense} --prompt-data {prompts} --rm-type math --rollout-max-response-len 16 --num-rollout 2
    --rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 4 --data-pad-size-multiplier 1
    --device cpu --dtype float32 --num-threads 1 --rollout-temperature 0.8 --distributed-timeout-minutes 1
    --lr 1e-2 --lr-decay-style linear --lr-decay-iters 10 --lr-warmup-iters 2 --lr-warmup-init 2e-3
    --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --adam-eps 1e-5
"""
# Adam divides gradients that are rounding noise by themselves; with this epsilon, trainers that add up in different
# orders stay comparable.
DYNAMIC = "--use-dynamic-batch-size --max-tokens-per-gpu 24"
GRPO = "--advantage-estimator grpo"
PPO = "--advantage-estimator ppo --critic-lr 5e-3 --gamma 0.99 --lambd 0.95"
HERE = jobs.__name__
TEACHERS = (
    "--use-opd --opd-type megatron --opd-teacher-load {other}"
    " --set plugins.on_policy_distillation.teachers.far.path={tied}"
)
"""Teachers of the actor's architecture, and with fewer tensors, which some samples name."""
CORRECTION = Path(__file__).parents[3] / "compat" / "examples" / "own_correction.py"

CASES = {
    "grpo": GRPO,
    "tied": f"--hf-checkpoint {{tied_with_biases}} {GRPO}",
    "experts": f"--hf-checkpoint {{experts}} {GRPO}",
    "experts, ppo": f"--hf-checkpoint {{experts}} {PPO}",
    "gspo": "--advantage-estimator gspo",
    "cispo": "--advantage-estimator cispo",
    "sapo": "--advantage-estimator sapo",
    "gmpo": "--advantage-estimator gmpo --eps-clip 0.1",
    "dppo": "--advantage-estimator dppo --set plugins.dppo.threshold=0.002",
    "opo": "--advantage-estimator opo",
    "gdpo": "--advantage-estimator gdpo",
    "gigpo": "--advantage-estimator gigpo",
    "mt_grpo": "--advantage-estimator mt_grpo",
    "turn_credit": "--advantage-estimator turn_credit --gamma 0.9",
    "lambdas": "--advantage-estimator ppo --critic-lr 5e-3 --set plugins.ppo.critic_lambd=1"
    " --set plugins.ppo.length_alpha=0.5",
    "vapo": "--advantage-estimator vapo --critic-lr 5e-3 --set plugins.vapo.length_alpha=0.5",
    "clip_cov": f"{GRPO} --loss-type clip_cov --set plugins.clip_cov.share=0.3 --set plugins.clip_cov.low=-0.2",
    "kl_cov": f"{GRPO} --loss-type kl_cov --set plugins.kl_cov.share=0.3",
    "per token": f"{GRPO} --calculate-per-token-loss --normalize-advantages",
    "ppo": f"{PPO} --normalize-advantages --kl-coef 0.02",
    "critic from elsewhere": f"{PPO} --critic-load {{critic}} --num-critic-only-steps 1",
    "kl loss, entropy": f"{GRPO} --use-kl-loss --kl-loss-coef 0.1 --kl-loss-type low_var_kl --entropy-coef 0.05",
    "kl in reward": "--advantage-estimator reinforce_plus_plus --normalize-advantages --kl-coef 0.05 --ref-load {other}"
    " --ref-update-interval 1",
    "kept tokens": f"{GRPO} --use-sampling-mask --entropy-coef 0.05 --log-probs-chunk-size 3",
    "tis": f"{GRPO} --use-tis --tis-clip 2 --tis-clip-low 0.3",
    "a user's correction": f"{GRPO} --use-tis --custom-tis-function-path {CORRECTION}:correction",
    "old actor": f"{GRPO} --keep-old-actor",
    "teacher": f"{GRPO} {TEACHERS} --use-rollout-entropy",
    "experts, teacher": f"--hf-checkpoint {{experts}} {GRPO} --use-opd --opd-type megatron"
    " --opd-teacher-load {experts} --set plugins.on_policy_distillation.teachers.far.path={other_experts}",
    "distillation": f"{GRPO} {TEACHERS} --loss-type distillation"
    " --set plugins.distillation.top_k=5 --set plugins.distillation.turn_weights=[1,0.5]",
    "own teacher": f"{GRPO} --use-opd --opd-type self --loss-type distillation --set plugins.distillation.top_k=7"
    " --set plugins.distillation.divergence=jsd --set plugins.distillation.tail=bucket",
    "logits": f"{GRPO} --loss-type custom_loss --custom-loss-function-path {HERE}.loss_of_logits",
    "reducer": f"{GRPO} --custom-pg-loss-reducer-function-path constant",
    "static packing": f"{GRPO} --micro-batch-size 3",
    "balanced": f"{GRPO} --balance-data --log-probs-chunk-size 3",
    "clipped": f"{GRPO} --clip-grad 0.05",
    "stateless": f"{GRPO} --use-stateless-adam --adam-eps 1e-4",
    "reset": f"{GRPO} --reset-optimizer-states --adam-eps 1e-4",
    "only some": f"{GRPO} --only-train-params-name-list mlp lm_head",
    "frozen": f"{GRPO} --freeze-params-name-list embed_tokens layers.0 layers.1",
    "not finite": f"{GRPO} --loss-type custom_loss --custom-loss-function-path {HERE}.loss_with_a_broken_gradient",
}

METRICS = {"rel": 1e-5, "abs": 3e-6}
FIRST_GRADIENT, GRADIENT, WEIGHT = 2e-5, 2e-4, 7e-5
"""Largest differences: of a gradient from its tensor's largest entry, before any update and after; of weights."""


class Parity:
    """Runs cases on both trainers.

    Args:
        root: Gets the models.
        ranks: Pools by number of processes.
    """

    def __init__(self, root: Path, ranks: Callable[[int], RankPool]) -> None:
        self._ranks = ranks
        self._embedded: dict[str, dict[str, Any]] = {}
        self._done: dict[tuple[int, str, str], Any] = {}
        self.root = root
        names = ("dense", "other", "tied", "tied_with_biases", "experts", "other_experts", "critic", "prompts")
        self.paths = {name: root / name for name in names}
        for name, variant in (
            *(("dense", "qwen3"), ("tied", "qwen3-tied"), ("tied_with_biases", "qwen2-tied")),
            ("experts", "qwen3-moe"),
        ):
            save_tiny(self.paths[name], variant, vocab_size=jobs.VOCABULARY)
        for name, variant in (("other", "qwen3"), ("other_experts", "qwen3-moe")):
            save_tiny(self.paths[name], variant, vocab_size=jobs.VOCABULARY, initializer_range=0.15)
        save_critic(self.paths["other"], self.paths["critic"])
        self.paths["prompts"].write_text('{"input": "1 + 1 =", "label": "2"}\n')

    def flags(self, case: str) -> list[str]:
        """What both trainers get."""
        packing = "" if "--micro-batch-size" in CASES[case] else DYNAMIC
        return f"{BASE} {packing} {CASES[case]}".format(**self.paths).split()

    def embedded(self, case: str) -> dict[str, Any]:
        """What the embedded trainer does, in this process."""
        if case not in self._embedded:
            torch.set_num_threads(1)
            self._embedded |= jobs.train({case: self.flags(case)})
        return self._embedded[case]

    def megatron(
        self, world_size: int, layout: str, cases: Sequence[str], *, job: str = "train", **given: Any
    ) -> dict[str, list[Any]]:
        """Case -> every rank's, rank 0's first. All cases of a layout are one job."""
        key = (world_size, layout, "|".join([job, *cases]))
        if key not in self._done:
            flags = {case: [*self.flags(case), "--train-backend", "megatron", *layout.split()] for case in cases}
            try:
                results = self._ranks(world_size).run(f"{HERE}:{job}", deadline=240, cases=flags, **given)
                self._done[key] = {case: [result[case] for result in results] for case in cases}
            except Exception as error:
                self._done[key] = error
        if isinstance(self._done[key], Exception):
            raise self._done[key]
        found: dict[str, list[Any]] = self._done[key]
        return found


def save_critic(model: Path, directory: Path) -> None:
    """A critic over the model's body, with a head that is not zero."""
    weights = load_file(model / "model.safetensors")
    del weights["lm_head.weight"]
    generator = torch.Generator().manual_seed(5)
    width = weights["model.norm.weight"].numel()
    weights |= {
        "score.weight": 0.1 * torch.randn(1, width, generator=generator),
        "score.bias": torch.tensor([0.3]),
    }
    directory.mkdir()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text((model / "config.json").read_text())


def assert_equal(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Every metric on every rank, the summed gradients of every step, and the weights are the embedded trainer's."""
    for rank, result in enumerate(results):
        assert len(result["metrics"]) == len(jobs.ROLLOUTS)
        for number, (found, wanted) in enumerate(zip(result["metrics"], expected["metrics"], strict=True)):
            assert found.keys() == wanted.keys()
            assert found == pytest.approx(wanted, **METRICS, nan_ok=True), f"rank {rank}, rollout {number}"
        assert str(result["metrics"]) == str(results[0]["metrics"]), f"rank {rank} has other metrics than rank 0"
    for role in ("actor", "critic"):
        if f"{role} weights" not in expected:
            assert f"{role} weights" not in results[0]
            continue
        gradients = zip(results[0][f"{role} gradients"], expected[f"{role} gradients"], strict=True)
        for number, (found, wanted) in enumerate(gradients):
            if all(torch.isfinite(tensor).all() for tensor in wanted.values()):
                gap = largest_gap(found, wanted, scaled=True)
                assert gap[0] <= (GRADIENT if number else FIRST_GRADIENT), f"{role}'s gradient of step {number}: {gap}"
            else:
                assert not all(torch.isfinite(tensor).all() for tensor in found.values())
        gap = largest_gap(results[0][f"{role} weights"], expected[f"{role} weights"])
        assert gap[0] <= WEIGHT, f"{role}'s weights: {gap}"


def largest_gap(found: jobs.Tensors, wanted: jobs.Tensors, *, scaled: bool = False) -> tuple[float, str]:
    """The largest difference and the tensor's name; `scaled`: in parts of that tensor's largest entry."""
    assert found.keys() == wanted.keys()
    assert all(torch.isfinite(tensor).all() for tensor in found.values())
    gaps = {name: (found[name] - tensor).abs().max().item() for name, tensor in wanted.items()}
    if scaled:
        gaps = {name: gap / max(wanted[name].abs().max().item(), 1e-7) for name, gap in gaps.items()}
    return max((gap, name) for name, gap in gaps.items())
