"""Agent programs for the tests, run in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import openai


async def ask(args: Any, sample: Any, *, base_url: str, api_key: str, sandbox: Any) -> None:
    """One question, the row's prompt; the answer goes into a file of the sandbox."""
    async with openai.AsyncOpenAI(base_url=base_url + "/v1", api_key=api_key) as client:
        answer = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": sample.prompt}]
        )
        await sandbox.write_file("answer.txt", answer.choices[0].message.content or "")


async def ask_and_crash(args: Any, sample: Any, *, base_url: str, api_key: str, sandbox: Any) -> None:
    """A program with an error after its question."""
    await ask(args, sample, base_url=base_url, api_key=api_key, sandbox=sandbox)
    raise KeyError("a bug of the program")


async def ask_and_count(args: Any, sample: Any, *, base_url: str, api_key: str, sandbox: Any) -> Any:
    """A program whose result has keys that JSON has not."""
    await ask(args, sample, base_url=base_url, api_key=api_key, sandbox=sandbox)
    return {("turn", 1): "asked"}


async def ask_and_hang(args: Any, sample: Any, *, base_url: str, api_key: str, sandbox: Any) -> None:
    """A program that takes an error of the endpoint for a reason to wait."""
    try:
        await ask(args, sample, base_url=base_url, api_key=api_key, sandbox=sandbox)
    except openai.APIError:
        await asyncio.Event().wait()
