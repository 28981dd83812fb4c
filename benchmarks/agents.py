"""Measure trajectories per second of generators with tools, environments and agents, and slime's share of the time.

    .venv/bin/python benchmarks/agents.py [--samples 512] [--repeats 3]

All samples run at once through the rollout stage, over an engine and tools that only take time: three turns, 20 ms each
for the engine and the tool (one turn for `single_turn`). The other side is `asyncio.gather` over coroutines that call
the same engine with the same ids and wait for the same tool, without sample, template, parser, HTTP or scheduling. The
sides alternate. Agents are programs in a separate process (`_agent_clients.py`), whose time is counted separately. The
third side, "http", is a minimal server for them: an aiohttp handler that reads a request and calls the engine with
known ids. "ours" is this process's processor time beyond the other side's, divided by its whole time. Engine and tools
need almost no processor time here, so it is an upper bound, not the share in a run with a model. Compare "us a turn"
with a model's milliseconds. An agent's trajectories per second are bounded by the one process that all 512 clients
share. Lag is that of `perf/event_loop_lag_*`, wall time: on a busy machine see the column of processor time.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
from _agent_clients import CLIENTS, PROMPT, TOOL_SECONDS, TURNS
from _harness import Parser, ratio, spread, table
from aiohttp import web
from overhead import GROUP_SIZE
from slime_runs.loop_lag import LoopLag
from slime_sandbox_local.protocol import ExecResult
from slime_testing_probes.scripted import CharTokenizer, Reply, Request, ScriptedEngine

from slime_core import Sample, Step
from slime_core.config import load_settings
from slime_core.launch.components import Resolver
from slime_core.launch.ranks import set_up_process
from slime_core.rollout.fate import FilterStage
from slime_core.rollout.pool import generate_rollout
from slime_core.rollout.reward import RewardStage
from slime_core.rollout.stage import RolloutParts, RolloutStage

ENGINE_SECONDS = 0.02
CALL, ANSWER = "<tool>12*34</tool><|end|>", "The answer is 408.<|end|>"
KINDS = {"single_turn": 1, "tool_use": TURNS, "multi_turn": TURNS, "agent": TURNS}
"""Generator -> engine calls per sample."""
HERE = str(Path(__file__).resolve())


# -- what the generators are given; loaded from this file by its path ------------------------------------


async def calculator(expression: str) -> str:
    """Compute.

    Args:
        expression: What.
    """
    await asyncio.sleep(TOOL_SECONDS)
    return "408"


class Room:
    """An environment of `TURNS` steps."""

    def __init__(self, args: Any) -> None:
        self.steps = 0

    async def reset(self, sample: Sample) -> None:
        """Do nothing: there is no first observation."""

    async def step(self, action: str) -> Step:
        """Wait, then return the next observation."""
        self.steps += 1
        await asyncio.sleep(TOOL_SECONDS if self.steps < TURNS else 0)
        return Step("<|tool|>408<|end|><|assistant|>", 1.0, self.steps == TURNS)

    async def close(self) -> None:
        """Do nothing: the environment holds no resources."""


class NoSandbox:
    """A stand-in for a sandbox: the program runs among the clients, so no sandbox is measured."""

    async def __aenter__(self) -> NoSandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def write_file(self, path: str, data: Any) -> None:
        """Write nothing."""

    async def exec(self, command: str, *, env: dict[str, str], timeout: float) -> ExecResult:
        """Run one of the clients in place of the command."""
        await CLIENTS.run(env["OPENAI_BASE_URL"], env["OPENAI_API_KEY"])
        return ExecResult(0, "", "")


def no_sandbox(args: Any, sample: Sample, url: str) -> tuple[Any, str]:
    """Return the sandbox for `sandbox_path` of the generator `agent`."""
    return NoSandbox(), url


# -- the two sides ---------------------------------------------------------------------------------------


class Prompts:
    """A data source without a file."""

    def __init__(self) -> None:
        self.ids, self.next = CharTokenizer().encode(f"<|user|>{PROMPT}<|end|><|assistant|>"), 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next groups."""
        first, self.next = self.next, self.next + num_samples
        return [
            [
                Sample(group_index=g, index=g * GROUP_SIZE + i, prompt=PROMPT, tokens=list(self.ids))
                for i in range(GROUP_SIZE)
            ]
            for g in range(first, self.next)
        ]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Do nothing: this benchmark gives no groups back."""
        raise AssertionError


def reply(request: Request) -> Reply:
    """Return a call in the first turns and an answer in the last; count turns by the tool results in the input."""
    told = CharTokenizer().decode(request.input_ids[len(Prompts().ids) :]).count("408")
    return Reply(ANSWER if told >= TURNS - 1 else CALL, delay=ENGINE_SECONDS)


def engine(kind: str) -> ScriptedEngine:
    """Return an engine that takes time but does no work."""
    return ScriptedEngine(reply if KINDS[kind] > 1 else lambda _: Reply(ANSWER, delay=ENGINE_SECONDS))


@dataclass(frozen=True)
class Measured:
    """A single measurement of one side."""

    seconds: float
    cpu: float
    lag: dict[str, float]
    clients: float = 0.0
    """Processor time of the agents' programs."""


def bare(kind: str, num_samples: int) -> Measured:
    """Measure the other side, without slime."""
    asked, lag = engine(kind), LoopLag()
    prompt, observation = Prompts().ids, CharTokenizer().encode("<|tool|>408<|end|><|assistant|>")

    async def one() -> None:
        ids = list(prompt)
        for turn in range(KINDS[kind]):
            ids += (await asked.generate(ids, {"max_new_tokens": 400})).token_ids
            if turn + 1 < KINDS[kind]:
                await asyncio.sleep(TOOL_SECONDS)
                ids += observation

    async def everything() -> None:
        with lag.counting():
            await asyncio.gather(*(one() for _ in range(num_samples)))

    started, cpu = time.perf_counter(), time.process_time()
    asyncio.run(everything())
    return Measured(time.perf_counter() - started, time.process_time() - cpu, lag.take())


def plain_http(num_samples: int) -> Measured:
    """Measure the agents' requests with a minimal HTTP handler."""
    asked, lag, clients = engine("agent"), LoopLag(), CLIENTS.cpu
    turn = CharTokenizer().encode(f"{CALL}<|tool|>408<|end|><|assistant|>")

    async def answer(request: web.Request) -> web.Response:
        turns = len(orjson.loads(await request.read())["messages"]) // 2
        output = await asked.generate(Prompts().ids + turns * turn, {"max_new_tokens": 400})
        message = {"role": "assistant", "content": output.text}
        body = {"id": "", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        return web.Response(body=orjson.dumps(body), content_type="application/json")

    async def everything() -> None:
        app = web.Application()
        app.router.add_post("/chat/completions", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        with lag.counting():
            await asyncio.gather(*(CLIENTS.run(url, "none") for _ in range(num_samples)))
        await runner.cleanup()

    started, cpu = time.perf_counter(), time.process_time()
    asyncio.run(everything())
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return Measured(seconds, cpu, lag.take(), CLIENTS.cpu - clients)


def settings(kind: str, num_samples: int, reward: Path) -> Any:
    """Return the settings as `slime rollout` would load them."""
    flags = ["--rollout-batch-size", str(num_samples // GROUP_SIZE), "--n-samples-per-prompt", str(GROUP_SIZE)]
    flags += ["--num-rollout", "1", "--rollout-max-response-len", "400", "--hf-checkpoint", "unused"]
    flags += ["--run-dir", "unused", "--custom-rm-path", f"{reward}:reward", "--tool-call-parser", "plain"]
    flags += ["--sglang-server-concurrency", str(num_samples), "--custom-generate-function-path", kind]
    flags += ["--tools-path", f"{HERE}:calculator", "--environment-path", f"{HERE}:Room"]
    flags += [
        "--set",
        "plugins.agent.command=one of the clients",
        "--set",
        f"plugins.agent.sandbox_path={HERE}:no_sandbox",
    ]
    return load_settings(flags, command="show")


def staged(kind: str, num_samples: int, reward: Path) -> Measured:
    """Measure slime's side: draw, generate, score, filter, order, metrics. The start is not counted."""
    loaded = settings(kind, num_samples, reward)
    args, resolver = loaded.args, Resolver(loaded)
    args.run_dir, args.over_sampling_batch_size = None, args.over_sampling_batch_size or args.rollout_batch_size
    scorer = resolver.reward(f"{reward}:reward", "benchmark")
    stage = RolloutStage(
        args,
        RolloutParts(
            data_source=Prompts(),
            rollout_function=generate_rollout,
            eval_function=None,
            tokenizer=CharTokenizer(),
            engine=engine(kind),
            generator=resolver.generator(kind, "benchmark"),
            rewards=RewardStage(args, scorer, resolver.reward, workers=resolver),
            filters=FilterStage(args, None),
            resolve_generator=resolver.generator,
        ),
    )
    stage.start()
    try:
        started, cpu, clients = time.perf_counter(), time.process_time(), CLIENTS.cpu
        groups, metrics = stage.generate_groups(0)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    finally:
        stage.stop()
    samples = [sample for group in groups for sample in group]
    assert len(samples) == num_samples, len(samples)
    wrong = [s for s in samples if s.status != Sample.Status.COMPLETED or ANSWER[:-7] not in s.response]
    assert not wrong, (len(wrong), wrong[0].status, wrong[0].response, wrong[0].metadata)
    lag = {k: v for k, v in metrics.items() if "event_loop_lag" in k}
    return Measured(seconds, cpu, lag, CLIENTS.cpu - clients)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--samples", type=int, default=512, help=f"at once; a multiple of {GROUP_SIZE}")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        reward = Path(folder) / "reward.py"
        reward.write_text("async def reward(args, sample):\n    return 1.0\n", encoding="utf-8")
        set_up_process(settings("single_turn", GROUP_SIZE, reward).args)
        rows, lags = [], []
        CLIENTS.start()
        for kind in KINDS:
            found: dict[str, list[Measured]] = {"bare": [], "slime": [], **({"http": []} if kind == "agent" else {})}
            staged(kind, GROUP_SIZE, reward)  # imports
            for _ in range(given.repeats):
                found["bare"].append(bare(kind, given.samples))
                found["slime"].append(staged(kind, given.samples, reward))
                if kind == "agent":
                    found["http"].append(plain_http(given.samples))
            rows.append(_row(kind, given.samples, found))
            lags += [_lag_row(kind, side, found[side]) for side in found]
        CLIENTS.stop()
    print(table(["generator", "trajectories/s", "spread", "bare", "to bare", "ours of CPU", "us a turn"], rows))
    print(_http_line(given.samples, found))
    ratio(f"{given.samples} at once, HTTP alone / agent", *([m.seconds for m in found[s]] for s in ("slime", "http")))
    print()
    print(table([f"lag, {given.samples} at once", "p99 ms", "max ms", "max, computed ms"], lags))


def _http_line(num_samples: int, found: dict[str, list[Measured]]) -> str:
    """Return a line with the processor time of the agents' HTTP alone and of their own programs."""
    least = statistics.median(m.cpu for m in found["http"]) - statistics.median(m.cpu for m in found["bare"])
    clients = statistics.median(m.clients for m in found["slime"])
    speed = num_samples / statistics.median(m.seconds for m in found["http"])
    one = 1e6 / num_samples / TURNS
    return (
        f"agent: HTTP alone takes {one * least:.0f} us a turn, at {speed:.0f} trajectories/s;"
        f" the programs, in their own process, take {one * clients:.0f} us a turn"
    )


def _row(kind: str, num_samples: int, found: dict[str, list[Measured]]) -> list[str]:
    def middle(side: str, of: Callable[[Measured], float]) -> float:
        return statistics.median(map(of, found[side]))

    sides = [[m.seconds for m in found[side]] for side in ("slime", "bare")]
    floor = statistics.median(m.seconds for m in found["http" if kind == "agent" else "bare"])
    ratio(f"{num_samples} at once, bare loop / {kind}", *sides, floor=floor, aim=0.22 if kind == "agent" else None)
    ours, theirs = map(statistics.median, sides)
    cpu, bare_cpu = middle("slime", lambda m: m.cpu), middle("bare", lambda m: m.cpu)
    return [
        kind, f"{num_samples / ours:.0f}", spread([m.seconds for m in found["slime"]]), f"{num_samples / theirs:.0f}",
        f"{theirs / ours:.2f}x", f"{100 * (cpu - bare_cpu) / cpu:.0f}%",
        f"{1e6 * (cpu - bare_cpu) / num_samples / KINDS[kind]:.0f}",
    ]  # fmt: skip


def _lag_row(kind: str, side: str, found: list[Measured]) -> list[str]:
    names = ("lag_p99", "lag_max", "lag_cpu_max")
    values = [statistics.median(m.lag[f"perf/event_loop_{name}"] for m in found) for name in names]
    return [f"{kind}, {side}", *(f"{1000 * value:.0f}" for value in values)]


if __name__ == "__main__":
    main()
