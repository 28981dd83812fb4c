"""`slime why --learning` prints what a run noticed, and the causes that its metrics support."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from slime_runs import Run
from slime_runs.inspect.learning import examine_run

from tests.zoo.bugs import BUGS

RECORDED = json.loads(Path(__file__).with_name("broken_runs.json").read_text(encoding="utf-8"))
"""Name -> metrics, incidents and settings of a run of the demo (12 rollouts), or `real-`: of SmolLM2-135M-Instruct on
short sentences (6 rollouts)."""
CONSTANT = "def reward(args, sample):\n    return 1.0\n"
RANDOM = "import random\n\n\ndef reward(args, sample):\n    return float(random.random() < 0.5)\n"
BREAKS: dict[str, tuple[str, str]] = {
    "lr1e-8": ("--lr 1e-8", "  learning rate too small: at 1e-08 "),
    "lr01": ("--lr 0.01", "  learning rate too large: at 0.01 "),
    "kl100": ("--kl-loss-coef 100", "  KL holds the policy: --kl-loss-coef 100 "),
    "len4": ("--rollout-max-response-len 4", "  truncation: "),
    "temp4": ("--rollout-temperature 4", "  temperature: at --rollout-temperature 4 answers are noise"),
    "label": ("--label-key input", "  no variance in groups: 100% of them"),
    "const": ("--custom-rm-path const.py", "  no variance in groups: 100% of them"),
    "noise": ("--custom-rm-path noise.py", "  the metrics support none of the usual causes; see the lines above"),
}
"""Name -> flags of the demo, and the first cause that is to be named."""
REAL = {
    "real-lr1e-6": "  learning rate too small: at 1e-06 ",
    "real-lr1e-3": "  learning rate too large: at 0.001 ",
    "real-kl100": "  KL holds the policy: --kl-loss-coef 100 ",
}


def replayed(name: str, folder: Path) -> Run:
    """A run directory with what was recorded, and a model that has nothing but its size."""
    found, model = RECORDED[name], folder / "model"
    model.mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [found["parameters"]], "data_offsets": [0, 0]}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    settings = {**found["settings"], "hf_checkpoint": str(model)}
    (folder / "config.yaml").write_text("".join(f"{n}: {json.dumps(v)}  # flag\n" for n, v in settings.items()))
    columns, values = found["metrics"].keys(), zip(*found["metrics"].values(), strict=True)
    rows = [{"step": step, **dict(zip(columns, row))} for step, row in enumerate(values, 1)]
    for file, lines in (("metrics", rows), ("incidents", found["incidents"])):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run(folder)


@pytest.mark.parametrize(("name", "said"), [*((n, said) for n, (_, said) in BREAKS.items()), *REAL.items()])
def test_it_names_what_a_run_was_broken_by(name: str, said: str, tmp_path: Path) -> None:
    """First of all, and the learning rate or KL in no run that something else broke."""
    lines = examine_run(replayed(name, tmp_path))[0].splitlines()
    causes = [line for line in lines if line.startswith("  ")]
    assert causes[0].startswith(said), lines
    for word in ("learning rate too", "KL holds"):
        assert (word in "".join(causes)) == (word in said), lines


def test_a_run_that_learns_has_no_cause(tmp_path: Path) -> None:
    lines = examine_run(replayed("demo", tmp_path))[0].splitlines()
    assert lines[0] == "no invariant was broken"
    assert lines[1].endswith(": it rises")
    assert len(lines) == 2


def test_a_still_tensor_is_no_bug_at_a_rate_near_zero(tmp_path: Path) -> None:
    assert RECORDED["lr1e-8"]["incidents"], "the invariants noticed that norms stand still"
    assert "a trained tensor never moves" not in examine_run(replayed("lr1e-8", tmp_path))[0]


@pytest.fixture(scope="module")
def demo(slime: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's run file and inputs."""
    folder = tmp_path_factory.mktemp("demo")
    slime("init", "demo", folder / "demo.yaml")
    (folder / "const.py").write_text(CONSTANT)
    (folder / "noise.py").write_text(RANDOM)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_it_names_how_the_demo_was_broken(name: str, demo: Path, slime: Any) -> None:
    """As recorded, of a run that is made now; samples are there too, so that the label's column is named."""
    flags, said = BREAKS[name]
    words = [str(demo / word) if word.endswith(".py") else word for word in flags.split()]
    run = demo / name
    own = ["--num-rollout", "12", "--no-preflight", "--save", run, "--skip-eval-before-train", "--eval-interval", "100"]
    slime("train", "--config", demo / "demo.yaml", *own, *words)
    lines = examine_run(Run(run))[0].splitlines()
    causes = [line for line in lines if line.startswith("  ")]
    assert causes[0].startswith(said), lines
    more = {
        "label": "the labels stand in the prompts: is --label-key 'input' the answer's column?",
        "const": "the grader gives the same mean 1 every time",
        "noise": "the grader is random",
    }
    assert more.get(name, "") in "\n".join(lines), lines


@pytest.mark.slow
def test_it_names_the_planted_cause(run_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = next(bug for bug in BUGS if bug.name == "always_right")
    bug.plant(monkeypatch)
    text = examine_run(Run(run_loop(steps=bug.after, **bug.settings).run_dir))[0]
    assert "[samples_carry_gradient]" in text
    assert "no variance in groups" in text
    assert "the grader gives the same mean 1 every time" in text


def test_it_says_that_nothing_was_noticed(run_loop: Any) -> None:
    text = examine_run(Run(run_loop(steps=2).run_dir))[0]
    assert text.startswith("no invariant was broken\nreward ")


@pytest.mark.slow
def test_why_learning_names_what_is_wrong_with_a_run(
    run_loop: Any, slime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted cause; then damage, with what to type; a sound run has neither."""
    sound = slime("why", "--learning", run_loop(steps=2).run_dir)
    assert sound.stdout.startswith("no invariant was broken")
    bug = next(bug for bug in BUGS if bug.name == "always_right")
    bug.plant(monkeypatch)
    run_dir = run_loop(steps=bug.after, **bug.settings).run_dir
    done = slime("why", "--learning", run_dir, check=False)
    assert done.returncode == 1
    assert "[samples_carry_gradient]" in done.stdout
    found = json.loads(slime("why", "--learning", run_dir, "--json", check=False).stdout)
    assert (found["wrong"], found["lines"]) == (True, done.stdout.splitlines())
    state = max((run_dir / "checkpoints").glob("rollout_*")) / "state.json"
    state.write_text(state.read_text().replace("0", "1"))
    done = slime("why", "--learning", run_dir, check=False)
    assert f"torn: {state.name}" in done.stdout
    assert done.returncode == 1
    missing = slime("why", "--learning", run_dir / "nowhere", check=False)
    assert (missing.returncode, "no such directory" in missing.stderr) == (2, True)
