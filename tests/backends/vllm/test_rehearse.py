"""`slime rehearse` starts vLLM on CPU; the assertions are those for SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.test_rehearse import rehearsed_with_a_server
from tests.conftest import Slime, TinyRun

pytestmark = [pytest.mark.backends, pytest.mark.timeout(1200)]


def test_vllm_is_rehearsed(slime: Slime, tiny: TinyRun, tmp_path: Path, vllm_python: Path) -> None:
    flags = ["--vllm-gpu-memory-utilization", "0.7", "--vllm-attention-backend", "FLASH_ATTN"]
    rehearsed_with_a_server(slime, tiny, tmp_path, "vllm", vllm_python, *flags)
