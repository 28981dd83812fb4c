"""The HTTP API of the embedded engine, route by route, in one event loop with the engine."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from slime_embedded.engine.engine import EmbeddedEngine
from slime_serving.native import serve_in_loop

from slime_core.cli.main import main
from slime_core.config import Args
from tests.tiny_models import byte_tokenizer, make_model, make_text_model, one_thread

__all__ = ["byte_tokenizer", "make_model", "make_text_model", "one_thread"]
Models = Callable[..., tuple[Path, Any]]


@pytest.fixture(scope="module")
def model(make_text_model: Models) -> tuple[Path, Any]:
    return make_text_model("qwen3", seed=1)


@pytest.fixture
async def engine(model: tuple[Path, Any]) -> AsyncIterator[EmbeddedEngine]:
    made = EmbeddedEngine(Args(hf_checkpoint=str(model[0]), num_threads=1))
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def client(engine: EmbeddedEngine) -> AsyncIterator[httpx.AsyncClient]:
    host, port, stop = await serve_in_loop(engine, "127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=30, trust_env=False) as made:
        yield made
    await stop()


async def post(client: httpx.AsyncClient, path: str, body: Any, status: int = 200) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def post_nothing(client: httpx.AsyncClient, path: str, body: Any) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text


def events(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@torch.inference_mode()
def scores(model: Any, ids: list[int]) -> torch.Tensor:
    out: torch.Tensor = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return out


async def test_a_request_names_its_adapter(model: tuple[Path, Any]) -> None:
    engine = EmbeddedEngine(Args(hf_checkpoint=str(model[0]), num_threads=1, lora_rank=4, lora_adapters=["planner"]))
    await engine.start()
    weights = dict(model[1].state_dict())
    changed = {f"adapters.planner.{name}": -tensor for name, tensor in weights.items() if "proj" in name}
    await engine.update_weights_from_tensor([*weights.items(), *changed.items()], 1)
    host, port = await engine.address()
    body = {"input_ids": [[5, 6]] * 3, "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
    body["logprob_start_len"] = 0
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=30, trust_env=False) as client:
        answers = await post(client, "/generate", body | {"lora_path": ["planner", None, None]})
        wrong = await post(client, "/generate", body | {"lora_path": "judge"}, status=400)
    planner, shared, plain = (answer["meta_info"]["input_token_logprobs"] for answer in answers)
    assert shared == plain != planner
    assert "'judge' is not served; --lora-adapters has planner" in json.dumps(wrong)
    await engine.stop()


async def test_generate_answers_as_sglang(client: httpx.AsyncClient, model: tuple[Path, Any]) -> None:
    prompt = list(range(20, 40))
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "rid": "mine", "return_logprob": True}
    body |= {"logprob_start_len": 0, "top_logprobs_num": 3}
    got = await post(client, "/generate", body)
    meta = got["meta_info"]
    assert meta["id"] == "mine"
    assert meta["prompt_tokens"] == 20
    assert meta["completion_tokens"] == 8
    assert meta["weight_version"] == "0"
    table = scores(model[1], prompt + got["output_ids"])
    for i, (log_prob, token, text) in enumerate(meta["output_token_logprobs"]):
        assert (token, text) == (got["output_ids"][i], None)
        assert log_prob == pytest.approx(table[19 + i, token].item(), abs=1e-5)
        assert meta["output_top_logprobs"][i][0][:2] == [pytest.approx(log_prob, abs=1e-5), token]
        assert len(meta["output_top_logprobs"][i]) == 3
    assert meta["input_token_logprobs"][0] == [None, 20, None]
    for i, (log_prob, token, _) in enumerate(meta["input_token_logprobs"][1:], start=1):
        assert token == prompt[i]
        assert log_prob == pytest.approx(table[i - 1, token].item(), abs=1e-5)
    body |= {"rid": "warm", "sampling_params": {"max_new_tokens": 0, "temperature": 0.5}}  # as a teacher is asked
    warm = (await post(client, "/generate", body))["meta_info"]
    expected = (table / 0.5).log_softmax(-1)
    for i, (log_prob, token, _) in enumerate(warm["input_token_logprobs"][1:], start=1):
        assert log_prob == pytest.approx(expected[i - 1, token].item(), abs=1e-5)
    none, *top = warm["input_top_logprobs"]
    assert none is None
    assert len(top) == len(prompt) - 1
    for row, entries in zip(expected, top, strict=False):
        assert [entry[0] for entry in entries] == pytest.approx(row.topk(3).values.tolist(), abs=1e-5)
        assert [row[entry[1]].item() for entry in entries] == pytest.approx(row.topk(3).values.tolist(), abs=1e-5)


async def test_generate_takes_text_batches_and_n(client: httpx.AsyncClient) -> None:
    params = {"max_new_tokens": 4, "ignore_eos": True, "sampling_seed": 1}
    one = await post(client, "/generate", {"text": "abc", "sampling_params": params})
    assert isinstance(one["text"], str)
    assert "output_token_logprobs" not in one["meta_info"]
    batch = await post(client, "/generate", {"text": ["abc", "de"], "sampling_params": params})
    assert batch[0]["output_ids"] == one["output_ids"]
    assert [len(b["output_ids"]) for b in batch] == [4, 4]
    several = await post(client, "/generate", {"text": "abc", "sampling_params": params | {"n": 3}})
    assert several[0]["output_ids"] == one["output_ids"]
    assert len({tuple(s["output_ids"]) for s in several}) == 3
    own = await post(
        client, "/generate", {"input_ids": [[5], [6]], "sampling_params": [params, params | {"max_new_tokens": 2}]}
    )
    assert [len(b["output_ids"]) for b in own] == [4, 2]


async def test_generate_streams_cumulatively(client: httpx.AsyncClient) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}, "stream": True}
    chunks = events(await client.post("/generate", json=body | {"return_logprob": True}))
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 9}
    assert [c["output_ids"] for c in chunks] == [chunks[-1]["output_ids"][: len(c["output_ids"])] for c in chunks]
    assert len(chunks[-1]["meta_info"]["output_token_logprobs"]) == 9
    both = events(await client.post("/generate", json=body | {"text": ["a", "b"]}))
    assert {c["index"] for c in both} == {0, 1}


MISTAKES: list[tuple[str, Any, str]] = [
    ("/generate", {}, "text or input_ids"),
    ("/generate", {"text": "a", "input_ids": [1]}, "either"),
    ("/generate", {"input_ids": "abc"}, "input_ids"),
    ("/generate", {"input_ids": [[3], 4]}, "mixes"),
    ("/generate", {"input_ids": [3], "sampling_params": {"top_k": "x"}}, "top_k"),
    ("/generate", {"input_ids": [3], "sampling_params": []}, "sampling_params"),
    ("/generate", {"input_ids": [3], "samplingparams": {}}, "sampling_params"),
    ("/generate", {"input_ids": [3], "stream": "yes"}, "stream"),
    ("/generate", {"input_ids": [3] * 512}, "512"),
    ("/generate", {"input_ids": [3] * 512, "stream": True}, "512"),
    ("/generate", {"input_ids": [3], "return_logprob": True, "logprob_start_len": 5}, "logprob_start_len"),
    ("/generate", {"input_ids": [3], "sampling_params": {"n": 0}}, "n is 0"),
    ("/generate", {"input_ids": [3], "sampling_params": {"n": True}}, "n is True"),
    ("/generate", {"input_ids": [3, -1]}, "-1"),
    ("/generate", {"input_ids": [[]]}, "empty"),
    ("/generate", [1, 2], "JSON object"),
    ("/abort_request", {}, "abort_all"),
    ("/pause_generation", {"mode": "sideways"}, "in_place"),
    ("/update_weights_from_disk", {}, "model_path"),
    ("/update_weights_from_disk", {"model_path": "/nowhere"}, "/nowhere"),
    ("/update_weights_from_disk", {"model_path": "/nowhere", "flush_cache": False}, "flush_cache"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": "gASV"}, "update_weights_from_disk"),
    ("/update_weight_version", {}, "new_version"),
    ("/weights_checker", {"action": "guess"}, "checksum"),
    ("/v1/completions", {"prompt": 3}, "prompt"),
    ("/v1/completions", {"prompt": [[], []]}, "empty"),
    ("/v1/completions", {"prompt": "a", "max_token": 3}, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "temperature": -3, "stream": True}, "temperature"),
    ("/v1/completions", {"prompt": "a", "n": 0}, "n is 0"),
    ("/v1/completions", {"prompt": "a", "stream_options": {"include_usag": True}}, "include_usage"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "logprobs: true"),
    ("/v1/chat/completions", {"messages": [{"role": "broken", "content": ""}]}, "'system'"),
]


async def test_mistakes_are_answered_400_with_the_reason(client: httpx.AsyncClient) -> None:
    """One server for all: it goes on after each."""
    for path, body, word in MISTAKES:
        answer = await post(client, path, body, status=400)
        assert word in answer["error"]["message"], (path, body)
        assert (await client.get("/health")).status_code == 200


async def test_information_routes(client: httpx.AsyncClient, model: tuple[Path, Any]) -> None:
    for path in ("/health", "/health_generate"):
        assert (await client.get(path)).status_code == 200
    for path in ("/get_model_info", "/model_info"):
        info = (await client.get(path)).json()
        assert info["model_path"] == str(model[0])
        assert info["weight_version"] == "0"
    for path in ("/get_server_info", "/server_info"):
        assert (await client.get(path)).json()["max_context_length"] == 512
    assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == 512
    assert (await client.get("/v1/loads")).json()["loads"][0]["num_running_reqs"] == 0


async def test_weight_routes(client: httpx.AsyncClient, engine: EmbeddedEngine, make_text_model: Models) -> None:
    directory, _ = make_text_model("qwen3", seed=2)
    before = (await post(client, "/weights_checker", {}))["checksums"]
    body = {"model_path": str(directory), "weight_version": "12"}
    assert (await post(client, "/update_weights_from_disk", body))["success"] is True
    after = (await post(client, "/weights_checker", {}))["checksums"]
    assert after == await engine.weight_checksums()
    assert after.keys() == before.keys()
    assert after != before
    assert (await client.get("/model_info")).json()["weight_version"] == "12"
    await post(client, "/update_weight_version", {"new_version": "release-a"})
    got = await post(client, "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}})
    assert got["meta_info"]["weight_version"] == "release-a"
    assert set(got["meta_info"]["token_weight_versions"]) == {13}
    await post(client, "/update_weight_version", {"new_version": "9" * 30})
    got = await post(client, "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}})
    assert got["meta_info"]["weight_version"] == "9" * 30
    assert set(got["meta_info"]["token_weight_versions"]) == {14}


async def test_a_client_that_goes_away_frees_its_request(client: httpx.AsyncClient, engine: EmbeddedEngine) -> None:
    await engine.pause()
    for stream in (False, True):
        with pytest.raises(httpx.ReadTimeout):
            await client.post(
                "/generate", json={"input_ids": [5], "stream": stream}, timeout=httpx.Timeout(60, read=0.2)
            )
    async with asyncio.timeout(60):
        while (await engine.info())["num_waiting"]:
            await asyncio.sleep(0.01)


async def test_completions(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hello", "max_tokens": 6, "seed": 3, "temperature": 0.9, "ignore_eos": True}
    one = await post(client, "/v1/completions", body | {"logprobs": 2})
    choice = one["choices"][0]
    assert one["object"] == "text_completion"
    assert one["usage"]["prompt_tokens"] == 5
    assert one["usage"]["completion_tokens"] == 6
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) == 6
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"])
    again = await post(client, "/v1/completions", body)
    assert again["choices"][0]["text"] == choice["text"]
    assert again["choices"][0]["logprobs"] is None
    many = await post(client, "/v1/completions", body | {"prompt": ["hello", "you"], "n": 2})
    assert [c["index"] for c in many["choices"]] == [0, 1, 2, 3]
    assert many["choices"][0]["text"] == choice["text"]
    assert len({c["text"] for c in many["choices"][:2]}) == 2
    chunks = events(await client.post("/v1/completions", json=body | {"stream": True}))
    assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_chat_completions(client: httpx.AsyncClient) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 7,
        "seed": 3,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
    }
    one = await post(client, "/v1/chat/completions", body)
    choice = one["choices"][0]
    assert one["object"] == "chat.completion"
    assert one["usage"]["prompt_tokens"] == 3
    assert choice["message"]["role"] == "assistant"
    assert len(choice["logprobs"]["content"]) == 7
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    stream = body | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(await client.post("/v1/chat/completions", json=stream))
    assert chunks[-1]["usage"] == one["usage"] | {"prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]}
    deltas = [c["choices"][0] for c in chunks[:-1]]
    assert deltas[0]["delta"]["role"] == "assistant"
    assert "".join(d["delta"].get("content", "") for d in deltas) == choice["message"]["content"]
    told = [entry for d in deltas if d["logprobs"] for entry in d["logprobs"]["content"]]
    assert told == choice["logprobs"]["content"]


async def test_a_streamed_stop_string_is_never_shown(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hello", "max_tokens": 300, "seed": 5, "ignore_eos": True}
    free = (await post(client, "/v1/completions", body))["choices"][0]["text"]
    at = next(i for i in range(10, len(free) - 3) if free[i : i + 3].isascii())
    stop = free[at : at + 3]
    chunks = events(await client.post("/v1/completions", json=body | {"stop": [stop], "stream": True}))
    assert "".join(c["choices"][0]["text"] for c in chunks) == free[: free.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_stop_string_counts_from_the_minimum_length_on(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hello", "max_tokens": 300, "seed": 5, "ignore_eos": True}
    free = (await post(client, "/v1/completions", body))["choices"][0]["text"]
    stop = next(c for c in free if c.isascii())
    early = await post(client, "/v1/completions", body | {"stop": [stop]})
    late = await post(client, "/v1/completions", body | {"stop": [stop], "min_tokens": 50})
    assert early["usage"]["completion_tokens"] < 50 <= late["usage"]["completion_tokens"]
    assert free.startswith(late["choices"][0]["text"])


def test_serve_on_a_taken_port_is_one_line_and_status_1(
    model: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--hf-checkpoint", str(model[0]), "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"127.0.0.1:{port}" in error


@pytest.mark.parametrize(("n", "rid"), [(1, "mine"), (2, "mine_1")])
async def test_an_openai_request_can_be_aborted_by_its_rid(
    client: httpx.AsyncClient, engine: EmbeddedEngine, n: int, rid: str
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "ignore_eos": True, "rid": "mine", "n": n}
    await engine.pause()
    task = asyncio.create_task(post(client, "/v1/chat/completions", body))
    async with asyncio.timeout(60):
        while (await engine.info())["num_waiting"] < n:
            await asyncio.sleep(0.01)
    await post_nothing(client, "/abort_request", {"rid": rid})
    await engine.resume()
    assert [c["finish_reason"] for c in (await task)["choices"]] == ["length"] * (n - 1) + ["abort"]
