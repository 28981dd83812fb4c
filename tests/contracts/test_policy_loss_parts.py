"""The built-in corrections and reducers, and the examples, by the suites that third parties use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from slime_testing_contracts import CorrectionContract, LossContract, LossReducerContract

from slime_core import EstimatorBase, resolve

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "hooks" / "policy_loss.py")


class TestIcePop(CorrectionContract):
    component = "icepop"
    args = {"tis_clip_low": 0.5}


class TestExampleFunction(CorrectionContract):
    component = f"{EXAMPLE}:tis_function"


class TestExampleReducer(LossReducerContract):
    component = f"{EXAMPLE}:pg_loss_reducer"


class TestCustomLoss(LossContract):
    """The loss of `--loss-type custom_loss`, which is built with a function."""

    component = "custom_loss"

    def build(self) -> Any:
        settings = self.settings
        function = resolve("custom_losses", f"{EXAMPLE}:custom_loss").obj
        return self.resolved.obj(settings, EstimatorBase(settings), function=function)


def _suite(kind: type, tmp_path: Path, text: str) -> object:
    path = tmp_path / "mine.py"
    path.write_text(text)
    return type("Mine", (kind,), {"component": str(path)})()


def test_a_reducer_that_means_over_its_micro_batch_is_found_out(tmp_path: Path) -> None:
    suite = _suite(LossReducerContract, tmp_path, "def reducer(a, b, c, d):\n    return lambda v: v.mean()\n")
    with pytest.raises(AssertionError):
        suite.test_it_is_a_sum_over_samples(False)


def test_a_correction_that_normalises_over_its_micro_batch_is_found_out(tmp_path: Path) -> None:
    text = (
        "import torch\n\ndef tis(*, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **rest):\n"
        "    w = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).clamp(max=2)\n"
        "    return pg_loss * w / w.mean(), loss_masks, {}\n"
    )
    suite = _suite(CorrectionContract, tmp_path, text)
    with pytest.raises(AssertionError):
        suite.test_no_split_or_order_changes_anything()
