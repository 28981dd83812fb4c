"""`slime sft` with each `--loss-mask-type`: what is trained of chats with tools, and the row that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from slime_commands.init.tiny_model import hf_config
from slime_data.saved import read_samples
from slime_embedded.models.decoder import init_weights

from slime_core.config import load_settings
from slime_core.errors import DataError
from slime_core.launch import run
from slime_core.models.config import load_model_config
from slime_core.models.hf_io import write_config, write_weights
from tests.chat_tokenizers import chat_tokenizer, save

ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CHAT = [
    {"role": "user", "content": "What is 1+2?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [ADD]},
    {"role": "tool", "name": "add", "content": "three"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "content": "Any time.", "step_loss_mask": 0},
    {"role": "user", "content": "Bye."},
    {"role": "assistant", "content": "Bye."},
]
TURNS = [
    'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>',
    "It is 3.<|im_end|>",
    "Bye.<|im_end|>",
]
THOUGHTS = [
    {"role": "user", "content": "What is 1+2?"},
    {"role": "assistant", "content": "<think>\nOne more.\n</think>\n\nIt is 3."},
    *CHAT[4:5],
    CHAT[-1],
]


def model(directory: Path, family: str) -> Path:
    """Random weights for the family's tokenizer and chat template."""
    tokenizer = chat_tokenizer(family)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    write_config(directory, hf_config(len(tokenizer)) | small | ends)
    write_weights(directory, init_weights(load_model_config(directory), seed=0).items())
    return save(family, directory)


def tune(folder: Path, directory: Path, mask_type: str, chat: list[dict[str, Any]]) -> list[str]:
    """The texts of the tokens that one step trains, each maximal run for itself."""
    folder.mkdir()
    (folder / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    flags = {
        "hf-checkpoint": directory, "prompt-data": folder / "chats.jsonl", "input-key": "messages",
        "rollout-batch-size": 1, "num-rollout": 1, "lr": 1e-3, "loss-mask-type": mask_type, "save": folder / "run",
        "save-debug-rollout-data": folder / "{rollout_id}.jsonl", "num-threads": 1,
    }  # fmt: skip
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    run(load_settings([*argv, "--no-preflight"], command="sft", env={}))
    (sample,) = read_samples(folder / "0.jsonl")
    (line,) = (json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines())
    assert line["train/loss"] > 0
    runs, before = [], 0
    for token, trained in zip(sample.response_tokens, sample.loss_mask or []):
        if trained:
            runs += [[]] if not before else []
            runs[-1].append(token)
        before = trained
    return [chat_tokenizer("qwen2.5").decode(ids) for ids in runs]


def test_the_types_train_what_they_say_and_refuse_what_they_would_train_otherwise(tmp_path: Path) -> None:
    plain = model(tmp_path / "plain", "qwen2.5")
    for mask_type in ("auto", "qwen", "qwen3", "qwen3_5"):
        assert tune(tmp_path / mask_type, plain, mask_type, CHAT) == TURNS
    assert tune(tmp_path / "distill", plain, "distill_qwen", CHAT) == TURNS[-1:]
    rewriting = model(tmp_path / "rewriting", "qwen3")
    with pytest.raises(DataError, match=r"chats.*row 0 \(from 0\): message 1: --loss-mask-type qwen3_5 would train"):
        tune(tmp_path / "refused", rewriting, "qwen3_5", THOUGHTS)
