from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import slime_rewards.on_policy_distillation as plugin

from slime_core.config import Args
from slime_core.errors import ConfigError, EngineError, PluginError
from slime_core.sample import Sample


def make_sample() -> Sample:
    return Sample(index=3, tokens=[5, 6, 7, 8, 9], response_length=2)


def score(url: str, sample: Sample, **keywords: Any) -> float:
    args = Args(rm_url=url, rollout_temperature=0.7)
    return asyncio.run(plugin.TeacherLogProbs(args)(args, sample, **keywords))


def test_the_response_gets_the_teachers_log_probs(teacher: Any) -> None:
    sample = make_sample()
    assert score(teacher.url, sample) == 0.0
    assert sample.teacher_log_probs == [-0.8, -0.9]
    ((path, body),) = teacher.requests
    assert path == "/generate"
    assert body["input_ids"] == sample.tokens
    assert (body["return_logprob"], body["logprob_start_len"]) == (True, 0)
    assert body["sampling_params"] == {"temperature": 0.7, "max_new_tokens": 0, "skip_special_tokens": False}


@pytest.mark.slow
def test_a_path_in_the_url_is_kept_and_a_busy_teacher_asked_again(teacher: Any) -> None:
    teacher.failures = 2
    sample = make_sample()
    score(f"{teacher.url}/teacher/generate", sample)
    assert sample.teacher_log_probs == [-0.8, -0.9]
    assert [path for path, _ in teacher.requests] == ["/teacher/generate"] * 3
    teacher.failures = plugin.ATTEMPTS
    with pytest.raises(PluginError, match=r"4 attempts in .*; last: 503"):
        score(teacher.url, sample)


def test_no_response_and_evaluation_ask_nobody(teacher: Any) -> None:
    url, sample = teacher.url, Sample(tokens=[1, 2])
    assert score(url, sample) == 0.0
    assert sample.teacher_log_probs is None
    sample = make_sample()
    assert score(url, sample, evaluation=True) == 0.0
    assert sample.teacher_log_probs is None
    assert teacher.requests == []


def test_a_model_of_this_run_named_teacher(teacher: Any, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("sglang: [{name: actor, server_groups: [{num_gpus: 1}]}]")
    args = Args(rm_url=None, rollout_engine="sglang", sglang_config=str(file))
    with pytest.raises(ConfigError, match="or a model named 'teacher' in the file of --sglang-config"):
        plugin.TeacherLogProbs(args)
    file.write_text("sglang: [{name: teacher, model_path: /models/t, server_groups: [{num_gpus: 1}]}]")
    reward, sample = plugin.TeacherLogProbs(args), make_sample()
    args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", teacher.server_port
    with pytest.raises(EngineError, match="model 'teacher' of --sglang-config is served while"):  # not the actor's
        asyncio.run(reward(args, sample))
    args.sglang_model_routers = {"actor": ("127.0.0.1", 1), "teacher": ("127.0.0.1", teacher.server_port)}
    assert asyncio.run(reward(args, sample)) == 0.0
    assert sample.teacher_log_probs == [-0.8, -0.9]
    assert [path for path, _ in teacher.requests] == ["/generate"]


def test_other_tokens_are_an_error() -> None:
    answer = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-1.0, 8, None], [-1.0, 1, None]]}}
    with pytest.raises(PluginError, match="share a tokenizer"):
        plugin.teacher_log_probs(answer, make_sample())
    with pytest.raises(PluginError, match="no usable"):
        plugin.teacher_log_probs({"meta_info": {}}, make_sample())


def test_post_process_reads_answers_and_gives_zeros() -> None:
    samples = [make_sample(), make_sample()]
    entries = [[None, 5, None], [-1.0, 6, None], [-1.5, 7, None], [-2.0, 8, None], [-2.5, 9, None]]
    samples[0].reward = {"text": "", "meta_info": {"input_token_logprobs": entries}}
    samples[1].reward, samples[1].teacher_log_probs = 1.0, [-3.0, -4.0]
    assert plugin.post_process_rewards(None, samples) == ([0.0, 0.0], [0.0, 0.0])
    assert samples[0].teacher_log_probs == [-2.0, -2.5]
    assert samples[1].teacher_log_probs == [-3.0, -4.0]
    with pytest.raises(PluginError, match="sample 3 has no teacher log-probs"):
        plugin.post_process_rewards(None, [make_sample()])


def test_only_sampled_tokens_have_teacher_log_probs() -> None:
    """Two turns with a tool's answer between: aligned with the sampled tokens, whatever the teacher says of others."""
    sample = Sample(index=4, tokens=[1, 2])
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-0.1, -0.2])
    sample.append_response_tokens(tokens=[7], trainable=False)
    sample.append_response_tokens(tokens=[8], log_probs=[-0.3])
    scores = [None, -1.0, -5.0, -6.0, None, -8.0]  # null: minus infinity, as JSON cannot say it
    answer = {"meta_info": {"input_token_logprobs": [[p, t, None] for p, t in zip(scores, sample.tokens)]}}
    assert plugin.teacher_log_probs(answer, sample) == [-5.0, -6.0, 0.0, -8.0]
    answer["meta_info"]["input_token_logprobs"][5][0] = None
    with pytest.raises(PluginError, match="no log-prob of a sampled token"):
        plugin.teacher_log_probs(answer, sample)
