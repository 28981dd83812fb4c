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


GIVES_UP = """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params):
    if sample.index % 4 == 0:  # as examples/coding_agent_rl
        sample.tokens, sample.response, sample.response_length, sample.loss_mask = [0, 0], "", 1, [0]
        sample.rollout_log_probs, sample.reward, sample.remove_sample = [0.0], 0.0, True
        sample.status = Sample.Status.ABORTED
        return [sample]
    tokenizer = GenerateState(args).tokenizer
    sample.tokens = sample.tokens or tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    body = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    meta = (await post(url, body))["meta_info"]
    assert args.sglang_server_concurrency * args.rollout_num_gpus == args.sglang_server_concurrency
    log_probs, tokens = zip(*[entry[:2] for entry in meta["output_token_logprobs"]])
    sample.append_response_tokens(args, tokens=tokens, log_probs=log_probs, trainable=True, meta_info=meta)
    sample.reward = {"score": float(sample.index % 2), "acc": True}
    return [sample]


def post_process(args, samples, **kwargs):
    raw = [sample.reward["score"] for sample in samples]
    return raw, [value - sum(raw) / len(raw) for value in raw]
"""


def test_one_of_a_group_gives_up_and_the_rewards_are_mappings(tiny: TinyRun, tmp_path: Path, slime) -> None:
    (tmp_path / "gen.py").write_text(GIVES_UP)
    slime(
        "train",
        *tiny.argv(
            tmp_path / "run", custom_generate_function_path=tmp_path / "gen.py", num_rollout=1, eval_interval=None,
            custom_reward_post_process_path=f"{tmp_path / 'gen.py'}:post_process", rm_type=None, custom_rm_path=None,
            eval_prompt_data=None, save_debug_rollout_data=tmp_path / "samples_{rollout_id}.jsonl",
        ),
    )  # fmt: skip
    samples = [json.loads(line) for line in (tmp_path / "samples_0.jsonl").read_text().splitlines()]
    assert [(s["index"], s["remove_sample"]) for s in samples] == [(i, i % 4 == 0) for i in range(16)]
    (line,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["train/grad_norm"] > 0
    assert line["rollout/masked_samples"] == 4
