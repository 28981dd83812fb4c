"""The dialogue of policy and environment, as messages or as text, in step with the sample's tokens.

`multi_turn` holds a dialogue per sample. The first observation follows the row's prompt; each later observation follows
the turn that it answers. Chat rows (messages) go through the chat template by `turn_delta`; text rows are continued
with text. `messages` is only the input of templates: ids of sampled turns come from the engine, never from `messages`.

Images in observations -> image tokens of the sample, images for engines, and inputs for training.

A `Dialogue` has one `Pictures`. Messages keep empty image parts, so that they can be stored as JSON; the images are
`Sample.multimodal_inputs`, those of the row first. The model's own processor says how many tokens an image has.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_data.images import ImagePrompts, load_processor
from slime_data.turns import turn_delta

from slime_core.data.tokenizer import encode_rendered, encode_text, quoted, quoted_messages, render_prompt
from slime_core.data.turns import rendered_spans
from slime_core.errors import DataError, RolloutError
from slime_core.multimodal import IMAGES, TrainInputs, has_images, image_token_of, images_of
from slime_core.protocols import Args
from slime_core.protocols.environment import Observation
from slime_core.sample import Sample
from slime_core.sample.provenance import Source, Span, Spans


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


OF_ROW = "row_images"
"""Key in the sample's metadata of the number of images that came with its row."""
_PER_TOKEN = ("mm_token_type_ids", "token_type_ids")
"""Inputs with the type of every token, [1, tokens]: 1 for an image, 0 for text."""


class Pictures:
    """The images of one sample's conversation."""

    def __init__(self, args: Args, sample: Sample) -> None:
        self._checkpoint, self._sample = str(args.hf_checkpoint), sample
        self._new: list[str] = []
        """Images of the newest observation, until `attach`."""

    def take(self, observation: Observation | None) -> Observation | None:
        """Return the observation with empty image parts.

        Raises:
            DataError: An image cannot be read.
            RolloutError: The model takes no images.
        """
        self._new = []
        if observation is None or isinstance(observation, str) or not has_images(observation):
            return observation
        if image_token_of(self._checkpoint) is None:
            raise RolloutError(
                f"the environment shows an image, and the model of --hf-checkpoint {self._checkpoint} reads text only"
                " (no image_token_id in its config.json); name a vision-language model, with --rollout-engine sglang or"
                " --rollout-engine http"
            )
        messages, self._new = _prompts(self._checkpoint).messages(observation, {})
        return messages

    def encoded_prompt(self, text: str) -> list[int] | None:
        """Return the ids of a rendered prompt with the row's images and the new ones; None without images."""
        refs = [*self._of_row(), *self._new]
        return _prompts(self._checkpoint).encode(text, refs)[0] if refs else None

    def expanded(self, pieces: Sequence[tuple[list[int], Source]]) -> list[tuple[list[int], Source]]:
        """Return the pieces with all tokens of the new images. Raises DataError if a template leaves out an image."""
        if not self._new:
            return list(pieces)
        token, prompts = image_token_of(self._checkpoint), _prompts(self._checkpoint)
        found = sum(ids.count(token) for ids, _ in pieces) if token is not None else 0
        if found != len(self._new):
            raise DataError(f"the chat template writes {found} image tokens for {len(self._new)} images")
        tokens = iter([prompts.encode(_spelled(prompts, token), [ref])[0] for ref in self._new])
        return [([t for id in ids for t in (next(tokens) if id == token else [id])], source) for ids, source in pieces]

    def attach(self, *, begin: bool = False) -> None:
        """Add the new images to the sample, whose tokens hold them; `begin`: in place of all but the row's images."""
        sample = self._sample
        if not self._new and not (begin and OF_ROW in sample.metadata):
            return
        held = self._of_row() if begin else images_of(sample.multimodal_inputs)
        sample.metadata.setdefault(OF_ROW, len(held))
        refs = [*held, *self._new]
        self._new = []
        sample.multimodal_inputs = {**(sample.multimodal_inputs or {}), IMAGES: refs} if refs else None
        sample.multimodal_train_inputs = self._train_inputs(refs) if refs else None

    def _of_row(self) -> list[Any]:
        held = images_of(self._sample.multimodal_inputs)
        return held[: self._sample.metadata.get(OF_ROW, len(held))]

    def _train_inputs(self, refs: Sequence[str]) -> TrainInputs:
        import numpy as np

        token, prompts = image_token_of(self._checkpoint), _prompts(self._checkpoint)
        inputs = prompts.encode(_spelled(prompts, token) * len(refs), refs)[1]
        types = np.array([[int(t == token) for t in self._sample.tokens]])
        return TrainInputs.of({n: types if n in _PER_TOKEN else np.asarray(array) for n, array in inputs.items()})


@functools.lru_cache(maxsize=4)
def _prompts(checkpoint: str) -> ImagePrompts:
    return ImagePrompts(load_processor(checkpoint), {}, Path())


def _spelled(prompts: ImagePrompts, token: int | None) -> str:
    return str(prompts.tokenizer.decode([token]))
