"""sglang-router from 0.3 on: which workers it has, and which fields of a request it passes on.

The client sends through it, the launcher and the supervisor keep its list of workers, which it changes in the
background. The router parses /generate into a structure of its own and writes that out again, so a field it does not
know is lost without a word.

Which fields: version 0.3.2 was asked with each field of `GenerateReqInput` and `SamplingParams` of SGLang 0.5.23 in
turn, in front of a worker that echoes its request; `tests/backends/test_client.py` does it again with the version
installed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from slime_core.errors import ConfigError
from slime_engine_http.api.transport import Answer, Http, engine_error, expecting
from slime_engine_http.api.worker import Worker

REGISTER_TIMEOUT_S = 60.0
_POLL_S = 0.05
_CONTROL_TIMEOUT_S = 10.0

FIELDS = frozenset({
    "text", "input_ids", "sampling_params", "return_logprob", "stream", "rid", "input_embeds", "image_data",
    "video_data", "audio_data", "modalities", "logprob_start_len", "top_logprobs_num", "token_ids_logprob",
    "return_text_in_logprobs", "log_metrics", "return_hidden_states", "session_params", "lora_path", "lora_id",
    "custom_logit_processor", "bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank",
    "conversation_id", "background", "priority", "extra_key", "no_logs", "custom_labels", "return_bytes",
    "return_entropy", "model",
})  # fmt: skip
PARAMS = frozenset({
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids",
    "ignore_eos", "frequency_penalty", "presence_penalty", "repetition_penalty", "skip_special_tokens",
    "no_stop_trim", "n", "json_schema", "regex", "ebnf", "sampling_seed",
})  # fmt: skip
"""Sampling parameters that reach the worker, as do the other `FIELDS`."""
HARMLESS = frozenset({"spaces_between_special_tokens"})
"""Dropped, and of no effect with the fast tokenizers that SGLang loads."""


class Router:
    """The router at `url`."""

    def __init__(self, http: Http, url: str) -> None:
        self.url = url
        self._http = http

    def dropped(self, body: Mapping[str, Any]) -> str:
        """The first thing in a /generate request that would not reach the worker; empty when everything would."""
        for name, value in body.items():
            if value is not None and name not in FIELDS:
                return str(name)
        for name, value in (body.get("sampling_params") or {}).items():
            if value is not None and name not in PARAMS and name not in HARMLESS:
                return f"sampling_params.{name}"
        return ""

    async def list_workers(self) -> list[str] | None:
        """URLs of its workers; None when what answers is no router. Raises EngineError; ConfigError for an old one."""
        answer = await self._call("GET", "/workers", accept=(404, 405))
        if answer.status == 200:
            return [url for url, _ in _entries(answer)]
        if (await self._call("GET", "/list_workers", accept=(404, 405))).status == 200:
            raise ConfigError(f"the router at {self.url} is older than sglang-router 0.3, the oldest that slime knows")
        return None

    async def add_worker(self, worker: Worker, *, timeout: float = REGISTER_TIMEOUT_S) -> None:
        """Have it send requests to a server; returns when it does. Adding one twice does nothing.

        Raises:
            EngineError: The router refused, or has not found it healthy within `timeout` seconds.
        """
        url = worker.url
        body: dict[str, Any] = {"url": url, "worker_type": worker.role}
        if worker.bootstrap_port is not None:
            body["bootstrap_port"] = worker.bootstrap_port
        await self._call("POST", "/workers", body, timeout=timeout, accept=(201, 409))
        await self._until(url, True, timeout)

    async def remove_worker(self, url: str, *, timeout: float = REGISTER_TIMEOUT_S) -> None:
        """Take a server out; one it does not have is no error. Raises EngineError."""
        for listed, entry in _entries(await self._call("GET", "/workers")):
            if listed == url:
                await self._call("DELETE", f"/workers/{entry.get('id', url)}", accept=(204, 404))
        await self._until(url, False, timeout)

    async def _until(self, url: str, wanted: bool, timeout: float) -> None:
        """Wait until the router has the worker, healthy, or has it no more: it works in the background."""
        deadline = time.monotonic() + timeout
        while True:
            found = [entry for listed, entry in _entries(await self._call("GET", "/workers")) if listed == url]
            if (wanted and any(e.get("is_healthy", True) for e in found)) or (not wanted and not found):
                return
            if time.monotonic() > deadline:
                what = "has not found it healthy" if wanted else "still has it"
                raise engine_error(self.url, f"worker {url}: the router {what} after {timeout:.0f} s")
            await asyncio.sleep(_POLL_S)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout: float = _CONTROL_TIMEOUT_S,
        attempts: int | None = None, accept: tuple[int, ...] = (),
    ) -> Answer:  # fmt: skip
        return await self._http.send(method, self.url, path, body, timeout=timeout, attempts=attempts, accept=accept)


def _entries(answer: Answer) -> list[tuple[str, Mapping[str, Any]]]:
    """URL and description of each worker. Raises EngineError."""
    body = answer.json()
    with expecting("a router's list of workers, each with its url", answer.url, body):
        return [(str(entry["url"]).rstrip("/"), entry) for entry in body["workers"]]
