from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from slime_commands.sft.rollout import fill_supervised, generate_rollout

from slime_core.config import Args
from slime_core.data.prompts import DatasetSource
from slime_core.data.tokenizer import load_tokenizer
from slime_core.errors import ConfigError, DataError
from slime_core.sample import Sample

NO_END = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="session")
def with_template(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    def build(template: str) -> Any:
        directory = tmp_path_factory.mktemp("template") / "model"
        shutil.copytree(tokenizer_dir, directory)
        config = json.loads((directory / "tokenizer_config.json").read_text())
        config.pop("chat_template")
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        (directory / "chat_template.jinja").write_text(template)
        return load_tokenizer(directory)

    return build


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def conversation(*messages: dict[str, Any]) -> Sample:
    return Sample(prompt=list(messages), metadata={"source_name": "chat", "source_index": 4})


def test_a_template_whose_generation_prompt_is_not_what_it_writes(with_template: Any) -> None:
    with pytest.raises(DataError, match="message 1: the chat template writes the turn otherwise than it prompts"):
        fill_supervised(
            conversation(turn("user", "a?"), turn("assistant", "b")),
            with_template(NO_END + "{% if add_generation_prompt %}<|tool|>{% endif %}"),
            Args(),
        )


def source(path: Path, rows: list[dict], tokenizer: Any, **changes: Any) -> tuple[Args, DatasetSource]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    defaults = {"prompt_data": str(path), "input_key": "input", "rollout_batch_size": 2, "rollout_seed": 0}
    args = Args(**{**defaults, "n_samples_per_prompt": 1, **changes})
    return args, DatasetSource(args, tokenizer)


def test_rollout_of_conversations(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"input": [turn("user", f"{i}?"), turn("assistant", f"{i}!")]} for i in range(3)]
    args, data = source(tmp_path / "data.jsonl", rows, tokenizer)
    out = generate_rollout(args, 0, data)
    assert [g[0].response for g in out.samples] == ["0!<|end|>", "1!<|end|>"]
    assert [g[0].response for g in generate_rollout(args, 1, data).samples] == ["2!<|end|>", "0!<|end|>"]


@pytest.mark.parametrize("chat", [False, True])
def test_rollout_of_prompt_and_response_columns(tmp_path: Path, tokenizer: Any, chat: bool) -> None:
    rows = [{"input": "1+1=?", "answer": "2"}, {"input": "1+2=?", "answer": "3"}]
    args, data = source(tmp_path / "data.jsonl", rows, tokenizer, label_key="answer", apply_chat_template=chat)
    sample = generate_rollout(args, 0, data).samples[1][0]
    prompt = "<|user|>1+2=?<|end|><|assistant|>" if chat else "1+2=?"
    assert tokenizer.decode(sample.tokens) == prompt + "3<|end|>"
    assert (sample.loss_mask, sample.response_length, sample.response) == ([1, 1], 2, "3<|end|>")


def test_rows_without_an_answer(tmp_path: Path, tokenizer: Any) -> None:
    args, data = source(tmp_path / "data.jsonl", [{"input": [turn("user", "a?")]}] * 2, tokenizer)
    with pytest.raises(DataError, match=r"data, row 0 \(from 0\): no answer to learn: .* --label-key"):
        generate_rollout(args, 0, data)


def test_settings_that_make_no_sense_here(tmp_path: Path, tokenizer: Any) -> None:
    args, data = source(tmp_path / "d.jsonl", [{"input": "a", "b": "c"}], tokenizer, label_key="b")
    with pytest.raises(ConfigError, match="--eval-function-path"):
        generate_rollout(args, 0, data, evaluation=True)
    args.n_samples_per_prompt = 8
    with pytest.raises(ConfigError, match="--n-samples-per-prompt 8"):
        generate_rollout(args, 0, data)
