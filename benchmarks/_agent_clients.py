"""The programs of `agents.py`'s agents, in a separate process, so that their time does not count as slime's.

::

    benchmark --- "number url key" a line ---> this file, run as a program: one coroutine per agent
              <-- "number seconds" a line ---  seconds: processor time of all agents so far

There is one such process for all agents, and it is slower than the server that the agents call. Trajectories per second
therefore depend on this process as much as on slime; the processor time of each side does not.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

PROMPT = "What is 12*34? Look it up."
TURNS = 3
TOOL_SECONDS = 0.02


class Clients:
    """The agents' process, started by the first call of `start`."""

    def __init__(self) -> None:
        self.cpu = 0.0
        """Processor time of all agents, in seconds, at the end of the last agent."""
        self._process: subprocess.Popen[str] | None = None
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = {}
        self._count = 0

    def start(self) -> None:
        """Start the process, and return when it accepts orders."""
        if self._process is None:
            command = [sys.executable, str(Path(__file__).resolve())]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._process.stdout is not None
            self._process.stdout.readline()
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def stop(self) -> None:
        """Close the process's input, which ends the process, and wait for its end."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(10)

    async def run(self, url: str, key: str) -> None:
        """Run an agent and wait for its end."""
        assert self._process is not None, "start comes first"
        assert self._process.stdin is not None
        loop = asyncio.get_running_loop()
        number, self._count = self._count, self._count + 1
        done = loop.create_future()
        self._waiting[number] = loop, done
        self._process.stdin.write(f"{number} {url} {key}\n")
        self._process.stdin.flush()
        await done

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            number, cpu = line.split()
            self.cpu = float(cpu)
            loop, done = self._waiting.pop(int(number))
            loop.call_soon_threadsafe(done.set_result, None)
        for loop, done in self._waiting.values():
            loop.call_soon_threadsafe(done.set_exception, RuntimeError("the agents' process has ended"))


CLIENTS = Clients()


# -- the process -----------------------------------------------------------------------------------------


async def _agent(number: int, url: str, key: str) -> None:
    """Run an agent with a base URL: send a request, wait for the tool, send the tool's result."""
    import aiohttp

    messages: list[dict[str, Any]] = [{"role": "user", "content": PROMPT}]
    headers = {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as client:
        for turn in range(TURNS):
            body = {"model": "policy", "messages": messages}
            async with client.post(f"{url}/chat/completions", json=body) as answer:
                answer.raise_for_status()
                message = (await answer.json())["choices"][0]["message"]
            if turn + 1 < TURNS:
                await asyncio.sleep(TOOL_SECONDS)
                messages += [message, {"role": "user", "content": "408"}]
    print(number, time.process_time(), flush=True)


async def _take_orders() -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    async with asyncio.TaskGroup() as agents:
        print("ready", flush=True)
        async for line in orders:
            number, url, key = line.decode().split()
            agents.create_task(_agent(int(number), url, key))


if __name__ == "__main__":
    asyncio.run(_take_orders())
