"""`slime init` in an empty directory, and what it writes, for somebody who has installed slime and nothing else."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from slime_commands.init.command import TEMPLATES

from slime_core.cli.main import main
from slime_core.config import load_settings

SLIME = str(Path(sys.executable).with_name("slime"))
SMALL = ["--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--eval-interval", "2"]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_written_is_a_run(template: str, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", template, "runs/my.yaml"]) == 0
    command = "sft" if template == "sft" else "train"
    assert capsys.readouterr().out.endswith(f"; next: slime {command} --config runs/my.yaml\n")
    settings = load_settings(["--config", "runs/my.yaml"], command=command, env={})
    assert settings.warnings == []
    assert settings.args.save == f"runs/outputs/{template}"
    assert not {"run.yaml"} & set(Path("runs/my.yaml").read_text().split())
    if template == "agent":
        files = settings.args.plugins["agent"]["files"]
        assert all(Path(file).is_file() for file in files.values())


def test_it_leaves_alone_what_is_there(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("agent.py").write_text("mine\n")
    assert main(["init", "agent"]) == 2
    assert capsys.readouterr().err.startswith("slime: error: slime init: agent.py is there; --force writes over it")
    assert os.listdir() == ["agent.py"]
    assert main(["init", "agent", "agent.py", "--force"]) == 2
    assert "agent.py is a file of the template" in capsys.readouterr().err
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # stands for a full disk
    try:
        assert main(["init", "agent", "--force"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert Path("agent.py").read_text() == "mine\n"
    assert main(["init", "agent", "--force"]) == 0
    assert "mine" not in Path("agent.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("template", sorted({*TEMPLATES} - {"smollm2"}))  # tests/integration/test_real_model.py
def test_a_template_trains(template: str, empty: Path) -> None:
    subprocess.run([SLIME, "init", template], check=True)
    command = ["sft"] if template == "sft" else ["train", *SMALL]
    done = subprocess.run([SLIME, *command, "--config", "run.yaml"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rollouts in" in done.stdout
    summary = json.loads(Path("outputs", template, "summary.json").read_text())
    assert Path(summary["checkpoint"]).is_dir()
