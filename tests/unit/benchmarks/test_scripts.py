"""Every benchmark script runs at a tiny size and prints its table and ratios; what they measure is not judged here."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Slime

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def run(program: Slime) -> Slime:
    """`run(script, *words)`."""
    return lambda script, *words: program(BENCHMARKS / script, *words, "--busy-anyway", cwd=BENCHMARKS.parent)


def _run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """In a fresh interpreter."""
    command = [sys.executable, str(BENCHMARKS / script), *words, "--busy-anyway"]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=BENCHMARKS.parent)


@pytest.mark.slow
def test_overhead(run: Slime) -> None:
    done = run("overhead.py", "--sizes", "80", "--calls", "200", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("hook, ")] == [
        f"hook, {n} listener(s)" for n in (0, 1, 4)
    ]
    assert [line.split(",")[0] for line in lines if line.endswith("1.00x")] == ["sync", "full"]


@pytest.mark.slow
def test_rollout_overhead(run: Slime) -> None:
    words = ["--groups", "20", "--repeats", "1", "--rm-timeout", "0.5", "--rm-workers", "2", "--concurrency", "16"]
    done = run("rollout_overhead.py", *words)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    kinds = [line.split()[1] for line in lines if line.startswith("stage, ")]
    assert kinds == ["async", "inline", "thread", "process", "inline", "async", "thread", "process"]
    assert all(line.endswith("x") for line in lines if line.startswith("stage, "))
    assert "least possible, by waiting alone: async 0.50 s" in done.stdout


@pytest.mark.slow
def test_agents(run: Slime) -> None:
    done = run("agents.py", "--samples", "16", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    names = [line.split("  ")[0] for line in done.stdout.splitlines()]
    kinds = ["single_turn", "tool_use", "multi_turn", "agent"]
    assert [name for name in names if name in kinds] == kinds
    assert [name for name in names if name.endswith((", bare", ", slime"))] == [
        f"{kind}, {side}" for kind in kinds for side in ("bare", "slime")
    ]


def test_a_kernel_that_a_gpu_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["accelerator.py", "--busy-anyway"])
    accelerator = importlib.import_module("accelerator")
    monkeypatch.setattr(accelerator.torch.cuda, "is_available", lambda: False)
    assert accelerator.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("missing: device: torch ")
    monkeypatch.setitem(accelerator.NEEDED, "device", lambda: "one")
    wrong = accelerator.torch.ones(2)
    for name in ("bfloat16", "attention"):
        monkeypatch.setitem(accelerator.NEEDED, name, lambda: accelerator.agrees(wrong, wrong * float("nan")))
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--without", "megatron"])
    assert accelerator.main() == 1
    found = capsys.readouterr()
    assert [line.split(":")[1].strip() for line in found.err.splitlines()] == ["bfloat16", "attention", "nccl"]
    assert "device  " in found.out


def _overlap(monkeypatch: pytest.MonkeyPatch, words: str) -> int:
    """`async_overlap.py` in this process, under the virtual clock; its exit status."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["async_overlap.py", "--virtual", *words.split()])
    return int(importlib.import_module("async_overlap").main())


@pytest.mark.slow
def test_async_overlap(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _overlap(monkeypatch, "--rho 0.5 --rollouts 10 --modes one-step") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("  ")[0] for line in lines if " 20 + 10 " in line or "30, in turns" in line]
    assert rows == ["sync", "one-step", "full"]
    (found,) = [line for line in lines if line.startswith("full / closed form: ")]
    ratio = float(found.split(": ")[1].split(";")[0])
    assert found.endswith("; responses came 0.0% of their time late")
    assert ratio == pytest.approx(1, abs=0.06)  # nothing but the schedule: below 1 by what full idles


def test_async_overlap_says_when_it_is_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One group a rollout cannot keep two sides busy."""
    assert _overlap(monkeypatch, "--rho 1 --workers 2 --per-worker 2 --rollouts 6 --modes full") == 1
    assert "off the closed form; 10% is allowed" in capsys.readouterr().err


@pytest.mark.slow
def test_buffer(run: Slime) -> None:
    done = run("buffer.py", "--groups", "130", "--state-groups", "20", "--group-size", "2")
    assert done.returncode == 0, done.stderr
    sides = ("deque of dicts", "list of dicts", "fifo", "function", "priority", "stratified", "replay", "curriculum")
    lines = [line for line in done.stdout.splitlines() if line.endswith("x")]
    assert [line.split("  ")[0].split(" (")[0] for line in lines] == list(sides)


@pytest.mark.slow
def test_weight_sync(run: Slime) -> None:
    done = run("weight_sync.py", "--millions", "0.5", "--repeat", "1")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("embedded")]
    assert [row[1] for row in rows] == ["tensor", "disk"]
    assert all(float(row[-1]) > 0 for row in rows)


@pytest.mark.slow
def test_engines_without_sglang(run: Slime) -> None:
    done = run("engines.py", "--engine-python", "", "--concurrency", "1", "4", "--tokens", "4", "--repeat", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("SGLang is left out: name its environment with --engine-python")
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("embedded")]
    assert [(row[1], *row[-2:]) for row in rows] == [("1", "1.00", "1.00"), ("4", "1.00", "1.00")]


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(path.name for path in BENCHMARKS.glob("[a-z]*.py")))
def test_every_script_starts(script: str) -> None:
    done = _run(script, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


@pytest.mark.slow
def test_watching() -> None:
    done = _run("watching.py", "--rounds", "1", "--rollouts", "3", "--most", "9")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "% to " in line]
    assert [row[0] for row in rows] == ["invariants", "kept", "both"]
    assert [row[-3] for row in rows] == ["2"] * 3, "twins"
    assert all(0 < float(row[-2].rstrip("%")) < 50 for row in rows), "of a rollout's time"


def test_end_to_end_says_how_to_get_trl() -> None:
    if importlib.util.find_spec("trl"):
        pytest.skip("trl is installed here")
    done = _run("end_to_end.py", "--trl-python", sys.executable)
    assert done.returncode != 0
    assert "pip install trl" in done.stderr
    assert "--trl-python" in done.stderr


@pytest.mark.slow
def test_end_to_end_of_slime_alone() -> None:
    words = ["--only", "slime", "--prompts", "2", "--group-size", "4", "--new-tokens", "4", "--rollouts", "1"]
    done = _run("end_to_end.py", *words, "--repeats", "1", "--micro-batch", "8")
    assert done.returncode == 0, done.stderr
    assert "8 samples (2 prompts x 4) of 4 new tokens" in done.stdout
    assert "bound: matrix products alone" in done.stdout


@pytest.mark.slow
def test_startup() -> None:
    done = _run("startup.py", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    assert "command to first rollout:" in done.stdout
    assert "slime config show" in done.stdout
    assert "engine started, first rollout" in done.stdout


@pytest.mark.slow
def test_trainers() -> None:
    names = ["hf sdpa, padded", "embedded", "megatron, 1 rank", "megatron, TP2"]
    done = _run("trainers.py", "--quick", "--sides", *names)
    assert done.returncode == 0, done.stderr
    rows = [line.split("  ")[0] for line in done.stdout.splitlines() if line.startswith(("hf", "embedded", "megatron"))]
    assert rows == [*names, *names[1:]]
    assert "best hf: hf sdpa, padded" in done.stdout
