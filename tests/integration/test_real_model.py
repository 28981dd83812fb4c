"""SmolLM2-135M-Instruct, a real tokenizer, template and vocabulary of 49k: all that touches them, once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_commands.init.smollm2 import HELD_OUT, WORDS, rows
from slime_runs import Run
from slime_runs.index import Filter

from tests.conftest import Slime
from tests.front_servers import in_thread, tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.xdist_group("smollm2")]
SMALL = ["--num-rollout", "1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--eval-interval", "1"]
SMALL += ["--eval-prompt-data", "heldout", "outputs/smollm2/inputs/heldout.jsonl@[:4]", "--prepare-path", "smollm2"]
MESSAGES: Any = [{"role": "user", "content": "Write one short sentence about music."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, slime: Slime) -> Path:
    """A folder after `slime init smollm2 run.yaml` and a run of one rollout, which made the model and the data."""
    root = tmp_path_factory.mktemp("smollm2")
    slime("init", "smollm2", root / "run.yaml")
    slime("train", "--config", root / "run.yaml", *_here(root, SMALL), timeout=900)
    return root


def _here(root: Path, argv: list[str]) -> list[str]:
    return [word.replace("outputs/smollm2", str(root / "outputs/smollm2")) for word in argv]


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return folder / "outputs/smollm2/inputs/model"


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with in_thread(partial(tiny, model)) as found:
        yield found


def samples(run: Path) -> list[Any]:
    """Return the samples that the first rollout trained on."""
    found = [stored.sample for stored in Run(run).samples(Filter(rollout=0, data_set=""))]
    assert found
    return found


def test_the_prompts_of_the_evaluation_are_not_trained_on() -> None:
    train, held_out = ({row["input"] for row in rows(words)} for words in (WORDS, HELD_OUT))
    assert (len(train), len(held_out)) == (490, 80)
    assert not train & held_out


def test_it_learns_the_task_in_ten_rollouts(folder: Path, slime: Slime) -> None:
    """0.12 -> 0.69 was measured; thirty rollouts, which `make real` has, end at 0.90."""
    run = folder / "learns"
    slime(
        "train", "--config", folder / "run.yaml", "--save", run, "--num-rollout", 10, timeout=1400
    )  # fmt: skip
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_before"] < 0.3
    assert summary["eval_after"] > summary["eval_before"] + 0.25
    gaps = [value for _, value in Run(run).series("train/train_rollout_logprob_abs_diff")]
    assert max(gaps) < 1e-4


def test_our_log_probs_are_those_of_transformers(folder: Path, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    for sample in samples(folder / "outputs/smollm2")[:3]:
        with torch.no_grad():
            logits = theirs(torch.tensor([sample.tokens])).logits[0, :-1] / 0.7
        found = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.tokens[1:])[:, None])[:, 0]
        ours = torch.tensor(sample.rollout_log_probs, dtype=torch.float64)
        assert (found[-len(ours) :] - ours).abs().max() < 1e-4


def test_prompts_are_the_templates_own_text(folder: Path, model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    for sample in samples(folder / "outputs/smollm2")[:4]:
        text = tokenizer.decode(sample.tokens[: len(sample.tokens) - sample.response_length])
        assert text.startswith("<|im_start|>system\n")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert sample.response == tokenizer.decode(sample.tokens[-sample.response_length :])
        assert (sample.tokens[-1] == tokenizer.eos_token_id) == (sample.status.value == "completed")


def test_a_stop_string_ends_the_answer(folder: Path, slime: Slime) -> None:
    run = folder / "stops"
    slime(
        "train", "--config", folder / "run.yaml", *_here(folder, SMALL), "--save", run,
        "--rollout-stop", ".", "--rollout-max-response-len", 48,
    )  # fmt: skip
    found = [s for s in samples(run) if s.status.value == "completed"]
    assert found
    for sample in found:
        assert sample.response.count(".") <= 1
        assert sample.response.rstrip().endswith((".", "<|im_end|>")), sample.response


SHOP = """def price(item: str) -> str:
    \"\"\"Return the price of a thing in a shop.

    Args:
        item: The thing.
    \"\"\"
    return {"apple": "3 coins", "bread": "5 coins", "milk": "2 coins"}[item]


tools = [price]


def reward(args, sample):
    return float("coins" in sample.response)
"""
CALL = '<tool_call>{"name": "price", "arguments": {"item": "%s"}}</tool_call>'


def _shopping(item: str) -> list[dict[str, str]]:
    """Return a chat that asks for a price, after two examples of a call."""
    chat = [{"role": "system", "content": f"You answer by calling a function, like this:\n{CALL % 'cheese'}"}]
    for seen in ("cheese", "butter"):
        chat.append({"role": "user", "content": f"What does {seen} cost?"})
        chat.append({"role": "assistant", "content": CALL % seen})
    return [*chat, {"role": "user", "content": f"What does {item} cost?"}]


def test_it_calls_a_tool_whose_answer_is_masked(folder: Path, model: Path, slime: Slime) -> None:
    from transformers import AutoTokenizer

    (folder / "shop.py").write_text(SHOP)
    data, run = folder / "shop.jsonl", folder / "shop"
    data.write_text("".join(json.dumps({"input": _shopping(item)}) + "\n" for item in ("apple", "bread", "milk")))
    slime(
        "train", "--hf-checkpoint", model, "--prompt-data", data, "--save", run, "--num-rollout", 1,
        "--rollout-batch-size", 3, "--n-samples-per-prompt", 4, "--rollout-temperature", 0.7,
        "--rollout-max-response-len", 96, "--custom-rm-path", f"{folder / 'shop.py'}:reward",
        "--custom-generate-function-path", "tool_use", "--tools-path", folder / "shop.py",
        "--tool-call-parser", "hermes",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    played = samples(run)
    called = [sample for sample in played if sample.reward]
    assert len(called) >= len(played) / 4
    for sample in called:
        masked = [t for t, kept in zip(sample.tokens[-sample.response_length :], sample.loss_mask) if not kept]
        assert "<|im_start|>tool\n" in tokenizer.decode(masked)
        assert " coins<|im_end|>\n<|im_start|>assistant\n" in tokenizer.decode(masked)
    [gap] = [value for _, value in Run(run).series("train/train_rollout_logprob_abs_diff")]
    assert gap < 1e-4


def test_openai_client_completes_streams_and_counts(url: str) -> None:
    openai = pytest.importorskip("openai")
    api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": "m", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = api.chat.completions.create(**asked).choices[0]
    assert len(whole.message.content.split()) > 3
    assert "<|im_end|>" not in whole.message.content
    chunks = list(api.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    cut = api.chat.completions.create(**asked, stop=[" music"]).choices[0]
    assert cut.message.content == whole.message.content.partition(" music")[0]
