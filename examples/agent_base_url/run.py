"""Train a tiny random model through an agent program that knows only a base URL; print its score before and after.

    python examples/agent_base_url/run.py RUN_DIR                   # a few minutes on two cores
    python examples/agent_base_url/run.py RUN_DIR --client anthropic --num-rollout 4

What follows RUN_DIR and `--client` goes to `slime train`. Nothing in `agent.py` knows of slime. It is given to the
sandbox as it is, asks twice, and what its answers are worth is decided by `check.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from slime_commands.init.tiny_model import write_random_model

from slime_core.cli.main import main as slime

HERE = Path(__file__).resolve().parent
PROMPTS = [f"Write digits, task {n}." for n in range(32)]


def arguments(folder: Path, client: str) -> list[str]:
    """The command line of the run; model and rows are written first."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, evaluated = folder / "train.jsonl", folder / "eval.jsonl"
    rows.write_text("".join(json.dumps({"input": p}) + "\n" for p in PROMPTS[:24]), encoding="utf-8")
    evaluated.write_text("".join(json.dumps({"input": p}) + "\n" for p in PROMPTS[24:]), encoding="utf-8")
    if not (folder / "model").exists():
        write_random_model(folder / "model", seed=0)
    options = {
        "command": "python3 agent.py",
        "files": {"agent.py": str(HERE / "agent.py")},
        "env": {"AGENT_CLIENT": client},
        "test_command": "python3 check.py",
        "test_files": {"check.py": str(HERE / "check.py")},
        "reward": "printed",
        "timeout": 120.0,
    }
    flags = {
        "--hf-checkpoint": folder / "model",
        "--prompt-data": rows,
        "--input-key": "input",
        "--custom-generate-function-path": "agent",
        "--rollout-batch-size": 4,
        "--n-samples-per-prompt": 4,
        "--num-steps-per-rollout": 1,
        "--rollout-max-response-len": 56,
        "--num-rollout": 12,
        "--lr": 3e-3,
        "--lr-decay-style": "constant",
        "--save": folder / "run",
    }
    argv = ["train", *(str(item) for pair in flags.items() for item in pair)]
    argv += [
        "--eval-prompt-data",
        "digits",
        str(evaluated),
        "--eval-interval",
        "12",
        "--n-samples-per-eval-prompt",
        "2",
    ]
    return [*argv, *(f"--set=plugins.agent.{name}={json.dumps(value)}" for name, value in options.items())]


def scores(run_dir: Path) -> list[float]:
    """`eval/digits` of each evaluation, the one before training first."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["eval/digits"] for line in map(json.loads, lines) if "eval/digits" in line]


def run(argv: list[str]) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--client", choices=["openai", "anthropic"], default="openai")
    own, further = parser.parse_known_args(argv)
    status = slime([*arguments(own.run_dir, own.client), *further])
    if status == 0:
        found = scores(own.run_dir / "run")
        print(f"share of digits in the agent's answers: {found[0]:.3f} before, {found[-1]:.3f} after")
    return int(status or 0)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
