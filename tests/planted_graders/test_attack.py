"""What `slime rewards attack` finds among planted graders, and what it says of sound ones; prints the table."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from slime_runs.inspect.attack_answers import case_of
from slime_runs.inspect.reward_attack import Report, audit

from slime_core.cli.main import main
from tests.planted_graders import broken, held_broken, held_sound, sound
from tests.planted_graders.rows import ROWS

HERE = Path(__file__).parent
slow = partial(pytest.param, marks=pytest.mark.slow)


def graders(module: ModuleType) -> dict[str, Callable[..., float]]:
    return {name: value for name, value in vars(module).items() if name.split("_")[0] in ROWS and callable(value)}


def attacked(name: str, grader: Callable[..., float]) -> Report:
    async def score(samples: list[Any]) -> list[float | str]:
        try:
            return [float(grader(None, sample)) for sample in samples]
        except Exception as error:
            return [f"{type(error).__name__}: {error}"] * len(samples)

    cases = [case_of(*row) for row in copy.deepcopy(ROWS[name.split("_")[0]])]
    return asyncio.run(audit(score, [case for case in cases if case]))


def found(module: ModuleType) -> tuple[list[str], list[str]]:
    """Names in which something was found, and in which nothing was."""
    reports = {name: attacked(name, grader) for name, grader in graders(module).items()}
    bad = [name for name, report in reports.items() if report.false_passes or report.false_fails]
    return bad, [name for name in reports if name not in bad]


@pytest.mark.slow
def test_planted_graders(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of answers compiled as patterns
        told = {
            module.__name__.rpartition(".")[2]: found(module) for module in (broken, held_broken, sound, held_sound)
        }
    seconds = time.process_time() - started
    with capsys.disabled():
        print()
        for name, (bad, good) in told.items():
            odd = ", ".join(good if "broken" in name else bad) or "none"
            print(f"{name:<12} {len(bad) + len(good):>3} graders, reported {len(bad):>3}; wrong: {odd}")
        print(f"{seconds:.1f} s of processor time")
    planted, honest = told["broken"][0] + told["held_broken"][0], told["sound"][0] + told["held_sound"][0]
    assert len(planted) >= 0.95 * len([*graders(broken), *graders(held_broken)])
    assert len(honest) <= 0.02 * len([*graders(sound), *graders(held_sound)])
    assert seconds < 10


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slime_core", "rewards", "attack", *words], capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_a_program_that_ends_its_process_ends_no_audit(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    prompt, label, metadata = ROWS["code"][0]
    rows.write_text(json.dumps({"input": prompt, "label": label, "metadata": metadata}) + "\n")
    done = run(str(HERE / "in_process.py"), "--data", str(rows), "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["false_passes"]
    assert any("WorkerDied" in found["error"] for found in report["errors"])


GRADERS = """
import asyncio
from slime_core import RewardTraits, declares

def loose(args, sample):
    return float(str(sample.label) in sample.response)

async def strict(args, sample):
    await asyncio.sleep(0)
    return float(sample.response.strip() == sample.label)

class Texts:
    def compute_reward(self, prompts, responses):
        return [float("42" in text) for text in responses]

@declares(RewardTraits(scores_groups=True))
def best(args, samples):
    right = [s.response.strip() == s.label for s in samples]
    return [1.0 / sum(right) if ok else 0.0 for ok in right]

def scores(args, sample):
    return {"score": float(sample.response.strip() == sample.label)}

def stuck(args, sample):
    while sample.response == "":
        pass
    return float(sample.response.strip() == sample.label)
"""


@pytest.mark.parametrize(
    ("name", "more", "status", "passes", "errors"),
    [
        ("loose", (), 1, True, False),
        slow("strict", (), 0, False, False),
        slow("Texts", (), 1, False, False),
        ("best", (), 0, False, False),
        slow("scores", ("--reward-key", "score"), 0, False, False),
        slow("scores", (), 1, False, True),
        ("stuck", ("--rm-timeout", "0.2"), 1, False, True),
    ],
)
def test_every_form_of_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, more: tuple[str, ...], status: int, passes: bool,
    errors: bool,
) -> None:  # fmt: skip
    (tmp_path / "my_graders.py").write_text(GRADERS)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input": "6*7?", "label": "42"}\n{"input": "Capital?", "label": "Paris"}\n')
    spec = f"{tmp_path / 'my_graders.py'}:{name}"
    assert main(["rewards", "attack", spec, "--data", str(rows), "--json", *more]) == status
    report = json.loads(capsys.readouterr().out)
    assert bool(report["false_passes"]) is (passes or name == "Texts")
    assert bool(report["errors"]) is errors


def test_without_rows_it_makes_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewards", "attack", "exact"]) == 0
    assert "0 false passes, 0 false fails, 0 raised" in capsys.readouterr().out
    assert main(["rewards", "attack", "random"]) == 1  # it reads no answers, and says so
    assert "no form of the right answer" in capsys.readouterr().out


def test_what_cannot_be_attacked_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["rewards", "attack", "no_such_reward"]) == 2
    assert "no_such_reward" in capsys.readouterr().err
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input": "6*7?"}\n')
    assert main(["rewards", "attack", "exact", "--data", str(rows)]) == 1
    assert "none of the rows read has a label" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact", "math", "f1", "dapo", "deepscaler", "gpqa", "boxed_f1", "boxed_exact"])
def test_our_own_pay_no_wrong_answer(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["rewards", "attack", name, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["false_passes"] == []
    assert report["errors"] == []
