"""Loss and gradient of one fixed batch against TRL's, as recorded by `tests/golden/make_trl_losses.py`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from slime_corrections.mis import MismatchImportanceSampling
from slime_corrections.truncated import IcePop, TruncatedImportanceSampling
from slime_estimators.cispo import cispo_surrogate
from slime_estimators.dr_grpo import constant

from slime_core.config import Args
from slime_core.estimator import EstimatorBase
from slime_core.learning.corrector import Corrector
from slime_core.learning.loss import PolicyLoss
from slime_core.learning.tensors import Denominators, TrainTensors
from slime_core.protocols import LossInputs, LossOutputs, MicroBatchOutput
from tests.batches import train_batch

torch.set_num_threads(1)

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "trl_losses.json").read_text(encoding="utf-8"))
LENGTHS = [sum(mask) for mask in GOLDEN["mask"]]
PER_TOKEN = ("bnpo", "dapo", "cispo")
"""Losses of TRL that are a mean over the batch's tokens."""


class SequenceRatio(EstimatorBase):
    ratio_level: ClassVar[Any] = "sequence"


class Cispo(EstimatorBase):
    def policy_loss(self, args: Any, inputs: LossInputs) -> LossOutputs:
        kl = self.policy_kl(inputs)
        loss, clipfrac = cispo_surrogate(kl, inputs.log_probs, inputs.advantages, args.eps_clip, args.eps_clip_high)
        return LossOutputs(loss, {"pg_clipfrac": clipfrac, "ppo_kl": kl.detach()})


def our_args(options: dict[str, Any]) -> Args:
    cispo = options["loss_type"] == "cispo"
    low, high = options["vllm_importance_sampling_clip_min"], options["vllm_importance_sampling_clip_max"]
    mode = options["vllm_importance_sampling_mode"] or "token_truncate"
    return Args(
        # TRL's CISPO has no lower bound and an absolute upper one.
        eps_clip=1.0 if cispo else options["epsilon_low"],
        eps_clip_high=options["epsilon_high"] - 1 if cispo else options["epsilon_high"],
        eps_clip_c=options["delta"],
        entropy_coef=options["entropy_coef"],
        use_kl_loss=options["beta"] > 0,
        kl_loss_coef=options["beta"],
        kl_loss_type="k3",
        use_unbiased_kl=options["use_bias_correction_kl"],
        use_opsm=options["off_policy_mask_threshold"] is not None,
        opsm_delta=options["off_policy_mask_threshold"] or 0.0,
        calculate_per_token_loss=options["loss_type"] in PER_TOKEN,
        rollout_max_response_len=options["max_completion_length"],
        custom_pg_loss_reducer_function_path="constant",
        tis_clip=high,
        tis_clip_low=low or 0.0,
        tis_level=mode.split("_")[0],
        tis_mode=mode.split("_")[1],
        tis_lower_bound=low or 0.0,
        tis_upper_bound=high,
    )


def our_loss(args: Any, options: dict[str, Any], correction: type[Any] | None) -> PolicyLoss:
    kind: type[EstimatorBase] = EstimatorBase
    if options["importance_sampling_level"] == "sequence":
        kind = SequenceRatio
    elif options["loss_type"] == "cispo":
        kind = Cispo
    corrector = None if correction is None else Corrector(args, correction(args))
    reducer = (lambda *a: constant(*a, args=args)) if options["loss_type"] == "dr_grpo" else None
    return PolicyLoss(args, kind(args), corrector, reducer)


def column(name: str) -> list[torch.Tensor]:
    return [torch.tensor(row[:n], dtype=torch.float64) for row, n in zip(GOLDEN["columns"][name], LENGTHS, strict=True)]


CORRECTIONS = {
    "token_truncate": (TruncatedImportanceSampling, MismatchImportanceSampling),
    "token_clip": (TruncatedImportanceSampling,),
    "token_mask": (IcePop, MismatchImportanceSampling),
    "sequence_truncate": (MismatchImportanceSampling,),
    "sequence_mask": (MismatchImportanceSampling,),
}


@pytest.mark.parametrize(
    ("case", "correction"), [(case, kind) for case in GOLDEN["cases"] for kind in CORRECTIONS.get(case, (None,))]
)
@pytest.mark.parametrize("splits", [[[0, 1, 2, 3]], [[2], [3, 0], [1]]])
def test_the_same_loss_and_gradient_as_trl(case: str, correction: Any, splits: list[list[int]]) -> None:
    golden = GOLDEN["cases"][case]
    args = our_args(golden["options"])
    n = len(LENGTHS)
    batch = train_batch([[1] * length for length in LENGTHS])
    new = [part.requires_grad_() for part in column("new")]
    tensors = TrainTensors(
        loss_masks=[torch.ones(length, dtype=torch.float64) for length in LENGTHS],
        rollout_log_probs=column("sampling"),
        old_log_probs=column("old"),
        ref_log_probs=column("ref"),
        advantages=[torch.full((m,), a, dtype=torch.float64) for m, a in zip(LENGTHS, GOLDEN["advantages"])],
    )
    denominators = replace(
        Denominators.of(batch, range(n), per_token=args.calculate_per_token_loss),
        positions=tuple(range(n)),
        all_reduce=lambda tensor: tensor,
    )
    function = our_loss(args, golden["options"], correction).bind(batch, tensors, denominators)
    entropy = column("entropy")
    total = torch.zeros((), dtype=torch.float64)
    for positions in splits:
        rows = torch.cat([new[p] for p in positions])
        total = total + function(MicroBatchOutput(positions, rows, torch.cat([entropy[p] for p in positions])))[0]
    assert total.item() == pytest.approx(golden["loss"], abs=1e-12)
    for found, row, length in zip(torch.autograd.grad(total, new), golden["gradient"], LENGTHS, strict=True):
        assert found.tolist() == pytest.approx(row[:length], abs=1e-12)


def test_the_cases_differ() -> None:
    """Each option has an effect on the recorded batch; `dapo` and `bnpo` are one formula in a single process."""
    losses = {name: round(case["loss"], 9) for name, case in GOLDEN["cases"].items() if name != "dapo"}
    assert len(set(losses.values())) == len(losses)
