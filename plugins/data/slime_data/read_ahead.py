"""`--num-data-workers`: prompts read and tokenised on threads while a rollout generates, in the order of drawing.

The data source (`data.prompts`, entry-point group `slime.data`) asks for one row after the other and says which rows
follow. Nothing depends on the threads, since a row's sample follows from the row alone; after a resume the rows that
were read ahead are dropped.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from slime_core.data.prompts import Place
from slime_core.sample import Sample

Read: TypeAlias = Callable[[int], Sample | None]


class ReadAhead:
    """A window of rows that threads read in advance."""

    def __init__(self, make_reader: Callable[[], Read], workers: int, window: int) -> None:
        """Create the window; `make_reader` is called once per thread, since a tokenizer serves one thread at a time."""
        self._window = window
        self._of_thread = threading.local()
        self._make_reader = make_reader
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="slime-data")
        self._reading: deque[tuple[Place, Future[Sample | None]]] = deque()
        self._upcoming: Iterator[tuple[Place, int]] = iter(())
        """Places and rows that follow the rows being read."""

    def take(self, place: Place, upcoming: Callable[[], Iterator[tuple[Place, int]]]) -> Sample | None:
        """Return the sample of the row at `place`, the first of `upcoming()`, and start reading the next rows.

        Raises what the reader raises.
        """
        if not self._reading or self._reading[0][0] != place:
            self._forget()
            self._upcoming = upcoming()
        for following, row in itertools.islice(self._upcoming, self._window - len(self._reading)):
            self._reading.append((following, self._pool.submit(self._read, row)))
        return self._reading.popleft()[1].result()

    def _read(self, row: int) -> Sample | None:
        reader: Read | None = getattr(self._of_thread, "reader", None)
        if reader is None:
            reader = self._of_thread.reader = self._make_reader()
        return reader(row)

    def _forget(self) -> None:
        for _, reading in self._reading:
            reading.cancel()
        self._reading.clear()

    def close(self) -> None:
        """End the threads."""
        self._forget()
        self._pool.shutdown(wait=True, cancel_futures=True)
