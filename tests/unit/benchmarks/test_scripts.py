"""Every benchmark script runs at a tiny size and prints its table and ratios; what they measure is not judged here."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def _run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """In a fresh interpreter."""
    command = [sys.executable, str(BENCHMARKS / script), *words, "--busy-anyway"]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=BENCHMARKS.parent)


TINY = {
    "overhead.py --sizes 80 --calls 200 --repeats 1": ["hook, 4 listener(s)", "sync,", "full,"],
    "rollout_overhead.py --groups 20 --repeats 1 --rm-timeout 0.5 --rm-workers 2 --concurrency 16": [
        *(f"stage, {kind}" for kind in ("async", "inline", "thread", "process")),
        "least possible, by waiting alone: async 0.50 s", "client of vLLM",
    ],
    "agents.py --samples 16 --repeats 1": [
        f"{kind}, {side}" for kind in ("single_turn", "tool_use", "multi_turn", "agent") for side in ("bare", "slime")
    ],
    "buffer.py --groups 130 --state-groups 20 --group-size 2": ["fifo", "function", "priority", "stratified", "replay"],
    "weight_sync.py --millions 0.5 --repeat 1": ["embedded"],
    "engines.py --engine-python= --concurrency 1 4 --tokens 4 --repeat 1": [
        "SGLang is left out", "embedded", "log-prob gap",
    ],
    "watching.py --rounds 1 --rollouts 3 --most 9": ["invariants", "kept", "both"],
    "end_to_end.py --only slime --prompts 2 --group-size 4 --new-tokens 4 --rollouts 1 --repeats 1 --micro-batch 8": [
        "8 samples (2 prompts x 4) of 4 new tokens", "bound: matrix products alone",
    ],
    "startup.py --repeats 1": ["command to first rollout:", "slime config show", "engine started, first rollout"],
    "trainers.py --quick --sides 'hf sdpa, padded' embedded 'megatron, 1 rank' 'megatron, TP2'": [
        "hf sdpa, padded", "embedded", "megatron, 1 rank", "megatron, TP2", "best hf: hf sdpa, padded",
    ],
}  # fmt: skip
"""Command of a script at a tiny size -> words of its table."""


@pytest.mark.slow
@pytest.mark.parametrize("words", TINY)
def test_a_script_runs_and_prints_its_table(words: str) -> None:
    done = _run(*shlex.split(words))
    assert done.returncode == 0, done.stderr
    assert [said for said in TINY[words] if said not in done.stdout] == []


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
@pytest.mark.parametrize("script", sorted(path.name for path in BENCHMARKS.glob("[a-z]*.py")))
def test_every_script_starts(script: str) -> None:
    done = _run(script, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


def test_end_to_end_says_how_to_get_trl() -> None:
    if importlib.util.find_spec("trl"):
        pytest.skip("trl is installed here")
    done = _run("end_to_end.py", "--trl-python", sys.executable)
    assert done.returncode != 0
    assert "pip install trl" in done.stderr
    assert "--trl-python" in done.stderr
