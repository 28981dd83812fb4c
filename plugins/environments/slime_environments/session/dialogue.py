"""The dialogue of policy and environment, as messages or as text, in step with the sample's tokens.

`multi_turn` holds a dialogue per sample. The first observation follows the row's prompt; each later observation follows
the turn that it answers. Chat rows (messages) go through the chat template by `turn_delta`; text rows are continued
with text. `messages` is only the input of templates: ids of sampled turns come from the engine, never from `messages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_data.turns import turn_delta

from slime_core.data.tokenizer import encode_rendered, encode_text, quoted, quoted_messages, render_prompt
from slime_core.data.turns import rendered_spans
from slime_core.errors import DataError
from slime_core.protocols import Args
from slime_core.protocols.environment import Observation
from slime_core.sample import Sample
from slime_core.sample.provenance import Source, Span, Spans
from slime_environments.session.pictures import Pictures


class Dialogue:
    """The dialogue of one sample."""

    def __init__(
        self, args: Args, tokenizer: Any, sample: Sample, *, role: str = "user", template: str = "{observation}"
    ) -> None:
        """Create the dialogue of a row whose prompt is already tokenized.

        Args:
            args: The run's settings.
            tokenizer: HF tokenizer.
            sample: Chat messages or text as `prompt`.
            role: Role of text observations in a chat.
            template: Template for observations of text rows; `{observation}` is replaced.

        Raises:
            DataError: The prompt is text that was rendered from chat messages, or `template` has no `{observation}`.
        """
        if "{observation}" not in template:
            raise DataError(f"observation_template {template!r} has no {{observation}} in it")
        self.chat = not isinstance(sample.prompt, str)
        if not self.chat and args.apply_chat_template:
            raise DataError(
                "the row's prompt was turned into text by --apply-chat-template, so later turns cannot be written as"
                " its messages' continuation: give rows whose prompt column is a list of chat messages, and leave"
                " --apply-chat-template out (messages are always written by the template)"
            )
        self._args, self._tokenizer, self._sample = args, tokenizer, sample
        self._role, self._template = role, template
        self._kwargs = sample.apply_chat_template_kwargs or args.apply_chat_template_kwargs
        self._tools = sample.metadata.get("tools")
        self._pictures = Pictures(args, sample)
        self.messages: list[dict[str, Any]] = []
        """Messages of the conversation so far, the row's prompt included; empty for text rows."""

    def opening(self, observation: Observation | None) -> tuple[list[int], Spans]:
        """Return ids and spans of the row's prompt followed by the first observation. Raises DataError."""
        observation = self._pictures.take(observation)
        if not self.chat:
            ids = encode_text(self._tokenizer, str(self._sample.prompt) + self._text(self._quoted(observation)))
            return ids, [Span(Source.USER, len(ids))] if ids else []
        messages = quoted_messages(self._tokenizer, self._opened(self._quoted(observation)), self._args)
        text = render_prompt(self._tokenizer, messages, self._tools, self._kwargs)
        if (with_images := self._pictures.encoded_prompt(text)) is not None:
            return with_images, [Span(Source.TEMPLATE, len(with_images))]
        return rendered_spans(self._tokenizer, messages, text, tools=self._tools, template_kwargs=self._kwargs)

    def open(self, observation: Observation | None) -> None:
        """Begin with this first observation; the caller has set the sample's ids to those of `opening`."""
        observation = self._pictures.take(observation)
        self._pictures.attach(begin=True)
        self._quoted(observation, self._sample.metadata)
        self.messages = self._opened(observation) if self.chat else []

    def continued(self, text: str, ids: Sequence[int], observation: Observation) -> list[tuple[list[int], Source]]:
        """Return the ids after a turn with their authors, up to the start of the policy's next turn. Raises DataError.

        Args:
            text: The turn's text.
            ids: The turn's ids, as sampled.
            observation: The environment's answer.
        """
        observation = self._pictures.take(observation) or ""
        if not self.chat:
            text = self._text(self._quoted(observation, self._sample.metadata))
            return [(encode_rendered(self._tokenizer, text), Source.TOOL)]
        new = self._as_messages(observation)
        pieces = turn_delta(
            self._tokenizer, self._args, self.messages, new,
            tools=self._tools, sampled_ids=ids, template_kwargs=self._kwargs, noted=self._sample.metadata,
        )  # fmt: skip
        self.messages += [{"role": "assistant", "content": text}, *new]
        return self._pictures.expanded(pieces)

    def attach_images(self) -> None:
        """Add the images of the last `continued` to the sample, which has its ids now."""
        self._pictures.attach()

    def _quoted(self, observation: Observation | None, noted: dict[str, Any] | None = None) -> Any:
        return quoted(self._tokenizer, observation, self._args, noted)

    def _opened(self, observation: Observation | None) -> list[dict[str, Any]]:
        """Return the row's messages and the first observation. Its text joins a last message of the same role, because
        templates require alternating roles."""
        assert not isinstance(self._sample.prompt, str), "a chat"
        messages = [dict(message) for message in self._sample.prompt]
        new = self._as_messages(observation) if observation else []
        if new and isinstance(observation, str) and messages and messages[-1].get("role") == new[0]["role"]:
            messages[-1] = {**messages[-1], "content": f"{messages[-1].get('content', '')}\n{observation}"}
            return messages
        return [*messages, *new]

    def _as_messages(self, observation: Observation) -> list[dict[str, Any]]:
        if isinstance(observation, str):
            return [{"role": self._role, "content": observation}]
        return [dict(message) for message in observation]

    def _text(self, observation: Observation | None) -> str:
        if not observation:
            return ""
        if not isinstance(observation, str):
            raise DataError("the environment answers with chat messages, but the row's prompt is text; give chat rows")
        return self._template.replace("{observation}", observation)
