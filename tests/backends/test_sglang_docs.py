"""Every command of docs/engines/sglang.md is run, in the page's order, as a reader who types it all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_pages import ROOT, blocks
from tests.ports import free_port

pytestmark = [pytest.mark.backends, pytest.mark.timeout(1800)]

TEXT = (ROOT / "docs/engines/sglang.md").read_text(encoding="utf-8")
SECTIONS = {
    part.splitlines()[0]: "\n".join(commands) for part in TEXT.split("\n## ")[1:] if (commands := blocks(part, "bash"))
}
"""Heading -> its shell commands."""
INSTALL = "Install"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that looks like this checkout, but for its outputs; sections find there what earlier ones made."""
    directory = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "plugins"):
        (directory / name).symlink_to(ROOT / name)
    subprocess.run([Path(sys.executable).with_name("slime"), "init", "demo", directory / "demo.yaml"], check=True)
    return directory


@pytest.fixture
def shell(checkout: Path, sglang_python: Path) -> Iterator[subprocess.Popen[str]]:
    """bash, which stops at the first command that fails; what it leaves running is ended."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLIME_ENGINE_PYTHON": str(sglang_python)}
    process = subprocess.Popen(
        ["bash", "-eu"], cwd=checkout, env=environment, start_new_session=True, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != INSTALL])
def test_commands_of_a_section(section: str, shell: subprocess.Popen[str], checkout: Path) -> None:
    script = SECTIONS[section]
    for number in ("30000", "30100"):
        # Only where something listens: the plans name machines that are not there.
        script = re.sub(rf"(localhost:|--port ){number}", rf"\g<1>{free_port()}", script)
    # Until the last process that the page has in the background has ended, and let go of the output.
    try:
        said, _ = shell.communicate(script + "wait\necho the end\n", timeout=900)
    except subprocess.TimeoutExpired as error:
        logs = "".join(path.read_text() for path in checkout.glob("outputs/*.log"))
        pytest.fail(f"not done after {error.timeout:.0f} s: {error.output!r}\n{logs}")
    assert said.endswith("the end\n"), said
    assert "Traceback" not in said
    for save in re.findall(r"--save (\S+)", script):
        summary = json.loads((checkout / save / "summary.json").read_text())
        assert summary["rollouts"] > 0, said
        lines = [json.loads(line) for line in (checkout / save / "metrics.jsonl").read_text().splitlines()]
        trained = [line for line in lines if "train/loss" in line]
        assert len(trained) == summary["rollouts"]
        assert max(line["train/train_rollout_logprob_abs_diff"] for line in trained) < 1e-5
        assert all(line["engine/requests"] > 0 for line in trained)


def test_the_environment_is_made_by_a_target_that_exists() -> None:
    """What `make sglang` does is what `make test-backends` has done where SLIME_ENGINE_PYTHON names nothing else."""
    target, variable = SECTIONS[INSTALL].splitlines()
    done = subprocess.run([*target.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert variable == "export SLIME_ENGINE_PYTHON=.venv-sglang/bin/python"
    assert variable.partition("=")[2] in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_every_section_with_commands_is_run() -> None:
    assert len(SECTIONS) >= 6
    assert sum(script.count("slime ") for script in SECTIONS.values()) == len(
        re.findall(r"^slime ", TEXT, re.MULTILINE)
    )
