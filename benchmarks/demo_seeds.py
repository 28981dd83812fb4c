"""Run the demo over several seeds, and the control: the same run with random rewards, which must not learn.

    python benchmarks/demo_seeds.py [--seeds 0 1 2 3 4] [--flags "--num-threads 2"]

Prints held-out accuracy before and after, and wall time, per seed. Exits with 1 when the demo misses its thresholds
(at most 0.4 before, at least 0.9 after) or a control comes out above 0.4.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEMO = str(ROOT / "plugins/commands/slime_commands/init/templates/demo.yaml")
SLIME = str(Path(sys.executable).with_name("slime"))

RANDOM_REWARD = '''
import hashlib


def reward(args, sample, **kwargs):
    """A coin that depends on the sample alone."""
    return float(hashlib.blake2b(f"{args.seed} {sample.index}".encode()).digest()[0] & 1)
'''


def run(root: Path, seed: int, control: bool, flags: list[str]) -> dict:
    """Train in a separate directory and return the run's summary."""
    inputs = root / f"seed-{seed}"
    save = inputs / ("control" if control else "run")
    evals = inputs / "eval.yaml"
    held_out = inputs / "heldout.jsonl"
    inputs.mkdir(exist_ok=True)
    # The recipe writes the held-out problems it finds in --eval-prompt-data, so the first run names them there.
    argv = [
        SLIME,
        "train",
        "--config",
        DEMO,
        "--seed",
        str(seed),
        "--save",
        str(save),
    ]
    argv += ["--prepare-path", "addition"]  # as a flag, it makes the files that other flags name
    argv += ["--hf-checkpoint", str(inputs / "model"), "--prompt-data", str(inputs / "train.jsonl")]
    argv += ["--rollout-seed", str(seed), "--eval-prompt-data", "addition", str(held_out), *flags]
    if control:
        (root / "random_reward.py").write_text(RANDOM_REWARD)
        evals.write_text(f"eval:\n  datasets:\n    - {{name: addition, path: {held_out}, custom_rm_path: exact}}\n")
        at = argv.index("--eval-prompt-data")
        del argv[at : at + 3]
        argv += ["--eval-config", str(evals), "--custom-rm-path", str(root / "random_reward.py")]
        argv += ["--config", str(_without_eval_data(root))]
    subprocess.run(argv, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return json.loads((save / "summary.json").read_text())


def _without_eval_data(root: Path) -> Path:
    path = root / "no_eval_data.yaml"
    path.write_text("eval_prompt_data: null\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--flags", default="", help="further flags of slime train, as one string")
    parser.add_argument("--no-control", action="store_true")
    options = parser.parse_args()
    flags, missed = shlex.split(options.flags), False
    print("seed  before  after  wall s  control after")
    with tempfile.TemporaryDirectory() as directory:
        for seed in options.seeds:
            done = run(Path(directory), seed, False, flags)
            before, after, wall = done["eval_before"], done["eval_after"], done["wall_seconds"]
            control = None if options.no_control else run(Path(directory), seed, True, flags)["eval_after"]
            shown = "-" if control is None else f"{control:.3f}"
            print(f"{seed:4}  {before:6.3f}  {after:5.3f}  {wall:6.1f}  {shown:>13}", flush=True)
            missed |= before > 0.4 or after < 0.9 or (control is not None and control > 0.4)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
