"""A query -> documents from a retrieval server that is asked as Search-R1's.

    POST URL {"queries": [q], "topk": k, "return_scores": true}
         <-  {"result": [[{"document": {"contents": ...}, "score": s}, ...]]}      or documents without scores

A server that refuses or is slow does not fail the sample; the model is shown an error, and the count of errors is in
the sample's metadata.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from slime_rewards.remote import JsonClient

from slime_core.errors import PluginError
from slime_generators.search.documents import Document, read_document


@lru_cache
def _client(connections: int, attempts: int) -> JsonClient:
    return JsonClient(connections=connections, attempts=attempts)


async def search_server(
    url: str, query: str, top_k: int, *, timeout: float, connections: int, attempts: int
) -> list[Document] | str:
    """Documents, best first; or an error for the model to read."""
    body = {"queries": [query], "topk": top_k, "return_scores": True}
    try:
        answer = await _client(connections, attempts).post(url, body, timeout=timeout)
        return read_answer(answer)[:top_k]
    except (PluginError, ValueError) as error:
        return f"error: the search failed: {error}"


def read_answer(answer: Any) -> list[Document]:
    """Documents of the first query. Raises ValueError: it has another form."""
    try:
        found = answer["result"][0]
        return [read_document(each.get("document", each)) for each in found]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"the answer is not {{'result': [[document, ...]]}}: {answer!r:.80}") from error
