"""Every child process is started by the guard (`slime_core/workers`): nothing else may make one, but for reasons."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.trees import files, tree

STARTS = {
    "subprocess": {"Popen", "run", "call", "check_call", "check_output", "getoutput"},
    "os": {"fork", "forkpty", "posix_spawn", "posix_spawnp", "spawnv", "spawnve", "system", "popen"},
    "multiprocessing": {"Process", "Pool", "get_context"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
    "futures": {"ProcessPoolExecutor"},
}
_ASKS = "a question with a deadline, whose answer is its output; the process has no children"

ALLOWED = {
    "workers/guard.py:_keep": "the guard itself",
    "workers/process.py:": "starts the guard",
    "slime_embedded/kernels/__init__.py:_built": "a C compiler, with a deadline, in the foreground",
    "workers/leftovers.py:watch": "ends what user code starts, after this process",
    "slime_engine_http/environment.py:_asked": _ASKS,
    "slime_engine_sglang/flag_list.py:introspected": _ASKS,
    "slime_commands/plugins/contracts.py:_pytest": "pytest in the foreground, with a deadline",
    "slime_commands/plugins/packages.py:pip": "pip in the foreground, with a deadline",
    "slime_commands/plugins/installing.py:_checked": "slime plugins check in the foreground, with a deadline",
    "slime_commands/init/smollm2.py:_download": "pip in the foreground, with a deadline",
    "slime_submit/slurm.py:": _ASKS,
    "slime_sandbox_local/inside/": "in a sandbox, below a guard",
}


def _found() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for file, name in files():
        for function, line in _starts(tree(file)):
            found.setdefault(f"{name}:{function}", []).append(line)
    return found


def _starts(module: ast.AST, within: str = "") -> Iterator[tuple[str, int]]:
    for node in ast.iter_child_nodes(module):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else within
        is_type = isinstance(module, ast.Subscript)
        module_name = getattr(getattr(node, "value", None), "id", "") if isinstance(node, ast.Attribute) else ""
        if not is_type and getattr(node, "attr", "") in STARTS.get(module_name, ()):
            yield inside, getattr(node, "lineno", 0)
        yield from _starts(node, inside)


def test_every_child_is_started_by_the_guard() -> None:
    found = _found()
    stray = {place: lines for place, lines in found.items() if not any(place.startswith(known) for known in ALLOWED)}
    assert stray == {}, "start it with slime_core.workers.process.Guarded"
    assert [known for known in ALLOWED if not any(place.startswith(known) for place in found)] == []
