from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import slime_rewards.on_policy_distillation as plugin
import transformers
from slime_estimators.distillation import unpack_likeliest
from slime_rewards.on_policy_distillation.asking import said

from slime_core import resolve
from slime_core.config import Args
from slime_core.errors import ConfigError, EngineError, PluginError
from slime_core.plugins.manager import current_registry
from slime_core.plugins.options import check_plugin_options
from slime_core.sample import Sample
from tests.chat_tokenizers import save


def make_sample(**fields: Any) -> Sample:
    return Sample(index=3, tokens=[5, 6, 7, 8, 9], response_length=2, **fields)


def args_of(url: str | None, chosen: dict[str, Any] | None = None, **changes: Any) -> Args:
    plugins = {"on_policy_distillation": chosen or {}} | changes.pop("plugins", {})
    return Args(rm_url=url, rollout_temperature=0.7, plugins=plugins, **changes)


def teach(args: Args, samples: list[Sample], **keywords: Any) -> list[Any]:
    return asyncio.run(plugin.TeacherLogProbs(args)(args, samples, **keywords))


def score(url: str, sample: Sample, **keywords: Any) -> float:
    args = args_of(url)
    (value,) = asyncio.run(plugin.TeacherLogProbs(args)(args, [sample], **keywords))
    return float(value)


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
    args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", teacher.port
    with pytest.raises(EngineError, match="model 'teacher' of --sglang-config is served while"):  # not the actor's
        asyncio.run(reward(args, [sample]))
    args.sglang_model_routers = {"actor": ("127.0.0.1", 1), "teacher": ("127.0.0.1", teacher.port)}
    assert asyncio.run(reward(args, [sample])) == [0.0]
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


# -- several teachers, their likeliest tokens ------------------------------------------------------------


def test_every_row_goes_to_its_teacher(teacher: Any, tmp_path: Path) -> None:
    teachers = {
        "math": {"url": f"{teacher.url}/math/generate"},
        "code": {"url": teacher.url, "adapter": "code-lora"},
        "chat": {"url": f"{teacher.url}/v1/completions", "adapter": "chat-lora"},
    }
    samples = [make_sample(metadata={"teacher": name} if name else {}) for name in ("math", "code", "chat", None)]
    args = args_of(f"{teacher.url}/all", {"teachers": teachers})
    assert teach(args, samples) == [0.0] * 4
    assert all(sample.teacher_log_probs == [-0.8, -0.9] for sample in samples)
    bodies = dict(teacher.requests)
    assert bodies.keys() == {"/math/generate", "/generate", "/v1/completions", "/all"}
    assert bodies["/generate"]["lora_path"] == "code-lora"
    assert "lora_path" not in bodies["/all"]
    chat = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 1, "temperature": 0.7, "prompt_logprobs": 0, "model": "chat-lora"}
    assert bodies["/v1/completions"] == chat
    with pytest.raises(PluginError, match=r"metadata\['teacher'\] is 'art'; .*teachers has 'math', 'code', 'chat'"):
        teach(args, [make_sample(metadata={"teacher": "art"})])
    with pytest.raises(PluginError, match=r"metadata\['subject'\] is None"):
        teach(args_of(None, {"teachers": teachers, "route": "subject"}), [make_sample()])


def test_the_trainer_learns_the_name_of_every_rows_teacher() -> None:
    names = ("math", None, "code")
    samples = [make_sample(metadata={"subject": name}, train_metadata={"kept": 1}) for name in names]
    chosen = {"teachers": {name: {"path": f"/models/{name}"} for name in ("math", "code")}, "route": "subject"}
    args = args_of(None, chosen, opd_type="megatron")
    teach(args, samples)
    given = [sample.train_metadata for sample in samples]
    assert given == [{"kept": 1, "teacher": "math"}, {"kept": 1}, {"kept": 1, "teacher": "code"}]
    with pytest.raises(PluginError, match=r"metadata\['subject'\] is 'art'; .*teachers has 'math', 'code'"):
        teach(args, [make_sample(metadata={"subject": "art"})])


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_the_likeliest_tokens_come_along(teacher: Any, path: str) -> None:
    args = args_of(teacher.url + path, loss_type="distillation", plugins={"distillation": {"top_k": 3}})
    sample = Sample(index=4, tokens=[1, 2], train_metadata={"kept": 1})
    sample.append_response_tokens(tokens=[5], log_probs=[-0.1])
    sample.append_response_tokens(tokens=[7], trainable=False)
    sample.append_response_tokens(tokens=[1], log_probs=[-0.3])
    teach(args, [sample])
    assert sample.teacher_log_probs == [-0.5, 0.0, -0.1]
    assert sample.train_metadata is not None
    assert sample.train_metadata["kept"] == 1
    found = unpack_likeliest(sample.train_metadata, 3)
    assert found is not None
    assert found[0].tolist() == [[0, 1, 2], [-1, -1, -1], [0, 1, 2]]
    assert found[1].ravel().tolist() == pytest.approx([0, -0.1, -0.2, 0, 0, 0, 0, -0.1, -0.2])
    if path == "/generate":
        assert teacher.requests[0][1]["logprob_start_len"] == 1, "the prompt's are not sent"
    Sample.from_dict(sample.to_dict()).validate()


def test_a_server_without_the_likeliest_tokens() -> None:
    answer = {"meta_info": {"input_token_logprobs": [[None, 7, None], [-1.0, 8, None], [-1.0, 9, None]]}}
    with pytest.raises(PluginError, match="likeliest tokens for 2 asked"):
        said(answer, make_sample(), 2)
    with pytest.raises(PluginError, match=r"no usable choices\[0\].prompt_logprobs"):
        said({"choices": []}, make_sample())
    other = [None, {"1": {"logprob": -1.0}}, {"2": {"logprob": -1.0}}]
    with pytest.raises(PluginError, match="share a tokenizer"):
        said({"choices": [{"prompt_logprobs": other}]}, make_sample())


# -- a teacher that sees more ----------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(save("qwen3", tmp_path / "model"))


def shown(checkpoint: str, sample: Sample) -> str:
    assert sample.train_metadata is not None
    ids = sample.train_metadata["teacher_prompt"]
    return str(transformers.AutoTokenizer.from_pretrained(checkpoint).decode(ids))


CONTEXT = ["{prompt}\nFeedback: {feedback}\nRight: {peer}", "{prompt}\nRight: {peer}", "{prompt}\n{feedback}"]


def test_the_first_template_that_fits_is_the_teachers_prompt(checkpoint: str, tmp_path: Path) -> None:
    """SDPO: feedback on the response, and another of the group that was right."""
    reward = tmp_path / "right.py"
    reward.write_text("def reward(args, sample, **kwargs):\n    return float(sample.response == 'four')\n")
    chosen = {"context": CONTEXT, "reward": str(reward)}
    args = args_of(None, chosen, opd_type="self", hf_checkpoint=checkpoint)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]

    def answer(text: str, **metadata: Any) -> Sample:
        return make_sample(prompt=chat, response=text, metadata=metadata)

    group = [answer("five", feedback="too much"), answer("four"), answer("six"), answer("four")]
    assert plugin.TeacherLogProbs(args).traits.scores_groups
    assert teach(args, group) == [0.0, 1.0, 0.0, 1.0]
    texts = [shown(checkpoint, sample) for sample in group]
    assert "2+2?\nFeedback: too much\nRight: four" in texts[0]
    assert all("Be brief." in text for text in texts)
    assert all("Feedback" not in text and "2+2?\nRight: four" in text for text in texts[1:])
    assert group[0].train_metadata is not group[1].train_metadata
    alone = [answer("four"), answer("five"), answer("six", feedback="even more")]
    teach(args, alone)
    prompts = [sample.train_metadata["teacher_prompt"] for sample in alone if sample.train_metadata]
    assert prompts[0] is None, "no other response is right"
    assert "2+2?\nRight: four" in shown(checkpoint, alone[1])
    assert [s.metadata["sample_metrics"]["teacher_context"] for s in alone] == [0.0, 1.0, 1.0]


def test_a_teacher_on_a_server_sees_more_too(teacher: Any, checkpoint: str) -> None:
    """OPSD: the solution; what the teacher says is of the response alone."""
    args = args_of(teacher.url, {"context": "{prompt} It is {label}."}, hf_checkpoint=checkpoint)
    samples = [make_sample(prompt="2+2?", label=4), make_sample(prompt="2+2?")]
    teach(args, samples)
    assert [sample.teacher_log_probs for sample in samples] == [[-0.8, -0.9]] * 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    sent = sorted((body["input_ids"] for _, body in teacher.requests), key=len)
    assert sent[0] == [5, 6, 7, 8, 9]
    assert tokenizer.decode(sent[1][:-2]) == "2+2? It is 4."
    assert sent[1][-2:] == [8, 9]
    images = make_sample(prompt="2+2?", label=4, multimodal_inputs={"images": ["a.png"]})
    with pytest.raises(PluginError, match="takes prompts of text only"):
        teach(args, [images])


def built(args: Args) -> plugin.TeacherLogProbs:
    """Check the settings as a run does before it starts."""
    check_plugin_options(args, current_registry(), used=[resolve("rewards", "on_policy_distillation")])
    return plugin.TeacherLogProbs(args)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"context": "{label.x}"}, r"a field is a name in braces"),
        ({"teachers": {"a": {"url": "localhost:1"}}}, r"'localhost:1' is no address; write http://HOST:PORT"),
        ({"teachers": {"a": {}}}, r"a teacher has a url, a model or a path, one of the three"),
        ({"teachers": {"a": {"path": "/m", "adapter": "b"}}}, r"adapter is a server's"),
        ({"teachers": {"a": {"path": "/m"}}}, r"teachers.a: a path is for --opd-type local; give a url"),
        ({"teachers": {"a": {"model": "b"}}}, r"teachers.a.model 'b': --sglang-config has no models"),
        ({"reward": "on_policy_distillation"}, r"plugins.on_policy_distillation.reward .*name the reward that scores"),
    ],
)
def test_options_that_are_wrong(chosen: dict[str, Any], message: str) -> None:
    args = args_of("http://localhost:1", chosen, rollout_engine="sglang")
    with pytest.raises(ConfigError, match=message):
        built(args)


def test_the_trainers_teacher_needs_something_to_see() -> None:
    with pytest.raises(ConfigError, match=r"with --opd-type self only shows the teacher more .*context=.*teachers"):
        plugin.TeacherLogProbs(args_of(None, opd_type="self"))
    chosen = {"context": "{prompt}", "teachers": {"a": {"url": "http://a"}}}
    with pytest.raises(ConfigError, match=r"teachers.a: with --opd-type local the trainer holds the teachers; give a"):
        plugin.TeacherLogProbs(args_of(None, chosen, opd_type="megatron"))
    with pytest.raises(ConfigError, match=r"teachers.a: with --opd-type self the actor is the teacher"):
        plugin.TeacherLogProbs(args_of(None, chosen, opd_type="self"))
