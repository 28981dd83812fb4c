"""Agent programs for whole runs, in the rollout's process."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import openai


async def busy(args: Any, sample: Any, *, base_url: str, api_key: str, sandbox: Any) -> None:
    """Two turns, a rewritten one, a sub-agent beside them, streamed and not, over all three APIs."""
    task: Any = {"role": "user", "content": sample.prompt}
    async with (
        openai.AsyncOpenAI(base_url=base_url + "/v1", api_key=api_key) as ours,
        anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key) as theirs,
    ):

        async def sub_agent() -> None:
            asked: Any = [{"role": "user", "content": "sub task"}]
            async with theirs.messages.stream(model="m", max_tokens=6, messages=asked) as stream:
                await stream.get_final_message()

        async def main() -> None:
            first = await ours.chat.completions.create(model="m", messages=[task], max_tokens=6)
            text = first.choices[0].message.content or ""
            history = [task, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
            stream = await ours.chat.completions.create(model="m", messages=history, max_tokens=6, stream=True)
            second = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
            changed: Any = [*history, {"role": "assistant", "content": second + " (rewritten)"}, task]
            await ours.responses.create(model="m", input=changed, max_output_tokens=6)
            await ours.chat.completions.create(model="m", messages=history, max_tokens=6)

        await asyncio.gather(main(), sub_agent())
    await sandbox.write_file("done", "1")
