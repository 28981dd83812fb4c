"""Find documents of a JSONL corpus for a query by BM25 (the library bm25s), with an index on disk.

::

    CORPUS.bm25/<digest>/       index files, and the documents' places in the corpus; made once, renamed into place

The first query of a process loads or creates the index in a thread, and all other queries wait for it. The digest is
computed from the corpus's path, size and modification time, so a changed corpus gets a new index, and the old index
remains on disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from slime_core.errors import DataError
from slime_generators.search.documents import Document, read_document

_VERSION = 1
_OFFSETS = "offsets.npy"
_BUILD_SECONDS = 3600.0


class Corpus:
    """An open corpus; `search` may be called from several threads."""

    def __init__(self, path: Path, index: Path) -> None:
        import bm25s
        import numpy as np

        self._path = path
        self._index = bm25s.BM25.load(str(index), mmap=True, show_progress=False, verbosity=0)
        self._offsets = np.load(index / _OFFSETS, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._offsets)

    def search(self, query: str, top_k: int) -> list[Document]:
        """Return the best documents that share a word with the query, best first."""
        import bm25s

        words = bm25s.tokenize([query], stopwords="en", show_progress=False, return_ids=False)
        known = [[word for word in words[0] if word in self._index.vocab_dict]]
        if not known[0]:
            return []
        numbers, scores = self._index.retrieve(known, k=min(top_k, len(self)), show_progress=False)
        found = [int(number) for number, score in zip(numbers[0], scores[0]) if score > 0]
        with self._path.open("rb") as file:
            return [self._read(file, number) for number in found]

    def _read(self, file: Any, number: int) -> Document:
        file.seek(int(self._offsets[number]))
        return read_document(json.loads(file.readline()))


def open_corpus(path: str | Path, index_dir: str | None = None) -> Corpus:
    """Open the corpus and its index; create the index if it is missing. Raises DataError if the corpus is unusable."""
    path = Path(path)
    try:
        state = path.stat()
    except OSError as error:
        raise DataError(f"plugins.search.corpus {str(path)!r}: {error.strerror}") from error
    key = repr((_VERSION, str(path.resolve()), state.st_size, state.st_mtime_ns))
    folder = Path(index_dir) if index_dir else path.with_name(f"{path.name}.bm25")
    index = folder / hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    if not index.is_dir():
        _make_index(path, index)
    return Corpus(path, index)


def _make_index(path: Path, index: Path) -> None:
    import bm25s
    import numpy as np

    texts, offsets = [], []
    with path.open("rb") as file:
        start = 0
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    texts.append(read_document(json.loads(line)).searched)
                except ValueError as error:
                    raise DataError(f"{path}:{number}: {error}") from error
                offsets.append(start)
            start += len(line)
    if not texts:
        raise DataError(f"plugins.search.corpus {str(path)!r}: no documents in it")
    retriever = bm25s.BM25()
    retriever.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=index.parent))
    except OSError as error:
        raise DataError(
            f"the index of {path} cannot be written to {index.parent}: {error.strerror}; name another place with"
            " plugins.search.index_dir"
        ) from error
    try:
        retriever.save(str(partial), show_progress=False)
        np.save(partial / _OFFSETS, np.asarray(offsets, dtype=np.int64))
        try:
            os.rename(partial, index)
        except OSError:
            if not index.is_dir():  # otherwise another process has created it meanwhile
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


_opened: dict[tuple[str, str | None], Corpus] = {}
_opening: dict[tuple[asyncio.AbstractEventLoop, str, str | None], asyncio.Future[Corpus]] = {}
_places: dict[tuple[asyncio.AbstractEventLoop, int], asyncio.Semaphore] = {}


def check_corpus(path: str, index_dir: str | None) -> None:
    """Check that the file exists, before a query needs it. Raises DataError."""
    if (path, index_dir) not in _opened and not Path(path).is_file():
        raise DataError(f"plugins.search.corpus {path!r}: No such file; it is JSONL, a document a line")


async def search_corpus(
    path: str, query: str, top_k: int, *, index_dir: str | None, timeout: float, threads: int
) -> list[Document] | str:
    """Return the documents for a query, or an error text for the model after a timeout."""
    corpus = await _shared(path, index_dir)
    loop = asyncio.get_running_loop()
    for old in [key for key in _places if key[0].is_closed()]:
        del _places[old]
    places = _places.setdefault((loop, threads), asyncio.Semaphore(threads))
    try:
        async with asyncio.timeout(timeout), places:
            return await asyncio.to_thread(corpus.search, query, top_k)
    except TimeoutError:
        return f"error: the search took longer than {timeout:g} s"


async def _shared(path: str, index_dir: str | None) -> Corpus:
    """Return the corpus of this process; the first call opens it."""
    name = (path, index_dir)
    if name in _opened:
        return _opened[name]
    key = (asyncio.get_running_loop(), *name)
    opening = _opening.get(key)
    if opening is None:
        opening = _opening[key] = asyncio.ensure_future(asyncio.to_thread(open_corpus, path, index_dir))
        opening.add_done_callback(lambda _: _opening.pop(key, None))
    async with asyncio.timeout(_BUILD_SECONDS):
        _opened[name] = await asyncio.shield(opening)
    return _opened[name]
