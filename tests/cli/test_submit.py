"""`slime submit`: what is wrong is found before anything is sent, and a job's folder is the same run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from slime_launcher_ray import job
from slime_launcher_ray.submit import HERE, make_job
from slime_launcher_ray.submit_command import run

from slime_core.config import load_settings
from slime_core.errors import ConfigError

NOWHERE = ["--address", "http://127.0.0.1:9"]
RUN = ["--hf-checkpoint=m", "--prompt-data=d", "--num-rollout=1", "--rollout-batch-size=1"]
RUN += ["--rollout-max-response-len=4"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*NOWHERE, "--hf-checkpoint", "x"], "unrecognized arguments: --hf-checkpoint x"),
        (NOWHERE, "which command"),
        (["train"], "must say where the dashboard is"),
        ([*NOWHERE, "train", "--lr", "fast"], "--lr"),
        ([*NOWHERE, "train", "--hf-checkpoint", "m", "--num-rollout", "1", "--rm-type", "math"], "m"),
    ],
)
def test_wrong_before_anything_is_sent(argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=message):
        run(argv)


def test_the_folder_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, folder, there = (tmp_path / name for name in ("work", "job", "there"))
    for directory in (work, folder):
        directory.mkdir()
    monkeypatch.chdir(work)
    (work / "rm.py").write_text("def reward(args, sample):\n    return 1.0\n")
    (work / "conf").mkdir()
    held_out = "datasets:\n  - {name: held, path: ../e.jsonl, custom_rm_path: '../rm.py:reward'}\n"
    (work / "conf/eval.yaml").write_text(held_out)
    settings = load_settings(
        [*RUN, "--custom-rm-path", "rm.py:reward", "--eval-config", "conf/eval.yaml", "--lr", "0.5"]
    )
    make_job(settings, folder, "/on/the/cluster")
    order = {"command": "train", "directory": "/on/the/cluster"}
    assert json.loads((folder / "job.json").read_text()) == order
    (folder / "job.json").write_text(json.dumps({**order, "directory": str(work)}))
    assert HERE in (folder / "run.yaml").read_text()
    assert str(work) not in (folder / "run.yaml").read_text()

    folder.rename(there)
    # What the job does, but for the run itself.
    stub = "import slime_core.cli.main as m; m.main = lambda argv: print(argv) or 0"
    stub += "; from slime_launcher_ray.job import main"
    done = subprocess.run(
        [sys.executable, "-c", f"{stub}; raise SystemExit(main())"], cwd=there, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(["train", "--config", str(there / "run.yaml")])
    again = load_settings(["--config", str(there / "run.yaml")]).args
    assert again.lr == 0.5
    file, _, function = again.custom_rm_path.partition(":")
    assert function == "reward"
    assert Path(file).is_relative_to(there)
    assert Path(file).read_text() == (work / "rm.py").read_text()
    [held] = yaml.safe_load(Path(again.eval_config).read_text())["datasets"]
    assert held["custom_rm_path"] == again.custom_rm_path
    assert held["path"] == "/on/the/cluster/e.jsonl"
    assert again.hf_checkpoint == "/on/the/cluster/m"


def test_a_directory_that_the_node_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"command": "train", "directory": str(tmp_path / "none")}))
    monkeypatch.chdir(tmp_path)
    assert job.main() == 2
    assert "the nodes need the directory of `slime submit`" in capsys.readouterr().err
