from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from slime_generators.search import STATS, generate
from slime_generators.search import corpus as corpus_module
from slime_generators.search.corpus import open_corpus
from slime_generators.search.documents import Document, read_answer, read_document
from slime_testing_contracts import CharTokenizer, ScriptedEngine, ScriptedService

from slime_core import GenerateContext, Sample, SampleStatus
from slime_core.config import Args
from slime_core.errors import ConfigError, DataError

TOKENIZER = CharTokenizer()
ROWS = [
    {"id": "0", "contents": '"Lima"\nLima is the capital of Peru.'},
    {"id": "1", "contents": "Paris is the capital of France."},
    {"title": "Rivers", "text": "The Seine flows through Paris; \u00e9t\u00e9."},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n", encoding="utf-8")
    return path


def run(script: Any, sample: Sample | None = None, limit: int = 900, **options: Any) -> Sample:
    args = Args(plugins={"search": options})
    sample = sample or Sample(index=0, prompt="?", tokens=TOKENIZER.encode("?"))
    context = GenerateContext(ScriptedEngine(script), TOKENIZER)
    return asyncio.run(generate(args, sample, {"max_new_tokens": limit}, context=context))


def test_documents_come_back_untrained(corpus: Path) -> None:
    sample = run(["<search>capital of Peru</search>", "<answer>Lima</answer>"], corpus=str(corpus), top_k=1)
    seen = "\n\n<information>Doc 1(Title: Lima) Lima is the capital of Peru.\n</information>\n\n"
    text = f"<search>capital of Peru</search><|end|>{seen}<answer>Lima</answer><|end|>"
    assert TOKENIZER.decode(sample.response_tokens) == text
    assert sample.status == SampleStatus.COMPLETED
    assert sample.loss_mask is not None
    untrained = [token for token, trained in zip(sample.response_tokens, sample.loss_mask) if not trained]
    assert TOKENIZER.decode(untrained) == seen
    assert sample.metadata[STATS]["search"]["calls"] == 1
    assert sample.metadata["num_turns"] == 2


def test_a_sample_that_was_reset_during_a_search_begins_with_a_turn(corpus: Path) -> None:
    told = [{"role": "assistant", "content": "<search>x</search>"}, {"role": "user", "content": "Doc 1"}]
    left = {"search_pending": 30, "observation_messages": told}
    sample = Sample(index=0, tokens=TOKENIZER.encode("?"), metadata=left)
    sample = run(["<answer>3</answer>"], sample, corpus=str(corpus))
    assert sample.status == SampleStatus.COMPLETED
    assert sample.metadata == {"num_turns": 1, "observation_messages": []}


def test_the_index_is_made_once_and_again_for_another_corpus(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    real = corpus_module._make_index
    monkeypatch.setattr(corpus_module, "_make_index", lambda p, i: (made.append(i), real(p, i)))

    async def many() -> list[Any]:
        ask = corpus_module.search_corpus
        calls = [ask(str(corpus), "Peru", 1, index_dir=None, timeout=60, threads=2) for _ in range(20)]
        return list(await asyncio.gather(*calls))

    assert all(found == [Document("Lima", "Lima is the capital of Peru.")] for found in asyncio.run(many()))
    open_corpus(corpus)
    assert len(made) == 1
    assert sorted(p.name for p in corpus.with_name("corpus.jsonl.bm25").iterdir()) == [made[0].name]
    with corpus.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"text": "Quito is in Ecuador."}) + "\n")
    assert open_corpus(corpus).search("Ecuador", 1)[0].text == "Quito is in Ecuador."
    assert len(made) == 2
    open_corpus(corpus, str(corpus.parent / "elsewhere"))
    assert (corpus.parent / "elsewhere").is_dir()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}\n{"body": "b"}\n', r"corpus.jsonl:2: a document needs"),
        ("{\n", r"corpus.jsonl:1: "),
        ("", "no documents in it"),
        (None, "No such file"),
    ],
)
def test_a_corpus_that_cannot_be_used(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "corpus.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=message):
        run(["<search>a</search>"], corpus=str(path))
    for options in ({}, {"corpus": "a", "url": "b"}):
        with pytest.raises(ConfigError, match="give one of them"):
            run(["x"], **options)


def test_limits(corpus: Path) -> None:
    sample = run(lambda request: "<search>Peru</search>", corpus=str(corpus), max_turns=2)
    assert sample.status == SampleStatus.TRUNCATED
    assert sample.response.count("<search>") == 2
    sample = run(["<search>Peru</search>"], corpus=str(corpus), limit=40)
    assert sample.status == SampleStatus.TRUNCATED
    assert "<information>" not in sample.response
    sample = run(["<search>Peru</search>", "x"], corpus=str(corpus), document_tokens=4)
    assert "Doc 1(Title: Lima) Lima ... (cut)\n" in sample.response
    sample = run(["<search> </search>", "x"], corpus=str(corpus))
    assert "<information>error: the query is empty</information>" in sample.response
    sample = run(["<search>zebra</search>", "x"], corpus=str(corpus))
    assert "<information>nothing found</information>" in sample.response


# -- a server ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [1, 2])
def test_a_server_is_asked_as_search_r1s_and_its_failures_are_for_the_model(failures: int) -> None:
    found = {"result": [[{"document": row, "score": 1.0} for row in ROWS]]}
    answers = iter([(503, {})] * failures + [found] * 2)
    with ScriptedService(lambda asked: next(answers)) as server:
        sample = run(["<search>q</search>", "x"], url=f"{server.url}/retrieve", top_k=2, attempts=2)
    body = {"queries": ["q"], "topk": 2, "return_scores": True}
    assert [asked.body for asked in server.asked] == [body] * 2, "a failure is tried again"
    assert sample.status == SampleStatus.COMPLETED
    assert sample.metadata[STATS]["search"]["errors"] == (failures == 2)
    if failures == 2:
        assert "<information>error: the search failed: POST http" in sample.response
    else:
        assert "Doc 1(Title: Lima) Lima is the capital of Peru.\nDoc 2 Paris is" in sample.response
        assert "Doc 3" not in sample.response


def test_forms() -> None:
    assert read_document({"contents": '"T"\nx\ny'}) == Document("T", "x\ny")
    assert read_document({"contents": "x\ny"}) == Document("", "x\ny")
    assert read_answer({"result": [[{"text": "a"}]]}) == [Document("", "a")]
    for bad in ({}, {"result": []}, {"result": [[1]]}, [], {"result": [[{"document": {}}]]}):
        with pytest.raises(ValueError, match=r"the answer is not|a document needs"):
            read_answer(bad)


def test_a_document_with_half_of_a_character_can_be_shown(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"contents": "the capital of Peru \\ud83d Lima"}\n{"title": "\\ud83d", "text": "x"}\n')
    sample = run(["<search>capital of Peru</search>", "<answer>Lima</answer>"], corpus=str(path))
    assert "Doc 1 the capital of Peru ? Lima\n" in sample.response
    assert read_document({"title": "\ud83d", "text": "\ud83d"}) == Document("?", "?")
