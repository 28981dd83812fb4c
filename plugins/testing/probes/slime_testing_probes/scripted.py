"""A rollout engine that says what it is told to, and a tokenizer of one token per character.

For tests of generate functions, of plugins in general and of the loop: no model, no torch, no time. Replies are taken
in order of the calls, so concurrent callers need a script made by a function.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from slime_core.errors import EngineError
from slime_core.types import GenerationOutput

if TYPE_CHECKING:
    from pathlib import Path

    import torch

_TENSORS_ONLY = "ScriptedEngine takes weights as tensors only"


class CharTokenizer:
    """One token per character; `<...>` tags given as specials are one token each. Has the HF methods in common use."""

    chat_template: ClassVar[str] = "<|role|>content<|end|> per message"
    """Not Jinja: `apply_chat_template` does it."""
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
        """Ids; nothing is added, whatever `add_special_tokens` says."""
        return [
            self.specials.index(piece) if piece in self.specials else len(self.specials) + ord(piece)
            for piece in self._pattern.findall(text)
        ]

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        """Text of the ids."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        count = len(self.specials)
        return "".join(("" if skip_special_tokens else self.specials[i]) if i < count else chr(i - count) for i in ids)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """HF's call: ids and attention mask."""
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
        """`<|role|>content<|end|>` per message, then `<|assistant|>` when the answer is asked for."""
        text = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)
        text += "<|assistant|>" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text


@dataclass(frozen=True)
class Reply:
    """One answer of a `ScriptedEngine`."""

    text: str
    finish: str = "stop"
    """ "stop", "length" or "abort"; an answer longer than `max_new_tokens` ends with "length"."""
    log_probs: tuple[float, ...] | None = None
    """One per token; default -0.5 each."""
    delay: float = 0.0
    """Seconds until the answer; an abort in the meantime returns the first half with "abort"."""
    until: asyncio.Event | None = None
    """The answer comes when this is set, and not before `delay`."""
    weight_versions: tuple[int, ...] | None = None
    """One per token; default: the engine's version, and where that changed during the delay, the old for the first
    half of the tokens."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of `meta_info`, or other values for those there are."""


@dataclass(frozen=True)
class Request:
    """One call of `generate`, as it came in."""

    input_ids: list[int]
    sampling_params: dict[str, Any]
    rid: str | None = None
    session_id: str | None = None


Script: TypeAlias = "Iterable[Reply | str | BaseException] | Callable[[Request], Reply | str | BaseException]"
"""Answers in order, or a function of the request; a string is a reply that ends with the end token, an exception is
raised."""


@dataclass
class ScriptedEngine:
    """A `RolloutEngine` in memory."""

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
        """Nothing to load."""
        self.started = True

    async def stop(self) -> None:
        """Abort what runs."""
        await self.abort()
        self.started = False

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
    ) -> GenerationOutput:
        """The next answer of the script. Raises EngineError at its end, or the exception the script says."""
        request = Request(list(input_ids), dict(sampling_params), rid, session_id)
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
        """Wait as long as the reply says; True when an abort came first."""
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
        """End the delayed request of that name, or all delayed ones."""
        self.aborted.append(rid)
        for name, event in self._waiting:
            if rid is None or name == rid:
                event.set()

    async def pause(self, mode: str = "in_place") -> None:
        """New requests wait."""
        self._running.clear()
        if mode == "abort":
            await self.abort()

    async def resume(self) -> None:
        """Let waiting requests go on."""
        self._running.set()

    async def flush_cache(self) -> None:
        """There is none."""

    async def update_weights_from_tensor(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Keep copies, for `weight_checksums`."""
        self.weights = {name: tensor.detach().clone() for name, tensor in weights}
        self.weight_version = version

    async def update_weights_from_distributed(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Not a transport of this engine."""
        raise EngineError(_TENSORS_ONLY)

    async def update_weights_from_disk(self, path: Path, version: int) -> None:
        """Not a transport of this engine."""
        raise EngineError(_TENSORS_ONLY)

    async def weight_checksums(self) -> dict[str, str]:
        """Of the tensors last handed over."""
        from slime_core.weights.checksum import tensor_checksum

        return {name: tensor_checksum(tensor) for name, tensor in self.weights.items()}

    async def address(self) -> tuple[str, int]:
        """There is none: this engine answers calls only."""
        raise EngineError("a scripted engine has no HTTP address")

    async def info(self) -> dict[str, Any]:
        """What an engine says about itself."""
        return {"model_path": "scripted", "weight_version": self.weight_version, "max_context_length": 1 << 20}


async def _due(reply: Reply) -> None:
    await asyncio.sleep(reply.delay)
    if reply.until is not None:
        await reply.until.wait()
