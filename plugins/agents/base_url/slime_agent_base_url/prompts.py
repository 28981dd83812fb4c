"""Messages -> prompt ids: what a session has sampled is kept token for token, only what is new is rendered.

`answering` calls `PromptWriter.prompt` for each request. Where the request repeats a conversation up to a sampled
answer, its ids are those the answer was sampled after, the answer's own ids, and the rendered *turn delta*: the end of
the assistant's message as the chat template writes it, the new messages, and the beginning of the next answer::

    request 1   <|user|>2*3=?<|end|><|assistant|>                            rendered
    answer 1                                     <tool>2*3</tool><|end|>     sampled
    request 2   ............................................................ <|tool|>6<|end|><|assistant|>   delta

The whole conversation is rendered nevertheless, to find the delta and to count where the template would have written
other tokens (drift). Those other tokens are never used. Only the text from where it differs from the last rendering
becomes ids: the time of a request grows by the template's alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_command_serve.front.prompts import quoted, render
from slime_command_serve.front.wanted import Message
from slime_command_serve.http.errors import BadRequest

from slime_agent_base_url.tree import Place, Prompt, Rendering, Turn
from slime_core.data.tokenizer import encode_rendered
from slime_core.data.turns import turn_delta
from slime_core.errors import DataError
from slime_core.protocols import Args
from slime_core.provenance import Source

logger = logging.getLogger(__name__)

_LOOK_BACK = 256
"""Tokens of a rendering's end in which the next one is looked for; one that changed before is encoded as a whole."""


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

    def __init__(self, tokenizer: Any, args: Args | None = None, *, check: bool = True) -> None:
        """`check`: count drift, for one more rendering of the whole conversation per request."""
        self.tokenizer, self.args = tokenizer, args
        self.template_kwargs = dict(args.apply_chat_template_kwargs if args else {})
        self.check = check
        self.drift = Drift()
        self._added = frozenset(getattr(tokenizer, "added_tokens_decoder", ()))

    def warm_up(self) -> None:
        """Import and compile what rendering needs: a tenth of a second that no request is to take."""
        try:
            encode_rendered(self.tokenizer, self._render([{"role": "user", "content": ""}], [], generation=True))
        except BadRequest as problem:  # not what it is for; requests may have what the template wants
            logger.debug("warming up: %s", problem)

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], place: Place, *, drift: Drift | None = None
    ) -> Prompt:
        """The ids that the engine goes on from; `drift` is where it is counted, `self.drift` unless given.

        Raises:
            BadRequest: There are no messages, the last one is the assistant's, or the template refuses them.
        """
        if not messages:
            raise BadRequest("there are no messages")
        if messages[-1]["role"] == "assistant":
            raise BadRequest("the last message is the assistant's; an answer begun by the client is not offered")
        drift, held = drift or self.drift, place.held
        noted: dict[str, Any] = {}
        messages = self._quoted(messages, noted)
        parts = self._delta(messages, held[0], tools, held[1]) if held else None
        if held is None or parts is None:
            drift.lost += held is not None
            rendering = self._rendered(messages, tools, None)
            return Prompt(rendering.ids, rendering=rendering if self.check else None, noted=noted)
        prompt = Prompt([], held[1], parts, noted=noted)
        if self.check:
            prompt.rendering = self._rendered(messages, tools, held[1].prompt)
            prompt.drifted = prompt.ids != prompt.rendering.ids
        drift.turns += 1
        drift.drifted += prompt.drifted
        if prompt.drifted:
            self.drift.note("drift", "the chat template would write other tokens than were sampled; those are kept")
        return prompt

    def count(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], place: Place) -> int:
        """Tokens of the prompt that `prompt` would make; also for conversations that end with the assistant."""
        if messages and messages[-1]["role"] != "assistant":
            return len(self.prompt(messages, tools, place, drift=Drift()).ids)
        return len(encode_rendered(self.tokenizer, self._render(self._quoted(messages, None), tools)))

    def _quoted(self, messages: Sequence[Message], noted: dict[str, Any] | None) -> list[Message]:
        """What follows the first answer is an environment's, whatever its role: programs write results as users."""
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        asked = quoted(self.tokenizer, messages[:first], self.args, noted)
        answered = quoted(self.tokenizer, messages[first:], self.args, noted, environment=True)
        return asked + answered

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

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], before: Prompt | None
    ) -> Rendering:
        """The whole prompt as the template writes it, given what it wrote for an earlier prompt of the conversation."""
        text = self._render(messages, tools, generation=True)
        old = before.rendering if before is not None and self._added else None
        kept, at = self._kept(old, text) if old is not None else ([], 0)
        return Rendering(text, kept + encode_rendered(self.tokenizer, text[at:]))

    def _kept(self, old: Rendering, text: str) -> tuple[list[int], int]:
        """(ids of the beginning that `old` and `text` share, its length in characters).

        The beginning ends before an added token, where every tokenizer begins anew, and which both have; the ids before
        it are right, since those from it on spell the rest of the old text.
        """
        common = _common(old.text, text)
        for index in range(len(old.ids) - 1, max(len(old.ids) - _LOOK_BACK, 0), -1):
            if old.ids[index] not in self._added:
                continue
            rest = self.tokenizer.decode(old.ids[index:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            at = len(old.text) - len(rest)
            mark = len(self.tokenizer.decode(old.ids[index : index + 1], skip_special_tokens=False))
            if at + mark <= common:
                return (old.ids[:index], at) if old.text.endswith(rest) else ([], 0)
        return [], 0

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool = False) -> str:
        kwargs = {**({"add_generation_prompt": True} if generation else {}), **self.template_kwargs}
        return render(self.tokenizer, messages, tools, kwargs)


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # comparing halves, not characters
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
