"""`slime eval` over several data sets, environments and generators at once; killed, and gone on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime_core.rollout.eval_record import read_groups
from tests.conftest import TinyRun

SLIME = [str(Path(sys.executable).with_name("slime"))]
HELD = '''
import asyncio, os
from pathlib import Path
from slime_core import resolve

GO = Path(os.environ["GO"])

async def generate(args, sample, sampling_params, *, context):
    """single_turn, but from the fourth prompt on only once a file is there."""
    if sample.group_index >= 3:
        while not GO.exists():
            await asyncio.sleep(0.02)
    return await resolve("generators", "single_turn").obj(args, sample, sampling_params, context=context)
'''
WORLD = '''
from slime_core import Step

class Environment:
    """Two steps, of which the second is worth a point."""

    def __init__(self, args):
        self.steps = 0

    def reset(self, sample):
        return None

    def step(self, action):
        self.steps += 1
        return Step("go on", reward=float(self.steps == 2), done=self.steps == 2)

    def close(self):
        pass
'''


def flags(tiny: TinyRun, run: Path, config: Path, **more: Any) -> list[str]:
    given = {
        "hf-checkpoint": tiny.root / "model", "eval-config": config, "input-key": "input", "label-key": "label",
        "apply-chat-template": None, "rm-type": "exact", "eval-max-response-len": 8, "run-dir": run,
        "num-threads": 1, "rm-workers": 1, **more,
    }  # fmt: skip
    words = []
    for name, value in given.items():
        words += [f"--{name}", *([] if value is None else [str(value)])]
    return words


def write(path: Path, datasets: list[dict[str, Any]]) -> Path:
    path.write_text(yaml.safe_dump({"eval": {"datasets": datasets}}))
    return path


def test_data_sets_environments_and_samplers_at_once(tiny: TinyRun, tmp_path: Path, slime) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    held = str(tiny.root / "eval.jsonl")
    config = write(
        tmp_path / "evals.yaml",
        [
            {"name": "plain", "path": held, "n_samples_per_eval_prompt": 3, "sampling_params": {"min_p": 0.01}},
            {"name": "greedy", "path": f"{held}@[:4]", "temperature": 0, "max_response_len": 4},
            {"name": "world", "path": f"{held}@[:2]", "custom_generate_function_path": "multi_turn",
             "apply_chat_template": False, "input_key": "text",
             "environment_path": str(tmp_path / "world.py"), "max_response_len": 40,
             "plugins": {"multi_turn": {"max_turn_tokens": 4, "reward": "sum"}}},
            {"name": "best", "path": f"{held}@[:2]", "custom_generate_function_path": "best_of_n",
             "plugins": {"best_of_n": {"n": 3}}},
            {"name": "vote", "path": f"{held}@[:2]", "custom_generate_function_path": "self_consistency",
             "n_samples_per_eval_prompt": 2, "ks": [2], "plugins": {"self_consistency": {"n": 4}}},
        ],
    )  # fmt: skip
    rows = [json.loads(line) for line in Path(held).read_text().splitlines()]
    (tmp_path / "world.jsonl").write_text("".join(json.dumps({**r, "text": "1+1="}) + "\n" for r in rows))
    loaded = yaml.safe_load(config.read_text())
    loaded["eval"]["datasets"][2]["path"] = f"{tmp_path / 'world.jsonl'}@[:2]"
    config.write_text(yaml.safe_dump(loaded))
    done = slime("eval", *flags(tiny, tmp_path / "run", config))
    report = json.loads((tmp_path / "run" / "eval.json").read_text())
    sets = report["datasets"]
    assert list(sets) == ["plain", "greedy", "world", "best", "vote"]
    assert [(s["prompts"], s["samples_per_prompt"]) for s in sets.values()] == [(8, 3), (4, 1), (2, 1), (2, 1), (2, 2)]
    assert [s["failed"] for s in sets.values()] == [0] * 5
    assert list(sets["plain"]["scores"]) == ["reward", "pass@1", "pass@2", "pass@3", "majority@2", "majority@3"]
    assert list(sets["vote"]["scores"]) == ["reward", "pass@2", "majority@2"]
    assert sets["world"]["scores"]["reward"] == {"value": 1.0, "low": pytest.approx(0.3424, abs=1e-4), "high": 1.0,
                                                 "method": "wilson"}  # fmt: skip
    assert {p["name"] for p in report["plugins"]} >= {"best_of_n", "self_consistency", "multi_turn", "single_turn"}
    assert report["model"]["files"]["model.safetensors"]["size"] > 0
    assert "majority@3" in done.stdout
    assert "95% interval" in done.stdout
    best = list(read_groups(tmp_path / "run/eval/best.jsonl")[0].values())
    assert [len(s.metadata["best_of_n"]["rewards"]) for g in best for s in g] == [3, 3]
    votes = [
        s.metadata["self_consistency"] for g in read_groups(tmp_path / "run/eval/vote.jsonl")[0].values() for s in g
    ]
    assert [v["n"] for v in votes] == [4] * 4


def groups_in(path: Path) -> int:
    return len(read_groups(path)[0]) if path.exists() else 0


def killed(argv: list[str], run: Path, groups: int, env: dict[str, str]) -> None:
    """SIGKILL the command once so many groups are on disk."""
    process = subprocess.Popen([*SLIME, *argv], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        while groups_in(run / "eval" / "held.jsonl") < groups:
            assert process.poll() is None, process.stderr.read().decode()[-3000:]
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()


def test_killed_and_resumed_is_as_never_killed(tiny: TinyRun, tmp_path: Path, slime) -> None:
    (tmp_path / "held.py").write_text(HELD)
    data = {"path": str(tiny.root / "eval.jsonl"), "custom_generate_function_path": str(tmp_path / "held.py")}
    config = write(tmp_path / "evals.yaml", [{"name": "held", **data, "n_samples_per_eval_prompt": 2}])
    two = {"sglang-server-concurrency": 2}
    env = {**os.environ, "GO": str(tmp_path / "go"), "OMP_NUM_THREADS": "1"}
    run = tmp_path / "run"
    killed(["eval", *flags(tiny, run, config, **two)], run, 3, env)
    kept = groups_in(run / "eval" / "held.jsonl")
    assert kept == 3
    refused = slime("eval", *flags(tiny, run, config, **two), check=False, GO=env["GO"])
    assert refused.returncode == 2
    assert f"Go on with it: slime eval --resume {run}" in refused.stderr
    (tmp_path / "go").touch()
    other = slime("eval", "--resume", run, "--rollout-seed", 3, check=False, GO=env["GO"])
    assert "rollout_seed 42 -> 3" in other.stderr
    resumed = slime("eval", "--resume", run, GO=env["GO"])
    assert f"resumed from {run}: 3 prompts are done" in resumed.stdout
    whole = tmp_path / "whole"
    slime("eval", *flags(tiny, whole, config, **two), GO=env["GO"])
    assert (run / "eval/held.jsonl").read_bytes() == (whole / "eval/held.jsonl").read_bytes()
    reports = [json.loads((place / "eval.json").read_text()) for place in (run, whole)]
    assert [r["resumed"] for r in reports] == [{"prompts_kept": n, "prompts": 8} for n in (3, 0)]
    assert reports[0]["datasets"] == reports[1]["datasets"]
    assert reports[0]["metrics"] == reports[1]["metrics"]
    again = slime("eval", "--resume", run, GO=env["GO"])
    assert "8 prompts are done" in again.stdout
    assert (run / "eval/held.jsonl").read_bytes() == (whole / "eval/held.jsonl").read_bytes()


def test_what_cannot_be_resumed_or_trained_is_refused(tiny: TinyRun, tmp_path: Path, slime) -> None:
    done = slime("eval", "--resume", tmp_path, check=False)
    assert f"--resume {tmp_path}: no evaluation to go on with" in done.stderr
    done = slime("train", *tiny.argv(tmp_path / "run", resume=tmp_path), check=False)
    assert "is for slime eval; slime train goes on with --load RUN" in done.stderr
    done = slime("train", *tiny.argv(tmp_path / "run", custom_generate_function_path="best_of_n"), check=False)
    assert "best_of_n is for evaluation" in done.stderr
    held = str(tiny.root / "eval.jsonl")
    config = write(tmp_path / "e.yaml", [{"name": "a", "path": held, "n_samples_per_eval_prompt": 2, "ks": [4]}])
    done = slime("eval", *flags(tiny, tmp_path / "e", config), check=False)
    assert "k = 4 of 2 samples per prompt" in done.stderr


def test_training_logs_the_same_scores(tiny: TinyRun, tmp_path: Path, slime) -> None:
    config = write(tmp_path / "e.yaml", [{"name": "held", "path": str(tiny.root / "eval.jsonl"), "rm_type": "exact",
                                          "n_samples_per_eval_prompt": 3, "temperature": 1.0}])  # fmt: skip
    run = tmp_path / "run"
    slime("train", *tiny.argv(run, eval_prompt_data=None, eval_config=config, num_rollout=1, eval_interval=1))
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert {k for k in first if "@" in k} == {
        f"eval/held-{k}" for k in ("pass@1", "pass@2", "pass@3", "majority@2", "majority@3")
    }
