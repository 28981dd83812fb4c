"""What a stranger sends to `slime serve`: limits, access, work beside the loop, fields of the router, constraints."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from slime_embedded.engine.engine import EmbeddedEngine
from slime_engine_http.api.engine import HttpEngine
from slime_serving.front.answer import token_bytes
from slime_serving.http import application, guard, threads
from slime_serving.http.application import bind
from slime_serving.http.guard import Access
from slime_serving.native import serve_socket

from slime_core.cli.main import main
from slime_core.config import Args, load_settings
from slime_core.data.tokenizer import encode_text, load_tokenizer
from tests.conftest import SLIME
from tests.tiny_models import byte_tokenizer, make_model, make_text_model, one_thread

__all__ = ["byte_tokenizer", "make_model", "make_text_model", "one_thread"]
Models = Callable[..., tuple[Path, Any]]
SAY = [{"role": "user", "content": "hi"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@asynccontextmanager
async def served(directory: Path, access: Access | None = None) -> AsyncIterator[httpx.AsyncClient]:
    engine = EmbeddedEngine(Args(hf_checkpoint=str(directory), num_threads=1), step_in_thread=True)
    await engine.start()
    host, port, stop = await serve_socket(engine, bind("127.0.0.1", 0), access=access)
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60, trust_env=False) as client:
        yield client
    await stop()
    await engine.stop()


@pytest.fixture(scope="module")
def directory(make_text_model: Models) -> Path:
    return make_text_model("qwen3", seed=1)[0]


@pytest.fixture
async def client(directory: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with served(directory) as made:
        yield made


async def refused(client: httpx.AsyncClient, path: str, body: Any, status: int = 400, **kwargs: Any) -> str:
    answer = await client.post(path, json=body, **kwargs)
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    return message


async def test_a_client_brings_no_template_of_its_own(client: httpx.AsyncClient) -> None:
    for name in ("chat_template", "tokenize", "messages", "tools", "no_such_variable"):
        body = {"messages": SAY, "max_tokens": 2, "chat_template_kwargs": {name: LOOPS}}
        assert name in await refused(client, "/v1/chat/completions", body)
    body = {"messages": SAY, "max_tokens": 2, "chat_template_kwargs": {"enable_thinking": False}}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.slow
async def test_a_template_that_takes_for_ever_is_ended_and_others_are_answered(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% if depth %}" + LOOPS + "{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    monkeypatch.setattr(threads.DeadlineThreads.__init__, "__defaults__", (2.0,))
    async with served(tmp_path) as client:
        body = {"messages": SAY, "max_tokens": 2}
        slow = body | {"chat_template_kwargs": {"depth": 9}}
        waiting = asyncio.ensure_future(refused(client, "/v1/chat/completions", slow, 503))
        for _ in range(5):
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert not waiting.done()
        assert "longer than 2 s" in await waiting
        alive = [thread for thread in threads.threading.enumerate() if thread.name == "slime-front-work"]
        for thread in alive:
            await asyncio.to_thread(thread.join, 30)
        assert not any(thread.is_alive() for thread in alive), "ended, not left behind"


async def test_what_cannot_fit_is_refused_before_it_is_tokenised(client: httpx.AsyncClient) -> None:
    long = "word " * 100_000
    talk = {"messages": [{"role": "user", "content": long}], "max_tokens": 2}
    assert "500000 characters" in await refused(client, "/v1/chat/completions", talk)
    assert "characters" in await refused(client, "/v1/messages", talk)
    assert "characters" in await refused(client, "/v1/responses", {"input": long})
    assert "characters" in await refused(client, "/v1/completions", {"prompt": long})
    assert "characters" in await refused(client, "/generate", {"text": long})
    assert "messages" in await refused(client, "/v1/chat/completions", {"messages": SAY * 600})
    assert "bytes" in await refused(client, "/generate", {"text": "x" * (17 << 20)}, 413)
    assert "n is" in await refused(client, "/v1/completions", {"prompt": "a", "n": 1000})
    assert "n is" in await refused(client, "/generate", {"text": "a", "sampling_params": {"n": 10**6}})
    deep: Any = {}
    for _ in range(80):
        deep = {"a": [deep]}
    assert "deep" in await refused(client, "/v1/chat/completions", {"messages": SAY, "tools": [deep]})
    headers = {"content-type": "application/json"}
    answer = await client.post("/generate", content=b"[" * 100_000, headers=headers)
    assert answer.status_code == 400
    message = await refused(client, "/generate", {"k" * 100_000: 1})
    assert len(message) < 1000
    assert len(await refused(client, "/pause_generation", {"mode": "m" * 100_000})) < 1000


async def test_a_web_page_cannot_ask(client: httpx.AsyncClient) -> None:
    body = {"text": "a"}
    assert "Origin" in await refused(client, "/generate", body, 403, headers={"Origin": "https://page.example"})
    assert "Host" in await refused(client, "/generate", body, 403, headers={"Host": "page.example"})
    async with asyncio.timeout(5):  # its body is here, so there is nothing to wait for
        form = await client.post("/generate", content=json.dumps(body), headers={"content-type": "text/plain"})
    assert form.status_code == 415
    assert (await client.get("/model_info", headers={"Host": "page.example"})).status_code == 403
    near = {"Origin": "http://localhost:3000"}
    body["sampling_params"] = {"max_new_tokens": 1}
    assert (await client.post("/generate", json=body, headers=near)).status_code == 200
    assert (await client.get("/flush_cache")).status_code == 405, "GET changes nothing"


async def test_a_key_is_asked_of_all_but_get(directory: Path) -> None:
    access = Access("secret", frozenset({"page.example"}))
    async with served(directory, access) as client:
        assert (await client.get("/health")).status_code == 200
        for path in ("/generate", "/update_weights_from_disk", "/v1/chat/completions", "/v1/messages", "/flush_cache"):
            answer = await client.post(path, json={})
            assert answer.status_code == 401, path
            kind = answer.json()["error"]["type"]
            assert kind == ("authentication_error" if path.startswith("/v1/") else "BadRequest")
        for headers in ({"Authorization": "Bearer secret"}, {"X-Api-Key": "secret"}):
            more = {**headers, "Origin": "https://page.example"}
            assert (await client.post("/generate", json={"text": "a"}, headers=more)).status_code == 200
    async with served(directory, Access(generates_only=True)) as client:
        assert (await client.post("/generate", json={"text": "a"})).status_code == 200
        assert "SLIME_API_KEY" in await refused(client, "/flush_cache", {}, 403)


ROUTED: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {
        "text": "hi", "sampling_params": {"max_new_tokens": 3}, "return_text_in_logprobs": False, "stream": False,
        "log_metrics": True, "return_hidden_states": False, "background": False, "no_logs": False,
        "return_bytes": False, "return_entropy": False, "model": None,
    }),
    ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}],
        "model": "m", "logprobs": False, "max_completion_tokens": 3, "stream": False, "no_stop_trim": False,
        "ignore_eos": False, "continue_final_message": False, "skip_special_tokens": True, "separate_reasoning": True,
        "stream_reasoning": True, "return_hidden_states": False, "response_format": {"type": "text"},
        "tool_choice": "auto", "parallel_tool_calls": True, "logit_bias": {},
    }),
    ("/v1/completions", {
        "model": "m", "prompt": "hi", "max_tokens": 3, "stream": False, "echo": False, "no_stop_trim": False,
        "ignore_eos": False, "skip_special_tokens": True, "return_hidden_states": False, "best_of": 1,
    }),
    ("/v1/responses", {
        "input": "hi", "model": "m", "store": True, "stream": None, "temperature": 1.0, "top_p": 1.0, "priority": 0,
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
    }),
]  # fmt: skip
"""What sglang-router 0.3.2 makes of the least that a client can send."""
CHANGING: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "a", "return_hidden_states": True}),
    ("/generate", {"text": "a", "token_ids_logprob": [1]}),
    ("/v1/completions", {"prompt": "a", "echo": True}),
    ("/v1/completions", {"prompt": "a", "best_of": 2}),
    ("/v1/chat/completions", {"messages": SAY, "continue_final_message": True}),
    ("/v1/chat/completions", {"messages": SAY, "logit_bias": {"5": 1.0}}),
    ("/v1/chat/completions", {"messages": SAY, "tool_choice": "required", "tools": [
        {"type": "function", "function": {"name": "f"}}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}),
]  # fmt: skip


async def test_fields_that_mean_nothing_are_taken_and_those_that_change_the_answer_refused(
    client: httpx.AsyncClient,
) -> None:
    for path, body in ROUTED:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, (path, answer.text)
    for path, body in CHANGING:
        await refused(client, path, body)


async def test_errors_have_the_shape_of_their_api(client: httpx.AsyncClient) -> None:
    openai = (await client.post("/v1/chat/completions", json={"messages": 5})).json()
    assert openai["error"].keys() == {"message", "type", "param", "code"}
    anthropic = (await client.post("/v1/messages", json={"messages": SAY})).json()
    assert anthropic["type"] == "error"
    assert "max_tokens" in anthropic["error"]["message"]
    assert (await client.get("/v1/nothing")).json()["error"]["type"] == "not_found_error"
    assert (await client.post("/release_memory_occupation", json={"tags": [{}]})).status_code == 400


async def test_answers_follow_a_schema_or_an_expression(client: httpx.AsyncClient) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object", "properties": {"sure": {"type": "boolean"}, "of": {"enum": ["x", "y"]}},
        "required": ["sure", "of"], "additionalProperties": False,
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    body = {"messages": SAY, "max_tokens": 60, "response_format": form, "seed": 1, "n": 3, "logprobs": True}
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    for choice in answer["choices"]:
        assert json.loads(choice["message"]["content"]).keys() == {"sure", "of"}
        assert choice["finish_reason"] == "stop"
        assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
    body = {"text": "a", "sampling_params": {"max_new_tokens": 20, "regex": "[ab]{3}c", "sampling_seed": 1}}
    made = (await client.post("/generate", json=body)).json()
    assert made["text"][3] == "c"
    assert set(made["text"][:3]) <= {"a", "b"}
    assert made["meta_info"]["finish_reason"]["type"] == "stop"
    for wrong in ({"regex": "[a"}, {"json_schema": "{"}, {"json_schema": '{"type": "objec"}'}, {"regex": 5}):
        await refused(client, "/generate", {"text": "a", "sampling_params": wrong})
    assert "json_object" in await refused(
        client, "/v1/chat/completions", {"messages": SAY, "response_format": {"type": "grammar"}}
    )


async def test_the_engine_http_sends_the_key(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(directory, Access("secret")) as client:
        url = str(client.base_url).rstrip("/")
        monkeypatch.setenv("SLIME_API_KEY", "secret")
        args = load_settings(
            ["--hf-checkpoint", str(directory), "--rollout-external-engine-addrs", url], command="serve", env={}
        ).args
        engine = HttpEngine(args)
        await engine.start()
        try:
            assert (await engine.generate([5], {"max_new_tokens": 3})).token_ids
            await engine.flush_cache()
        finally:
            await engine.stop()


PARTS = (b"", b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
"""Nothing; headers that do not end; a request after which the connection stays open."""
BODY = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
"""A request whose body does not end."""


@pytest.mark.parametrize("sent", [*PARTS, BODY])
async def test_connections_that_ask_nothing_shut_nobody_out(
    sent: bytes, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "_CONNECTIONS", 16)
    async with served(directory) as client:
        url = client.base_url
        open_ones = [await asyncio.open_connection(url.host, url.port) for _ in range(50)]
        for _, writer in open_ones:
            writer.write(sent)
        assert (await client.get("/health")).status_code == 200
        for _, writer in open_ones:
            writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [PARTS[1], BODY])
async def test_a_flood_of_connections_keeps_nobody_waiting(sent: bytes, directory: Path) -> None:
    """The server may open 1024 files, the usual limit, and meets four times as many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 5000:
        pytest.skip("this process may not open 5000 files")
    argv = [SLIME, "serve", "--hf-checkpoint", str(directory), "--port", "0", "--num-threads", "1"]
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", 'ulimit -n 1024; exec "$0" "$@"', *argv, stdout=asyncio.subprocess.PIPE
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (5000, hard))
    writers: list[asyncio.StreamWriter] = []
    try:
        assert process.stdout is not None
        url = httpx.URL((await process.stdout.readline()).decode().split(" on ")[1].strip())
        async with asyncio.timeout(120):
            for number in range(4200):
                _, writer = await asyncio.open_connection(url.host, url.port)
                writers.append(writer)
                writer.write(sent)
                if number % 600 == 0:
                    assert (await asyncio.to_thread(httpx.get, f"{url}/health", timeout=60)).status_code == 200
        for _ in range(5):
            assert (await asyncio.to_thread(httpx.get, f"{url}/health", timeout=3)).status_code == 200
    finally:
        for writer in writers:
            writer.transport.abort()
        process.terminate()
        await process.wait()
        await asyncio.sleep(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_none_is_kept_for_ever(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "_KEEP_ALIVE_S", 0.2)
    monkeypatch.setattr(application, "HEADERS_S", 0.2)
    monkeypatch.setattr(guard, "BODY_S", 0.2)
    async with served(directory) as client, asyncio.timeout(60):
        url = client.base_url
        for sent, said in [(PARTS[0], b""), (PARTS[1], b" 408 "), (PARTS[2], b" 200 "), (BODY, b" 408 "),
                           (PARTS[2] + b"\r\n", b" 200 "), (PARTS[2] + PARTS[1], b" 200 ")]:  # fmt: skip
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(sent)
            assert said in await reader.readline()
            await reader.read()  # until the server closes what asks nothing
            writer.close()


async def test_the_headers_of_a_request_may_come_in_pieces(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "HEADERS_S", 30.0)
    async with served(directory) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        for _ in range(2):
            for byte in PARTS[2]:
                writer.write(bytes([byte]))
                await writer.drain()
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()


async def test_texts_begin_once_wherever_they_come_in(directory: Path, tmp_path: Path) -> None:
    """A tokenizer that puts a token before and one after every text: as training data, there is one, and no end."""
    model = tmp_path / "model"
    shutil.copytree(directory, model)
    raw = json.loads((model / "tokenizer.json").read_text())
    special = [{"SpecialToken": {"id": token, "type_id": 0}} for token in ("<|user|>", "<|end|>")]
    single = [special[0], {"Sequence": {"id": "A", "type_id": 0}}, special[1]]
    ids = {token["content"]: token["id"] for token in raw["added_tokens"]}
    known = {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in ("<|user|>", "<|end|>")}
    raw["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": known}
    (model / "tokenizer.json").write_text(json.dumps(raw))
    expected = len(encode_text(load_tokenizer(model), "ab"))
    assert expected == 3
    async with served(model) as client:
        for text in ("ab", "<|user|>ab"):
            native = await client.post("/generate", json={"text": text, "sampling_params": {"max_new_tokens": 1}})
            assert native.json()["meta_info"]["prompt_tokens"] == expected
            other = await client.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
            assert other.json()["usage"]["prompt_tokens"] == expected


async def test_log_probs_tell_bytes_and_places(directory: Path) -> None:
    """Of a model whose tokens are bytes: most of what it samples at random are parts of characters."""
    async with served(directory) as client:
        body = {"max_tokens": 40, "temperature": 3.0, "seed": 5, "ignore_eos": True, "skip_special_tokens": False}
        chat = await client.post("/v1/chat/completions", json={"messages": SAY, "logprobs": True, **body})
        (choice,) = chat.json()["choices"]
        told = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
        assert told.decode("utf-8", "replace") == choice["message"]["content"]
        assert any(entry["bytes"] not in ([239, 191, 189], list(entry["token"].encode()))
                   for entry in choice["logprobs"]["content"])  # fmt: skip
        body = {"prompt": "x", "logprobs": 5, **body}
        (whole,) = (await client.post("/v1/completions", json=body)).json()["choices"]
        streamed: dict[str, list[Any]] = {}
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for key, values in (json.loads(line[6:])["choices"][0]["logprobs"] or {}).items():
                        streamed.setdefault(key, []).extend(values)
        assert streamed == whole["logprobs"]
        offsets = whole["logprobs"]["text_offset"]
        assert offsets == sorted(offsets)
        assert 0 < offsets[-1] <= len(whole["text"])
        assert all(len(top) >= 5 for top in whole["logprobs"]["top_logprobs"])  # alternatives do not fall together
        assert any(token.startswith("bytes:\\x") for token in whole["logprobs"]["tokens"])


@pytest.mark.parametrize(
    ("piece", "text", "expected"),
    [("<0xE2>", "\ufffd", b"\xe2"), ("\u00e2\u0124", "\ufffd", b"\xe2\x82"), ("a", "a", b"a"),
     ("\u00ef\u00bf\u00bd", "\ufffd", b"\xef\xbf\xbd"), ("\u2581\ufffd", " \ufffd", " \ufffd".encode())],
)  # fmt: skip
def test_the_bytes_of_a_token(piece: str, text: str, expected: bytes) -> None:
    class Vocabulary:
        def convert_ids_to_tokens(self, token: int) -> str:
            return piece

    assert token_bytes(Vocabulary(), 7, text) == expected


MANY = b"5," * 600_000 + b"5"
COUNTED: list[tuple[str, bytes, str]] = [
    ("/v1/chat/completions", b'{"messages":[' + b'{"role":"user"},' * 9000 + b"{}]}", " lists and objects; allowed"),
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":[' + b'"a",' * 200_000 + b'""]}]}', " values; "),
    ("/v1/chat/completions", b'{"logit_bias":{' + b'"1":1,' * 20_000 + b'"2":2}}', "messages"),
    ("/v1/chat/completions", json.dumps({"logit_bias": dict.fromkeys(map(str, range(20_000)), 1)}).encode(),
     "logit_bias has 20000 entries; allowed: 16384"),
    ("/v1/responses", b'{"input":[' + b"{}," * 9000 + b"{}]}", " lists and objects; allowed"),
    ("/v1/messages", b'{"messages":[' + b"{}," * 9000 + b"{}]}", " lists and objects; allowed"),
    ("/generate", b'{"input_ids":[' + b"[5]," * 9000 + b"[5]]}", " lists and objects; allowed"),
    ("/generate", b'{"input_ids":[' + b"[5]," * 2000 + b"[5]]}", "input_ids has 2001 lists; allowed: 1024"),
    ("/generate", b'{"input_ids":[' + MANY + b"]}", "input_ids has 600001 entries; allowed: 524288"),
    ("/generate", b'{"text":[' + b'"a",' * 2000 + b'"a"]}', "text has 2001 entries; allowed: 1024"),
    ("/generate", b'{"text":"1","sampling_params":{"stop":[' + b'"x",' * 2000 + b'"x"]}}', "'stop' has 2001 entries"),
    ("/generate", b'{"text":"1","sampling_params":{"stop":[' + b'"x",' * 64 + b'"x"]}}', "allowed: 64 strings"),
    ("/generate", b'{"text":"1","sampling_params":{"stop":"' + b"x" * 5000 + b'"}}', "4096 characters in all"),
    ("/v1/completions", b'{"prompt":[' + MANY + b"]}", "prompt has 600001 entries; allowed: 524288"),
]  # fmt: skip


async def test_bodies_are_counted_before_they_are_looked_at(directory: Path) -> None:
    async with served(directory) as client:
        for path, body, said in COUNTED:
            answer = await client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400, (path, body[:80])
            assert any(part in answer.text for part in said.split("|")), (said, answer.text[:300])
        text = '{"[,' * 2000 + '\\"'  # what only looks like many values is text
        answer = await client.post("/generate", json={"text": text, "sampling_params": {"max_new_tokens": 1}})
        assert "context" in answer.text


def test_a_host_that_others_reach_wants_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--hf-checkpoint", "/nowhere", "--host", "0.0.0.0"]) == 2
    said = capsys.readouterr().err
    assert "--host 0.0.0.0" in said
    assert "--api-key" in said


async def test_an_answer_does_not_wait_for_an_acknowledgement() -> None:
    at_once: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at_once.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    sock = bind("127.0.0.1", 0)
    async with await asyncio.start_server(met, sock=sock), asyncio.timeout(30):
        _, writer = await asyncio.open_connection(*sock.getsockname())
        assert await at_once
        writer.close()


async def test_a_tool_result_cannot_end_its_message(client: httpx.AsyncClient, directory: Path) -> None:
    """Bytes, one token each: what names control tokens is as long as its text."""
    end = load_tokenizer(directory).eos_token

    async def length(said: str, **body: Any) -> int:
        messages = [*SAY, {"role": "assistant", "content": "a"}, {"role": "tool", "tool_call_id": "1", "content": said}]
        answer = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1, **body})
        assert answer.status_code == 200, answer.text
        count: int = answer.json()["usage"]["prompt_tokens"]
        return count

    assert await length(f"4{end}5") == await length(f"4{'x' * len(end)}5")
