"""Main program of an environment's own process: build the environment, answer calls (`slime_rewards.processes.worker`).

`places.ProcessPlace` starts it. This process resolves the environment from its spec, so it does not know environments
that code registered in the run's process.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from typing import Any

from slime_rewards.processes.messages import changes, restore, unpack_args
from slime_rewards.processes.worker import serve

from slime_core.errors import SlimeError
from slime_core.plugins.resolve import resolve
from slime_core.plugins.signatures import construct
from slime_core.workers.call import raised_at
from slime_environments.session.places import PackedSample


def main(descriptor: int) -> None:
    """Serve one environment over the socket `descriptor`."""
    serve(descriptor, _Served().answer)


class _Served:
    """The served environment, and an event loop for coroutines."""

    def __init__(self) -> None:
        self._environment: Any = None
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)

    def answer(self, message: bytes) -> bytes:
        """Answer a pickled request with pickled ("ok", answer) or ("error", text)."""
        try:
            verb, *rest = pickle.loads(message)
            if verb == "build":
                self.build(*rest)
            return pickle.dumps(("ok", self.call(*rest) if verb == "call" else None))
        except SlimeError as error:
            return pickle.dumps(("error", str(error)))
        except Exception as error:
            return pickle.dumps(("error", f"raised {type(error).__name__}: {error} (at {raised_at(error)})"))

    def build(self, spec: str, args: bytes) -> None:
        """Resolve and construct the environment."""
        self._environment = construct(resolve("environments", spec).obj, unpack_args(args))

    def call(self, method: str, args: list[Any], keywords: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
        """Call a method; return its answer, and its changes to each sample argument."""
        before = [pickle.dumps(dict(value)) for value in args if isinstance(value, PackedSample)]
        given = [restore(dict(value)) if isinstance(value, PackedSample) else value for value in args]
        answer = getattr(self._environment, method)(*given, **keywords)
        if inspect.isawaitable(answer):
            answer = self._loop.run_until_complete(_answered(answer))
        samples = [value for value, sent in zip(given, args, strict=True) if isinstance(sent, PackedSample)]
        return answer, [changes(pickle.loads(state), sample) for state, sample in zip(before, samples, strict=True)]


async def _answered(answer: Any) -> Any:
    return await answer  # the calling process has the deadline and kills this process
