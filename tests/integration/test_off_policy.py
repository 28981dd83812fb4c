"""Off-policy corrections in whole runs: stale tokens from partial rollouts, and functions from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import TinyRun
from tests.docs.test_snippets import FILES
from tests.run_files import metrics

STALE = {
    "partial_rollout": True,
    "over_sampling_batch_size": 8,
    "dynamic_sampling_filter_path": "nonzero_std",
    "num_rollout": 3,
    "eval_prompt_data": None,
    "eval_interval": None,
    "use_tis": True,
}
"""Groups that are over when a rollout has enough are trained on one update later."""


def test_stale_tokens_are_weighed_and_fresh_ones_are_not(tiny: TinyRun, tmp_path: Path, slime) -> None:
    slime("train", *tiny.argv(tmp_path / "run", **STALE))
    lines = metrics(tmp_path / "run")
    assert lines[0]["rollout/staleness"] == 0.0
    assert lines[0]["train/tis_abs"] < 1e-4
    stale = [line for line in lines if line["rollout/staleness"] > 0]
    assert stale
    assert all(line["train/tis_abs"] > 1e-2 for line in stale)
    assert all(line["perf/log_probs_time"] > 0 for line in lines)


@pytest.mark.slow
def test_interpolation_costs_no_pass_and_knows_what_is_fresh(tiny: TinyRun, tmp_path: Path, slime) -> None:
    slime("train", *tiny.argv(tmp_path / "run", **STALE, proximal_policy="interpolate"))
    lines = metrics(tmp_path / "run")
    assert not any("perf/log_probs_time" in line for line in lines)
    # Fresh tokens are their own proximal policy: never clipped, ratio 1 in both optimizer steps.
    assert lines[0]["train/ois"] == 1.0
    assert lines[0]["train/pg_clipfrac"] == 0.0
    # A token one version old is anchored at the engine: the ratio moves, and its weight is 1.
    stale = [line for line in lines if line["rollout/staleness"] == 1.0]
    assert stale
    assert all(line["train/ppo_kl"] != 0.0 for line in stale)
    assert all(line["train/tis_abs"] < 1e-6 for line in stale)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["my_tis", "centred_tis"])
def test_the_functions_of_the_page(tiny: TinyRun, tmp_path: Path, slime, name: str) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text(FILES["docs/concepts/off-policy.md", name])
    slime("train", *tiny.argv(tmp_path / "run", **STALE, custom_tis_function_path=path))
    key = {"my_tis": "train/my_weight", "centred_tis": "train/weight"}[name]
    values = [line[key] for line in metrics(tmp_path / "run")]
    assert values[0] == pytest.approx(1.0, abs=1e-4)
    assert any(value != values[0] for value in values)
