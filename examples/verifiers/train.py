"""Train a tiny random model in an environment of the verifiers package; print its score before and after.

    python examples/verifiers/train.py RUN_DIR                   # a minute or two on two cores

What follows RUN_DIR goes to `slime train`. The environment is a package like any other of verifiers, found by its name;
`pip install -e examples/verifiers` installs it, and without that this script puts its folder on the path.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from slime_commands.init.tiny_model import write_random_model

from slime_core.cli.main import main as slime

HERE = Path(__file__).resolve().parent


def arguments(folder: Path) -> list[str]:
    """The command line of the run; the model is written first."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    if not (folder / "model").exists():
        write_random_model(folder / "model", seed=0)
    options = {
        "env": "digit-echo",
        "select": {"include": {"idx": ["0:40"]}},
        "eval_select": {"include": {"idx": ["40:48"]}},
        "timeout": 300.0,
    }
    flags = {
        "--hf-checkpoint": folder / "model",
        "--data-source-path": "verifiers",
        "--custom-generate-function-path": "verifiers",
        "--prepare-path": "verifiers",
        "--rollout-batch-size": 4,
        "--n-samples-per-prompt": 4,
        "--num-steps-per-rollout": 1,
        "--rollout-max-response-len": 48,
        "--num-rollout": 12,
        "--lr": 3e-3,
        "--lr-decay-style": "constant",
        "--eval-interval": 12,
        "--n-samples-per-eval-prompt": 2,
        "--save": folder / "run",
        "--num-threads": 1,
        "--device": "cpu",
    }
    argv = ["train", *(str(item) for pair in flags.items() for item in pair)]
    argv += ["--eval-prompt-data", "digit_echo", str(folder / "heldout.jsonl")]
    return [*argv, *(f"--set=plugins.verifiers.{name}={json.dumps(value)}" for name, value in options.items())]


def scores(run_dir: Path) -> list[float]:
    """`eval/digit_echo` of each evaluation, the one before training first."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["eval/digit_echo"] for line in map(json.loads, lines) if "eval/digit_echo" in line]


def run(argv: list[str]) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    own, further = parser.parse_known_args(argv)
    status = slime([*arguments(own.run_dir), *further])
    if status == 0:
        found = scores(own.run_dir / "run")
        print(f"share of digits in the answers: {found[0]:.3f} before, {found[-1]:.3f} after")
    return int(status or 0)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
