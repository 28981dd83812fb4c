"""Requests that schemathesis makes of `/openapi.json`: none of them is an error of the server, and none hangs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from tests.front_servers import in_thread, tiny
from tests.tiny_models import byte_tokenizer, make_model, make_text_model, one_thread

__all__ = ["byte_tokenizer", "make_model", "make_text_model", "one_thread"]
REQUESTS = 5000
ANSWERED_S = 30.0


LAST = ("release_memory", "resume_memory")
"""Paths after which a server waits for weights."""


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_no_request_is_an_error_of_the_server(make_text_model: Callable[..., tuple[Path, Any]]) -> None:
    """Well-formed ones and, of each operation, as many that are not."""
    schemathesis = pytest.importorskip("schemathesis")
    with in_thread(partial(tiny, make_text_model("qwen3", seed=1)[0])) as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        operations.sort(key=lambda operation: operation.path.strip("/").startswith(LAST))
        with_bodies = sum(operation.method.upper() == "POST" for operation in operations)
        each, sent = REQUESTS // (2 * with_bodies) + 100, Counter[int]()

        def ask(case: Any) -> None:
            answer = case.call(timeout=ANSWERED_S)
            sent[answer.status_code] += 1
            assert answer.status_code < 500, (case.path, case.body, answer.text)

        for operation in operations:
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
                strategy = operation.as_strategy(generation_mode=mode)
                with suppress(Unsatisfiable):  # where nothing can be wrong
                    settings(
                        max_examples=each, database=None, deadline=None, derandomize=True,
                        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
                    )(given(case=strategy)(ask))()  # fmt: skip
            httpx.post(f"{url}/continue_generation", json={}).raise_for_status()
        assert httpx.get(f"{url}/health").status_code == 200
        print(f"requests by status: {dict(sent)}")
        assert sum(sent.values()) >= REQUESTS
        assert sent[200] > 100
