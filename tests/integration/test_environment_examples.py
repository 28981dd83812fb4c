"""`examples/turns`, and `examples/environments`, `reasoning_gym` and `verifiers` at reduced size: each gets better."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from slime_commands.init import warmup

from slime_core.config import load_settings
from slime_core.launch import run
from slime_core.plugins import presets
from slime_core.plugins.resolve import resolve
from tests.scripts import load_script

ROOT = Path(__file__).parents[2]


def scores(run_dir: Path, name: str) -> list[float]:
    return metric(run_dir, f"eval/{name}")


def metric(run_dir: Path, name: str) -> list[float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line[name] for line in lines if name in line]


def turns(config: str, estimator: str) -> Path:
    """Run an example of `examples/turns`; return its run directory."""
    if not Path("examples").exists():
        Path("examples").symlink_to(ROOT / "examples")
    save = Path(estimator)
    argv = ["--config", f"examples/turns/{config}.yaml", "--advantage-estimator", estimator, "--no-preflight"]
    argv += ["--save", str(save)]
    run(presets.load_settings(argv, command="train", env={}))
    return save


@pytest.mark.slow
def test_credit_by_turn_makes_fewer_detours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare as many walks of each, all of which arrive in the end; only arriving pays."""
    monkeypatch.chdir(tmp_path)
    by_turn, by_walk = (turns("walk", name) for name in ("gigpo", "grpo"))
    moves = {save: metric(save, "rollout/num_turns") for save in (by_turn, by_walk)}
    assert moves[by_turn][0] == moves[by_walk][0]
    assert sum(moves[by_turn][-2:]) < sum(moves[by_walk][-2:]) < 1.5 * moves[by_walk][0]
    assert all(metric(save, "rollout/raw_reward")[-1] > 0.9 for save in moves)


@pytest.mark.slow
def test_parts_normalised_apart_both_rise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Normalised as a sum, the small part collapses."""
    monkeypatch.chdir(tmp_path)
    apart, summed = (turns("answers", name) for name in ("gdpo", "grpo"))
    for part in ("moves", "polite"):
        first, *_, last = metric(apart, f"rollout/reward/{part}")
        assert last > 1.2 * first
    moves, polite = (metric(summed, f"rollout/reward/{part}") for part in ("moves", "polite"))
    assert moves[-1] > 1.2 * moves[0]
    assert polite[-1] < 0.5 * polite[0]


@pytest.mark.slow
def test_signs_are_followed_more_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    recipe = resolve("recipes", "examples/environments/warm.py").obj.__globals__
    monkeypatch.setitem(recipe, "NUM_CARELESS", 1200)
    argv = ["--config", "examples/environments/run.yaml", "--num-rollout", "4", "--rollout-batch-size", "8"]
    argv += ["--n-samples-per-prompt", "8", "--eval-interval", "4", "--lr", "2e-3", "--no-preflight"]
    run(load_settings(argv, command="train", env={}))
    before, after = scores(Path("outputs/environments"), "signs")
    assert after > before + 0.1


@pytest.mark.slow
def test_the_recipe_of_words_at_reduced_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(tmp_path)
    source = (ROOT / "examples/reasoning_gym/prepare.py").read_text(encoding="utf-8")
    phases = []
    for settings in warmup.PHASES:
        text = re.sub(r"(?m)^rollout_batch_size: \d+", "rollout_batch_size: 32", settings.read_text(encoding="utf-8"))
        phases.append(tmp_path / settings.name)
        phases[-1].write_text(re.sub(r"(?m)^lr_warmup_iters: \d+", "lr_warmup_iters: 1", text), encoding="utf-8")
    small = f"PHASES = {tuple(map(str, phases))!r}\nPHASES = tuple(map(Path, PHASES))\n"
    path = tmp_path / "prepare_words.py"
    source = re.sub(r"(?m)^(NUM_BACKWARD|NUM_MIXED) = \d+", r"\1 = 64", source)
    path.write_text(source.replace("RECIPE = ", f"{small}RECIPE = ", 1), encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    argv = ["--config", "examples/reasoning_gym/train.yaml", "--prepare-path", str(path)]
    argv += ["--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--lr-warmup-iters", "1"]
    argv += ["--eval-interval", "2", "--set", "plugins.reasoning_gym.eval_size=8", "--no-preflight"]
    argv += ["--rm-workers", "0"]  # each would import the package, for seconds
    run(load_settings(argv, command="train", env={}))
    assert len(scores(Path("outputs/reasoning_gym"), "spell_backward")) == 2
    held_out = [
        json.loads(line) for line in Path("outputs/reasoning_gym/inputs/heldout.jsonl").read_text().splitlines()
    ]
    assert all(len(row["label"]) in (3, 4) for row in held_out)
    stamp = json.loads(Path("outputs/reasoning_gym/inputs/model", warmup.STAMP).read_text(encoding="utf-8"))
    assert stamp["recipe"] == "spell_backward"


@pytest.mark.slow
def test_an_environment_of_verifiers_is_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers")
    monkeypatch.setattr(sys, "path", list(sys.path))
    example = load_script(ROOT / "examples/verifiers/train.py")
    small = ["--num-rollout", "4", "--eval-interval", "4", "--rollout-max-response-len", "24", "--no-preflight"]
    small += ["--n-samples-per-eval-prompt", "1", "--lr", "1e-2"]
    assert example.run([str(tmp_path), *small]) == 0
    before, after = scores(tmp_path / "run", "digit_echo")
    assert after > before + 0.1
    metrics = (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8")
    assert '"rollout/verifiers/reward/share_of_digits"' in metrics
    assert '"eval/digit_echo/verifiers/reward/share_of_digits"' in metrics
