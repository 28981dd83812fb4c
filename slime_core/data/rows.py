"""Convert a row of a data set to a PENDING sample: prompt, ids, label, metadata, tools.

`prompts.py` reads training and evaluation rows through `PromptReader`. A conversation that ends with the assistant is
not a prompt: it keeps its messages and gets no ids (the rollout `sft` writes the ids).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from slime_core.config.sections.evaluation import EvalDataset
from slime_core.data.dataset import Row, Rows, column, exact_json, split_path, written
from slime_core.data.tokenizer import (
    Tokenizer,
    Tools,
    as_messages,
    encode_text,
    quoted_messages,
    render_prompt,
    spelled,
)
from slime_core.data.tools import prompt_tools
from slime_core.data.turns import rendered_spans
from slime_core.distributions import offered, provided
from slime_core.errors import ConfigError, DataError
from slime_core.multimodal import IMAGES, TrainInputs, has_images
from slime_core.protocols import Args
from slime_core.sample import Sample

logger = logging.getLogger(__name__)


IMAGE = "image"
"""The only kind of `--multimodal-keys` that is supported."""
Prompt = str | list[dict[str, Any]]
"""Text, or chat messages."""


class Layout(Protocol):
    """Columns that were recognised without `--input-key`; its text names them."""

    prompt: str
    answer: str | None
    system: str | None
    """Column of the system message."""

    def read(self, row: Row) -> tuple[Prompt, object]:
        """Return the prompt and the label of a row. Raises DataError."""


class Images(Protocol):
    """Reader of prompts with images."""

    def messages(self, prompt: Prompt, row: Row) -> tuple[list[dict[str, Any]], list[str]]:
        """Return messages whose image parts are empty, and the images of these parts, in order. Raises DataError."""

    def encode(self, text: str, refs: Sequence[str]) -> tuple[list[int], TrainInputs]:
        """Return the ids of the rendered prompt, and the model's further inputs. Raises DataError."""


@dataclass(frozen=True)
class Columns:
    """Meaning of the data set's columns, and the format of prompts."""

    input: str | None
    """Column of the prompt. None: recognised in the first row (`layouts`), together with the label."""
    label: str | None
    metadata: str | None
    tools: str | None
    apply_chat_template: bool = False
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    run_tools: tuple[Mapping[str, object], ...] = ()
    """Tool schemas for the chat template if a row has none."""
    max_prompt_len: int | None = None
    """Limit in tokens; longer prompts are skipped."""
    multimodal: Mapping[str, str] = field(default_factory=dict)
    """Kind -> column (`--multimodal-keys`); empty: text only."""
    checkpoint: str | None = None
    """Checkpoint whose processor tokenizes prompts with images."""
    system: str | None = None
    """System message put before every prompt that has none (`--system-prompt`)."""
    args: Args | None = None
    """The run's settings, read for `content_special_tokens`."""
    demonstrates: bool = False
    """True in a supervised run, whose rows are answers to learn instead of problems."""

    @classmethod
    def of_run(cls, args: Args) -> Columns:
        """Return the columns of the training data."""
        return cls._of(args, args, args.rollout_max_prompt_len, demonstrates=not args.compute_advantages_and_returns)

    @classmethod
    def of_eval(cls, dataset: EvalDataset, args: Args) -> Columns:
        """Return the columns of an evaluation data set that has its fallbacks; `args` has the tools."""
        return cls._of(dataset, args, dataset.max_prompt_len)

    @classmethod
    def _of(
        cls, rows: Args | EvalDataset, args: Args, max_prompt_len: int | None, *, demonstrates: bool = False
    ) -> Columns:
        return cls(
            input=rows.input_key,
            label=rows.label_key,
            metadata=rows.metadata_key,
            tools=rows.tool_key,
            apply_chat_template=rows.apply_chat_template,
            template_kwargs=rows.apply_chat_template_kwargs,
            run_tools=tuple(prompt_tools(args, {})),
            max_prompt_len=max_prompt_len,
            multimodal=rows.multimodal_keys or {},
            checkpoint=args.hf_checkpoint,
            system=rows.system_prompt,
            args=args,
            demonstrates=demonstrates,
        )


class PromptReader:
    """Reader of samples by row index; `processor` is for prompts with images, by default the checkpoint's."""

    def __init__(
        self, rows: Rows, tokenizer: Tokenizer, columns: Columns, spec: str | Path, *, processor: object = None
    ) -> None:
        self._rows = rows
        self._tokenizer = tokenizer
        self._columns = columns
        self.layout = recognised(rows, columns)
        """Recognised columns; None with `--input-key`, and without the plugin that recognises columns."""
        path = split_path(str(spec))[0]
        self._source_name = path.stem
        self._images: Images | None = None
        if columns.multimodal:
            images = provided("slime.data", "images")
            processor = processor or images.load_processor(columns.checkpoint or "")
            self._images = images.ImagePrompts(processor, columns.multimodal, path.parent)

    def read(self, index: int) -> Sample | None:
        """Return the row's sample without group and index, or None if its prompt is too long.

        Raises:
            DataError: The row cannot be used; the message names file and line.
        """
        row = self._rows[index]
        try:
            return self._sample(row, index)
        except DataError as error:
            raise DataError(f"{self._rows.where(index)}: {error}") from error

    def _sample(self, row: Row, index: int) -> Sample | None:
        columns = self._columns
        metadata = _metadata(row, columns.metadata)
        metadata.setdefault("source_name", self._source_name)
        metadata.setdefault("source_index", index)
        tools = _json_list(row.get(columns.tools), columns.tools) if columns.tools else None
        if tools:
            metadata["tools"] = tools
        prompt, label = self._prompt_and_label(row)
        named = self.layout.system if self.layout else None
        if system := (row.get(named) if named else None) or columns.system:
            prompt = _with_system(
                prompt, system, "--system-prompt" if system is columns.system else f"column {named!r}", columns
            )
        sample = Sample(
            prompt=prompt,
            label=label,
            metadata=metadata,
            generate_function_path=metadata.get("generate_function_path"),
            custom_rm_path=metadata.get("custom_rm_path"),
            apply_chat_template_kwargs=dict(columns.template_kwargs),
        )
        if self._images is not None:
            self._take_images(self._images, sample, row)
        elif has_images(sample.prompt):
            raise DataError('the prompt holds images; --multimodal-keys \'{"image": "images"}\' has them read')
        if is_conversation(sample.prompt):
            if sample.multimodal_inputs:
                raise DataError(
                    "a conversation with images that ends with the assistant; images are read in prompts only"
                )
            return sample
        self._spell(sample, tools or list(columns.run_tools))
        too_long = columns.max_prompt_len is not None and len(sample.tokens) > columns.max_prompt_len
        return None if too_long else sample

    def _prompt_and_label(self, row: Row) -> tuple[Prompt, object]:
        columns = self._columns
        if self.layout is not None:
            return self.layout.read(row)
        label = column(row, columns.label, "--label-key") if columns.label else None
        name = columns.input or "input"
        return checked_prompt(column(row, name, "--input-key"), name), label

    def _take_images(self, images: Images, sample: Sample, row: Row) -> None:
        messages, refs = images.messages(sample.prompt, row)
        if not refs:
            return
        if isinstance(sample.prompt, str) and not self._columns.apply_chat_template:
            raise DataError("a text prompt with images needs --apply-chat-template, which spells the images")
        sample.prompt, sample.multimodal_inputs = messages, {IMAGES: refs}

    def _spell(self, sample: Sample, tools: Tools) -> None:
        """Fill in the ids; with --apply-chat-template the prompt becomes the rendered text, as in THUDM/slime."""
        if isinstance(sample.prompt, str) and not self._columns.apply_chat_template:
            sample.tokens = encode_text(self._tokenizer, sample.prompt)
        else:
            messages = as_messages(sample.prompt)
            messages = quoted_messages(self._tokenizer, messages, self._columns.args, sample.metadata)
            text = render_prompt(self._tokenizer, messages, tools, self._columns.template_kwargs)
            if sample.multimodal_inputs and self._images is not None:
                # Image tokens come from the processor and have no author, so the whole prompt is one span.
                refs = sample.multimodal_inputs[IMAGES]
                sample.tokens, sample.multimodal_train_inputs = self._images.encode(text, refs)
            else:
                sample.tokens, sample.spans = rendered_spans(
                    self._tokenizer,
                    messages,
                    text,
                    tools=tools,
                    template_kwargs=self._columns.template_kwargs,
                )
            if self._columns.apply_chat_template:
                sample.prompt = "".join(spelled(self._tokenizer, text))
        if not sample.tokens:
            raise DataError("the prompt has no tokens")


def is_conversation(prompt: Prompt) -> bool:
    """Return whether the messages end with the assistant, so that there is nothing to generate."""
    return not isinstance(prompt, str) and prompt[-1].get("role") == "assistant"


def recognised(rows: Rows, columns: Columns) -> Layout | None:
    """Recognise the columns if `--input-key` is not given and a plugin can. Raises DataError if they are ambiguous."""
    if columns.input is not None:
        return None
    if (layouts := offered("slime.data", "layouts")) is None:
        return None
    try:
        layout: Layout = layouts.recognise(rows[0], columns.label, demonstrates=columns.demonstrates)
        return layout
    except DataError as error:
        raise DataError(f"{rows.where(0)}: {error}") from error


def check_kinds(columns: Mapping[str, object]) -> None:
    """Raise ConfigError for kinds of `--multimodal-keys` that are not supported."""
    other = sorted(set(columns) - {IMAGE})
    if other or not all(isinstance(column, str) for column in columns.values()):
        raise ConfigError(
            f"--multimodal-keys {dict(columns)}: this version reads images only; type"
            ' --multimodal-keys \'{"image": "COLUMN"}\''
        )


def _with_system(prompt: Prompt, text: str, origin: str, columns: Columns) -> list[dict[str, Any]]:
    if isinstance(prompt, str) and not columns.apply_chat_template:
        raise DataError(f"{origin} is for chat messages, and this prompt is text; add --apply-chat-template")
    messages = [dict(message) for message in as_messages(prompt)]
    if messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": text}, *messages]


_SHARE_GPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
_TEXT_PARTS = {"text", "input_text", "output_text"}
_IMAGE_PARTS = {"image", "image_url"}


def checked_prompt(value: object, key: str) -> Prompt:
    """Return the prompt as text, or as chat messages in the form that templates take.

    Messages in ShareGPT's form (`from`, `value`) get roles, and content in text parts becomes one text. Null
    keys are dropped, since Parquet gives every message the union of all keys.

    Raises:
        DataError: The value of column `key` is neither text nor chat messages.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise DataError(f"column {key!r} is {_kind(value)}; a prompt is text or a list of chat messages")
    messages = []
    for position, given in enumerate(value):
        message = {k: v for k, v in given.items() if v is not None or k == "content"} if isinstance(given, dict) else {}
        if message.keys() >= {"from", "value"} and "role" not in message:
            role = str(message.pop("from")).lower()
            message = {"role": _SHARE_GPT.get(role, role), "content": message.pop("value"), **message}
        if not isinstance(message.get("role"), str):
            raise DataError(f"column {key!r}, message {position}: not an object with a text 'role'")
        content = message.get("content")
        if isinstance(content, list) and content and all(isinstance(p, dict) and "type" in p for p in content):
            kinds = {str(part["type"]) for part in content}
            if kinds <= _TEXT_PARTS:
                message["content"] = "".join(str(part.get("text") or "") for part in content)
            elif message["role"] != "tool" and (other := sorted(kinds - _TEXT_PARTS - _IMAGE_PARTS)):
                raise DataError(
                    f"column {key!r}, message {position}: a content part of type {other[0]!r}; text and images are read"
                )
        messages.append(message)
    return messages


def _metadata(row: Row, key: str | None) -> dict[str, Any]:
    """Return the row's metadata; text that is not JSON is kept under the column's name."""
    value = row.get(key) if key else None
    if isinstance(value, str):
        try:
            value = _parse_json(value, key)
        except DataError:
            _warn_of_text(key)
            value = {str(key): value}
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError(f"column {key!r} (--metadata-key) is {_kind(value)}; it must be an object, or JSON text of one")
    return dict(value)


@cache
def _warn_of_text(key: str | None) -> None:
    logger.warning(
        "column %r (--metadata-key) has text that is no JSON; it is kept under that key of sample.metadata", key
    )


def _json_list(value: object, key: str | None) -> list[Any] | None:
    if isinstance(value, str):
        value = _parse_json(value, key)
    if value is not None and not isinstance(value, list):
        raise DataError(f"column {key!r} (--tool-key) is {_kind(value)}; it must be a list, or JSON text of one")
    return value if value is None else list(written(value))


def _parse_json(text: str, key: str | None) -> object:
    try:
        return exact_json(text.encode())
    except json.JSONDecodeError as error:
        raise DataError(f"column {key!r}: not JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:
        raise DataError(f"column {key!r}: {error}") from error


def _kind(value: object) -> str:
    return "empty" if value == [] else f"a {type(value).__name__}"
