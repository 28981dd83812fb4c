"""Check which assumptions of multi-turn training hold for a tokenizer and its chat template: `slime tokens check`.

`check_tokens` runs every check on built-in conversations and returns findings. A template that rewrites history is a
note and not a failure: `turns.turn_delta` never renders a sampled turn again, so the trajectory keeps the sampled
tokens, and conversations of data are assembled the same way (`demonstrations.py`). A server that renders the whole
conversation again sees a different text, however, and the note has the position of the first difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from slime_data.turns import PLACEHOLDER, turn_delta

from slime_core.data.tokenizer import encode_rendered, render_messages
from slime_core.errors import DataError
from slime_core.sample.provenance import Source

OK, NOTE, FAILED = "ok", "note", "failed"

TEXTS = (
    "The quick brown fox.",
    "1234567890 + 3.14e-10 = ?",
    "def f(x):\n    return {'a': [x, 2 ** 3]}\n\n\n# end\t\n",
    "\u00dcber na\u00efve caf\u00e9s: \u4f60\u597d, \u043c\u0438\u0440, \U0001f600\u200d\U0001f680",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
)
"""Texts that must be the same after encoding and decoding: code, digits, scripts, white space, markup."""

_ASK = {"role": "user", "content": "What is 17 + 25?"}
_ANSWER = {"role": "assistant", "content": "It is 42."}
_AGAIN = {"role": "user", "content": "And 8 more?"}
_REASONED = {"role": "assistant", "content": "<think>\nSeven and five make twelve.\n</think>\n\nIt is 42."}
_RULES = {"role": "system", "content": "Answer briefly."}
_CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 17, "b": 25}}}
    ],
}
_RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "forty-two"}
_SECOND = {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "exactly"}
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    },
)


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    name: str
    status: str
    """OK, NOTE (worth knowing) or FAILED (training with it would be wrong)."""
    text: str


@dataclass(frozen=True)
class _Subject:
    tokenizer: Any
    kwargs: Mapping[str, Any]
    stop_ids: frozenset[int]

    def render(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False, tools: bool = False) -> str:
        kwargs = {**self.kwargs, "add_generation_prompt": prompt}
        return render_messages(self.tokenizer, messages, TOOLS if tools else None, kwargs)

    def delta(
        self, messages: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], **more: Any
    ) -> list[tuple[list[int], Source]]:
        return turn_delta(self.tokenizer, None, messages, new, template_kwargs=self.kwargs, **more)

    def decoded(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def check_tokens(
    tokenizer: Any, stop_ids: frozenset[int] = frozenset(), template_kwargs: Mapping[str, Any] | None = None
) -> list[Finding]:
    """Return the findings in order; without a chat template, the checks of the template are skipped.

    Args:
        tokenizer: HF tokenizer.
        stop_ids: Further ids that end a turn at the engine (see `stop_ids_of`).
        template_kwargs: Value of --apply-chat-template-kwargs.
    """
    eos = tokenizer.eos_token_id
    subject = _Subject(tokenizer, template_kwargs or {}, stop_ids | ({eos} if eos is not None else set()))
    checks: list[Callable[[_Subject], Finding]] = [_round_trip, _special_tokens]
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if has_template:
        checks += _TEMPLATE_CHECKS
    found = [_run(check, subject) for check in checks]
    if not has_template:
        found.append(Finding("chat_template", NOTE, "there is none: text prompts only, no chats and no turns"))
    return found


def _run(check: Callable[[_Subject], Finding], subject: _Subject) -> Finding:
    try:
        return check(subject)
    except DataError as error:
        hard = check in (_generation_prompt, _end_of_turn, _delta_user)
        return Finding(check.__name__.strip("_"), FAILED if hard else NOTE, str(error))


def stop_ids_of(directory: Path) -> frozenset[int]:
    """Return the ids that end a turn in a model's config.json and generation_config.json."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        if path.is_file():
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found |= set(value) if isinstance(value, list) else set() if value is None else {int(value)}
    return frozenset(found)


# -- the tokenizer ---------------------------------------------------------------------------------------


def _round_trip(subject: _Subject) -> Finding:
    for text in TEXTS:
        again = subject.decoded(encode_rendered(subject.tokenizer, text))
        if again != text:
            return Finding("round_trip", FAILED, _differ("a text and its ids decoded", text, again))
    return Finding("round_trip", OK, f"{len(TEXTS)} texts are the same after encoding and decoding")


def _special_tokens(subject: _Subject) -> Finding:
    tokenizer = subject.tokenizer
    tokens = sorted({*tokenizer.all_special_tokens, *(str(t) for t in tokenizer.added_tokens_decoder.values())})
    for token in tokens:
        ids = encode_rendered(tokenizer, token)
        if len(ids) != 1:
            return Finding("special_tokens", FAILED, f"{token!r} becomes {len(ids)} tokens {ids[:8]}; expected one")
    if tokenizer.eos_token_id is None:
        return Finding("special_tokens", FAILED, "there is no eos_token; name it in tokenizer_config.json")
    return Finding("special_tokens", OK, f"{len(tokens)} are one token each; eos is {tokenizer.eos_token!r}")


# -- the template ----------------------------------------------------------------------------------------


def _generation_prompt(subject: _Subject) -> Finding:
    name = "generation_prompt"
    without, prompted = subject.render([_ASK]), subject.render([_ASK], prompt=True)
    if not prompted.startswith(without):
        text = _differ("the conversation without and with add_generation_prompt", without, prompted)
        return Finding(name, FAILED, text)
    answered = subject.render([_ASK, _ANSWER])
    added = prompted[len(without) :]
    if not answered.startswith(prompted):
        text = _differ("the prompt and an assistant's turn in data", prompted, answered)
        return Finding(name, NOTE, f"{text}; supervised fine-tuning on such turns is refused")
    num_prompt = len(encode_rendered(subject.tokenizer, prompted))
    ids = encode_rendered(subject.tokenizer, answered)[:num_prompt]
    if subject.decoded(ids) != prompted:
        return Finding(name, NOTE, f"{added!r} is cut into other tokens when an answer follows")
    return Finding(name, OK, f"{added!r}, which is how an assistant's turn begins")


def _end_of_turn(subject: _Subject) -> Finding:
    name = "end_of_turn"
    end = subject.render([_ASK, {"role": "assistant", "content": PLACEHOLDER}]).partition(PLACEHOLDER)[2]
    ids = encode_rendered(subject.tokenizer, end) if end else []
    stops = ", ".join(sorted(repr(subject.tokenizer.convert_ids_to_tokens(i)) for i in subject.stop_ids))
    if ids and ids[0] in subject.stop_ids:
        return Finding(name, OK, f"{end!r}; generation stops at {stops}")
    following = [token for ids, _ in subject.delta([_ASK], [_AGAIN]) for token in ids]
    if not ids and following and following[0] in subject.stop_ids:
        return Finding(name, OK, f"none; the next speaker's token is one of those that stop generation: {stops}")
    return Finding(
        name,
        FAILED,
        f"a turn ends with {(end or subject.decoded(following[:1]))!r}, and generation stops at {stops or 'nothing'}:"
        " the model would go on. Name its id as eos_token_id in generation_config.json, or in --rollout-stop-token-ids",
    )


def _system_prompt(subject: _Subject) -> Finding:
    name = "system_prompt"
    before = subject.render([_ASK]).partition(str(_ASK["content"]))[0]
    ruled = subject.render([_RULES, _ASK])
    if str(_RULES["content"]) not in ruled:
        return Finding(name, NOTE, "the template leaves out system messages")
    bare = subject.decoded([i for i in encode_rendered(subject.tokenizer, before) if not _is_special(subject, i)])
    if len(bare.split()) > 1:
        return Finding(name, NOTE, f"without a system message the template writes one of its own: {before!r}")
    return Finding(name, OK, "only what the messages say")


def _is_special(subject: _Subject, token: int) -> bool:
    return token in subject.tokenizer.all_special_ids or token in subject.tokenizer.added_tokens_decoder


def _append_only(subject: _Subject) -> Finding:
    return _history(subject, "append_only", [_RULES, _ASK, _ANSWER, _AGAIN, _ANSWER, _ASK])


def _append_only_tools(subject: _Subject) -> Finding:
    return _history(subject, "append_only_tools", [_ASK, _CALLS, _RESULT, _ANSWER, _AGAIN, _ANSWER], tools=True)


def _append_only_reasoning(subject: _Subject) -> Finding:
    name = "append_only_reasoning"
    sampled = subject.render([_ASK], prompt=True) + str(_REASONED["content"])
    rendered = subject.render([_ASK, _REASONED])
    if not rendered.startswith(sampled):
        what = "prompt and sampled reasoning, and the same as messages,"
        return Finding(name, NOTE, f"the template rewrites history: {_differ(what, sampled, rendered)}")
    return _history(subject, name, [_ASK, _REASONED, _AGAIN, _REASONED, _ASK])


def _history(subject: _Subject, name: str, messages: Sequence[Mapping[str, Any]], tools: bool = False) -> Finding:
    """Check that every conversation begins with the text of the conversation one message before."""
    earlier = subject.render(messages[:1] if messages[0]["role"] != "system" else messages[:2], tools=tools)
    for count in range(3 if messages[0]["role"] == "system" else 2, len(messages) + 1):
        later = subject.render(messages[:count], tools=tools)
        if not later.startswith(earlier):
            what = f"the text of {count - 1} messages, once a {messages[count - 1]['role']} message follows"
            return Finding(name, NOTE, f"the template rewrites history: {_differ(what, earlier, later)}")
        earlier = later
    return Finding(name, OK, f"{len(messages)} messages, each added to the text before")


def _delta_user(subject: _Subject) -> Finding:
    return _delta(subject, "delta_user", [_RULES, _ASK], _ANSWER, [_AGAIN])


def _delta_tools(subject: _Subject) -> Finding:
    found = _delta(subject, "delta_tools", [_ASK], _CALLS, [_RESULT], assistant=_CALLS, tools=TOOLS)
    if found.status == OK and str(_RESULT["content"]) not in found.text:
        return Finding("delta_tools", NOTE, "the template leaves out what tools answer")
    return found


def _delta(
    subject: _Subject,
    name: str,
    messages: list[Mapping[str, Any]],
    turn: Mapping[str, Any],
    new: list[Mapping[str, Any]],
    **more: Any,
) -> Finding:
    """Compare prompt, turn and delta, each encoded separately, with the template's text of the whole conversation."""
    tools = "tools" in more
    prompt, before = subject.render(messages, prompt=True, tools=tools), subject.render([*messages, turn], tools=tools)
    whole = subject.render([*messages, turn, *new], prompt=True, tools=tools)
    end = subject.render([*messages, {"role": "assistant", "content": PLACEHOLDER}], tools=tools).partition(PLACEHOLDER)
    delta = [token for ids, _ in subject.delta(messages, new, **more) for token in ids]
    if not (before.startswith(prompt) and whole.startswith(before) and before.endswith(end[2])):
        return Finding(name, NOTE, f"{subject.decoded(delta)!r}; the template rewrites the turn before it")
    written = before[len(prompt) : len(before) - len(end[2])]
    pieces = [encode_rendered(subject.tokenizer, piece) for piece in (prompt, written)]
    text = subject.decoded([*pieces[0], *pieces[1], *delta])
    if text != whole:
        return Finding(name, FAILED, _differ("prompt, turn and what is appended, and the template's text", text, whole))
    at_once = encode_rendered(subject.tokenizer, whole)
    if [*pieces[0], *pieces[1], *delta] != at_once:
        at = next(i for i, (a, b) in enumerate(zip([*pieces[0], *pieces[1], *delta], at_once)) if a != b)
        where = f"after {subject.decoded(at_once[max(0, at - 4) : at])!r} {subject.decoded(at_once[at : at + 1])!r}"
        return Finding(name, NOTE, f"{subject.decoded(delta)!r}; encoded as one text, it is other tokens: {where}")
    return Finding(name, OK, f"{subject.decoded(delta)!r}")


def _consecutive_tools(subject: _Subject) -> Finding:
    name = "consecutive_tools"
    both = [i for ids, _ in subject.delta([_ASK], [_RESULT, _SECOND], tools=TOOLS) for i in ids]
    each = [
        i
        for message, prompt in ((_RESULT, False), (_SECOND, True))
        for ids, _ in subject.delta([_ASK], [message], tools=TOOLS, add_generation_prompt=prompt, sampled_ids=())
        for i in ids
    ]
    text = subject.decoded(both)
    if any(str(m["content"]) not in text for m in (_RESULT, _SECOND)):
        return Finding(name, NOTE, f"of two tools' answers the template writes {text!r}")
    end = subject.render([_ASK, {"role": "assistant", "content": PLACEHOLDER}], tools=True).partition(PLACEHOLDER)[2]
    grouped = subject.decoded(each).replace(end, "") != text.replace(end, "")
    how = "in one turn: give turn_delta all answers of a turn at once" if grouped else "one after the other"
    return Finding(name, OK, f"written {how}")


_TEMPLATE_CHECKS: tuple[Callable[[_Subject], Finding], ...] = (
    _generation_prompt,
    _end_of_turn,
    _system_prompt,
    _append_only,
    _append_only_tools,
    _append_only_reasoning,
    _delta_user,
    _delta_tools,
    _consecutive_tools,
)


def _differ(what: str, first: str, second: str) -> str:
    """Return the position where two texts begin to differ, with an excerpt of each."""
    at = next(i for i, (a, b) in enumerate(zip_longest(_chars(first), _chars(second))) if a != b)
    begin = max(0, at - 12)
    return f"{what} differ at character {at}: {first[begin : at + 40]!r} and {second[begin : at + 40]!r}"


def _chars(text: str) -> Iterator[str]:
    return iter(text)
