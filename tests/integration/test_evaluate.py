"""`slime eval` over several data sets, environments and generators at once; killed, and gone on with."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from slime_commands.eval.record import read_groups

from tests.conftest import TinyRun

HELD = '''
import asyncio, os, signal
from pathlib import Path
from slime_core import resolve
from slime_commands.eval.record import read_groups

async def generate(args, sample, sampling_params, *, context):
    """single_turn; once END_AFTER prompts are on disk, the process gets the signal END."""
    if "END" in os.environ and sample.group_index >= int(os.environ["END_AFTER"]):
        record = Path(args.run_dir, "eval/held.jsonl")
        while not record.exists() or len(read_groups(record)[0]) < int(os.environ["END_AFTER"]):
            await asyncio.sleep(0.01)
        if "END" in os.environ:
            os.kill(os.getpid(), signal.Signals[os.environ.pop("END")])
        await asyncio.Event().wait()
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

WORTH = '''
from slime_core import PluginOptions, options

class Options(PluginOptions):
    points: float = 1.0
    """What every response gets."""

def reward(args, sample):
    return options(args, "worth", Options).points
'''
AGENT = '''
import openai

async def program(args, sample, *, base_url, api_key, sandbox):
    """A question, one more about the answer, and a conversation beside it; every second sample is right."""
    async with openai.AsyncOpenAI(base_url=base_url + "/v1", api_key=api_key) as client:
        async def ask(*messages):
            answer = await client.chat.completions.create(model="m", max_tokens=4, messages=list(messages))
            return {"role": "assistant", "content": answer.choices[0].message.content or ""}

        question = {"role": "user", "content": str(sample.label)}
        await ask(question, await ask(question), {"role": "user", "content": "sure?"})
        await ask({"role": "user", "content": "another task"})
    await sandbox.write_file("right", str(sample.index % 2))
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


@pytest.mark.slow
def test_data_sets_environments_and_samplers_at_once(tiny: TinyRun, tmp_path: Path, slime) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    worth = str(tmp_path / "worth.py")
    Path(worth).write_text(WORTH)
    held = str(tiny.root / "eval.jsonl")
    config = write(
        tmp_path / "evals.yaml",
        [
            {"name": "plain", "path": held, "n_samples_per_eval_prompt": 3, "sampling_params": {"min_p": 0.01}},
            {"name": "greedy", "path": f"{held}@[:4]", "temperature": 0, "max_response_len": 4,
             "custom_rm_path": worth, "plugins": {"worth": {"points": 7}}},
            {"name": "world", "path": f"{held}@[:2]", "custom_generate_function_path": "multi_turn",
             "apply_chat_template": False, "input_key": "text",
             "environment_path": str(tmp_path / "world.py"), "max_response_len": 40,
             "plugins": {"multi_turn": {"max_turn_tokens": 4, "reward": "sum"}}},
            {"name": "best", "path": f"{held}@[:2]", "custom_generate_function_path": "best_of_n",
             "custom_rm_path": worth, "plugins": {"best_of_n": {"n": 3}}},
            {"name": "vote", "path": f"{held}@[:2]", "custom_generate_function_path": "self_consistency",
             "n_samples_per_eval_prompt": 2, "ks": [2], "plugins": {"self_consistency": {"n": 4}}},
        ],
    )  # fmt: skip
    rows = [json.loads(line) for line in Path(held).read_text().splitlines()]
    (tmp_path / "world.jsonl").write_text("".join(json.dumps({**r, "text": "1+1="}) + "\n" for r in rows))
    loaded = yaml.safe_load(config.read_text())
    loaded["eval"]["datasets"][2]["path"] = f"{tmp_path / 'world.jsonl'}@[:2]"
    config.write_text(yaml.safe_dump(loaded))
    done = slime("eval", *flags(tiny, tmp_path / "run", config, set="plugins.worth.points=2"))
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
    of_options = {name: sets[name]["scores"]["reward"]["value"] for name in ("greedy", "best")}
    assert of_options == {"greedy": 7.0, "best": 2.0}, "the data set's options, or the run's"
    best = list(read_groups(tmp_path / "run/eval/best.jsonl")[0].values())
    assert [len(s.metadata["best_of_n"]["rewards"]) for g in best for s in g] == [3, 3]
    votes = [
        s.metadata["self_consistency"] for g in read_groups(tmp_path / "run/eval/vote.jsonl")[0].values() for s in g
    ]
    assert [v["n"] for v in votes] == [4] * 4


@pytest.mark.slow
def test_conversations_beside_one_another_are_one_execution(tiny: TinyRun, tmp_path: Path, slime) -> None:
    pytest.importorskip("openai")
    (tmp_path / "agent.py").write_text(AGENT)
    agent = {"program": f"{tmp_path / 'agent.py'}:program", "test_command": "cat right", "reward": "printed",
             "isolation": "best-effort"}  # fmt: skip
    data = {"name": "agent", "path": f"{tiny.root / 'eval.jsonl'}@[:2]", "custom_generate_function_path": "agent"}
    data |= {"n_samples_per_eval_prompt": 2, "apply_chat_template": False, "max_response_len": 60}
    slime("eval", *flags(tiny, tmp_path / "run", write(tmp_path / "e.yaml", [{**data, "plugins": {"agent": agent}}])))
    found = json.loads((tmp_path / "run" / "eval.json").read_text())["datasets"]["agent"]
    kept = [s for g in read_groups(tmp_path / "run/eval/agent.jsonl")[0].values() for s in g]
    assert (found["prompts"], found["samples_per_prompt"], found["failed"]) == (2, 2, 0)
    assert len(kept) > found["executions"] == 4, "the conversation beside it is a sibling"
    assert [found["scores"][score]["value"] for score in ("reward", "pass@1", "pass@2")] == [0.5, 0.5, 1.0]


@pytest.mark.slow
def test_ended_by_signals_and_resumed_is_as_never_ended(tiny: TinyRun, tmp_path: Path, slime) -> None:
    """By ctrl-C, which tells how to go on, and by SIGKILL, which cannot."""
    (tmp_path / "held.py").write_text(HELD)
    data = {"path": str(tiny.root / "eval.jsonl"), "custom_generate_function_path": str(tmp_path / "held.py")}
    config = write(tmp_path / "evals.yaml", [{"name": "held", **data, "n_samples_per_eval_prompt": 2}])
    run, whole = tmp_path / "run", tmp_path / "whole"
    begun = flags(tiny, run, config, **{"sglang-server-concurrency": 2})
    ended = slime("eval", *begun, check=False, END="SIGINT", END_AFTER="2")
    assert ended.returncode == 130
    assert f"2 of 8 prompts are done and kept; go on with: slime eval --resume {run}" in ended.stdout
    assert len(read_groups(run / "eval/held.jsonl")[0]) == 2
    refused = slime("eval", *begun, check=False)
    assert refused.returncode == 2
    assert f"Go on with it: slime eval --resume {run}" in refused.stderr
    killed = slime("eval", "--resume", run, check=False, END="SIGKILL", END_AFTER="5")
    assert killed.returncode == -signal.SIGKILL
    assert f"resumed from {run}: 2 prompts are done" in killed.stdout
    other = slime("eval", "--resume", run, "--rollout-seed", 3, check=False)
    assert "rollout_seed 42 -> 3" in other.stderr
    resumed = slime("eval", "--resume", run)
    assert f"resumed from {run}: 5 prompts are done" in resumed.stdout
    slime("eval", *flags(tiny, whole, config, **{"sglang-server-concurrency": 2}))
    assert (run / "eval/held.jsonl").read_bytes() == (whole / "eval/held.jsonl").read_bytes()
    reports = [json.loads((place / "eval.json").read_text()) for place in (run, whole)]
    assert [r["resumed"] for r in reports] == [{"prompts_kept": n, "prompts": 8} for n in (5, 0)]
    assert reports[0]["datasets"] == reports[1]["datasets"]
    assert reports[0]["metrics"] == reports[1]["metrics"]
    again = slime("eval", "--resume", run)
    assert "8 prompts are done" in again.stdout
    assert (run / "eval/held.jsonl").read_bytes() == (whole / "eval/held.jsonl").read_bytes()


def test_what_cannot_be_resumed_or_trained_is_refused(tiny: TinyRun, tmp_path: Path, refused) -> None:
    assert f"--resume {tmp_path}: no evaluation" in refused("eval", "--resume", tmp_path)
    assert "--load RUN" in refused("train", *tiny.argv(tmp_path / "run", resume=tmp_path))
    argv = tiny.argv(tmp_path / "run", custom_generate_function_path="best_of_n")
    assert "best_of_n is for evaluation" in refused("train", *argv)
    held = str(tiny.root / "eval.jsonl")
    config = write(tmp_path / "e.yaml", [{"name": "a", "path": held, "n_samples_per_eval_prompt": 2, "ks": [4]}])
    assert "k = 4 of 2 samples per prompt" in refused("eval", *flags(tiny, tmp_path / "e", config))


def test_training_logs_the_same_scores(tiny: TinyRun, tmp_path: Path, slime) -> None:
    config = write(tmp_path / "e.yaml", [{"name": "held", "path": str(tiny.root / "eval.jsonl"), "rm_type": "exact",
                                          "n_samples_per_eval_prompt": 3, "temperature": 1.0}])  # fmt: skip
    run = tmp_path / "run"
    slime("train", *tiny.argv(run, eval_prompt_data=None, eval_config=config, num_rollout=1, eval_interval=1))
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert {k for k in first if "@" in k} == {
        f"eval/held-{k}" for k in ("pass@1", "pass@2", "pass@3", "majority@2", "majority@3")
    }
