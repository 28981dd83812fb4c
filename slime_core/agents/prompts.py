"""Messages -> prompt ids: what a session has sampled is kept token for token, only what is new is rendered.

`answering` calls `PromptWriter.prompt` for each request. Where the request repeats a conversation up to a sampled
answer, its ids are those the answer was sampled after, the answer's own ids, and the rendered *turn delta*: the end of
the assistant's message as the chat template writes it, the new messages, and the beginning of the next answer::

    request 1   <|user|>2*3=?<|end|><|assistant|>                            rendered
    answer 1                                     <tool>2*3</tool><|end|>     sampled
    request 2   ............................................................ <|tool|>6<|end|><|assistant|>   delta

What a reader would get wrong: the whole conversation is rendered nevertheless, to find the delta and to count where
the template would have written other tokens (drift). Those other tokens are never used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_core.agents.messages import BadRequest, Message
from slime_core.agents.tree import Place, Prompt, Turn
from slime_core.data.tokenizer import encode_rendered, render_messages
from slime_core.data.turns import turn_delta
from slime_core.errors import DataError
from slime_core.provenance import Source

logger = logging.getLogger(__name__)


@dataclass
class Drift:
    """How often the template, given the conversation as text, would not have written what was sampled."""

    turns: int = 0
    """Prompts that went on from held tokens."""
    drifted: int = 0
    lost: int = 0
    """Prompts that had to be rendered anew although an answer was held: no delta could be told from the rendering."""
    _logged: set[str] = field(default_factory=set)

    def note(self, kind: str, message: str) -> None:
        """Log the first of a kind."""
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(message)


class PromptWriter:
    """Writes prompts with one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None, *, check: bool = True) -> None:
        """`check`: count drift, for one more tokenisation of the whole conversation per request."""
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.check = check
        self.drift = Drift()

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], place: Place) -> Prompt:
        """The ids that the engine goes on from.

        Raises:
            BadRequest: There are no messages, the last one is the assistant's, or the template refuses them.
        """
        if not messages:
            raise BadRequest("there are no messages")
        if messages[-1]["role"] == "assistant":
            raise BadRequest("the last message is the assistant's; an answer begun by the client is not offered")
        held = place.held
        parts = self._delta(messages, held[0], tools, held[1]) if held else None
        if held is None or parts is None:
            self.drift.lost += held is not None
            return Prompt(encode_rendered(self.tokenizer, self._render(messages, tools, generation=True)))
        turn = held[1]
        ids = [*turn.prompt.ids, *turn.output.token_ids, *(token for part, _ in parts for token in part)]
        drifted = self.check and ids != encode_rendered(self.tokenizer, self._render(messages, tools, generation=True))
        self.drift.turns += 1
        self.drift.drifted += drifted
        if drifted:
            self.drift.note("drift", "the chat template would write other tokens than were sampled; those are kept")
        return Prompt(ids, turn, parts, drifted)

    def count(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], place: Place) -> int:
        """Tokens of the prompt that `prompt` would make; also for conversations that end with the assistant."""
        if messages and messages[-1]["role"] != "assistant":
            before = self.drift
            self.drift = Drift(_logged=before._logged)
            try:
                return len(self.prompt(messages, tools, place).ids)
            finally:
                self.drift = before
        return len(encode_rendered(self.tokenizer, self._render(messages, tools)))

    def _delta(
        self, messages: Sequence[Message], index: int, tools: Sequence[dict[str, Any]], turn: Turn
    ) -> list[tuple[list[int], Source]] | None:
        """What follows the ids of the answer `messages[index]`.

        Some templates want calls before results; others write calls otherwise once results follow. A template is
        asked both ways.
        """
        problem: DataError | None = None
        for answer in (messages[index], None):
            try:
                return turn_delta(
                    self.tokenizer,
                    None,
                    messages[:index],
                    messages[index + 1 :],
                    tools=tools or None,
                    sampled_ids=turn.output.token_ids,
                    assistant=answer,
                    template_kwargs=self.template_kwargs,
                )
            except DataError as error:
                problem = problem or error
        self.drift.note("lost", f"a prompt is rendered anew although its beginning was sampled: {problem}")
        return None

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool = False) -> str:
        kwargs = {**({"add_generation_prompt": True} if generation else {}), **self.template_kwargs}
        try:
            return render_messages(self.tokenizer, messages, tools, kwargs)
        except DataError as error:
            raise BadRequest(str(error)) from error
