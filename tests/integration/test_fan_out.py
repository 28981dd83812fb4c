"""Runs whose generate function makes 1 to 4 training samples of one execution, in every mode, next to runs without."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from slime_runs.history import read_history
from slime_runs.inspect.ledger_verify import verify
from slime_testing_contracts.loop import LoopRun, run_loop
from slime_testing_contracts.tiny import write_rows

from slime_core.learning.report import GAP
from slime_core.sample.types import executions

STEPS = 3
FIXTURE = """
import copy

async def plain(args, sample, sampling_params, context):
    output = await context.engine.generate(sample.tokens, sampling_params, session_id=sample.session_id)
    sample.append_response_tokens(
        args, output.token_ids, output.log_probs, meta_info=output.meta_info, text=output.text
    )
    return sample

async def fanned(args, sample, sampling_params, context):
    sample = await plain(args, sample, sampling_params, context)
    return [sample, *(copy.deepcopy(sample) for _ in range(sample.index % 4))]
"""
MODES: dict[str, dict[str, Any]] = {"sync": {}, "one-step": {"async_training": True}}


def run(folder: Path, function: str, **settings: Any) -> LoopRun:
    folder.mkdir(parents=True)
    (folder / "gen.py").write_text(FIXTURE)
    settings = {"custom_generate_function_path": f"{folder / 'gen.py'}:{function}", **settings}
    return run_loop(folder, settings.pop("steps", STEPS), **settings)


def problems(done: LoopRun) -> list[str]:
    """What `slime ledger verify` finds."""
    assert done.checkpoint is not None
    return verify(read_history(done.checkpoint)).problems


def check_whole(samples: list[Any], groups: int) -> None:
    """Every group has four executions, and every execution all its siblings."""
    members = executions(samples)
    assert Counter(e[0].group_index for e in members).most_common() == [(g, 4) for g in dict.fromkeys(
        e[0].group_index for e in members)]  # fmt: skip
    assert len({e[0].group_index for e in members}) == groups
    assert [len(e) for e in members] == [e[0].index % 4 + 1 for e in members]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "settings",
    [
        {"dynamic_sampling_filter_path": "nonzero_std_with_fallback", "over_sampling_batch_size": 6},
        {"advantage_estimator": "rloo", "use_tis": True},
    ],
    ids=["filtered", "corrected"],
)
def test_a_run_is_as_without_fan_out(mode: str, settings: dict[str, Any], tmp_path: Path) -> None:
    held = write_rows(tmp_path / "held.jsonl", 3)
    settings = {
        **settings, **MODES[mode], "log_passrate": True, "eval_prompt_data": ["held", held], "eval_interval": STEPS,
        "n_samples_per_eval_prompt": 4,
    }  # fmt: skip
    plain, found = (run(tmp_path / name, name, **settings) for name in ("plain", "fanned"))
    for before, after in zip([*plain.steps, *plain.evaluations], [*found.steps, *found.evaluations], strict=True):
        assert before.keys() == after.keys()
        for name, value in before.items():
            if name != GAP and not name.startswith(("perf/", "rollout/buffer")):  # GAP: a mean over tokens
                assert after[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    for samples in found.samples:
        check_whole(samples, 4)
    assert problems(found) == []


@pytest.mark.slow
@pytest.mark.parametrize("partial", [False, True])
def test_full_async_keeps_executions_whole_over_an_interruption_and_a_restart(partial: bool, tmp_path: Path) -> None:
    settings = {
        "async_training": True, "async_mode": "full", "max_staleness": 1, "partial_rollout": partial,
        "save_interval": 1, "async_buffer_groups": 6,
    }  # fmt: skip
    first = run(tmp_path / "a", "fanned", **settings)
    rest = run(
        tmp_path / "b", "fanned", steps=STEPS + 2, load=first.run_dir / "checkpoints" / "rollout_0000001", **settings
    )
    for samples in [*first.samples, *rest.samples]:
        check_whole(samples, 4)
    assert sum(first.steps[-1][name] for name in first.steps[-1] if "/staleness/hist_" in name) == 16
    assert problems(first) == []
