from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from slime_generators.multi_agent import generate
from slime_testing_contracts import CharTokenizer, Reply, ScriptedEngine

from slime_core import GenerateContext, Sample, SampleStatus, SlimeError
from slime_core.config import Args
from slime_core.errors import EngineError

TOKENIZER = CharTokenizer()
ROLES = [
    {"name": "solver", "again": "critic: {critic}"},
    {"name": "critic", "prompt": "{question} was answered {solver}", "system": "Be strict."},
]


def prompt(**fields: Any) -> Sample:
    messages = [{"role": "user", "content": "1+1=?"}]
    tokens = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)
    assert isinstance(tokens, list)
    return Sample(group_index=4, index=3, prompt=messages, tokens=tokens, label="2", session_id="s", **fields)


def run(engine: ScriptedEngine, sample: Sample, limit: int = 200, **given: Any) -> list[Sample]:
    args = Args(**{"plugins": {"multi_agent": {"roles": ROLES}}, **given})
    context = GenerateContext(engine, TOKENIZER)
    result = asyncio.run(generate(args, sample, {"max_new_tokens": limit}, context=context))
    return result if isinstance(result, list) else [result]


def text(ids: list[int]) -> str:
    return TOKENIZER.decode(ids)


def test_each_role_has_a_trajectory_with_its_own_log_probs() -> None:
    replies = [Reply("3<|end|>", log_probs=(-1.0, -2.0)), Reply("no<|end|>", log_probs=(-3.0, -4.0, -5.0)), "2"]
    engine = ScriptedEngine(replies, weight_version=6)
    solver, critic = run(engine, prompt())
    between = "<|user|>critic: no<|end|><|assistant|>"
    assert text(solver.response_tokens) == f"3<|end|>{between}2<|end|>"
    told = len(TOKENIZER.encode(between))
    assert solver.loss_mask == [1, 1, *[0] * told, 1, 1]
    assert solver.rollout_log_probs == [-1.0, -2.0, *[0.0] * told, -0.5, -0.5]
    assert solver.token_weight_versions == [6, 6, *[-1] * told, 6, 6]
    asked = "<|system|>Be strict.<|end|><|user|>1+1=? was answered 3<|end|><|assistant|>"
    assert text(critic.prompt_tokens) == asked
    assert (critic.rollout_log_probs, critic.loss_mask) == ([-3.0, -4.0, -5.0], [1, 1, 1])
    assert [s.metadata["role"] for s in (solver, critic)] == ["solver", "critic"]
    assert [s.metadata["num_turns"] for s in (solver, critic)] == [2, 1]
    assert {s.rollout_id for s in (solver, critic)} == {3}
    turns = [[(turn.first, turn.last, turn.role) for turn in s.turns or ()] for s in (solver, critic)]
    assert turns == [[(0, 2, "solver"), (2 + told, 4 + told, "solver")], [(0, 3, "critic")]]
    assert (critic.group_index, critic.label, critic.session_id) == (4, "2", "s-critic")
    assert [r.input_ids for r in engine.requests][1] == critic.prompt_tokens
    assert engine.requests[2].input_ids == solver.tokens[:-2], "the second answer follows exactly what was sampled"


def test_every_role_is_generated_and_trained_with_its_adapter() -> None:
    roles = [ROLES[0], {**ROLES[1], "adapter": "other"}, {"name": "judge", "prompt": "{solver}"}]
    order = ["solver", "critic", "solver", "judge"]
    engine = ScriptedEngine(["3", "no", Reply("", "abort")])
    flags = {"lora_adapters": ["solver", "other"], "plugins": {"multi_agent": {"roles": roles, "order": order}}}
    (stopped,) = run(engine, prompt(train_metadata={"mine": 1}), **flags)
    rest = ScriptedEngine(["2", "good"])
    samples = run(rest, Sample.from_dict(stopped.to_dict()), **flags)
    asked = [request.adapter for request in (*engine.requests, *rest.requests)]
    assert asked == ["solver", "other", "solver", "solver", None]
    assert [s.train_metadata for s in samples] == [{"mine": 1, "adapter": "solver"}, {"adapter": "other"}, None]
    plain = run(ScriptedEngine(["3", "no", "2"]), prompt())
    assert [s.train_metadata for s in plain] == [None, None]


@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.parametrize("partial", ["", "x"])
def test_an_interruption_at_any_turn_is_picked_up(cut: int, partial: str) -> None:
    replies: list[Any] = ["3", "no", "2"]
    replies[cut] = Reply(partial, "abort")
    (stopped,) = run(ScriptedEngine(replies), prompt())
    assert stopped.status == SampleStatus.ABORTED
    stopped = Sample.from_dict(stopped.to_dict())
    rest = ["3", "no", "2"][cut:]
    engine = ScriptedEngine(rest)
    solver, critic = run(engine, stopped)
    words = ["3", "no", "2"]
    words[cut] = partial + words[cut]
    assert text(solver.response_tokens) == (
        f"{words[0]}<|end|><|user|>critic: {words[1]}<|end|><|assistant|>{words[2]}<|end|>"
    )
    assert text(critic.response_tokens) == f"{words[1]}<|end|>"
    assert "multi_agent" not in solver.metadata
    assert len(engine.requests) == len(rest)


@pytest.mark.parametrize("partial", ["", "x"])
def test_a_single_role_keeps_its_place_over_an_interruption(partial: str) -> None:
    own = {"multi_agent": {"roles": [{"name": "solver", "again": "you said {solver}"}], "order": ["solver"] * 3}}
    (stopped,) = run(ScriptedEngine(["1", Reply(partial, "abort")]), prompt(), plugins=own)
    engine = ScriptedEngine(["2", "3", "beyond the last turn"])
    (solver,) = run(engine, Sample.from_dict(stopped.to_dict()), plugins=own)
    assert len(engine.requests) == 2
    assert (solver.metadata["num_turns"], text(solver.response_tokens).count("you said")) == (3, 2)
    assert "multi_agent" not in solver.metadata


def test_a_conversation_whose_sample_was_reset_begins_again() -> None:
    (stopped,) = run(ScriptedEngine(["3", Reply("x", "abort")]), prompt())
    stopped.reset_for_retry()
    solver, critic = run(ScriptedEngine(["3", "no", "2"]), stopped)
    assert text(solver.response_tokens) == "3<|end|><|user|>critic: no<|end|><|assistant|>2<|end|>"
    assert text(critic.response_tokens) == "no<|end|>"


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_sample_that_was_reset_asks_the_rows_question(cancelled: bool) -> None:
    own = {"multi_agent": {"roles": [{"name": "solver", "prompt": "Answer {question}"}], "order": ["solver"]}}
    sample = prompt()
    if cancelled:
        with pytest.raises(EngineError, match="gone"):
            run(ScriptedEngine([EngineError("gone")]), sample, plugins=own)
    else:
        (sample,) = run(ScriptedEngine([Reply("x", "abort")]), sample, plugins=own)
    sample.reset_for_retry()
    (solver,) = run(ScriptedEngine(["2"]), Sample.from_dict(sample.to_dict()), plugins=own)
    assert text(solver.prompt_tokens) == "<|user|>Answer 1+1=?<|end|><|assistant|>"
    assert "multi_agent" not in solver.metadata


def test_a_turn_that_is_cut_ends_the_conversation() -> None:
    (solver,) = run(ScriptedEngine([Reply("3" * 50)]), prompt(), limit=5)
    assert (solver.status, solver.response_length) == (SampleStatus.TRUNCATED, 5)
    roles = [{**ROLES[0], "max_new_tokens": 3}, ROLES[1]]
    engine = ScriptedEngine(["3", "no", Reply("2" * 9)])
    solver, critic = run(engine, prompt(), plugins={"multi_agent": {"roles": roles}})
    assert (solver.status, critic.status) == (SampleStatus.TRUNCATED, SampleStatus.COMPLETED)
    assert [r.sampling_params["max_new_tokens"] for r in engine.requests] == [3, 200, 3]


def test_all_roles_get_the_last_answers_reward() -> None:
    answers = ["3", "no", r"\boxed{2}"]
    samples = run(ScriptedEngine(answers), prompt(), rm_type="exact", rm_timeout=30.0)
    assert [s.reward for s in samples] == [1.0, 1.0]


def test_a_function_may_reward_each_role(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "async def rewards(args, samples, reward):\n"
        "    return {name: reward + 10 * (name == 'critic') for name in samples}\n"
        "def forgets(args, samples, reward):\n    return {'solver': 1.0}\n"
    )
    own = {"roles": ROLES, "reward_path": f"{file}:rewards"}
    samples = run(
        ScriptedEngine(["3", "no", r"\boxed{2}"]),
        prompt(), rm_type="exact", rm_timeout=30.0, plugins={"multi_agent": own},
    )  # fmt: skip
    assert [s.reward for s in samples] == [1.0, 11.0]
    with pytest.raises(ValueError, match=r"returned rewards of \['solver'\]; expected \['critic', 'solver'\]"):
        run(
            ScriptedEngine(["3", "no", "2"]),
            prompt(), plugins={"multi_agent": {**own, "reward_path": f"{file}:forgets"}},
        )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"roles": []}, "give at least one"),
        ({"roles": ROLES, "order": ["solver", "judge"]}, "order .* name roles of"),
        ({"roles": ROLES, "order": ["critic", "solver"]}, "begin with 'solver'"),
        ({"roles": ROLES, "order": ["solver"]}, "have all of"),
        ({"roles": [{"name": "a"}], "order": ["a", "a"]}, "speaks more than once and needs `again`"),
        ({"roles": [{"name": "a", "prompt": "{judge}"}], "order": ["a"]}, r"has \['judge'\]; known: {question}, {a}"),
        ({"roles": [{"name": "a", "system": "x"}], "order": ["a"]}, "`system` goes with `prompt`"),
        ({"roles": [{"name": "A"}], "order": ["A"]}, "pattern"),
    ],
)
def test_options_that_do_not_fit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SlimeError, match=message):
        run(ScriptedEngine([]), prompt(), plugins={"multi_agent": given})
