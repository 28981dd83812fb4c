"""SGLang's router in front of two `slime serve`: what it adds to requests asks for nothing, and is taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from slime_engine_http.api.router import Router
from slime_engine_http.api.transport import Http
from slime_engine_http.api.worker import Worker
from slime_engine_http.service import Place
from slime_engine_sglang.programs import RouterProcess

from tests.front_servers import in_thread, tiny

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]
SAY: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def test_a_router_in_front_of_two_servers_of_slime(
    sglang_python: Path, tmp_path: Path, make_text_model: Callable[..., tuple[Path, Any]]
) -> None:
    serve = partial(tiny, make_text_model("qwen3", seed=1)[0])
    process = RouterProcess("slime", {}, Place(sglang_python, tmp_path, 120.0), device="cpu")
    http = Http(timeout=60.0)
    await http.open()
    try:
        await process.launch()
        with in_thread(serve) as first, in_thread(serve) as second:
            router = Router(http, process.url)
            for url in (first, second):
                await router.add_worker(Worker(url))
            async with openai.AsyncOpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as api:
                for _ in range(4):
                    body = {"text": "hi", "sampling_params": {"max_new_tokens": 3}}
                    answer = (await http.send("POST", process.url, "/generate", body)).json()
                    assert answer["meta_info"]["completion_tokens"] == 3
                    ask = {"model": "m", "messages": SAY, "max_tokens": 3}
                    chat = await api.chat.completions.create(**ask, tools=[TOOL], tool_choice="auto")  # type: ignore[call-overload]
                    assert chat.usage.completion_tokens == 3
                    stream = await api.chat.completions.create(**ask, stream=True)  # type: ignore[call-overload]
                    assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"
                    text = await api.completions.create(model="m", prompt="hi", max_tokens=3)
                    assert text.usage is not None
                    assert text.usage.completion_tokens == 3
                    response = await api.responses.create(model="m", input="hi", max_output_tokens=3)
                    assert response.usage is not None
                    assert response.usage.output_tokens == 3
                with pytest.raises(openai.BadRequestError, match="best_of is 2"):
                    await api.completions.create(model="m", prompt="hi", max_tokens=3, best_of=2, n=2)
    finally:
        await http.close()
        process.stop()
