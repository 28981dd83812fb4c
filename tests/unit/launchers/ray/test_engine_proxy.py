"""The engine as the rollout stage sees it: the same answers, steps only when allowed, nothing left waiting."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from slime_launcher_ray.engine_actor import EngineActor
from slime_launcher_ray.engine_proxy import EngineProxy, proxy_class
from slime_launcher_ray.wait import Member
from slime_testing_probes.scripted import Reply, ScriptedEngine

from slime_core.config import Args
from slime_core.errors import EngineError
from slime_core.protocols import EngineTraits, traits_of


class _Reference:
    """A call's result, as Ray's references give it to coroutines."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def future(self) -> Future[Any]:
        return self._future


class _Here(Member):
    """An actor of this event loop."""

    def submit(self, method: str, *args: Any, group: str = "", num_returns: int = 1) -> Any:
        call = getattr(self.handle, method)(*args)
        return _Reference(asyncio.run_coroutine_threadsafe(call, asyncio.get_running_loop()))


class _Anyhow(_Here):
    """One whose calls begin, and answer, as late as it happens."""

    chance: random.Random

    def submit(self, method: str, *args: Any, group: str = "", num_returns: int = 1) -> Any:
        before, after = self.chance.randrange(30), self.chance.randrange(30)

        async def call() -> Any:
            for _ in range(before):
                await asyncio.sleep(0)
            try:
                return await getattr(self.handle, method)(*args)
            finally:
                for _ in range(after):
                    await asyncio.sleep(0)

        return _Reference(asyncio.run_coroutine_threadsafe(call(), asyncio.get_running_loop()))


class _Stepped(ScriptedEngine):
    """Answers a request only in a step: `notify`, when `may_step` allows it; the last to come first."""

    may_step: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps: list[int] = []
        self.seen: list[int] = []
        self.ended: list[int] = []
        self._held: list[asyncio.Event] = []

    async def generate(self, input_ids: Any, sampling_params: Any, **named: Any) -> Any:
        turn = asyncio.Event()
        self._held.append(turn)
        self.seen.append(input_ids[0])
        await turn.wait()
        self.ended.append(input_ids[0])
        return await super().generate(input_ids, sampling_params, **named)

    async def abort(self, rid: str | None = None) -> None:
        """Ends the oldest one, whatever is asked."""
        if self._held:
            self._held.pop(0).set()

    def notify(self) -> None:
        if self._held and self.may_step():
            self.steps.append(len(self._held))
            self._held.pop().set()


def _proxy(engine: Any, kind: type[_Here] = _Here) -> EngineProxy:
    order = SimpleNamespace(settings=SimpleNamespace(args=Args(distributed_timeout_minutes=1)))
    actor = EngineActor(order, "engine")
    order.settings.args.engine = engine
    actor.run = cast(Any, SimpleNamespace(parts=SimpleNamespace(engine=lambda args: engine), args=order.settings.args))
    return proxy_class(type(engine), kind("engine", actor, EngineError, silence=60.0))(Args())


class _Seeing(_Stepped):
    """Takes images, and answers with how many."""

    traits = EngineTraits(takes_images=True)

    async def generate(self, input_ids: Any, sampling_params: Any, *, image_data: Any = (), **named: Any) -> Any:
        return await super().generate([len(image_data)], sampling_params, **named)


async def test_images_go_to_an_engine_that_takes_them() -> None:
    proxy = _proxy(_Seeing(lambda request: f"{request.input_ids[0]} {request.rid}"))
    await proxy.start()
    assert traits_of(proxy, EngineTraits).takes_images
    proxy.may_step = lambda: True
    calls = [proxy.generate([1], {}, rid="r", image_data=["data:image/png;base64,"] * count) for count in (0, 2)]
    assert [output.text for output in await asyncio.gather(*calls)] == ["0 r", "2 r"]
    await proxy.stop()


async def test_an_error_is_the_engines_own() -> None:
    proxy = _proxy(ScriptedEngine([]))
    await proxy.start()
    with pytest.raises(EngineError, match="the script has no reply for call 1"):
        await proxy.generate([1], {})
    await proxy.stop()


async def test_a_cancelled_request_is_aborted_over_there() -> None:
    engine = ScriptedEngine([Reply("long", delay=60.0)])
    proxy = _proxy(engine)
    await proxy.start()
    task = asyncio.create_task(proxy.generate([1], {}, rid="mine"))
    while not engine.requests:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    while "mine" not in engine.aborted:
        await asyncio.sleep(0)
    await proxy.stop()


async def test_steps_wait_for_the_stage() -> None:
    engine = _Stepped(lambda request: f"{request.input_ids[0]}")
    proxy = _proxy(engine)
    await proxy.start()
    allowed = False
    proxy.may_step = lambda: allowed
    finished: list[str] = []

    async def ask(number: int) -> None:
        finished.append((await proxy.generate([number], {})).text)

    tasks = [asyncio.create_task(ask(number)) for number in range(3)]
    for _ in range(50):
        await asyncio.sleep(0)
    assert engine.steps == [], "nothing steps before the stage allows it"
    allowed = True
    proxy.notify()
    await asyncio.gather(*tasks)
    assert engine.steps == [3, 2, 1], "all requests were there before the first step"
    assert finished == ["2", "1", "0"], "in the order of the engine"
    await proxy.stop()


async def test_stop_ends_what_waits() -> None:
    proxy = _proxy(_Stepped(lambda request: ""))
    await proxy.start()
    proxy.may_step = lambda: False
    task = asyncio.create_task(proxy.generate([1], {}))
    await asyncio.sleep(0)
    await proxy.stop()
    with pytest.raises(EngineError, match="being stopped"):
        await task


@pytest.mark.parametrize("seed", range(4))
async def test_calls_and_answers_that_overtake_each_other(seed: int) -> None:
    engine, chance = _Stepped(lambda request: f"{request.input_ids[0]}"), random.Random(seed)
    proxy = _proxy(engine, _Anyhow)
    cast(_Anyhow, proxy.member).chance = chance
    await proxy.start()
    proxy.may_step = lambda: True
    told: list[int] = []

    async def ask(number: int) -> None:
        told.append(int((await proxy.generate([number], {})).text))

    tasks = []
    for number in range(30):
        tasks.append(asyncio.create_task(ask(number)))
        for _ in range(chance.randrange(40)):
            await asyncio.sleep(0)
        if chance.random() < 0.2:
            tasks.append(asyncio.create_task(proxy.abort()))
    await asyncio.gather(*tasks)
    assert engine.seen == list(range(30)), "in the order in which they were asked for"
    assert told == engine.ended, "in the order in which they ended"
    await proxy.stop()


async def test_results_reach_others_though_the_caller_who_brought_them_goes_away() -> None:
    engine = _Stepped(lambda request: "")
    proxy = _proxy(engine)
    await proxy.start()
    steps = [False]
    proxy.may_step = lambda: steps[0]
    waiting = asyncio.create_task(proxy.generate([1], {}))
    await asyncio.sleep(0)
    ends = asyncio.create_task(proxy.abort())
    while not engine.ended:
        await asyncio.sleep(0)
    ends.cancel()
    assert (await waiting).text == ""
    await proxy.stop()
