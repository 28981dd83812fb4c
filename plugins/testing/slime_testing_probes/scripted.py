"""A rollout engine with scripted replies, and a tokenizer with one token per character.

They are for tests of generate functions, of plugins in general and of the loop: they need no model, no torch and no
time. Replies are used in the order of the calls, so concurrent callers need a function as the script.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from slime_core.errors import EngineError
from slime_core.sample import GenerationOutput

if TYPE_CHECKING:
    from pathlib import Path

    import torch

_TENSORS_ONLY = "ScriptedEngine takes weights as tensors only"


class CharTokenizer:
    """A tokenizer with one token per character or special `<...>` tag, and the common methods of HF tokenizers."""

    chat_template: ClassVar[str] = "<|role|>content<|end|> per message"
    """Description of the format, not Jinja; `apply_chat_template` implements it."""
    name_or_path: ClassVar[str] = "characters"
    bos_token: ClassVar[str | None] = None
    is_fast: ClassVar[bool] = False
    all_special_ids: ClassVar[Sequence[int]] = ()
    added_tokens_decoder: ClassVar[Mapping[int, str]] = {}
    SPECIALS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<tool>", "</tool>")

    def __init__(self, specials: Sequence[str] = SPECIALS) -> None:
        self.specials = list(specials)
        self.pad_token, self.eos_token = self.specials[0], self.specials[1]
        self.pad_token_id, self.eos_token_id = 0, 1
        self._pattern = re.compile("|".join([*map(re.escape, self.specials), "."]), re.DOTALL)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; `add_special_tokens` has no effect."""
        return [
            self.specials.index(piece) if piece in self.specials else len(self.specials) + ord(piece)
            for piece in self._pattern.findall(text)
        ]

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of the ids."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        count = len(self.specials)
        return "".join(("" if skip_special_tokens else self.specials[i]) if i < count else chr(i - count) for i in ids)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """Return ids and attention mask, as HF tokenizers do."""
        ids = self.encode(text)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def __len__(self) -> int:
        return len(self.specials) + 0x110000

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **_: Any,
    ) -> list[int] | str:
        """Return `<|role|>content<|end|>` per message, then `<|assistant|>` with `add_generation_prompt`."""
        text = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)
        text += "<|assistant|>" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text


@dataclass(frozen=True)
class Reply:
    """A reply of a `ScriptedEngine`."""

    text: str
    finish: str = "stop"
    """Finish reason: "stop", "length" or "abort"; a reply longer than `max_new_tokens` ends with "length"."""
    log_probs: tuple[float, ...] | None = None
    """Log-prob of each token; default -0.5."""
    delay: float = 0.0
    """Seconds until the reply; an abort in the meantime returns its first half with "abort"."""
    until: asyncio.Event | None = None
    """Event for which the reply waits, in addition to `delay`."""
    weight_versions: tuple[int, ...] | None = None
    """Weight version of each token. Default: the engine's version; if it changed during the delay, the old version for
    the first half of the tokens."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Additional or changed entries of `meta_info`."""


@dataclass(frozen=True)
class Request:
    """The arguments of a call of `generate`."""

    input_ids: list[int]
    sampling_params: dict[str, Any]
    rid: str | None = None
    session_id: str | None = None
    adapter: str | None = None


Script: TypeAlias = "Iterable[Reply | str | BaseException] | Callable[[Request], Reply | str | BaseException]"
"""Replies in order, or a function of the request. A string is a reply that ends with the end token; an exception is
raised."""


@dataclass
class ScriptedEngine:
    """A `RolloutEngine` that returns the replies of a script."""

    script: Script
    tokenizer: Any = field(default_factory=CharTokenizer)
    weight_version: int = 0

    weight_transports: ClassVar[tuple[str, ...]] = ("tensor",)

    def __post_init__(self) -> None:
        self.requests: list[Request] = []
        self.aborted: list[str | None] = []
        self.weights: dict[str, Any] = {}
        self.started = False
        self._replies = None if callable(self.script) else iter(self.script)
        self._waiting: list[tuple[str | None, asyncio.Event]] = []
        self._running = asyncio.Event()
        self._running.set()

    async def start(self) -> None:
        """Mark the engine as started; it loads nothing."""
        self.started = True

    async def stop(self) -> None:
        """Abort running requests."""
        await self.abort()
        self.started = False

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
        adapter: str | None = None,
    ) -> GenerationOutput:
        """Return the next reply of the script. Raises EngineError at its end, or the script's exception."""
        request = Request(list(input_ids), dict(sampling_params), rid, session_id, adapter)
        self.requests.append(request)
        await self._running.wait()
        reply = self._next(request)
        if isinstance(reply, BaseException):
            raise reply
        if isinstance(reply, str):
            reply = Reply(reply + self.tokenizer.eos_token)
        tokens, finish = self.tokenizer.encode(reply.text, add_special_tokens=False), reply.finish
        half, version = len(tokens) // 2, self.weight_version
        if await self._interrupted(reply, rid):
            tokens, finish = tokens[:half], "abort"
        versions = reply.weight_versions or (version,) * half + (self.weight_version,) * (len(tokens) - half)
        limit = int(request.sampling_params.get("max_new_tokens", len(tokens)))
        if len(tokens) > limit:
            tokens, finish = tokens[:limit], "length"
        return self._output(request, tokens, finish, reply, versions)

    def _next(self, request: Request) -> Reply | str | BaseException:
        if callable(self.script):
            return self.script(request)
        assert self._replies is not None, "a script that is no function is iterated"
        try:
            return next(self._replies)
        except StopIteration:
            raise EngineError(f"the script has no reply for call {len(self.requests)}") from None

    async def _interrupted(self, reply: Reply, rid: str | None) -> bool:
        """Wait for the reply's delay and event; return True if an abort came first."""
        if not reply.delay and reply.until is None:
            return False
        aborted = asyncio.Event()
        entry = (rid, aborted)
        self._waiting.append(entry)
        waiting = asyncio.ensure_future(aborted.wait())
        due = asyncio.ensure_future(_due(reply))
        try:
            await asyncio.wait({waiting, due}, return_when=asyncio.FIRST_COMPLETED)
            return aborted.is_set()
        finally:
            waiting.cancel()
            due.cancel()
            self._waiting.remove(entry)

    def _output(
        self, request: Request, tokens: list[int], finish: str, reply: Reply, versions: Sequence[int]
    ) -> GenerationOutput:
        count = len(tokens)
        meta_info = {
            "id": request.rid or f"request-{len(self.requests)}",
            "finish_reason": {"type": finish},
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": count,
            "cached_tokens": 0,
            "weight_version": str(self.weight_version),
            "token_weight_versions": list(versions[:count]),
            **reply.meta,
        }
        skip = bool(request.sampling_params.get("skip_special_tokens", True))
        return GenerationOutput(
            token_ids=tokens,
            log_probs=list(reply.log_probs[:count]) if reply.log_probs else [-0.5] * count,
            text=self.tokenizer.decode(tokens, skip_special_tokens=skip),
            meta_info=meta_info,
        )

    async def abort(self, rid: str | None = None) -> None:
        """Abort the delayed request with this id, or all delayed requests."""
        self.aborted.append(rid)
        for name, event in self._waiting:
            if rid is None or name == rid:
                event.set()

    async def pause(self, mode: str = "in_place") -> None:
        """Make new requests wait; abort running ones in mode "abort"."""
        self._running.clear()
        if mode == "abort":
            await self.abort()

    async def resume(self) -> None:
        """Resume waiting requests."""
        self._running.set()

    async def flush_cache(self) -> None:
        """Do nothing; the engine has no cache."""

    async def update_weights_from_tensor(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Keep copies, for `weight_checksums`."""
        self.weights = {name: tensor.detach().clone() for name, tensor in weights}
        self.weight_version = version

    async def update_weights_from_distributed(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Raise EngineError, since the engine does not support this transport."""
        raise EngineError(_TENSORS_ONLY)

    async def update_weights_from_disk(self, path: Path, version: int) -> None:
        """Raise EngineError, since the engine does not support this transport."""
        raise EngineError(_TENSORS_ONLY)

    async def weight_checksums(self) -> dict[str, str]:
        """Return the checksums of the last received tensors."""
        from slime_core.weights.sync import tensor_checksum

        return {name: tensor_checksum(tensor) for name, tensor in self.weights.items()}

    async def address(self) -> tuple[str, int]:
        """Raise EngineError, since the engine has no address."""
        raise EngineError("a scripted engine has no HTTP address")

    async def info(self) -> dict[str, Any]:
        """Return the model path, the weight version and the context length."""
        return {"model_path": "scripted", "weight_version": self.weight_version, "max_context_length": 1 << 20}


async def _due(reply: Reply) -> None:
    await asyncio.sleep(reply.delay)
    if reply.until is not None:
        await reply.until.wait()
