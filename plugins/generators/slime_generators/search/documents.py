"""Documents, read from the formats of corpora and servers, and from a server that answers as Search-R1's.

    POST URL {"queries": [q], "topk": k, "return_scores": true}
         <-  {"result": [[{"document": {"contents": ...}, "score": s}, ...]]}      or documents without scores

A server that refuses or is slow does not fail the sample: the model reads an error, which the metadata counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from slime_rewards.remote import JsonClient

from slime_core.errors import PluginError
from slime_generators.multi_turn import encodable


@dataclass(frozen=True)
class Document:
    """A document that is searched and shown."""

    title: str
    """May be empty."""
    text: str

    @property
    def searched(self) -> str:
        """Text to search: title and text."""
        return f"{self.title}\n{self.text}" if self.title else self.text


def read_document(row: Any) -> Document:
    """Read `{"contents": "title\\ntext"}`, or `{"text"[, "title"]}`. Raises ValueError for another form.

    If the first line of `contents` is in quotation marks, it is the title, as in Search-R1's corpora.
    """
    if isinstance(row, Mapping):
        if isinstance(row.get("text"), str):
            return Document(encodable(str(row.get("title") or "")).strip('"'), encodable(row["text"]))
        if isinstance(row.get("contents"), str):
            contents = encodable(row["contents"])
            first, _, rest = contents.partition("\n")
            if rest and first.startswith('"') and first.endswith('"'):
                return Document(first.strip('"'), rest)
            return Document("", contents)
    raise ValueError(f"a document needs 'contents' or 'text', a string; got {row!r:.80}")


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
