"""Functions as the texts that this project was asked to implement write them: same imports, names and signatures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyRun

GENERATE = """
import aiohttp
from slime.data import Sample

MASKS = []


async def generate_single(args, conversation):
    body = {"messages": conversation, "max_tokens": 6, "temperature": 1.0}
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        return (await answer.json())["choices"][0]["message"]["content"]


def extract_tool_call(response):
    return None


def compute_reward(sample):
    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)


async def custom_generate(args, samples: list[Sample], evaluation: bool = False) -> list[Sample]:
    for sample in samples:
        conversation = sample.prompt if isinstance(sample.prompt, list) else [
            {"role": "user", "content": sample.prompt}
        ]
        for turn in range(args.max_turns):
            response = await generate_single(args, conversation)
            tool_call = extract_tool_call(response)
            if tool_call:
                conversation.append({"role": "assistant", "content": response})
                conversation.append({"role": "tool", "content": tool_call})
            else:
                sample.response = response or "0"
                break
        sample.reward = compute_reward(sample)
    return samples
"""
REWARD = """
from slime.data import Sample


async def reward_func(args, sample: Sample, **kwargs) -> float:
    response = sample.response
    ground_truth = sample.label or sample.metadata.get("answer", "")
    return 1.0 if response.strip() == ground_truth.strip() else 0.0


async def batched_custom_rm(args, samples: list[Sample]) -> list[float]:
    rewards = []
    for sample in samples:
        rewards.append(await reward_func(args, sample))
        sample.metadata["batch"] = len(samples)
    return rewards
"""
SOURCE = """
from slime.data import RolloutDataSource, Sample


class RolloutDataSourceWithBuffer(RolloutDataSource):
    def __init__(self, dataset, args):
        super().__init__(dataset, args)
        self.buffer = []

    def get_samples(self, num_samples: int) -> list[Sample]:
        return [Sample(prompt=p) for p in self.dataset.sample(num_samples)]

    def add_samples(self, samples: list[Sample]) -> None:
        self.buffer.extend(samples)

    def buffer_filter(self, args, buffer, num_samples) -> list[Sample]:
        sorted_buffer = sorted(buffer, key=lambda s: s.reward, reverse=True)
        return sorted_buffer[:num_samples]
"""
MODEL = """
LOADED = []


def load_model(path):
    LOADED.append(path)
    return lambda prompts, responses: [float(len(response)) for response in responses]


class CustomRewardModel:
    def __init__(self, model_path):
        self.model = load_model(model_path)

    def compute_reward(self, prompts, responses):
        assert len(LOADED) == 1, LOADED
        return self.model(prompts, responses)
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in {"custom_generate": GENERATE, "custom_rm": REWARD, "source": SOURCE, "model_rm": MODEL}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def _samples(save: Path, rollout: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (save / f"samples_{rollout}.jsonl").read_text().splitlines()]


def test_batch_generate_function_and_buffered_source(tiny: TinyRun, files: Path, slime) -> None:
    """`custom_generate(args, samples, evaluation)` that sets text, and a source with a buffer of its own."""
    save = files / "run"
    done = slime(
        "train",
        *tiny.argv(
            save, custom_generate_function_path=files / "custom_generate.py", max_turns=2, custom_rm_path=None,
            data_source_path=files / "source.py", num_rollout=2, num_steps_per_rollout=1, eval_interval=None,
            eval_prompt_data=None, input_key="input", apply_chat_template=True,
            save_debug_rollout_data=save / "samples_{rollout_id}.jsonl",
        ),
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert "returns text without token ids" in text
    assert "come from older weights: --use-tis corrects" in text
    first, second = (_samples(save, rollout) for rollout in (0, 1))
    assert {s["label"] for s in first} != {None}, "the row's label comes with its prompt"
    assert all(s["spans"][-1][0] == "text" and s["rollout_log_probs"] is None for s in first)
    reused = [s for s in second if s["metadata"].get("reused")]
    assert reused, "what the filter chose is trained on again"
    assert {s["group_index"] for s in reused} < {s["group_index"] for s in first}
    assert len(second) == 16
    last = json.loads((save / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["train/grad_norm"] > 0


@pytest.mark.slow
def test_group_rm_takes_the_function_of_a_batch(tiny: TinyRun, files: Path, slime) -> None:
    flags = {"custom_rm_path": files / "custom_rm.py", "num_rollout": 1, "eval_interval": None}
    for group_rm in (True, None):
        save = files / f"run-{group_rm}"
        dump = save / "samples_{rollout_id}.jsonl"
        slime("train", *tiny.argv(save, **flags, group_rm=group_rm, save_debug_rollout_data=dump))
        assert {s["metadata"].get("batch") for s in _samples(save, 0)} == {4 if group_rm else None}


@pytest.mark.slow
def test_a_reward_model_is_built_once_from_what_its_constructor_asks_for(tiny: TinyRun, files: Path, slime) -> None:
    argv = tiny.argv(files / "run", custom_rm_path=files / "model_rm.py", num_rollout=1, eval_interval=None)
    done = slime("train", *argv, check=False)
    assert done.returncode == 2
    assert "needs 'model_path'; type --set plugins.model_rm.model_path=VALUE, or write model_path: VALUE" in done.stderr
    config = files / "custom.yaml"
    config.write_text("model_path: /models/judge\n")
    slime("train", *argv, "--preflight", "--custom-config-path", config)
