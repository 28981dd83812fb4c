"""Functions written for THUDM/slime, as its users' examples are built; `compat/examples` has more of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import TinyRun

OWN_PROMPT = """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    question = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[0]["content"]
    prompt = state.tokenizer.encode("<|user|>tools: none " + question + "<|assistant|>", add_special_tokens=False)
    sample.tokens = prompt
    sample.metadata["own_prompt"] = len(prompt)
    for turn in range(2):
        params = {**sampling_params, "max_new_tokens": 3}
        answer = await post(url, {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True})
        found = answer["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args, tokens=[t[1] for t in found], log_probs=[t[0] for t in found], trainable=True,
            meta_info=answer["meta_info"], text=answer["text"],
        )
        if turn == 0:
            told = state.tokenizer.encode("=?", add_special_tokens=False)
            sample.append_response_tokens(args, tokens=told, trainable=False, text="=?")
    return sample
"""


@pytest.mark.slow
def test_a_generate_function_with_a_prompt_of_its_own(tiny: TinyRun, tmp_path: Path, slime) -> None:
    (tmp_path / "gen.py").write_text(OWN_PROMPT)
    slime(
        "train",
        *tiny.argv(
            tmp_path / "run", custom_generate_function_path=tmp_path / "gen.py", num_rollout=1, eval_interval=None,
            save_debug_rollout_data=tmp_path / "samples_{rollout_id}.jsonl",
        ),
    )  # fmt: skip
    samples = [json.loads(line) for line in (tmp_path / "samples_0.jsonl").read_text().splitlines()]
    assert {s["status"] for s in samples} <= {"completed", "truncated"}
    for sample in samples:
        assert len(sample["tokens"]) - sample["response_length"] == sample["metadata"]["own_prompt"]
        assert [source for source, *_ in sample["spans"][-3:]] == ["sampled", "tool", "sampled"]
    (line,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["train/train_rollout_logprob_abs_diff_max"] < 1e-4, "trained on what was sent and sampled"
