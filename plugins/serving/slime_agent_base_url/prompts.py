"""Messages -> prompt ids: sampled answers are kept token for token, and only new messages are rendered.

`answering` calls `PromptWriter.prompt` for each request. If the request repeats a conversation up to a sampled answer,
its ids are the prompt ids of that answer, the answer's own ids, and the rendered *turn delta*: the end of the
assistant's message as the chat template writes it, the new messages, and the beginning of the next answer::

    request 1   <|user|>2*3=?<|end|><|assistant|>                            rendered
    answer 1                                     <tool>2*3</tool><|end|>     sampled
    request 2   ............................................................ <|tool|>6<|end|><|assistant|>   delta

The whole conversation is rendered nevertheless, to find the delta and to count prompts for which the template would
have written other tokens (drift). These other tokens are never used. Only the text after the part shared with the last
rendering is tokenised, so the time of a request grows only by the time of the template.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_data.turns import turn_delta
from slime_serving.front.prompts import quoted, render
from slime_serving.front.wanted import Message
from slime_serving.http.errors import BadRequest

from slime_agent_base_url.tree import Place, Prompt, Rendering, Turn
from slime_core.data.tokenizer import encode_rendered
from slime_core.errors import DataError
from slime_core.protocols import Args
from slime_core.sample.provenance import Source

logger = logging.getLogger(__name__)

_LOOK_BACK = 256
"""Number of last tokens of a rendering to compare with the next text; a text that differs earlier is encoded whole."""


@dataclass
class Drift:
    """Counts of prompts for which the template, given the conversation as text, would not write the sampled tokens."""

    turns: int = 0
    """Prompts that continue kept tokens."""
    drifted: int = 0
    lost: int = 0
    """Prompts rendered as a whole although an answer was kept, because the rendering gave no delta."""
    _logged: set[str] = field(default_factory=set)

    def note(self, kind: str, message: str) -> None:
        """Log the message if it is the first of its kind."""
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(message)


class PromptWriter:
    """Write prompts with one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, args: Args | None = None, *, check: bool = True) -> None:
        """Create the writer. With `check` it counts drift, which costs a rendering of the conversation per request."""
        self.tokenizer, self.args = tokenizer, args
        self.template_kwargs = dict(args.apply_chat_template_kwargs if args else {})
        self.check = check
        self.drift = Drift()
        self._added = frozenset(getattr(tokenizer, "added_tokens_decoder", ()))

    def warm_up(self) -> None:
        """Import and compile the code for rendering, so that the first request does not wait 0.1 s for it."""
        try:
            encode_rendered(self.tokenizer, self._render([{"role": "user", "content": ""}], [], generation=True))
        except BadRequest as problem:  # ignored: the template may need more than this message
            logger.debug("warming up: %s", problem)

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], place: Place, *, drift: Drift | None = None
    ) -> Prompt:
        """Return the prompt for the engine. Drift is counted in `drift`, by default in `self.drift`.

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
        """Return the number of tokens of the prompt of `prompt`; a conversation may also end with the assistant."""
        if messages and messages[-1]["role"] != "assistant":
            return len(self.prompt(messages, tools, place, drift=Drift()).ids)
        return len(encode_rendered(self.tokenizer, self._render(self._quoted(messages, None), tools)))

    def _quoted(self, messages: Sequence[Message], noted: dict[str, Any] | None) -> list[Message]:
        """Quote control tokens. Messages after the first answer count as an environment's, whatever their role is.

        Programs write results as user messages.
        """
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        asked = quoted(self.tokenizer, messages[:first], self.args, noted)
        answered = quoted(self.tokenizer, messages[first:], self.args, noted, environment=True)
        return asked + answered

    def _delta(
        self, messages: Sequence[Message], index: int, tools: Sequence[dict[str, Any]], turn: Turn
    ) -> list[tuple[list[int], Source]] | None:
        """Return the ids and sources after the answer `messages[index]`, or None if the template gives no delta.

        Some templates require calls before results; others write calls differently if results follow. So the template
        is tried with the answer's message and without it.
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
        self.drift.note("lost", f"a prompt is rendered again although its beginning was sampled: {problem}")
        return None

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], before: Prompt | None
    ) -> Rendering:
        """Render the whole prompt; reuse the ids of an earlier prompt of the conversation for the text they share."""
        text = self._render(messages, tools, generation=True)
        old = before.rendering if before is not None and self._added else None
        kept, at = self._kept(old, text) if old is not None else ([], 0)
        return Rendering(text, kept + encode_rendered(self.tokenizer, text[at:]))

    def _kept(self, old: Rendering, text: str) -> tuple[list[int], int]:
        """Return (ids of the beginning that `old` and `text` share, its length in characters).

        The beginning ends before an added token that both texts have, because every tokenizer starts a new piece there.
        The ids before this token are right, since the ids from it on decode to the rest of the old text.
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
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # comparing halves, not characters
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
