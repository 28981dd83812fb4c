"""Fails unless the demo learned: `check_demo.py outputs/demo/summary.json`."""

import json
import sys
from pathlib import Path

summary = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
before, after, seconds = summary["eval_before"], summary["eval_after"], summary["wall_seconds"]
problems = []
if not before <= 0.4:
    problems.append(f"held-out accuracy before training is {before}, expected at most 0.4")
if not after >= 0.9:
    problems.append(f"held-out accuracy after training is {after}, expected at least 0.9")
if not {"slime-rl-core", "slime-rl"} <= summary["versions"].keys() or not summary["plugins"]:
    problems.append("versions of core and plugins are missing")
print(f"demo: {before} -> {after} in {seconds} s")
sys.exit("\n".join(problems) or 0)
