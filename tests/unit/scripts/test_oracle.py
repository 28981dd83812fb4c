"""`scripts/oracle.py`: what it says of two sides' facts; and, slow, that it finds a planted change and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).parents[3]


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script(ROOT / "scripts" / "oracle.py")


def _sides(oracle: ModuleType, tmp_path: Path) -> list[object]:
    return [oracle.Side(name, tmp_path / name, tmp_path / "env/bin/python", tmp_path) for name in ("base", "head")]


def test_the_first_line_that_differs_is_named(oracle: ModuleType) -> None:
    base = {"weights": "aa", "metrics loss": "step 1: 0.5\nstep 2: 0.25", "full seed 7": "drawn\ntaken", "gone": "x"}
    head = {"weights": "aa", "metrics loss": "step 1: 0.5\nstep 2: 0.26", "full seed 7": "drawn", "new": "x"}
    assert oracle.differences(base, head) == [
        "metrics loss: line 2: step 2: 0.25 | step 2: 0.26",
        "full seed 7: line 2: taken | (ended)",
        "gone: base only",
        "new: head only",
    ]
    assert oracle.differences(base, dict(base)) == []


def test_names_of_a_message_are_compared_and_its_words_are_not(oracle: ModuleType) -> None:
    before = (
        "slime: starting for 3 s: loading code, 2 s\n"
        "slime: error: --kl-coef 0.1 (run.yaml:14) and --kl-loss-coef '-1e-3' (flag): the model's <work>/m.py has none."
        " Type: pip install 'slime-rl[ray]'"
    )
    after = "error: `-1e-3` for --kl-loss-coef at run.yaml:14, with --kl-coef 0.1; 'slime-rl[ray]' and <work>/m.py"
    assert oracle.cited(before) == oracle.cited(after)
    assert {"--kl-coef", "0.1", "run.yaml:14", "-1e-3", "<work>/m.py", "slime-rl[ray]"} <= oracle.cited(before)
    assert oracle.cited(after.replace("--kl-coef", "--kl-cost")) != oracle.cited(after)


def test_of_a_run_everything_but_times_is_a_fact(oracle: ModuleType, tmp_path: Path) -> None:
    for name in ("rollout_0000000", "rollout_0000001", "ledger"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "model.safetensors").write_bytes(name.encode())
    (tmp_path / "checkpoints/ledger/0000001-ab.jsonl").write_text('{"header":1}\n{"event":"drawn"}\n')
    lines = [{"step": n, "train/loss": n / 3, "perf/rollout_time": n, "rollout/tools/x/seconds": n} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = oracle.of_run(tmp_path)
    assert list(facts) == ["weights model.safetensors", "metrics train/loss", "ledger"]
    assert facts["metrics train/loss"] == f"step 1: {1 / 3!r}\nstep 2: {2 / 3!r}"
    assert facts["ledger"] == '{"event":"drawn"}'
    (tmp_path / "checkpoints/rollout_0000000/model.safetensors").write_bytes(b"other")
    assert oracle.of_run(tmp_path) == facts
    (tmp_path / "checkpoints/rollout_0000001/model.safetensors").write_bytes(b"other")
    assert oracle.different(oracle.of_run(tmp_path), facts) == ["weights model.safetensors"]


def test_what_a_side_does_not_repeat_is_said_and_not_counted(
    oracle: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = iter(range(9))

    def facts(side: object) -> tuple[dict[str, str], float]:
        return {"steady": "1", "timed": str(next(runs))}, 2.0

    assert oracle.compare(oracle.Case("case", facts), _sides(oracle, tmp_path)) == []
    assert "in two runs of one side, so not compared: timed" in capsys.readouterr().out

    def changed(side: object) -> tuple[dict[str, str], float]:
        return {"steady": side.name, "timed": str(next(runs))}, 3.0 if side.name == "head" else 2.0  # type: ignore[attr-defined]

    found = oracle.compare(oracle.Case("case", changed), _sides(oracle, tmp_path))
    assert found == ["steady: base | head"]
    assert "processor time 2.0 s base, 3.0 s head: 1.50" in capsys.readouterr().out


def test_a_case_that_fails_on_both_sides_is_no_agreement(oracle: ModuleType, tmp_path: Path) -> None:
    case = oracle.Case("case", lambda side: ({oracle.FAILED: "exit 1"}, 1.0))
    assert oracle.compare(case, _sides(oracle, tmp_path)) == ["base failed: exit 1", "head failed: exit 1"]


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """The tracked files of this checkout as a repository of one commit, installed nowhere yet."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for argv in (["init", "-q"], ["add", "-f", "."], ["commit", "-qm", "base"]):
        subprocess.run([*git, *argv], cwd=tmp_path, check=True)
    yield tmp_path
    shutil.rmtree(tmp_path / "outputs", ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(900)  # two installations
def test_a_planted_change_is_found_and_nothing_else(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    oracle = load_script(clone / "scripts" / "oracle.py")
    monkeypatch.setattr(oracle, "SEEDS", 3)
    argv = ["HEAD", "--case", "simulation"]
    assert oracle.main(argv) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.splitlines()[-1] == "nothing differs"
    ledger = clone / "slime_core" / "data" / "ledger.py"
    text = ledger.read_text()
    assert '"groups": len(parts)}' in text
    ledger.write_text(text.replace('"groups": len(parts)}', '"groups": len(parts) + 1}'))
    assert oracle.main(argv) == 1
    found = capsys.readouterr().out.splitlines()
    assert "simulation   9 DIFFER       9 facts" in found[0]
    assert '"groups":2} | {"event":"rollout","rollout":0,"groups":3}' in "".join(found)
