"""Checks of a conversation before its chat template is run, and of a client's template arguments."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from slime_core.data.tokenizer import quoted_messages, render_messages
from slime_core.errors import DataError
from slime_core.protocols import Args
from slime_serving.front.wanted import Message, Wanted
from slime_serving.http.bodies import check_text
from slime_serving.http.errors import BadRequest, unknown


def check_conversation(wanted: Wanted, context: int) -> int:
    """Return the number of characters of a conversation before it is rendered.

    Raises:
        BadRequest: It cannot fit into `context` tokens.
    """
    if not wanted.messages:
        raise BadRequest("there are no messages")
    if len(wanted.messages) > context:
        raise BadRequest(f"there are {len(wanted.messages)} messages; allowed: {context}, the tokens of the context")
    said = [str(message.get(key) or "") for message in wanted.messages for key in ("content", "reasoning_content")]
    calls = [message["tool_calls"] for message in wanted.messages if message.get("tool_calls")]
    others = [json.dumps(value, default=str) for value in (wanted.tools, wanted.template_kwargs, calls) if value]
    size = sum(map(len, said)) + sum(map(len, others))
    check_text(size, context, "the conversation")
    return size


def render(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
) -> str:
    """Render the conversation by the template. Raises BadRequest."""
    try:
        return render_messages(tokenizer, messages, tools, kwargs)
    except DataError as error:
        raise BadRequest(str(error)) from error


def quoted(
    tokenizer: Any,
    messages: Sequence[Message],
    args: Args | None,
    noted: dict[str, Any] | None = None,
    *,
    environment: bool = False,
) -> list[Message]:
    """Return `quoted_messages`. Raises BadRequest if `--content-special-tokens` refuses a message."""
    try:
        return [dict(m) for m in quoted_messages(tokenizer, messages, args, noted, environment=environment)]
    except DataError as error:
        raise BadRequest(str(error)) from error


def allowed_kwargs(tokenizer: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `chat_template_kwargs` that the template reads.

    Raises:
        BadRequest: The template does not read a name whose value is neither null nor false.
    """
    taken = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
    known = _variables(str(getattr(tokenizer, "chat_template", None) or ""), taken)
    for name, value in given.items():
        if name not in known and value not in (None, False):
            raise BadRequest(unknown(name, known, "variable of the chat template") + " (chat_template_kwargs)")
    return {name: value for name, value in given.items() if name in known}


@lru_cache(maxsize=16)
def _variables(template: str, taken: frozenset[str]) -> frozenset[str]:
    """Return the undeclared variables of a template, without the variables of `apply_chat_template` and `taken`."""
    from jinja2 import Environment, TemplateSyntaxError, meta, nodes
    from jinja2.ext import Extension, loopcontrols

    class Generation(Extension):
        """The block of transformers around the assistant's text."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))

    try:
        found = meta.find_undeclared_variables(Environment(extensions=[loopcontrols, Generation]).parse(template))
    except TemplateSyntaxError:
        return frozenset()
    own = {*taken, "messages", "raise_exception", "strftime_now"}
    return frozenset(name for name in found if name not in own and not name.endswith("_token"))
