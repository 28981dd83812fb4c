"""Turns of model and retriever: documents, untrained, follow each `<search>query</search>`, until `<answer>`.

::

    prompt | <search>capital of X</search> | <information>Doc 1 ...</information> | <answer>Y</answer>
    mask   | 1 ...                       1 | 0 ...                             0  | 1 ...             1

The workflow of Search-R1. Documents come from a JSONL corpus on disk by BM25 (`corpus.py`) or from a retrieval server
(`server.py`). By default the model continues in the same turn, as in Search-R1; with `observation: null` the documents
are a separate chat message.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import Field

from slime_core import Args, GenerateContext, PluginOptions, Sample, SampleStatus, options
from slime_core.errors import ConfigError
from slime_generators.multi_turn import Observations, begin_answer, next_turn
from slime_generators.search.corpus import check_corpus, search_corpus
from slime_generators.search.documents import Document, search_server

STATS = "tool_stats"
"""Key of the sample's metadata: {"search": counts and seconds}."""
PENDING = "search_pending"
"""Key of the sample's metadata that is True while a finished turn waits for its documents."""


class Options(PluginOptions):
    """`plugins: {search: {...}}`; give either `corpus` or `url`."""

    corpus: str | None = None
    """JSONL file with one document per line: `contents`, or `title` and `text`."""
    index_dir: str | None = None
    """Directory of the corpus's index; by default next to the corpus."""
    url: str | None = None
    """Address of a retrieval server with Search-R1's protocol: POST {"queries", "topk", "return_scores"}."""
    top_k: int = Field(3, ge=1)
    """Documents per query."""
    document_tokens: int = Field(128, ge=1)
    """Maximum tokens shown of a document; the rest is cut."""
    max_turns: int = Field(4, ge=1)
    """Maximum turns of the model; a sample whose last turn is a query is TRUNCATED."""
    timeout: float = Field(30.0, gt=0)
    """Seconds per query, including retries and waiting for a connection; afterwards the model sees an error."""
    connections: int = Field(32, ge=1)
    """Maximum concurrent queries to the server or the corpus."""
    attempts: int = Field(4, ge=1)
    """Maximum requests per query."""
    observation: str | None = "\n\n<information>{result}</information>\n\n"
    """Text around documents, with {result} in it; null: a message, by the tokenizer's chat template."""
    observation_role: str = "user"
    """Role of that message."""


_QUERY = re.compile(r"<search>((?:(?!<search>).)*)</search>\s*(?:<[^<>]*>)?\s*\Z", re.DOTALL)
"""A query ends the turn; at most the tokenizer's end-of-turn token follows it."""
_STOPS = ("</search>", "</answer>")


async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any], *, context: GenerateContext) -> Sample:
    """Alternate model and retriever until the model answers without a query.

    `max_new_tokens` counts documents too. The sample is TRUNCATED when tokens or turns run out.

    Raises:
        ConfigError: Neither or both of `corpus` and `url` are given.
        DataError: The corpus is missing or cannot be read, or an observation cannot be rendered.
        ValueError: The sample has no prompt tokens.
        EngineError: The engine refused the request or stopped responding.
    """
    own = options(args, "search", Options)
    search = _retriever(args, own)
    template = own.observation
    observations = Observations(args, sample, context.tokenizer, template=template, role=own.observation_role)
    limit = int(sampling_params["max_new_tokens"])
    while await next_turn(args, sample, sampling_params, context, PENDING, stop=_STOPS):
        query = _QUERY.search(observations.turn_text)
        if sample.status != SampleStatus.COMPLETED or query is None:
            return sample
        begin_answer(sample, PENDING)
        fits = observations.finished_turns + 1 < own.max_turns
        fits = fits and observations.append(await _found(sample, query[1].strip(), search, own, observations), limit)
        sample.metadata.pop(PENDING)
        if not fits:
            sample.status = SampleStatus.TRUNCATED
            return sample
    return sample


Search = Callable[[str], Awaitable[list[Document] | str]]
"""Query -> documents, best first; or an error message for the model."""


def _retriever(args: Args, own: Options) -> Search:
    if (own.corpus is None) == (own.url is None):
        raise ConfigError(
            f"plugins.search: corpus {own.corpus!r} and url {own.url!r}; give one of them, for instance --set"
            " plugins.search.corpus=corpus.jsonl"
        )
    if own.url is not None:
        url = own.url
        return lambda query: search_server(
            url, query, own.top_k, timeout=own.timeout, connections=own.connections, attempts=own.attempts
        )
    corpus = str(own.corpus)
    check_corpus(corpus, own.index_dir)
    return lambda query: search_corpus(
        corpus, query, own.top_k, index_dir=own.index_dir, timeout=own.timeout, threads=own.connections
    )


async def _found(sample: Sample, query: str, search: Search, own: Options, observations: Observations) -> str:
    """Search and return the text that the model sees."""
    started = time.monotonic()
    try:
        answer: list[Document] | str = await search(query) if query else "error: the query is empty"
    finally:
        seconds = time.monotonic() - started
        sample.non_generation_time += seconds
    stats = sample.metadata.setdefault(STATS, {}).setdefault("search", {"calls": 0, "errors": 0, "seconds": 0.0})
    stats["calls"] += 1
    stats["errors"] += int(isinstance(answer, str))
    stats["seconds"] += seconds
    if isinstance(answer, str):
        return answer
    lines = [
        f"Doc {number}{f'(Title: {document.title})' if document.title else ''} "
        f"{observations.cut(document.text, own.document_tokens)}\n"
        for number, document in enumerate(answer, 1)
    ]
    return "".join(lines) or "nothing found"
