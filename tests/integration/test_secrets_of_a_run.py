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


LOUD = """
import asyncio, logging, os, subprocess, sys, threading, traceback
from slime_core import RewardTraits, declares

def loud(args):
    told = f"GET {args.rm_url} with {args.wandb_key} and {os.environ['HF_TOKEN']}"
    print(told)
    print("key:", args.wandb_key, file=sys.stderr, flush=True)
    sys.stderr.writelines([args.wandb_key[:4], args.wandb_key[4:], "\\n"])
    logging.getLogger("mine").warning(told)
    try:
        raise ValueError(told)
    except ValueError:
        traceback.print_exc()
    thread = threading.Thread(target=lambda: 1 / len(told[:0]) if told else None, name=told)
    thread.start()
    thread.join()
    split = 'echo "child: $1"; printf %s "$2"; sleep 0.05; echo "$3"'
    subprocess.run(["sh", "-c", split, "sh", told, told[:-4], told[-4:]])
    print("said", flush=True)
    return 1.0

def worker(args, sample, **kwargs):
    return loud(args)

@declares(RewardTraits(execution="inline"))
def inline(args, sample, **kwargs):
    return loud(args)

async def asynchronous(args, sample, **kwargs):
    return loud(args)
"""


@pytest.mark.parametrize("function", [
    "inline", *(pytest.param(where, marks=pytest.mark.slow) for where in ("worker", "asynchronous")),
])  # fmt: skip
def test_what_a_reward_prints_and_logs(function: str, tiny: TinyRun, slime: Any, tmp_path: Path) -> None:
    """Also by what it starts, in two pieces, in a traceback, as the name of a thread."""
    (tmp_path / "rm.py").write_text(LOUD, encoding="utf-8")
    reward = f"{tmp_path / 'rm.py'}:{function}"
    changes = {"custom_rm_path": reward, "rm_url": f"http://me:{PASSWORD}@127.0.0.1:9", "wandb_key": KEY}
    argv = tiny.argv(tmp_path / "run", num_rollout=1, eval_interval=None, eval_prompt_data=None, **changes)
    done = slime("train", *argv, check=False, HF_TOKEN=IN_ENVIRONMENT)
    said = done.stdout + done.stderr
    assert {word: word in said for word in ("ZeroDivisionError", "ValueError: GET", "child: GET", "said")} == {
        "ZeroDivisionError": True, "ValueError: GET": True, "child: GET": True, "said": True
    }  # fmt: skip
    assert {secret: secret in said for secret in (KEY, PASSWORD, IN_ENVIRONMENT)} == {
        KEY: False, PASSWORD: False, IN_ENVIRONMENT: False
    }  # fmt: skip
