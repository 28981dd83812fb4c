"""No file and no line of a run holds a key or a password that it was given, also where what needs them fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.conftest import TinyRun

KEY, PASSWORD, IN_ENVIRONMENT = "wandb-0123456789", "s3cr3tpass", "hf_abcdefgh0123"
REWARD = """
import os

from slime_core.errors import PluginError


def reward(args, sample, **kwargs):
    if sample.index % 4 == 0:
        raise PluginError(f"GET {args.rm_url} with {args.wandb_key} and {os.environ['HF_TOKEN']}: 401")
    return float(sample.index % 2)
"""


@pytest.mark.slow
def test_a_reward_that_fails_with_them(tiny: TinyRun, slime: Any, tmp_path: Path) -> None:
    (tmp_path / "rm.py").write_text(REWARD, encoding="utf-8")
    changes = {"custom_rm_path": tmp_path / "rm.py", "rm_url": f"http://me:{PASSWORD}@127.0.0.1:9", "wandb_key": KEY}
    done = slime("train", *tiny.argv(tmp_path / "run", num_rollout=2, **changes), check=False, HF_TOKEN=IN_ENVIRONMENT)
    found = {"stdout": done.stdout.encode(), "stderr": done.stderr.encode()}
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            if path.suffix == ".zst":
                data = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
            found[str(path.relative_to(tmp_path))] = data
    assert {"run/metrics.jsonl", "run/samples/rollout_0000001.jsonl.zst"} <= found.keys()
    assert any("/failures/reward-" in name for name in found)
    secrets = [text.encode() for text in (KEY, PASSWORD, IN_ENVIRONMENT)]
    assert {name for name, data in found.items() if any(secret in data for secret in secrets)} == set()
