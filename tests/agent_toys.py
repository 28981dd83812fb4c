"""A toy tokenizer that writes tool calls, and an engine that streams what it is told, for tests of agents."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from slime_testing_contracts import CharTokenizer, ScriptedEngine

from slime_core import GenerationOutput


class ToyTokenizer(CharTokenizer):
    """One token per character and tag; its template writes calls as Hermes models do, and strips earlier reasoning."""

    def __init__(self) -> None:
        super().__init__([*CharTokenizer.SPECIALS, "<|system|>", "<tool_call>", "</tool_call>", "<think>", "</think>"])

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **_: Any,
    ) -> list[int] | str:
        text = f"<|system|>tools: {json.dumps(tools)}<|end|>" if tools else ""
        for message in messages:
            calls = "".join(
                f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in message.get("tool_calls") or []
            )
            text += f"<|{message['role']}|>{message['content']}{calls}<|end|>"
        text += "<|assistant|>" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text


class StreamingEngine(ScriptedEngine):
    """Yields an answer three tokens at a time."""

    async def stream(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
    ) -> AsyncIterator[GenerationOutput]:
        """Everything so far, then the answer."""
        whole = await self.generate(input_ids, sampling_params, rid=rid, session_id=session_id)
        for end in range(3, len(whole.token_ids), 3):
            ids = whole.token_ids[:end]
            skip = bool(sampling_params.get("skip_special_tokens", True))
            text = self.tokenizer.decode(ids, skip_special_tokens=skip)
            yield GenerationOutput(ids, whole.log_probs[:end], text, {**whole.meta_info, "finish_reason": None})
        yield whole


PARAMS = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 500, "skip_special_tokens": False, "no_stop_trim": True}


def call_text(name: str, **arguments: Any) -> str:
    """A call as the toy model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
