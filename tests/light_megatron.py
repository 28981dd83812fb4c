"""Import Megatron without the compiler and the tracker that it loads: three seconds in each process of the tests.

Where TORCH_COMPILE_DISABLE says that nothing is compiled, `torch.compile` loads the compiler and returns what it got.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import pytest
import torch


def _as_it_is(model: Any = None, **_: Any) -> Any:
    return _as_it_is if model is None else model


with pytest.MonkeyPatch.context() as patch:
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        patch.setattr(torch, "compile", _as_it_is)
    if "wandb" not in sys.modules:
        patch.setitem(sys.modules, "wandb", None)
    importlib.import_module("megatron.core")
