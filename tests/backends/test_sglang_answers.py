"""The installed SGLang's answers against those recorded of its version, which the quick tests rely on."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from slime_engine_http.api.versions import TESTED_VERSIONS
from slime_engine_sglang.environment import installed_versions

from tests.as_written.test_sglang_answers import ANSWERS
from tests.backends.conftest import Running

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]

BODIES: dict[str, Any] = {
    "/server_info": None,
    "/model_info": None,
    "/v1/loads": None,
    "/generate": {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 3, "temperature": 0.5},
        "return_logprob": True,
    },
    "/weights_checker": {"action": "checksum"},
}


def asked(url: str, path: str, body: Any) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


def form(value: Any, like: Any) -> Any:
    """Names and kinds of what `like` has; lists by their first element, numbers alike, null as what is recorded."""
    if isinstance(like, dict) and isinstance(value, dict):
        return {name: form(value.get(name, "(absent)"), part) for name, part in like.items()}
    if isinstance(like, list) and isinstance(value, list):
        return [form(value[0], like[0])] if value and like else []
    if value is None or like is None:
        return "anything"
    return "number" if isinstance(value, int | float) else type(value).__name__


def test_the_installed_version_answers_as_recorded(sglang_server: Running, sglang_python: Path) -> None:
    version = installed_versions(sglang_python)["sglang"]
    assert version in TESTED_VERSIONS, "record its answers, and add it to TESTED_VERSIONS"
    (url,) = sglang_server.urls
    for path, recorded in ANSWERS[version].items():
        answer = asked(url, path, BODIES[path])
        assert form(answer, recorded) == form(recorded, recorded), f"{path}: {json.dumps(answer)}"
    said = [line for line in sglang_server.servers[0].log.read_text().splitlines() if "slime: " in line]
    assert said == [], "slime's plugin found every place inside"
