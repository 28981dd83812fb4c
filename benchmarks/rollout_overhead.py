"""Samples per second through the rollout stage, when nothing takes time but the stage, and when rewards misbehave.

    .venv/bin/python benchmarks/rollout_overhead.py [--groups 1000] [--repeats 3]

1,000 groups of 8 one-token answers, sides in turns, medians. Part 1, in processor time, workers included: an
instant in-memory engine, rewards on the loop, on threads, in processes and async, against `asyncio.gather` over
coroutines that ask the same engine. Part 2, in wall time as part 3: an instant HTTP worker behind `--rollout-engine
http`, against as many bare requests of the same client library; then the clients of SGLang's and vLLM's servers alone,
in processor time, over a connection that has the answer already. Part 3: rewards of which 1% hang and 5% take 50 ms,
under a short --rm-timeout; the bound is not CPU time but waiting: hanging calls hold a worker for --rm-timeout each, so
the line below the table says the least that any scheduler with as many places could take.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
from _harness import Parser, cpu_seconds, in_turns, ratio, spread, table
from overhead import GROUP_SIZE, PROMPT, baseline_seconds, run_stage
from slime_engine_http.api.answers import Wire
from slime_engine_http.api.client import Client
from slime_engine_http.api.engine import HttpEngine
from slime_engine_http.api.transport import Answer, Http
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState
from slime_engine_vllm.wire import VllmWire

from slime_core import Sample
from slime_core.config import load_settings
from slime_core.launch.ranks import set_up_process
from slime_core.plugins import adapters
from slime_core.plugins.adapters import EXECUTIONS

KINDS = ("async", *EXECUTIONS)
SLOW = 0.05
"""Seconds of a slow reward."""
REWARD = """
import asyncio, hashlib, time
from slime_core import RewardTraits, declares

def share(sample):
    return int.from_bytes(hashlib.blake2b(str(sample.index).encode(), digest_size=4).digest(), "big") % 100

{declaration}{keyword} reward(args, sample):
    part = share(sample) if {misbehaves} else 100
    if part < 1: {sleep}(3600)
    if part < 6: {sleep}({slow})
    return 1.0
"""


def write_reward(directory: Path, kind: str, misbehaves: bool) -> Path:
    """Write a file with a reward of the kind, and return its path."""
    is_async = kind == "async"
    path = directory / f"{kind}_{int(misbehaves)}.py"
    text = REWARD.format(
        keyword="async def" if is_async else "def",
        sleep="await asyncio.sleep" if is_async else "time.sleep",
        misbehaves=misbehaves,
        slow=SLOW,
        declaration="" if is_async else f"@declares(RewardTraits(execution={kind!r}))\n",
    )
    path.write_text(text, encoding="utf-8")
    return path


def fates(num_samples: int) -> tuple[int, int]:
    """Return how many samples of the second rollout, which is measured, hang and how many are slow."""
    namespace: dict[str, Any] = {}
    exec(REWARD.format(keyword="def", sleep="time.sleep", misbehaves=True, slow=SLOW, declaration=""), namespace)
    shares = [namespace["share"](Sample(index=i)) for i in range(num_samples, 2 * num_samples)]
    return sum(s < 1 for s in shares), sum(1 <= s < 6 for s in shares)


def settings(num_samples: int, *flags: str) -> Any:
    """Load the settings as `slime rollout` would."""
    groups = str(num_samples // GROUP_SIZE)
    common = ["--rollout-batch-size", groups, "--n-samples-per-prompt", str(GROUP_SIZE), "--num-rollout", "1"]
    common += ["--rollout-max-response-len", "4", "--hf-checkpoint", "unused", "--run-dir", "unused"]
    common += ["--max-consecutive-failures", str(num_samples), "--rm-type", "exact"]
    return load_settings([*common, *flags], command="show")


def stage_seconds(
    num_samples: int,
    reward: Path,
    *flags: str,
    engine: Any = None,
    num_hanging: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of a rollout. On a busy machine slow rewards may overrun, too; hanging rewards always do."""
    loaded = settings(num_samples, *flags)
    made = None if engine is None else engine(loaded.args)
    loaded.args.run_dir = None
    seconds, samples = run_stage(loaded, reward, clock, made)
    failed = sum(sample.status == Sample.Status.FAILED for sample in samples)
    assert len(samples) == num_samples, len(samples)
    assert failed >= num_hanging, failed
    assert num_hanging or not failed, failed
    return seconds


# -- an instant HTTP worker ------------------------------------------------------------------------------

SGLANG = (
    b'{"text": "7", "output_ids": [7], "meta_info": {"id": "x", "finish_reason": {"type": "stop", "matched": 2},'
    b' "prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 0, "weight_version": "0",'
    b' "output_token_logprobs": [[-0.5, 7, null]]}, "model_path": "m", "weight_version": "0", "status": "ok"}'
)
VLLM = (
    b'{"request_id": "generate-tokens-x", "choices": [{"index": 0, "finish_reason": "stop", "stop_reason": 2,'
    b' "token_ids": [7], "logprobs": {"content": [{"token_id": 7, "logprob": -0.5, "rank": 1, "top_logprobs":'
    b' [{"token_id": 7, "logprob": -0.5, "rank": 1}]}]}, "weight_versions": [{"version": "0", "start": 0, "end":'
    b' 1}], "routed_experts": null, "sampling_mask": null}], "usage": {"prompt_tokens": 3, "completion_tokens": 1,'
    b' "total_tokens": 4}, "prompt_logprobs": null}'
)


def serve(port: Any) -> None:
    """Answer every request in the shape of SGLang's /generate at once, with as little as asyncio allows."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(SGLANG)

    class Answer(asyncio.Protocol):
        def __init__(self) -> None:
            self.data = b""

        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.data += data
            while b"\r\n\r\n" in self.data:
                head_end = self.data.index(b"\r\n\r\n") + 4
                fields = self.data[:head_end].lower().split(b"\r\n")
                size = next((int(f.split(b":")[1]) for f in fields if f.startswith(b"content-length:")), 0)
                if len(self.data) < head_end + size:
                    return
                self.data = self.data[head_end + size :]
                self.transport.write(head + SGLANG)

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Answer, "127.0.0.1", 0, backlog=4096)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def bare_requests_seconds(num_samples: int, url: str, concurrency: int) -> float:
    """Return the seconds for the same number of requests from the engine's client library only."""
    payload = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}

    async def everything() -> None:
        slots = asyncio.Semaphore(concurrency)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

            async def one() -> None:
                async with slots, client.post(url, json=payload) as answer:
                    await answer.json()

            await asyncio.gather(*(one() for _ in range(num_samples)))

    started = time.perf_counter()
    asyncio.run(everything())
    return time.perf_counter() - started


class Answered(Http):
    """A connection that has the answer already."""

    answer = b""

    async def once(self, method: str, url: str, data: bytes | None, headers: object, accept: object = ()) -> Answer:
        """Return the answer; the request is encoded by then."""
        del method, data, headers, accept
        return Answer(url, 200, self.answer, {})


def client_seconds(num_samples: int, concurrency: int, answer: bytes, wire: Wire, software: str) -> float:
    """Return the processor seconds of as many requests through the client of servers with this wire and version."""
    args = load_settings(["--hf-checkpoint", "unused", "--sglang-server-concurrency", str(concurrency)], command="show")
    params = {"temperature": 1.0, "max_new_tokens": 4, "skip_special_tokens": False}

    async def everything() -> None:
        pool, http = WorkerPool([Worker("http://h:1", state=WorkerState.READY, software=software)]), Answered()
        pool.version_wanted, http.answer = 0, answer
        client = Client(http, pool, None, args.args, wire=wire)
        await asyncio.gather(*(client.generate(PROMPT, params, None, str(i)) for i in range(num_samples)))
        client.close()

    started = time.process_time()
    asyncio.run(everything())
    return time.process_time() - started


# -- the three parts -------------------------------------------------------------------------------------


def show(title: str, num_samples: int, found: Mapping[str, list[float]], base: str, extra: str = "") -> None:
    """Print the table of a part."""
    medians = {name: statistics.median(times) for name, times in found.items()}
    rows = [
        [name, f"{num_samples / s:.0f}", f"{s:.2f}", spread(found[name]), f"{s / medians[base]:.1f}x"]
        for name, s in medians.items()
    ]
    print(table([title, "samples/s", "s", "spread", f"of {base.split(',')[0]}"], rows), end="\n\n", flush=True)
    if extra:
        print(extra, end="\n\n", flush=True)


def in_memory(num_samples: int, repeats: int, directory: Path) -> None:
    """Run part 1, in processor time that includes the workers."""
    sides: dict[str, Any] = {"asyncio.gather": lambda: baseline_seconds(num_samples, cpu_seconds)}
    for kind in KINDS:
        path = write_reward(directory, kind, False)
        sides[f"stage, {kind} reward"] = lambda path=path: stage_seconds(
            num_samples, path, "--sglang-server-concurrency", "512", clock=cpu_seconds
        )
    found = in_turns(sides, repeats)
    show("in-memory engine, processor time", num_samples, found, "asyncio.gather")
    bare = found.pop("asyncio.gather")
    for name, times in found.items():
        each = 1e6 * statistics.median(times) / num_samples
        aim = {"inline": 0.25, "process": 0.17}.get(name.split()[1])
        ratio(f"bare loop / {name}, {each:.0f} us a sample", times, bare, floor=statistics.median(bare), aim=aim)
    print()


def over_http(num_samples: int, repeats: int, directory: Path, concurrency: int) -> None:
    """Run part 2."""
    context = multiprocessing.get_context("spawn")
    port = context.SimpleQueue()
    worker = context.Process(target=serve, args=(port,), daemon=True)
    worker.start()
    try:
        number = port.get()
        url = f"http://127.0.0.1:{number}"
        path = write_reward(directory, "inline", False)
        flags = ["--rollout-engine", "http", "--sglang-server-concurrency", str(concurrency)]
        flags += ["--rollout-external-engine-addrs", f"127.0.0.1:{number}"]
        base = "bare requests"
        sides: dict[str, Any] = {base: lambda: bare_requests_seconds(num_samples, f"{url}/generate", concurrency)}
        sides["stage, inline reward"] = lambda: stage_seconds(num_samples, path, *flags, engine=HttpEngine)
        show(f"instant HTTP worker, {concurrency} at once", num_samples, in_turns(sides, repeats), base)
        clients = {"SGLang": (SGLANG, Wire(), "0.5.23"), "vLLM": (VLLM, VllmWire(lambda ids, params: ""), "0.32.0")}
        sides = {
            f"client of {name}": partial(client_seconds, num_samples, concurrency, *own)
            for name, own in clients.items()
        }
        loop = "asyncio.gather, in memory"
        sides[loop] = lambda: baseline_seconds(num_samples, time.process_time)
        show("client alone, processor time, aim 4x", num_samples, in_turns(sides, repeats), loop)
    finally:
        worker.kill()
        worker.join()


def misbehaving(num_samples: int, repeats: int, directory: Path, timeout: float, workers: int) -> None:
    """Run part 3."""
    hang, slow = fates(num_samples)
    flags = [
        "--sglang-server-concurrency",
        str(num_samples),
        "--rm-timeout",
        str(timeout),
        "--rm-workers",
        str(workers),
    ]
    places = {"async": 256, "thread": adapters.THREADS.count, "process": workers}
    sides: dict[str, Any] = {"asyncio.gather": lambda: baseline_seconds(num_samples, time.perf_counter)}
    for kind in places:  # an inline reward that hangs would hang everything, which is why few rewards are inline
        path = write_reward(directory, kind, True)
        sides[f"stage, {kind} reward, {places[kind]} at once"] = lambda path=path: stage_seconds(
            num_samples, path, *flags, num_hanging=hang
        )
    least = {kind: max(timeout, (hang * timeout + slow * SLOW) / count) for kind, count in places.items()}
    show(
        f"{hang} hang, {slow} take {SLOW * 1e3:.0f} ms, --rm-timeout {timeout:g}",
        num_samples,
        in_turns(sides, repeats),
        "asyncio.gather",
        "least possible, by waiting alone: " + ", ".join(f"{kind} {s:.2f} s" for kind, s in least.items()),
    )


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rm-timeout", type=float, default=1.0)
    parser.add_argument("--rm-workers", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=256, help="simultaneous HTTP requests")
    parser.add_argument("--only", choices=("memory", "http", "misbehaving"))
    options = parser.parse_args()
    logging.getLogger("slime_core").setLevel(logging.ERROR)
    num_samples = options.groups * GROUP_SIZE
    set_up_process(settings(num_samples).args)
    with TemporaryDirectory(prefix="slime-bench-") as name:
        directory = Path(name)
        if options.only in (None, "memory"):
            in_memory(num_samples, options.repeats, directory)
        if options.only in (None, "http"):
            over_http(num_samples, options.repeats, directory, options.concurrency)
        if options.only in (None, "misbehaving"):
            misbehaving(num_samples, options.repeats, directory, options.rm_timeout, options.rm_workers)


if __name__ == "__main__":
    sys.exit(main())
