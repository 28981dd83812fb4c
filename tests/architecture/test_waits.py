"""Nothing in the core waits without a name, a deadline and a declared end: each wait in the code is accounted for.

A wait is accounted for when it stands inside `with waiting(...)` or `asyncio.timeout(...)`, is an argument of `within`,
has a timeout of its own, or is in ALLOWED with the reason. Awaiting a coroutine function or
`asyncio.gather` of some is no wait of its own: what they wait for is found where it stands.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from tests.architecture.trees import files, tree

COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather_object", "init_process_group", "monitored_barrier", "recv",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter_object_list", "new_group",
}  # fmt: skip
PROCESSES = {"call", "check_call", "check_output", "communicate", "run"}
BLOCKING = {"accept", "acquire", "urlopen", "wait_closed"}

_COLLECTIVE = "the process group's deadline, --distributed-timeout-minutes; named by the stage's call around it"
_SERVES = "waits for work, not for progress: who gives the work has the deadline"
_STAGE = "awaits a stage's call, which is named where it waits"
_SAMPLE = "a sample's request: --rollout-timeout of the sample around it"
_CLIENT = "a client's request: the client's deadline, and its going away"
_JUST_KILLED = "of a process or task that was just killed or cancelled, or has just ended"

ALLOWED = {
    "slime_serving/command.py:_serve": "serves until a signal",
    "slime_python/channel.py:_accept": "in a daemon thread; `close` ends it, and so does the process's end",
    "slime_python/control.py:_work_elsewhere": "the run in a process of its own, whose waits have deadlines",
    "slime_runs/view/command.py:_serve": "serves until a signal",
    "slime_environments/session/child.py:_answered": "the other side kills this process at --environment-step-timeout",
    "slime_environments/session/places.py:_answered": "the session's `within` around it: --environment-step-timeout",
    "slime_environments/session/places.py:_work": _SERVES,
    "slime_hooks/trackers/__init__.py:_work": _SERVES,
    "slime_launcher_ray/engine_actor.py:advance": "the actor's caller counts its silence (slime_launcher_ray/wait.py)",
    "slime_launcher_ray/engine_actor.py:in_turn": "the actor's caller counts its silence (slime_launcher_ray/wait.py)",
    "slime_launcher_ray/wait.py:awaited": "is done, or its process has died",
    "slime_launcher_ray/engine_proxy.py:_abortable": _SAMPLE,
    "slime_launcher_ray/engine_proxy.py:_control": _STAGE,
    "slime_launcher_ray/engine_proxy.py:_forever": _SERVES,
    "slime_launcher_ray/engine_proxy.py:_survive": "steps of a start, each of which is named where it waits",
    "slime_launcher_ray/engine_proxy.py:generate": _SAMPLE,
    "slime_embedded/engine/engine.py:_drive": _SERVES,
    "slime_embedded/engine/engine.py:stream": _CLIENT,
    "slime_serving/http/application.py:listen": "uvicorn's start, which ends or fails",
    "slime_serving/http/application.py:stop": "uvicorn's timeout_graceful_shutdown",
    "slime_serving/http/streams.py:merge": _CLIENT,
    "slime_serving/http/streams.py:unless_disconnected": _CLIENT,
    "launch/ranks.py:_wait": "of ranks, each of which has deadlines of its own; named by its caller",
    "waits/bounded.py:by_deadline": "a timer of its own ends it",
    "waits/table.py:placed": "reads a variable",
    "workers/guard.py:_watch": "lives as long as its parent, and waits for its end",
    "slime_engine_sglang/engine.py:_in_thread": "processes get SIGTERM, then SIGKILL after a grace",
    "slime_engine_vllm/engine.py:_end": "processes get SIGTERM, then SIGKILL after a grace",
    "slime_engine_vllm/server_side/plugin/slime_vllm_plugin/transfer.py:_broadcast": _COLLECTIVE,
    "slime_engine_http/api/client.py:_acquire": "looks at the pool; what it waits for meanwhile has a deadline",
    "slime_engine_http/api/flights.py:_until": "a try has its request's deadline, a stream --rollout-timeout",
    "slime_engine_http/weights/delta.py:outcome": "a request with --update-weight-timeout",
    "slime_engine_http/weights/distributed.py:_in_thread": _COLLECTIVE,
    "slime_engine_http/weights/distributed.py:_together": "requests with a deadline, and a collective",
    "slime_engine_http/weights/distributed.py:broadcast": _COLLECTIVE,
    "loop.py:cancel": _JUST_KILLED,
    "loop.py:ended": _STAGE,
    "loop.py:answer": _STAGE,
    "slime_runs/timeline.py:wait": _STAGE,
    "slime_commands/plan/simulate.py:run": "no wait: a command of the simulated run",
    "workers/call.py:awaited": "the deadline of the reward or hook that calls it",
    "slime_rewards/processes/pool.py:_own": _SERVES,
    "slime_rewards/processes/pool.py:score": "its thread keeps the call's deadline; named by the reward stage",
    "workers/call.py:_serve": _SERVES,
    "slime_sandbox_local/inside/forward.py:hand_over": "accepts a connection that is there already",
    "rollout/generate.py:run_group": "samples, each of which has deadlines of its own",
    "rollout/gate.py:begin": "the gate names it: a free place for samples",
    "rollout/deadlines.py:run": "`within` keeps --eval-timeout, --rollout-stall-timeout is in a rollout",
    "rollout/stage.py:keep_result": "named by its callers; the parts of a rollout or evaluation have deadlines",
    "slime_embedded/trainer/parallel.py": _COLLECTIVE,
    "slime_trainer_megatron": _COLLECTIVE,
    "slime_weight_transport_delta/puller.py:_apply": "copies files, and is not left behind; see the request",
    "slime_weight_transport_delta/puller.py:serve": "serves until a signal",
}
"""Place (a function, file or folder) -> why it needs no name or deadline of its own."""


def _allowed(place: str) -> str | None:
    """The entry of ALLOWED that covers a place."""
    path = place.split(":")[0]
    return next((a for a in ALLOWED if a in (place, path) or path.startswith(f"{a}/")), None)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _owner(node: ast.expr) -> str:
    return _name(node.value) if isinstance(node, ast.Attribute) else ""


def _bounded(call: ast.Call) -> bool:
    return any(k.arg in ("timeout", "deadline", "timeout_s", "blocking") for k in call.keywords)


def _wait(node: ast.AST) -> str | None:
    """What kind of wait without a deadline of its own the node is."""
    if isinstance(node, ast.Await) and isinstance(node.value, (ast.Name, ast.Attribute)):
        return f"await {_name(node.value)}"
    if isinstance(node, ast.AsyncWith):
        for item in node.items:
            if "lock" in _name(item.context_expr).lower() or "semaphore" in _name(item.context_expr).lower():
                return f"async with {_name(item.context_expr)}"
    if not isinstance(node, ast.Call) or _bounded(node):
        return None
    name, owner = _name(node.func), _owner(node.func)
    if name == "wait" and (owner == "asyncio" or not node.args):
        return f"{owner}.wait"
    if name == "wait_for" and owner == "asyncio" and len(node.args) < 2:
        return "asyncio.wait_for"
    if name in ("join", "get", "result") and not node.args and isinstance(node.func, ast.Attribute):
        made_here = isinstance(node.func.value, ast.Call)
        return f"{owner}.{name}" if name != "result" or made_here else None
    if name == "shield" or (name in COLLECTIVES and owner in ("dist", "distributed", "group", "torch_dist")):
        return f"{owner}.{name}"
    if name in BLOCKING or (owner == "subprocess" and name in PROCESSES) or name == "communicate":
        return f"{owner}.{name}"
    if owner in ("ray",) and name in ("get", "wait"):
        return f"ray.{name}"
    return None


def _accounted(node: ast.AST) -> bool:
    """Whether the node gives what is inside it a name or a deadline."""
    if isinstance(node, (ast.With, ast.AsyncWith)):
        calls = [i.context_expr for i in node.items if isinstance(i.context_expr, ast.Call)]
        named = {_name(i.context_expr) for i in node.items}
        return any(_name(c.func) in ("waiting", "timeout") for c in calls) or bool(named & {"clock"})
    return isinstance(node, ast.Call) and _name(node.func) == "within"


def _waits(parsed: ast.Module) -> Iterator[tuple[str, int, str]]:
    """(function, line, kind) of every wait that nothing accounts for."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, int, str]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        kind = _wait(node)
        if kind is not None:
            yield function, getattr(node, "lineno", 0), kind
        if not _accounted(node):
            for child in ast.iter_child_nodes(node):
                yield from visit(child, function)

    yield from visit(parsed, "")


@cache
def _found() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for file, name in files():
        if name.startswith("slime_testing_"):  # suites for tests, which have pytest's deadline
            continue
        for function, line, kind in _waits(tree(file)):
            place = f"{name}:{function}"
            found.setdefault(place, []).append(f"{kind} (line {line})")
    return found


def test_every_wait_is_accounted_for() -> None:
    bare = {place: waits for place, waits in _found().items() if _allowed(place) is None}
    assert bare == {}, (
        'waits without a name or a deadline: put each into `with waiting("what", deadline=..., then=...)` of'
        " slime_core.waits (or use within), or name it in ALLOWED with the reason; add it to the table"
        " of docs/reliability.md, too"
    )


def test_the_list_has_no_entry_for_nothing() -> None:
    assert set(ALLOWED) - {_allowed(place) for place in _found()} == set()


@pytest.mark.parametrize(
    "statement",
    [
        "await event.wait()", "await asyncio.wait(tasks)", "await asyncio.wait_for(x)", "await queue.get()",
        "await turn", "queue.get()", "thread.join()", "event.wait()", "process.communicate()",
        "subprocess.run(command)",
        "lock.acquire()", "pool.submit(f).result()", "dist.all_reduce(t)", "dist.barrier()", "ray.get(reference)",
        "urlopen(url)", "await asyncio.shield(task)", "async with self._lock: pass",
    ],
)  # fmt: skip
def test_a_new_bare_wait_is_found(statement: str) -> None:
    assert list(_waits(ast.parse(f"async def f():\n    {statement}\n")))
    with_name = f"async def f():\n    with waiting('x', deadline=1, then='y'):\n        {statement}\n"
    assert list(_waits(ast.parse(with_name))) == []
