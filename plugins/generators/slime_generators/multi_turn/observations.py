"""Observations: answers to a sample's turns, appended as tokens that no policy sampled.

Generators whose model makes requests in its text (`code_sandbox`, `search`) create one `Observations` per call;
`tool_use`, whose turns have tool calls, uses a `Conversation`. All state is in the sample, so an interrupted sample can
resume in any process. `token_weight_versions` shows which tokens belong to a turn, since `loss_mask` may have been
zeroed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core import Args, GenerateContext, Sample, SampleStatus, Source, encode_result, turn_delta
from slime_core.errors import DataError

UNTEMPLATED = "<|tool|>{result}<|end|><|assistant|>"
"""Template of an observation for a tokenizer without a chat template."""
_MESSAGES = "observation_messages"
"""Key in the sample's metadata for turns and answers so far, the input of the chat template."""


def turn_tokens(sample: Sample) -> list[int]:
    """Return the ids of the current turn: the tokens sampled after the last token that no policy sampled."""
    versions = sample.token_weight_versions
    start = next((i + 1 for i in range(len(versions) - 1, -1, -1) if versions[i] < 0), 0)
    return sample.response_tokens[start:]


def finished_turns(sample: Sample) -> int:
    """Return the number of turns before the current one: each is followed by a run of tokens that no policy sampled."""
    versions = sample.token_weight_versions
    return sum(1 for before, after in itertools.pairwise(versions) if before >= 0 > after)


def encodable(text: str) -> str:
    """Return the text without lone surrogates, which JSON may escape and tokenizers do not accept."""
    return text.encode("utf-8", "replace").decode("utf-8")


def begin_answer(sample: Sample, key: str) -> None:
    """Note under the metadata key that the current turn ended and its answer is not appended yet.

    The note is the response's length, so it does not apply to a response that was dropped, cut back or continued.
    """
    sample.metadata[key] = sample.response_length


async def next_turn(
    args: Args,
    sample: Sample,
    sampling_params: Mapping[str, Any],
    context: GenerateContext,
    key: str,
    *,
    stop: Sequence[str] = (),
) -> bool:
    """Sample the next turn, unless `begin_answer` noted under `key` that the last one awaits its answer.

    `max_new_tokens` counts the whole response. Return False, with status TRUNCATED, if it has that many tokens.
    Each of `stop` ends the turn, too.

    Raises:
        EngineError: The engine refused the request or stopped answering.
    """
    length = sample.response_length
    if length and sample.metadata.get(key) == length:
        return True
    sample.metadata.pop(key, None)
    room = int(sampling_params["max_new_tokens"]) - length
    if room <= 0:
        sample.status = SampleStatus.TRUNCATED
        return False
    params = {**sampling_params, "max_new_tokens": room}
    if stop:
        given = params.get("stop") or ()
        params["stop"] = [*([given] if isinstance(given, str) else given), *stop]
    output = await context.engine.generate(sample.tokens, params, session_id=sample.session_id)
    sample.append_response_tokens(
        args, output.token_ids, output.log_probs, meta_info=output.meta_info, text=output.text
    )
    sample.metadata["num_turns"] = finished_turns(sample) + 1
    return True


def keep_messages(sample: Sample, key: str) -> None:
    """Cut the list of messages under the metadata key to the response's finished turns.

    An assistant message begins each turn. A response that was dropped or cut back left messages of later turns.
    """
    messages = sample.metadata.get(key)
    if messages:
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        sample.metadata[key] = messages[: [*turns, len(messages)][min(finished_turns(sample), len(turns))]]


def cut(tokenizer: Any, text: str, most: int) -> str:
    """Return at most `most` tokens of a text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return text if len(ids) <= most else f"{tokenizer.decode(ids[:most])} ... (cut)"


class Observations:
    """A reader of a sample's current turn, which also appends the answer."""

    def __init__(self, args: Args, sample: Sample, tokenizer: Any, *, template: str | None, role: str = "user") -> None:
        """Set how answers are written.

        Args:
            args: The run's settings.
            sample: Sample with its prompt's tokens.
            tokenizer: HF tokenizer.
            template: Text with `{result}` in it. None uses a chat message in the tokenizer's chat template, or
                `UNTEMPLATED` if the tokenizer has no chat template.
            role: Role of the chat message.

        Raises:
            ValueError: The sample has no prompt tokens.
            DataError: `template` has no `{result}`.
        """
        if not sample.tokens:
            raise ValueError(f"sample {sample.index} has no prompt tokens; the data source sets `Sample.tokens`")
        if template is not None and "{result}" not in template:
            raise DataError(f"observation {template!r} has no {{result}} in it")
        if template is None and not tokenizer.chat_template:
            template = UNTEMPLATED
        keep_messages(sample, _MESSAGES)
        self._args, self._sample, self._tokenizer = args, sample, tokenizer
        self._template, self._role = template, role

    @property
    def finished_turns(self) -> int:
        """Number of turns before the current one."""
        return finished_turns(self._sample)

    @property
    def turn_ids(self) -> list[int]:
        """Ids of the current turn."""
        return turn_tokens(self._sample)

    @property
    def turn_text(self) -> str:
        """Text of the current turn; special tokens are kept, since tags may be special tokens."""
        return str(self._tokenizer.decode(self.turn_ids, skip_special_tokens=False))

    def cut(self, text: str, most: int) -> str:
        """Return at most `most` tokens of a text."""
        return cut(self._tokenizer, text, most)

    def append(self, result: str, limit: int) -> bool:
        """Append an untrained answer to the current turn.

        Return False, and change nothing, if the response would exceed `limit`.

        Raises:
            DataError: The chat template refuses the message.
        """
        sample, decode = self._sample, self._tokenizer.decode
        messages = []
        if self._template is not None:
            ids = encode_result(self._tokenizer, self._template, result, self._args, sample.metadata)
            delta = [(ids, Source.TOOL)]
        else:
            prompt = sample.prompt
            begun = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            new = {"role": self._role, "content": result}
            delta = turn_delta(
                self._tokenizer, self._args, [*begun, *sample.metadata.get(_MESSAGES, [])], [new],
                sampled_ids=self.turn_ids, template_kwargs=sample.apply_chat_template_kwargs, noted=sample.metadata,
            )  # fmt: skip
            messages = [{"role": "assistant", "content": self.turn_text}, new]
        if sample.response_length + sum(len(ids) for ids, _ in delta) > limit:
            return False
        for ids, source in delta:
            text = decode(ids, skip_special_tokens=False)
            sample.append_response_tokens(self._args, ids, trainable=False, text=text, source=source)
        if messages:
            sample.metadata.setdefault(_MESSAGES, []).extend(messages)
        return True
