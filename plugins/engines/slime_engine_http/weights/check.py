"""`--check-weight-update-equal`: compare the weights that the servers serve with the trained weights.

    a server's checksums --> the trained weights as a checkpoint, which it loads --> its checksums again --> equal?

The checksums are SGLang's own (`/weights_checker`), of its fused and sharded parameters. So the weights that arrived by
a transport are compared with the weights that the server's own loader reads from a checkpoint, without a table of
names. `WeightUpdates` runs this check within an update: the servers are paused, and a server that differs is taken out.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from safetensors import SafetensorError

from slime_core.errors import ConfigError, EngineError, WeightSyncError
from slime_core.models.hf_io import copy_assets, write_weights
from slime_core.protocols import Args
from slime_engine_http.api.transport import Http, expecting
from slime_engine_http.api.worker import Worker
from slime_engine_http.weights.buckets import Named
from slime_engine_http.weights.protocol import ServerFacts, call, server_facts
from slime_engine_http.weights.round import Round
from slime_engine_http.weights.transports import push_directory

_FLAG = "--check-weight-update-equal"
_DRAFT = re.compile(r"draft(_step_\d+)?\.")
"""Name prefix of a speculative draft model's parameters (since SGLang 0.5.23), which are not trained."""
_SHOWN = 5


async def require_checksums(http: Http, workers: Sequence[Worker], timeout: float) -> None:
    """Raise ConfigError with the name of a server that cannot return checksums, and why. Raises EngineError."""

    async def ask(worker: Worker) -> None:
        facts = await server_facts(http, worker.url)
        if facts.pp_size > 1:
            raise ConfigError(f"{_FLAG}: {worker.url} is pipeline-parallel; only its first stage tells what it serves")
        try:
            await checksums(http, worker, facts, timeout)
        except EngineError as error:
            if error.status not in (400, 404, 405, 500):
                raise
            raise ConfigError(f"{_FLAG}: {worker.url} does not tell checksums of its weights: {error}") from error

    await asyncio.gather(*map(ask, workers))


async def checksums(http: Http, worker: Worker, facts: ServerFacts, timeout: float) -> dict[tuple[int, str], str]:
    """Return the checksum of each (process, parameter). Raises EngineError."""
    path = "/weights_checker"
    answer = await call(http, worker.url, path, {"action": "checksum"}, timeout=timeout)
    with expecting("checksums by name of each rank", worker.url + path, answer, facts.software):
        ranks = [answer] if facts.is_atomic else answer["ranks"]
        return {
            (number, name): str(found)
            for number, rank in enumerate(ranks)
            for name, found in rank["checksums"].items()
            if not _DRAFT.match(name)
        }


@asynccontextmanager
async def written(args: Args, weights: Iterable[Named]) -> AsyncIterator[Path]:
    """Write a checkpoint that exists until the end of the block. Raises WeightSyncError if it cannot be written."""
    root = args.update_weight_disk_dir or args.run_dir

    def write(folder: Path) -> None:
        folder.chmod(0o755)  # servers may run as another user
        copy_assets(args.hf_checkpoint, folder)
        own = ((name, tensor.clone()) for name, tensor in weights)  # safetensors refuses tensors that share memory
        write_weights(folder, own, shard_bytes=int(args.save_shard_size * 1e9))

    with ExitStack() as stack:
        try:
            if root is not None:
                Path(root).mkdir(parents=True, exist_ok=True)
            own = tempfile.TemporaryDirectory(prefix=".weight-check-", suffix=".partial", dir=root)
            folder = Path(stack.enter_context(own))
            await asyncio.to_thread(write, folder)
        except (OSError, SafetensorError) as error:  # SafetensorError also if the disk is full
            where = "give --update-weight-disk-dir a directory with room for a checkpoint"
            raise WeightSyncError(f"{_FLAG}: the weights could not be written: {error}; {where}") from error
        yield folder


async def push_compared(round_: Round, path: Path) -> None:
    """Make every live server load the weights that it should already serve. Raises WeightSyncError as `Round.each`."""
    before: dict[Worker, dict[tuple[int, str], str]] = {}

    async def read(worker: Worker) -> None:
        before[worker] = await checksums(round_.http, worker, round_.facts[worker], round_.timeout)

    async def compare(worker: Worker) -> None:
        after = await checksums(round_.http, worker, round_.facts[worker], round_.timeout)
        if wrong := sorted({name for (_, name), _ in before[worker].items() ^ after.items()}):
            more = len(wrong) - _SHOWN
            listed = ", ".join(wrong[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
            raise EngineError(f"it serves {listed} otherwise than trained")

    await round_.each("reading checksums", read)
    await push_directory(round_, path)
    await round_.each("comparing checksums", compare)
