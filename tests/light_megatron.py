"""Import Megatron without the compiler and the tracker that it loads: three seconds in each process of the tests.

Where TORCH_COMPILE_DISABLE says that nothing is compiled, `torch.compile` loads the compiler and returns what it got.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch


def _as_it_is(model: Any = None, **_: Any) -> Any:
    return _as_it_is if model is None else model


compiler, tracked = torch.compile, "wandb" in sys.modules
try:
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        torch.compile = _as_it_is
    if not tracked:
        sys.modules["wandb"] = None  # type: ignore[assignment]
    importlib.import_module("megatron.core")
finally:
    torch.compile = compiler
    if not tracked:
        del sys.modules["wandb"]
