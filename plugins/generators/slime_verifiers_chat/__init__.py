"""A chat harness for the verifiers package: runs a task's prompt, model and tools in this process.

verifiers finds it by the id `slime_verifiers_chat`; the generator `verifiers` uses it for seats without a harness of
their own. It does not bypass verifiers: every model call goes to the endpoint that verifiers provides, which records
the trace that its rewards read.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import openai
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

__all__ = ["ChatHarness"]


class ChatHarnessConfig(HarnessConfig):  # type: ignore[misc]  # verifiers has no type information
    """Settings of the harness; it adds none."""


class ChatHarness(Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """A chat loop with MCP tools, like the package's `null`, without a program to install."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Chat until the model calls no tool. An endpoint error ends the chat; verifiers has recorded the error."""
        messages = self._opening(data)
        async with AsyncExitStack() as stack:
            client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
            await stack.enter_async_context(client)
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                asked: Any = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                try:
                    answer = await client.chat.completions.create(**asked)
                except openai.APIError as error:
                    return ProgramResult(1, "", f"{type(error).__name__}: {error}")
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return ProgramResult(0, "", "")
                for call in message.tool_calls:
                    content = await _result(call, dispatch, connections)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    def _opening(self, data: TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *(message_to_wire(message) for message in prompt or [])]


async def _result(call: Any, dispatch: dict[str, Any], connections: dict[str, Any]) -> Any:
    """Call a tool and return its output, or an error message for the model if the call is invalid."""
    name = call.function.name
    if name not in dispatch:
        return f"error: unknown tool {name!r}; there are {', '.join(sorted(dispatch)) or 'none'}"
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except json.JSONDecodeError as error:
        return f"error: the arguments are no JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments must be a JSON object"
    return await call_mcp(connections, dispatch, name, arguments)
