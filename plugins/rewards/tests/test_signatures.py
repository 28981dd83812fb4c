"""Functions shaped like those of other projects' documentation, scored as a run scores them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from slime_core import RewardCaller, Sample, resolve
from slime_core.config import Args
from slime_core.errors import PluginError, PluginSignatureError

ROWS = [
    {"prompt": "1+1=", "ground_truth": "2", "task": "math"},
    {"prompt": "name a bird", "ground_truth": "owl", "task": "text"},
]
CHAT = [{"prompt": [{"role": "user", "content": row["prompt"]}], "solution": row["ground_truth"]} for row in ROWS]
VERL = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "1+1="}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 7},
    }
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory that knows the special tokens, and nothing else."""
    tokens = [{"content": "<|end|>", "special": True}, {"content": "think", "special": False}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    return tmp_path


def score(
    code: str, rows: list[dict[str, Any]], folder: Path, responses: list[str], *, name: str = "", **settings: Any
) -> list[Any]:
    """Return the rewards of one response per row, with the reward in a file beside the data."""
    theirs = folder / f"theirs_{len(list(folder.iterdir()))}.py"
    theirs.write_text(code)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    group = settings.pop("group", False)
    args = Args(hf_checkpoint=str(folder), prompt_data=str(folder / "train.jsonl"), **settings)
    samples = []
    for index, (row, response) in enumerate(zip(rows, responses)):
        label = row.get("ground_truth") or row.get("solution") or row.get("reward_model", {}).get("ground_truth")
        sample = Sample(prompt=f"<user>{row['prompt']}", label=label, index=index, tokens=[9, 1, 2], response=response)
        sample.response_length, sample.metadata = 2, {"source_name": "train", "source_index": index}
        samples.append(sample)
    spec = f"{theirs}{name and ':' + name}"
    caller = RewardCaller(resolve("rewards", spec), args, group=group)

    async def each() -> list[Any]:
        found: list[Any] = []
        for part in [samples] if group else [[sample] for sample in samples]:
            found += await caller.score(part)
        return found

    return asyncio.run(each())


@pytest.mark.parametrize(
    ("code", "rows", "expected"),
    [
        pytest.param(
            "def reward_func(completions, ground_truth, **kwargs):\n"
            "    return [1.0 if c == g else 0.0 for c, g in zip(completions, ground_truth)]\n",
            ROWS, [1.0, 0.0], id="trl column",
        ),
        pytest.param(
            "def reward_func(completion_ids, **kwargs):\n    return [float(len(ids)) for ids in completion_ids]\n",
            ROWS, [2.0, 2.0], id="trl ids",
        ),
        pytest.param(
            "async def reward_func(prompts, completions, **kwargs):\n"
            "    assert set(kwargs) >= {'task', 'ground_truth', 'completion_ids', 'log_metric'}\n"
            "    return [float(p == '1+1=') for p in prompts]\n",
            ROWS, [1.0, 0.0], id="trl async",
        ),
        pytest.param(
            "import re\ndef format_reward(completions, **kwargs):\n"
            "    contents = [completion[0]['content'] for completion in completions]\n"
            "    return [1.0 if re.match(r'^2$', content) else 0.0 for content in contents]\n",
            CHAT, [1.0, 0.0], id="trl conversations, without special tokens",
        ),
        pytest.param(
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
            "    assert (data_source, extra_info['index']) == ('sums', 7)\n"
            "    return float(solution_str == ground_truth)\n",
            VERL, [1.0], id="verl",
        ),
        pytest.param(
            "def extract(text, method):\n    return text\n\n"
            "async def compute_score(solution_str, ground_truth, method='strict'):\n"
            "    return {'score': float(extract(solution_str, method) == ground_truth), 'acc': 0.5}\n",
            VERL, [1.0], id="verl async, mapping, helper in the file",
        ),
        pytest.param(
            "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
            "    return [{'score': float(s == g)} for s, g in zip(solution_strs, ground_truths)]\n",
            VERL, [1.0], id="verl batched",
        ),
        pytest.param(
            "import torch\ndef reward_func(queries, prompts, labels):\n"
            "    assert all(q.startswith(p) and q.endswith('<|end|>') for q, p in zip(queries, prompts))\n"
            "    right = torch.tensor([float(label in q) for q, label in zip(queries, labels)])\n"
            "    return {'rewards': right, 'scores': right, 'extra_logs': {'length': right + 1}}\n",
            ROWS, [1.0, 0.0], id="openrlhf",
        ),
        pytest.param(
            "async def correct(completion, answer, state):\n"
            "    assert state['answer'] == answer\n"
            "    return 1.0 if answer in completion[-1]['content'] else 0.0\n",
            [{**row, "answer": row["solution"]} for row in CHAT], [1.0, 0.0], id="verifiers",
        ),
        pytest.param(
            "def ranks(completions, states):\n"
            "    return [float(s['completion'] == c) for s, c in zip(states, completions)]\n",
            ROWS, [1.0, 1.0], id="verifiers group",
        ),
        pytest.param(
            "class Result:\n    def __init__(self, score):\n        self.score = score\n\n"
            "class Verifier:\n    def __init__(self, verifier_config=None):\n        self.weight = 1.0\n\n"
            "    def __call__(self, tokenized_prediction, prediction, label, query=None):\n"
            "        assert tokenized_prediction == [1, 2]\n"
            "        return Result(float(prediction == label))\n",
            ROWS, [1.0, 0.0], id="open-instruct class",
        ),
        pytest.param(
            "class Judge:\n    async def __call__(self, completions, **kwargs):\n"
            "        return [float(c == '2') for c in completions]\n\njudge = Judge()\n",
            ROWS, [1.0, 0.0], id="class with async call",
        ),
    ],
)  # fmt: skip
def test_a_function_of_another_project_scores_as_there(
    code: str, rows: list[dict[str, Any]], expected: list[float], checkpoint: Path
) -> None:
    name = {"Result": "Verifier", "Judge": "Judge"}.get(code.partition("class ")[2].partition(":")[0], "")
    assert score(code, rows, checkpoint, ["2<|end|>", "5<|end|>"], name=name) == expected


def test_entries_of_mappings_are_components_with_a_reward_key(checkpoint: Path) -> None:
    verl = "def compute_score(solution_str, ground_truth):\n    return {'score': 1.0, 'acc': 0.5}\n"
    assert score(verl, VERL, checkpoint, ["2"], reward_key="score") == [{"score": 1.0, "acc": 0.5}]
    rlhf = (
        "def reward_func(queries, prompts, labels):\n"
        "    return {'rewards': [3.0], 'scores': [1.0], 'extra_logs': {'length': [4.0]}}\n"
    )
    (found,) = score(rlhf, VERL, checkpoint, ["2"], reward_key="score")
    assert found == {"score": 3.0, "scores": 1.0, "length": 4.0}
    plain = "def reward_func(completions, **kwargs):\n    return [2.0]\n"
    assert score(plain, VERL, checkpoint, ["2"], reward_key="score") == [{"score": 2.0}]


def test_a_group_is_one_call_with_group_rm(checkpoint: Path) -> None:
    code = "def reward_func(completions, **kwargs):\n    return [float(len(completions))] * len(completions)\n"
    assert score(code, ROWS, checkpoint, ["2", "3"], group=True) == [2.0, 2.0]
    assert score(code, ROWS, checkpoint, ["2", "3"]) == [1.0, 1.0]


TASKS = """
def maths(completions, task, **kwargs):
    return [None if t != "math" else float(c == "2") for c, t in zip(completions, task)]

def texts(completions, task, **kwargs):
    return [None if t != "text" else 0.25 for c, t in zip(completions, task)]

def none(completions, **kwargs):
    return [None] * len(completions)
"""


def test_none_leaves_a_reward_out_of_the_sum(checkpoint: Path) -> None:
    def summed(*names: str, **settings: Any) -> list[Any]:
        (checkpoint / "tasks.py").write_text(TASKS)
        terms = [{"reward": f"{checkpoint / 'tasks.py'}:{n}", "weight": 2.0, "name": n} for n in names]
        plugins = {"weighted_sum": {"terms": terms}}
        code = "from slime_rewards.weighted_sum import WeightedSum\nclass Total(WeightedSum):\n    pass\n"
        return score(code, ROWS, checkpoint, ["2", "owl"], name="Total", plugins=plugins, **settings)

    assert summed("maths", "texts") == [2.0, 0.5]
    assert summed("maths", "texts", reward_key="score") == [{"score": 2.0, "maths": 1.0}, {"score": 0.5, "texts": 0.25}]
    with pytest.raises(PluginError, match="sample 1: every term returned None, so no reward applies"):
        summed("maths", "none")
    with pytest.raises(PluginError, match="returned NoneType for sample 0"):
        score(TASKS, ROWS, checkpoint, ["2", "owl"], name="none")


@pytest.mark.parametrize(
    ("code", "error", "named"),
    [
        ("def f(completions, trainer_state):\n    return []\n", PluginSignatureError, ("TRL", "'trainer_state'")),
        ("def f(completion, parser):\n    return 0\n", PluginSignatureError, ("verifiers", "'parser'")),
        ("def f(completions, missing):\n    return []\n", PluginError, ("'missing'", "columns: ground_truth, prompt")),
        ("def f(solution_str, ground_truth):\n    return {'acc': 1}\n", PluginError, ("'acc'", "'score'")),
    ],
)
def test_what_slime_does_not_have_is_named(code: str, error: type, named: tuple[str, ...], checkpoint: Path) -> None:
    with pytest.raises(error) as caught:
        score(code, ROWS, checkpoint, ["2", "5"])
    assert [word for word in named if word not in str(caught.value)] == []


def test_functions_of_slime_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def reward(args, sample, completions=None):\n    return 1.0\n")
    assert not hasattr(resolve("rewards", str(tmp_path / "own.py")).obj, "form")
