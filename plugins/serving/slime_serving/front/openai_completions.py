"""OpenAI's `/v1/completions` <-> `Wanted` and `Answer`: text or ids, continued."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from slime_serving.front.answer import Answer, Piece
from slime_serving.front.openai_chat import error, usage
from slime_serving.front.sampling import SamplingBody
from slime_serving.front.wanted import Wanted
from slime_serving.http.bodies import MOST_IDS, NOTHING
from slime_serving.http.streams import DONE, event

__all__ = ["Body", "Stream", "error", "reply", "wanted"]


def _prompts(value: Any) -> Any:
    single = not isinstance(value, list) or (bool(value) and isinstance(value[0], int))
    items = [value] if single else value
    for item in items:
        if not isinstance(item, str) and not (isinstance(item, list) and all(type(token) is int for token in item)):
            raise ValueError("prompt must be a string, a list of strings, token ids, or a list of lists of token ids")
    return items


class Body(SamplingBody):
    """The body of `/v1/completions`."""

    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(_prompts),
        Field(min_length=1, max_length=1024),
        WithJsonSchema({"type": ["string", "array"]}),
    ]
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)

    most_values = 2 * MOST_IDS
    most_entries = {"prompt": MOST_IDS}
    only = {**SamplingBody.only, **dict.fromkeys(("echo", "suffix"), NOTHING), "best_of": (1,)}


def wanted(body: Body) -> Wanted:
    """The request. Raises BadRequest."""
    made = body.wanted(max_tokens=body.max_tokens)
    made.prompts, made.top_logprobs = body.prompt, body.logprobs
    return made


def reply(wanted: Wanted, ident: str, answers: list[Answer]) -> dict[str, Any]:
    """The whole answer."""
    choices = [
        _choice(wanted, index, answer.content, answer.log_probs, answer.finish, _Offsets())
        for index, answer in enumerate(answers)
    ]
    return {**_envelope(wanted, ident), "choices": choices, "usage": usage(answers)}


class Stream:
    """Chunks of the answers."""

    def __init__(self, wanted: Wanted, ident: str, prompt_tokens: int) -> None:
        self.wanted, self.ident = wanted, ident
        self._offsets: dict[int, _Offsets] = {}

    def begin(self, choice: int) -> Iterator[bytes]:
        """Nothing."""
        return iter(())

    def piece(self, choice: int, piece: Piece) -> Iterator[bytes]:
        """New text."""
        if piece.content:
            yield self._chunk(_choice(self.wanted, choice, piece.content, piece.log_probs, None, self._of(choice)))

    def end(self, choice: int, answer: Answer) -> Iterator[bytes]:
        """Why it ended."""
        left = answer.log_probs[answer.known_log_probs :]
        yield self._chunk(_choice(self.wanted, choice, "", left, answer.finish, self._of(choice)))

    def close(self, answers: list[Answer]) -> Iterator[bytes]:
        """Usage where it is wanted, and the end."""
        if self.wanted.include_usage:
            yield event({**_envelope(self.wanted, self.ident), "choices": [], "usage": usage(answers)})
        yield DONE

    def failed(self, status: int, message: str) -> Iterator[bytes]:
        """An error after the status was sent."""
        yield event(error(status, message))

    def _of(self, choice: int) -> _Offsets:
        return self._offsets.setdefault(choice, _Offsets())

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return event({**_envelope(self.wanted, self.ident), "choices": [choice]})


def _choice(
    wanted: Wanted, index: int, text: str, log_probs: list[dict[str, Any]], finish: str | None, offsets: _Offsets
) -> dict[str, Any]:
    told = None
    if wanted.top_logprobs is not None:
        tops = [{_name(top): top["logprob"] for top in entry["top_logprobs"]} for entry in log_probs]
        told = {
            "tokens": [_name(entry) for entry in log_probs],
            "token_logprobs": [entry["logprob"] for entry in log_probs],
            "top_logprobs": tops if wanted.top_logprobs else None,
            "text_offset": [offsets.next(entry) for entry in log_probs],
        }
    return {"index": index, "text": text, "logprobs": told, "finish_reason": finish}


def _name(entry: Mapping[str, Any]) -> str:
    """A token's text; of a part of a character its bytes, as OpenAI spells them."""
    spelled = bytes(entry["bytes"])
    text = str(entry["token"])
    return text if spelled == text.encode() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class _Offsets:
    """Offsets of tokens in an answer's text."""

    def __init__(self) -> None:
        self._at = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, entry: Mapping[str, Any]) -> int:
        """Return the offset of the next token."""
        at = self._at
        self._at += len(self._characters.decode(bytes(entry["bytes"])))
        return at


def _envelope(wanted: Wanted, ident: str) -> dict[str, Any]:
    return {"id": f"cmpl-{ident}", "object": "text_completion", "created": int(time.time()), "model": wanted.model}
