"""The list of --vllm-* flags, what a launch sets, and the recorded architectures, against the installed vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from slime_engine_vllm.environment import server_environment
from slime_engine_vllm.flags import FLAGS
from slime_engine_vllm.launch import server_arguments

from slime_core.config import Args
from tests.scripts import load_script

pytestmark = [pytest.mark.backends, pytest.mark.slow, pytest.mark.timeout(900)]

ASK = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
print(json.dumps({word: action.nargs == 0 for action in parser._actions for word in action.option_strings}))
"""


def test_the_installed_vllm_has_every_flag(vllm_python: Path) -> None:
    environment = {**os.environ, **server_environment("cpu")}
    done = subprocess.run(
        [str(vllm_python), "-c", ASK], capture_output=True, text=True, timeout=600, env=environment, check=True
    )
    known = json.loads(done.stdout.strip().splitlines()[-1])
    set_by_slime = server_arguments(Args(lora_rank=4, lora_unmerged=True), "cpu", 1, 0, {})
    for name in [*FLAGS, *set_by_slime]:
        assert f"--{name.replace('_', '-')}" in known, name
    for name, (kind, _) in FLAGS.items():
        assert known[f"--{name.replace('_', '-')}"] == (kind is bool), name


def test_the_recorded_architectures_are_the_installed_ones(vllm_python: Path) -> None:
    assert load_script("scripts/snapshot.py").main(["--vllm", str(vllm_python), "--check"]) == 0
