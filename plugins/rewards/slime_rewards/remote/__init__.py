"""Reward of an HTTP service: POST `{"prompt", "response", "label"}` to `--rm-url`; the JSON response is the reward.

Registered as `remote` and, as in THUDM/slime, `remote_rm`. The response is a number, or a mapping for `--reward-key`.
Failed connections, 429 and 5xx are retried with growing pauses until shortly before `--rm-timeout`. Any other status
fails the sample at once with the service's message.

The reward runs on the event loop and shares a session of `connections` connections. Further requests wait, and the wait
counts against the deadline.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar, Literal

from pydantic import Field

from slime_core import Args, PluginOptions, Sample, options
from slime_core.errors import ConfigError
from slime_rewards.remote.json_client import JsonClient

__all__ = ["JsonClient", "Options", "Remote", "bearer"]


class Options(PluginOptions):
    """Options of the plugin: `plugins: {remote: {...}}`, or `remote_rm` if the reward is chosen by that name."""

    connections: int = Field(64, ge=1)
    """Maximum number of concurrent requests."""
    attempts: int = Field(10, ge=1)
    """Number of tries before the sample fails."""
    api_key_env: str | None = None
    """Environment variable whose value is sent as `Authorization: Bearer ...`."""
    include: list[Literal["metadata", "tokens", "response_length", "status", "index", "group_index"]] = Field(
        default_factory=list
    )
    """Further fields of the sample to send."""


class Remote:
    """The reward `remote`; its settings are checked when the run starts."""

    Options = Options
    name: ClassVar[str] = "remote"

    def __init__(self, args: Args) -> None:
        self.options = options(args, self.name, Options)
        self.url = args.rm_url or ""
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--rm-url {self.url!r}: reward {self.name!r} asks a service; type --rm-url http://HOST:PORT/PATH"
            )
        self.headers = bearer(self.options.api_key_env, f"plugins.{self.name}.api_key_env")
        self.client = JsonClient(connections=self.options.connections, attempts=self.options.attempts)

    async def __call__(self, args: Args, sample: Sample) -> Any:
        """Return the service's reward. Raises PluginError if it refuses or cannot be reached in time."""
        body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        body |= {name: getattr(sample, name) for name in self.options.include}
        seconds = None if args.rm_timeout is None else 0.95 * args.rm_timeout
        return await self.client.post(self.url, body, headers=self.headers, timeout=seconds)


class RemoteRm(Remote):
    """The same reward under THUDM/slime's name."""

    name = "remote_rm"


def bearer(variable: str | None, option: str) -> dict[str, str]:
    """Return the header with the key in the environment variable. Raises ConfigError if the variable is not set."""
    if variable is None:
        return {}
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(f"{option} {variable!r}: the environment has no such variable; type export {variable}=KEY")
    return {"Authorization": f"Bearer {key}"}
