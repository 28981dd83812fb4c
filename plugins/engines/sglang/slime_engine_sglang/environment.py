"""The Python environment of SGLang: its interpreter, its versions, and the environment variables of its processes.

SGLang need not be in slime's own environment: this module does not import it, and the servers run in SGLang's
environment. The versions are read from names of directories, which is fast enough for every start.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_engine_sglang.api.versions import TESTED_VERSIONS

PYTHON_VARIABLE = "SLIME_ENGINE_PYTHON"
SERVER_SIDE = Path(__file__).resolve().parent / "server_side"
"""Folder of the server-side code; see its README."""
CPU_STUBS = SERVER_SIDE / "cpu_stubs"
"""Folder with a stand-in for each package that SGLang imports, but does not call, without CUDA."""
SERVER_DISTRIBUTION, ROUTER_DISTRIBUTION = "sglang", "sglang-router"

_ASK_DEADLINE_S = 60
_ASK = (
    "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()"
    " if (d.name or '').lower().replace('_', '-') in ('sglang', 'sglang-router')}))"
)


def find_python(args: Args) -> Path | None:
    """Return the interpreter of SGLang's environment; None if none is named and this environment has no SGLang.

    Raises:
        ConfigError: The named path is no interpreter, or its environment has no SGLang.
    """
    named, where = args.engine_python, f"--engine-python / {PYTHON_VARIABLE}"
    if not named:
        named = os.environ.get(PYTHON_VARIABLE)
    if not named:
        return Path(sys.executable) if importlib.util.find_spec("sglang") and _this().get(SERVER_DISTRIBUTION) else None
    python = Path(os.path.abspath(os.path.expanduser(str(named))))
    if python.is_dir():
        python = python / "bin" / "python"
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise ConfigError(
            f"{where} {str(named)!r}: no Python interpreter; expected that of the environment SGLang is installed in,"
            " such as /path/to/venv/bin/python."
        )
    if SERVER_DISTRIBUTION not in installed_versions(python):
        raise ConfigError(
            f"{where} {str(named)!r}: SGLang is not installed there. Type: {python} -m pip install"
            f" sglang=={TESTED_VERSIONS[-1]} sglang-router"
        )
    return python


def engine_python(args: Args) -> Path:
    """Return SGLang's interpreter: --engine-python, else SLIME_ENGINE_PYTHON, else this one if SGLang is installed.

    Symbolic links are not resolved, since the interpreter of a virtual environment is a link.

    Raises:
        ConfigError: No environment has SGLang, or the named path is no interpreter or its environment has no SGLang.
            The message contains the command to type.
    """
    python = find_python(args)
    if python is None:
        raise ConfigError(missing(args))
    return python


def missing(args: Args) -> str:
    """Return an error that there is no environment with SGLang, with the commands to type; empty if there is one.

    Raises:
        ConfigError: The named path is no interpreter, or its environment has no SGLang.
    """
    if find_python(args) is not None:
        return ""
    return (
        f"SGLang is not installed beside slime ({sys.executable} cannot import sglang). It gets an environment of its"
        f" own: python -m venv sglang-env && sglang-env/bin/pip install sglang=={TESTED_VERSIONS[-1]} sglang-router."
        f" Then type --engine-python sglang-env/bin/python, or set {PYTHON_VARIABLE}."
    )


@cache
def installed_versions(python: Path) -> dict[str, str]:
    """Return the versions of "sglang" and "sglang-router" in the interpreter's environment, if they are installed.

    Raises:
        ConfigError: The interpreter does not run.
    """
    if str(python) == sys.executable:
        return _this()
    found = _in_directories(python)
    return found if SERVER_DISTRIBUTION in found else _asked(python)


def _has(python: Path, package: str) -> bool:
    """Return whether a virtual environment has a package; False if its directories do not show this."""
    return any(python.parent.parent.glob(f"lib*/python3*/site-packages/{package}/__init__.py"))


def _this() -> dict[str, str]:
    return _in(sys.path)


def _in_directories(python: Path) -> dict[str, str]:
    """Return versions from the interpreter's directories; empty unless it belongs to a virtual environment."""
    prefix = python.parent.parent
    known = (prefix / "pyvenv.cfg").is_file()
    return _in([str(path) for path in prefix.glob("lib*/python3*/site-packages")] if known else [])


def _in(places: list[str]) -> dict[str, str]:
    names = (SERVER_DISTRIBUTION, ROUTER_DISTRIBUTION)
    found = {name: next(iter(metadata.distributions(name=name, path=places)), None) for name in names}
    return {name: distribution.version for name, distribution in found.items() if distribution is not None}


def _asked(python: Path) -> dict[str, str]:
    try:
        safe = {**os.environ, "PYTHONSAFEPATH": "1"}
        done = subprocess.run(
            [str(python), "-c", _ASK], capture_output=True, text=True, timeout=_ASK_DEADLINE_S, env=safe
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--engine-python / {PYTHON_VARIABLE} {str(python)!r} does not run: {error}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ConfigError(f"--engine-python / {PYTHON_VARIABLE} {str(python)!r} does not run: {last}")
    return {name.lower().replace("_", "-"): version for name, version in json.loads(done.stdout).items()}


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
    paths += [str(stub) for stub in sorted(CPU_STUBS.iterdir()) if python is None or not _has(python, stub.name)]
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
