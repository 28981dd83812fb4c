"""SGLang's load generator against `slime serve`, where SGLang's environment has `datasets`, which it needs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from slime_engine_sglang.environment import server_environment

from tests.front_servers import in_thread, tiny

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]

REQUESTS = 12


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm"])
def test_every_request_is_answered(
    backend: str, sglang_python: Path, make_text_model: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    if subprocess.run([sglang_python, "-c", "import datasets"], capture_output=True).returncode:
        pytest.skip(f"{sglang_python} -m pip install datasets")
    model = make_text_model("qwen3", seed=1)[0]
    with in_thread(partial(tiny, model)) as url:
        host, port = url.removeprefix("http://").split(":")
        command = [
            *(sglang_python, "-m", "sglang.bench_serving", "--backend", backend, "--host", host, "--port", port),
            *("--model", model, "--tokenizer", model, "--dataset-name", "random-ids", "--random-input-len", "16"),
            *("--random-output-len", "8", "--num-prompts", str(REQUESTS), "--max-concurrency", "4", "--disable-tqdm"),
        ]
        environment = os.environ | server_environment("cpu", python=sglang_python)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    assert int(found["Successful requests"]) == REQUESTS
    assert int(found["Total generated tokens"]) > REQUESTS
