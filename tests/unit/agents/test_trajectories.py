"""What becomes of conversations: tree routing (1), linearisation (2), rewritten answers (3), odd answers (4).

The cases are those of THUDM/slime's trajectory matrix (tests/test_agent/trajectory), with our decisions where they
differ; docs/how-to/agents-by-base-url.md has the table.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_agent_base_url.linearise import Line, Step, linearise
from slime_agent_base_url.prompts import PromptWriter
from slime_agent_base_url.tree import MessageTree, Turn
from slime_serving.front.wanted import Message
from slime_serving.http.errors import BadRequest

from slime_core import GenerationOutput
from tests.agent_toys import ToyTokenizer

TOKENIZER = ToyTokenizer()
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def called(name: str, ident: str = "c", **arguments: Any) -> Message:
    call = {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}
    return assistant("", tool_calls=[call])


class Agent:
    """A session's tree, with answers said by the test."""

    def __init__(self, threshold: int = 1024) -> None:
        self.tree = MessageTree(rewrite_threshold=threshold)
        self.writer = PromptWriter(TOKENIZER)
        self.threshold = threshold
        self.version = 0

    def ask(self, messages: list[Message], text: str, *, answer: Message | None = None, finish: str = "stop",
            tools: Any = ()) -> Turn:  # fmt: skip
        """The answer `text`, sampled; `answer` is what the client is shown of it."""
        place = self.tree.find(messages, tools)
        prompt = self.writer.prompt(messages, list(tools), place)
        ids = TOKENIZER.encode(text + ("<|end|>" if finish == "stop" else ""))
        meta = {"finish_reason": {"type": finish}, "token_weight_versions": [self.version] * len(ids)}
        turn = Turn(prompt, GenerationOutput(ids, [-0.5] * len(ids), text, meta))
        self.tree.add(place, messages, answer or assistant(text), turn).delivered = True
        return turn

    def lines(self) -> list[Line]:
        return linearise(self.tree.paths(), fork_threshold=self.threshold)

    def texts(self) -> list[tuple[str, str]]:
        """(all tokens, those that are trained) of each line."""
        return [
            (TOKENIZER.decode(line.trajectory.tokens),
             TOKENIZER.decode([t for t, m in zip(line.trajectory.tokens, line.trajectory.loss_mask) if m]))
            for line in self.lines()
        ]  # fmt: skip


@pytest.fixture
def agent() -> Agent:
    return Agent()


# -- 1: which messages go together ----------------------------------------------------------------------


def test_another_system_prompt_user_or_tool_list_is_another_root(agent: Agent) -> None:
    for messages, tools in (
        ([user("a")], ()),
        ([user("b")], ()),
        ([{"role": "system", "content": "s"}, user("a")], ()),
        ([user("a")], TOOLS),
    ):
        agent.ask(messages, "A", tools=tools)
    assert len(agent.lines()) == 4


def test_equal_answers_stay_two_and_the_later_is_gone_on_with(agent: Agent) -> None:
    agent.ask([user("a")], "same")
    later = agent.ask([user("a")], "same")
    third = agent.ask([user("a"), assistant("same"), user("b")], "B")
    assert third.prompt.held is later
    assert [trained for _, trained in agent.texts()] == ["same<|end|>", "same<|end|>B<|end|>"]


@pytest.mark.parametrize("continues", [False, True])
def test_an_answer_is_kept_although_a_request_before_it_is_forgotten_meanwhile(continues: bool) -> None:
    """The client of the first request left; the second one began before the server knew."""
    tree, writer, asked = MessageTree(rewrite_threshold=1), PromptWriter(TOKENIZER), [user("hi")]

    def turn(messages: list[Message], place: Any) -> Turn:
        ids = TOKENIZER.encode("yes<|end|>")
        output = GenerationOutput(ids, [-0.5] * len(ids), "yes", {"finish_reason": {"type": "stop"}})
        return Turn(writer.prompt(messages, [], place), output)

    first = tree.find(asked)
    lost = tree.add(first, asked, assistant("yes"), turn(asked, first))
    messages = [*asked, assistant("yes"), user("go")] if continues else asked
    place = tree.find(messages)
    second = turn(messages, place)
    tree.forget(lost)
    tree.add(place, messages, assistant("yes"), second)
    assert [path[-1] for path in tree.paths()] == [second]
    assert len(tree.find([*messages, assistant("yes")]).nodes) == len(messages) + 1


def test_blank_space_call_ids_and_left_out_reasoning_are_no_difference(agent: Agent) -> None:
    shown = {**called("add", "ours", a=1), "reasoning_content": "think"}
    agent.ask([user("a")], "<think>think</think> x \n", answer=assistant(" x \n", reasoning_content="think"))
    second = agent.ask([user("a"), assistant("x"), user("b")], "call", answer=shown)
    third = agent.ask(
        [user("a"), assistant("x"), user("b"), called("add", "theirs", a=1), {"role": "tool", "content": "1"}], "C"
    )
    assert third.prompt.held is second
    assert len(agent.lines()) == 1
    assert agent.texts()[0][1] == "<think>think</think> x \n<|end|>call<|end|>C<|end|>"


@pytest.mark.parametrize(
    "sent", [called("add", a=2), called("sub", a=1), assistant("x"), {**called("add", a=1), "reasoning_content": "new"}]
)
def test_other_calls_text_or_reasoning_are_a_rewrite(sent: Message) -> None:
    agent = Agent(threshold=0)
    agent.ask([user("a")], "call", answer={**called("add", a=1), "reasoning_content": "old"})
    agent.ask([user("a"), sent, user("b")], "B")
    assert len(agent.lines()) == 2


def test_what_cannot_be_asked_is_refused(agent: Agent) -> None:
    with pytest.raises(BadRequest, match="no messages"):
        agent.ask([], "A")
    with pytest.raises(BadRequest, match="last message is the assistant's"):
        agent.ask([user("a"), assistant("begin")], "A")
    assert agent.lines() == []


# -- 2: which tokens go together -------------------------------------------------------------------------


def test_what_a_template_would_rewrite_is_kept_as_sampled(agent: Agent) -> None:
    agent.ask([user("a")], "<think>why</think>A ", answer=assistant("A", reasoning_content="why"))
    agent.ask([user("a"), assistant("A"), user("b")], "B")
    ((whole, _),) = agent.texts()
    assert whole == ("<|user|>a<|end|><|assistant|><think>why</think>A <|end|><|user|>b<|end|><|assistant|>B<|end|>")
    assert (agent.writer.drift.turns, agent.writer.drift.drifted) == (1, 1)


def test_an_answer_cut_at_the_limit_is_closed_by_the_template(agent: Agent) -> None:
    agent.ask([user("a")], "cut of", finish="length")
    agent.ask([user("a"), assistant("cut of"), user("b")], "B")
    ((whole, trained),) = agent.texts()
    assert "cut of<|end|><|user|>b" in whole
    assert trained == "cut ofB<|end|>", "the end token was not sampled"


def test_a_shared_answer_is_trained_once(agent: Agent) -> None:
    agent.ask([user("a")], "A")
    agent.ask([user("a"), assistant("A"), user("b")], "B")
    agent.ask([user("a"), assistant("A"), user("c")], "C")
    (first, trained), (second, also) = agent.texts()
    assert (trained, also) == ("A<|end|>B<|end|>", "C<|end|>")
    assert second.startswith("<|user|>a<|end|><|assistant|>A<|end|><|user|>c")
    prompt = agent.lines()[1].trajectory.prompt_length
    assert TOKENIZER.decode(agent.lines()[1].trajectory.tokens[prompt:]) == "C<|end|>"
    assert first != second


# -- 3: answers that the client rewrote ------------------------------------------------------------------


def rewritten(threshold: int, sampled: str, sent: str) -> Agent:
    agent = Agent(threshold)
    agent.ask([user("a")], sampled)
    agent.ask([user("a"), assistant(sent), user("b")], "B")
    return agent


def test_a_short_rewritten_answer_is_realigned_as_a_whole() -> None:
    agent = rewritten(1024, "hello wurld", "hello world")
    ((whole, trained),) = agent.texts()
    assert whole == "<|user|>a<|end|><|assistant|>hello world<|end|><|user|>b<|end|><|assistant|>B<|end|>"
    assert trained == "B<|end|>", "the whole answer is context, not only its rewritten end"
    (line,) = agent.lines()
    assert line.steps == [Step.REALIGN]
    assert line.trajectory.metadata["lossy"][0]["sampled"] == len(TOKENIZER.encode("hello wurld<|end|>"))
    assert agent.tree.rewritten == 1


@pytest.mark.parametrize(("threshold", "samples"), [(6, 2), (7, 1)])
def test_the_threshold_is_exclusive(threshold: int, samples: int) -> None:
    agent = rewritten(threshold, "hello", "jello")  # 6 tokens with the end
    assert len(agent.lines()) == samples


def test_of_two_answers_neither_is_taken_for_a_rewritten_one(agent: Agent) -> None:
    agent.ask([user("a")], "one")
    agent.ask([user("a")], "two")
    agent.ask([user("a"), assistant("three"), user("b")], "B")
    assert len(agent.lines()) == 3


# -- 4: odd answers --------------------------------------------------------------------------------------


def test_log_probs_that_do_not_fit_are_an_error(agent: Agent) -> None:
    turn = agent.ask([user("a")], "A")
    turn.output.log_probs.pop()
    with pytest.raises(ValueError, match="2 sampled tokens but 1 log-probs"):
        agent.lines()


# -- any conversation ------------------------------------------------------------------------------------

STEPS = st.lists(st.tuples(st.sampled_from(["go on", "again", "rewrite", "compact", "back"]), st.sampled_from("xyz"),
                           st.integers(0, 12)), max_size=12)  # fmt: skip


@given(steps=STEPS, threshold=st.sampled_from([0, 3, 1024]))
def test_every_sampled_token_is_trained_once_or_noted_as_dropped(steps: Any, threshold: int) -> None:
    agent = Agent(threshold)
    history: list[Message] = [user("q")]
    turns = []
    for action, letter, length in [("go on", "x", 3), *steps]:
        if action == "rewrite" and history[-1]["role"] == "user" and len(history) > 1:
            history = [*history[:-2], assistant("r" + letter), history[-1]]
        elif action == "compact":
            history = [user("summary " + letter)]
        elif action == "back":
            history = history[:1]
        text = letter * length
        turns.append(agent.ask(history, text))
        if action != "again":
            history = [*history, assistant(text), user(letter)]
    lines = agent.lines()
    trained = [id(turn) for line in lines for turn in line.turns]
    assert len(trained) == len(set(trained))
    dropped = sum(note["sampled"] for line in lines for note in line.trajectory.metadata.get("lossy", ()))
    sampled = sum(len(turn.output.token_ids) for turn in turns)
    assert sum(sum(line.trajectory.loss_mask) for line in lines) + dropped == sampled
    for line in lines:
        ids, place = line.trajectory.tokens, 0
        for turn in line.turns:
            place = len(turn.prompt.ids)
            assert ids[:place] == turn.prompt.ids, "an answer is trained after exactly what it was sampled after"
            assert ids[place : place + len(turn.output.token_ids)] == turn.output.token_ids
