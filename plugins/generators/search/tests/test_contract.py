from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from slime_testing_contracts import GeneratorContract


@pytest.fixture(autouse=True)
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus under the name that the suites' settings give."""
    monkeypatch.chdir(tmp_path)
    Path("corpus.jsonl").write_text(json.dumps({"title": "Lima", "text": "Lima is the capital of Peru."}) + "\n")


class TestSearch(GeneratorContract):
    component = "search"
    script = ("<search>capital of Peru</search>", "<answer>Lima</answer>")
    args: ClassVar[Mapping[str, Any]] = {"plugins": {"search": {"corpus": "corpus.jsonl"}}}


class TestSearchWithoutAQuery(GeneratorContract):
    component = "search"
    args: ClassVar[Mapping[str, Any]] = {"plugins": {"search": {"corpus": "corpus.jsonl"}}}
