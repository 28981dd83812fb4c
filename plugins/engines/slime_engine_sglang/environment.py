"""The Python environment of SGLang: its interpreter, its versions, and the environment variables of its processes.

SGLang need not be in slime's own environment: this module does not import it, and the servers run in SGLang's
environment. The versions are read from names of directories, which is fast enough for every start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_engine_http.api.versions import TESTED_VERSIONS
from slime_engine_http.environment import Environment, has_package

SERVER_SIDE = Path(__file__).resolve().parent / "server_side"
"""Folder of the server-side code; see its README."""
CPU_STUBS = SERVER_SIDE / "cpu_stubs"
"""Folder with a stand-in for each package that SGLang imports, but does not call, without CUDA."""
SERVER_DISTRIBUTION, ROUTER_DISTRIBUTION = "sglang", "sglang-router"

SGLANG = Environment(
    "SGLang",
    "sglang",
    [SERVER_DISTRIBUTION],
    f"sglang=={TESTED_VERSIONS[-1]} sglang-router",
    others=[ROUTER_DISTRIBUTION],
)
find_python, engine_python, missing = SGLANG.find_python, SGLANG.engine_python, SGLANG.missing
installed_versions = SGLANG.installed_versions


def server_environment(
    device: str, arguments: Mapping[str, Any] | None = None, python: Path | None = None
) -> dict[str, str]:
    """Return the variables to add to `os.environ` for a server, a router or a script of SGLang's environment.

    Args:
        device: "cpu" or "cuda".
        arguments: `ServerArgs` fields of the server; on CPU with several processes they decide the binding of cores.
        python: Interpreter of SGLang's environment; stubs of packages that it has are left out. None: all stubs.

    Returns:
        On both devices: no cache of images' embeddings. On CPU also PYTHONPATH, with slime's plugin for SGLang and the
        import stubs before its current entries, SGLANG_USE_CPU_ENGINE, OMP_NUM_THREADS and SGLANG_CPU_OMP_THREADS_BIND.
        The last two are left out if the user's environment sets them.
    """
    # SGLang caches the vision tower's output by image only, so it would survive a weight update and a flush.
    found = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
    if device != "cpu":
        return found
    paths = [str(SERVER_SIDE / "plugin")]
    paths += [str(stub) for stub in sorted(CPU_STUBS.iterdir()) if python is None or not has_package(python, stub.name)]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in paths]
    found |= {"PYTHONPATH": os.pathsep.join(paths), "SGLANG_USE_CPU_ENGINE": "1"}
    # More threads in a process make it slower: with 2, throughput falls by a factor of 20.
    defaults = {"OMP_NUM_THREADS": "1"}
    sizes = arguments or {}
    ranks = int(sizes.get("tp_size") or 1) * int(sizes.get("pp_size") or 1)
    if ranks > 1:
        defaults["SGLANG_CPU_OMP_THREADS_BIND"] = _core_binding(ranks)
    return found | {name: value for name, value in defaults.items() if name not in os.environ}


def _core_binding(ranks: int) -> str:
    """Return a core list for each rank, such as `0,1|2,3`; SGLang's CPU workers assert one list per rank."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(len(cores) // ranks, 1)
    parts = [[cores[(rank * each + i) % len(cores)] for i in range(each)] for rank in range(ranks)]
    return "|".join(",".join(map(str, part)) for part in parts)
