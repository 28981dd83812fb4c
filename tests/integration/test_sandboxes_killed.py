"""SIGKILL of `slime train` while programs run in sandboxes: they end with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from slime_sandbox_local import isolation_here

from tests.conftest import TinyRun

pytestmark = pytest.mark.skipif(not isolation_here().complete, reason=f"no complete isolation here: {isolation_here()}")
CODE = """
import sys
from slime_sandbox_local import InterpreterPool, SandboxLimits, pool_of

CODE = "import subprocess; subprocess.run(['sleep', '{marker}'])"

async def generate(args, sample, sampling_params, *, context):
    # What `code_sandbox` does with a turn; a random model writes none.
    await pool_of(args, SandboxLimits()).run(object(), CODE, timeout=900)
    raise AssertionError("it was to be killed")
"""


def sleepers(seconds: int) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", str(seconds)]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["agent", "code_sandbox"])
def test_programs_end_with_a_driver_that_is_killed(kind: str, tiny: TinyRun, tmp_path: Path) -> None:
    marker = 1_000_000 + int.from_bytes(tmp_path.name.encode()[-3:], "big") % 900_000
    argv = tiny.argv(tmp_path / "run", skip_eval_before_train=True, sglang_server_concurrency=3)
    if kind == "agent":
        command = f"sleep {marker} & sleep {marker}"
        argv += ["--custom-generate-function-path", "agent", "--set", f"plugins.agent.command={command}"]
    else:
        (tmp_path / "code.py").write_text(CODE.format(marker=marker), encoding="utf-8")
        argv += ["--custom-generate-function-path", str(tmp_path / "code.py:generate")]
    log = tmp_path / "log"
    with log.open("wb") as out:
        driver = subprocess.Popen([sys.executable, "-m", "slime_core", "train", *argv], stderr=out, stdout=out)
    below: list[psutil.Process] = []
    try:
        while len(sleepers(marker)) < 3:
            assert driver.poll() is None, log.read_text()[-3000:]
            below = psutil.Process(driver.pid).children(recursive=True)
        below += sleepers(marker)
    finally:
        driver.kill()
        driver.wait()
    _, alive = psutil.wait_procs(below, timeout=60)
    assert alive == []
    late = sleepers(marker)  # those that began when they were counted
    assert psutil.wait_procs(late, timeout=60)[1] == []
