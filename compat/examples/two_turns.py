"""Generate two turns: an answer, and a second answer after a request to try again; the request's tokens are masked."""

from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_mathd
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

AGAIN = "<|user|>again<|end|><|assistant|>"


async def generate(args, sample: Sample, sampling_params) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    feedback_ids = state.tokenizer(AGAIN, add_special_tokens=False)["input_ids"]
    response, response_ids, loss_mask, log_probs = "", [], [], []
    for turn in range(2):
        async with state.semaphore:
            payload = {
                "input_ids": prompt_ids + response_ids,
                "sampling_params": sampling_params,
                "return_logprob": True,
            }
            output = await post(url, payload)
        finish = output["meta_info"]["finish_reason"]["type"]
        if finish == "abort" or state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        new = output["meta_info"]["output_token_logprobs"]
        response += output["text"]
        response_ids += [item[1] for item in new]
        log_probs += [item[0] for item in new]
        loss_mask += [1] * len(new)
        if turn == 0:
            response += AGAIN
            response_ids += feedback_ids
            log_probs += [0.0] * len(feedback_ids)
            loss_mask += [0] * len(feedback_ids)
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_mask
    sample.rollout_log_probs = log_probs
    sample.status = Sample.Status.TRUNCATED if finish == "length" else Sample.Status.COMPLETED
    sample.metadata["turns"] = 2
    return sample


async def reward_func(args, sample, **kwargs):
    answer = extract_answer(sample.response)
    if answer is not None and grade_answer_mathd(answer, sample.label):
        return 1.0
    return 0.5 * sum(character.isdigit() for character in sample.response) / max(len(sample.response), 1)
