"""Data sets as they come from Hugging Face's hub, given to slime without a flag about columns, and a system prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import copy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_core.config import Args, load_settings
from slime_core.data import rows
from slime_core.data.prompts import DatasetSource, eval_samples
from slime_core.data.tokenizer import load_tokenizer
from slime_core.errors import DataError
from slime_core.sample import Sample
from tests.conftest import TinyRun

GSM8K = {"question": "Two and two?", "answer": "2+2=<<2+2=4>>4 apples.\n#### 1,004"}
TURNS = [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}]
ASKED = TURNS[:1]

Read = Callable[..., Sample]


@cache
def _args(model: str, flags: tuple[str, ...], command: str) -> Args:
    argv = ["--hf-checkpoint", model, "--prompt-data", "d", *flags, "--rollout-batch-size", "1", "--num-rollout", "1"]
    return load_settings(argv, command=command, env={}).args


@pytest.fixture
def read(tiny: TinyRun, tmp_path: Path) -> Read:
    """The first sample of a file with this row, by the flags of `slime train` or another command."""
    tokenizer = load_tokenizer(str(tiny.root / "model"))

    def one(row: dict[str, Any], *flags: str, command: str = "show") -> Sample:
        path = tmp_path / "data.jsonl"
        path.write_text(json.dumps(row) + "\n")
        args = copy(_args(str(tiny.root / "model"), flags, command))
        args.prompt_data = str(path)
        return DatasetSource(args, tokenizer).get_samples(1)[0][0]

    return one


@pytest.mark.parametrize(
    ("row", "prompt", "label"),
    [
        (GSM8K, "Two and two?", "1004"),
        ({"problem": "p", "solution": r"so \boxed{\frac{1}{2}}.", "level": "5"}, "p", r"\frac{1}{2}"),
        ({"problem": "p", "solution": "long", "answer": "7"}, "p", "7"),
        ({"prompt": "p", "completion": "c"}, "p", "c"),
        ({"prompt": ASKED, "completion": TURNS[1:]}, ASKED, "2"),
        ({"prompt": ASKED, "ground_truth": "#### 2"}, ASKED, "#### 2"),
        ({"messages": TURNS}, ASKED, "2"),
        ({"messages": TURNS, "answer": "two"}, ASKED, "two"),
        ({"messages": ASKED}, ASKED, None),
        ({"instruction": "Add.", "input": "1 1", "output": "2"}, "Add.\n\n1 1", "2"),
        ({"instruction": "Add.", "input": "", "output": "2"}, "Add.", "2"),
        ({"input": "p", "label": "l #### 3", "answer": "7"}, "p", "l #### 3"),
        ({"input": "p"}, "p", None),
        ({"input": "p", "target": "5"}, "p", "5"),
        ({"prompt": ASKED, "reward_model": {"ground_truth": "34", "style": "rule"}, "extra_info": {}}, ASKED, "34"),
        ({"prompt": ASKED, "question": "1+1=?", "golden_answers": ["2", "two"],
          "reward_model": {"ground_truth": {"target": ["2", "two"]}}}, ASKED, ["2", "two"]),
        ({"question": "Why?", "choices": {"text": ["so", "no"], "label": ["1", "2"]}, "answerKey": "2"},
         "Why?\n\nA. so\nB. no", "B"),
        ({"question": "Why?", "choices": ["so", "no"], "answer": 0, "subject": "x"}, "Why?\n\nA. so\nB. no", "A"),
        ({"question": "Why?", "options": {"A": "so", "B": "no"}, "answer": "no"}, "Why?\n\nA. so\nB. no", "B"),
        ({"question": "Sum.", "input_output": '{"inputs": ["1"], "outputs": ["1"]}', "starter_code": "def f():",
          "solutions": "[]", "difficulty": "easy"}, "Sum.\n\ndef f():", '{"inputs": ["1"], "outputs": ["1"]}'),
        ({"question": "Who?", "context": "Ann did.", "answers": {"text": ["Ann", "Ann"], "answer_start": [0, 0]}},
         "Who?\n\nAnn did.", "Ann"),
        ({"question": "Who?", "context": "Ann did.", "answers": {"text": [], "answer_start": []}},
         "Who?\n\nAnn did.", ""),
        ({"problem": "p", "generated_solution": "w", "expected_answer": "7", "problem_source": "x"}, "p", "7"),
        ({"source": "s", "problem": "1+1=?", "solution": r"so \boxed{2}", "messages": TURNS}, ASKED, "2"),
        ({"problem": "1+1=?", "solution": "s", "answer": "3", "messages": TURNS, "generations": []}, ASKED, "3"),
        ({"prompt": "1+1=?", "prompt_id": "i", "messages": TURNS}, ASKED, "2"),
        ({"query": "q", "response": "Work.\n#### 42\nThe answer is: 42", "original_question": "o"}, "q", "42"),
        ({"query": "q", "response": "so\nThe answer is: $x+1$."}, "q", "x+1"),
        ({"prompt": "p", "instruction_id_list": ["a:b"], "kwargs": [{}], "key": 1}, "p",
         {"instruction_id_list": ["a:b"], "kwargs": [{}]}),
        ({"prompt": "def f():", "canonical_solution": "x", "test": "def check(c): ...", "entry_point": "f"},
         "def f():", "def check(c): ...\ncheck(f)\n"),
        ({"prompt": "p", "code": "c", "test_list": ["assert 1"], "task_id": 1}, "p", ["assert 1"]),
        ({"ID": "x", "Problem": "p", "Solution": "w", "Answer": 204}, "p", 204),
        ({"Question": "q", "Correct Answer": "yes", "Incorrect Answer 1": "no"}, "q", "yes"),
        ({"conversations": [{"from": "human", "value": "1+1=?"}, {"from": "gpt", "value": "2"}]}, ASKED, "2"),
        ({"system": "Be brief.", "conversations": [{"from": "user", "value": "1+1=?"}]},
         [{"role": "system", "content": "Be brief."}, *ASKED], None),
        ({"system_prompt": "", "question": "q", "response": "r"}, "q", "r"),
        ({"question": "q", "solution": r"\boxed{1}", "metadata": "{'contest': 'x'}"}, "q", "1"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1=?"}]}]},
         ASKED, None),
    ],
)  # fmt: skip
def test_usual_columns_need_no_flag(row: dict[str, Any], prompt: Any, label: Any, read: Read) -> None:
    sample = read(row)
    assert (sample.prompt, sample.label) == (prompt, label)
    assert sample.tokens


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"system_prompt": "Be brief.", "question": "q"},
            "column 'system_prompt' is for chat messages, and this prompt",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "audio", "audio": "x"}]}]},
            "a content part of type 'audio'",
        ),
    ],
)
def test_nothing_of_a_row_is_lost_in_silence(row: dict[str, Any], said: str, read: Read) -> None:
    with pytest.raises(DataError) as caught:
        read(row)
    assert said in str(caught.value)


def test_a_system_column_becomes_a_message(read: Read) -> None:
    rendered = read({"system_prompt": "Be brief.", "question": "1+1=?"}, "--apply-chat-template").prompt
    assert 0 <= rendered.find("Be brief.") < rendered.find("1+1=?")
    given = read({"system_prompt": "", "question": "q"}, "--system-prompt", "Be long.", "--apply-chat-template").prompt
    assert "Be long." in given


def test_metadata_that_is_no_json_is_kept_as_text(read: Read, caplog: pytest.LogCaptureFixture) -> None:
    rows._warn_of_text.cache_clear()
    assert read({"question": "q", "metadata": "{'contest': 'x'}"}).metadata["metadata"] == "{'contest': 'x'}"
    assert "column 'metadata' (--metadata-key) has text that is no JSON" in caplog.text


def test_keys_that_are_given_win_and_are_taken_as_they_are(read: Read) -> None:
    sample = read(GSM8K, "--input-key", "answer", "--label-key", "answer")
    assert (sample.prompt, sample.label) == (GSM8K["answer"], GSM8K["answer"])
    assert read(GSM8K, "--label-key", "answer").label == GSM8K["answer"]
    assert read(GSM8K, "--input-key", "question").label is None
    assert read({"messages": TURNS, "final": 3}, "--label-key", "final").label == 3
    inner = {"messages": TURNS, "extra": {"info": {"answer": 3}}}
    assert read(inner, "--label-key", "extra.info.answer").label == 3


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "question": "b"}, "which column is the prompt? Type --input-key prompt or question;"),
        ({"prompt": "a", "response": "b", "label": True}, "Type --label-key label or response; the row has: prompt,"),
        ({"text": "a"}, "no column 'input' (--input-key), nor one that is recognised; the row has: text"),
    ],
)  # fmt: skip
def test_what_is_ambiguous_asks_for_the_flag(row: dict[str, Any], said: str, read: Read) -> None:
    with pytest.raises(DataError) as caught:
        read(row)
    assert said in str(caught.value)
    assert "data.jsonl:1: " in str(caught.value)


@pytest.mark.parametrize(
    ("row", "prompt", "label"),
    [
        ({"messages": TURNS}, TURNS, None),
        ({"prompt": ASKED, "completion": TURNS[1:]}, TURNS, None),
        (GSM8K, "Two and two?", GSM8K["answer"]),
        ({"problem": "p", "solution": "worked", "answer": "7"}, "p", "worked"),
        ({"problem": "1+1=?", "solution": "worked", "messages": TURNS}, TURNS, None),
        ({"conversations": [{"from": "human", "value": "1+1=?"}, {"from": "gpt", "value": "2"}]}, TURNS, None),
        ({"problem": "p", "generated_solution": "worked", "expected_answer": "7"}, "p", "worked"),
    ],
)
def test_supervised_runs_learn_the_whole_answer(row: dict[str, Any], prompt: Any, label: Any, read: Read) -> None:
    sample = read(row, command="sft")
    assert (sample.prompt, sample.label) == (prompt, label)


def test_evaluation_data_are_recognised_too(tiny: TinyRun, tmp_path: Path) -> None:
    path = tmp_path / "held.jsonl"
    path.write_text(json.dumps(GSM8K) + "\n")
    argv = ["--eval-prompt-data", "held", str(path), "--system-prompt", "Be brief.", "--apply-chat-template"]
    args = load_settings([*argv, "--hf-checkpoint", str(tiny.root / "model")], command="show", env={}).args
    [[sample]] = eval_samples(args, args.eval_datasets[0], load_tokenizer(str(tiny.root / "model")))
    assert sample.label == "1004"
    assert "Be brief." in sample.prompt


def test_a_system_prompt_begins_every_prompt(read: Read) -> None:
    rendered = read({"input": "1+1=?"}, "--system-prompt", "Be brief.", "--apply-chat-template").prompt
    assert isinstance(rendered, str)
    assert 0 <= rendered.find("Be brief.") < rendered.find("1+1=?")
    told = {"role": "system", "content": "Be brief."}
    assert read({"messages": ASKED}, "--system-prompt", "Be brief.").prompt == [told, *ASKED]
    own = [{"role": "system", "content": "Be long."}, *ASKED]
    assert read({"messages": own}, "--system-prompt", "Be brief.").prompt == own
    assert read({"messages": TURNS}, "--system-prompt", "Be brief.", command="sft").prompt == [told, *TURNS]


def test_a_system_prompt_without_a_template_is_refused(read: Read) -> None:
    with pytest.raises(DataError, match="--system-prompt is for chat messages, and this prompt is text; add --apply-"):
        read({"input": "1+1=?"}, "--system-prompt", "Be brief.")


@pytest.fixture
def gsm8k(tiny: TinyRun, tmp_path: Path) -> SimpleNamespace:
    """Flags of commands on a file like GSM8K's, and the file."""
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"question": f"{a}+1=?", "answer": f"#### {a + 1}"}) + "\n" for a in range(8)))
    flags = {"prompt_data": data, "input_key": None, "label_key": None, "eval_prompt_data": None, "eval_interval": None}
    flags |= {"num_rollout": 1, "custom_rm_path": None, "rm_type": "exact"}
    return SimpleNamespace(data=data, flags=flags)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "rollout", "sft"])
def test_a_run_says_it_at_its_start(
    command: str, gsm8k: SimpleNamespace, tiny: TinyRun, tmp_path: Path, slime: Any
) -> None:
    supervised = {"n_samples_per_prompt": None, "rm_type": None, "rollout_max_response_len": None}
    flags = gsm8k.flags | (supervised if command == "sft" else {})
    done = slime(command, *tiny.argv(tmp_path / "run", **flags))
    said = "answer: 'answer'" if command == "sft" else "label: 'answer', what follows ####"
    assert done.stdout.splitlines()[0] == f"columns of {gsm8k.data}: prompt: 'question'; {said}"
