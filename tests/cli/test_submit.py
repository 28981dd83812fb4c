"""`slime submit`: what is wrong is found before anything is sent, and a job's folder is the same run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from slime_submit import job, manifests
from slime_submit.command import run
from slime_submit.folder import make_job, without_settings
from slime_submit.job import HERE

from slime_core.config import load_settings
from slime_core.errors import ConfigError
from slime_core.plugins import presets
from tests.conftest import TinyRun
from tests.run_files import metrics

NOWHERE = ["--address", "http://127.0.0.1:9"]
RUN = ["--hf-checkpoint=m", "--prompt-data=d", "--num-rollout=1", "--rollout-batch-size=1"]
RUN += ["--rollout-max-response-len=4", "--rm-type=math"]
SLURM = ["--to", "slurm", "--dry-run", "--no-check"]
K8S = ["--to=k8s", "--dry-run", "--no-check", "--image=i", "--volume=claim:/data", "--directory=/data/work"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*NOWHERE, "--hf-checkpoint", "x"], "unrecognized arguments: --hf-checkpoint x"),
        (NOWHERE, "which command"),
        (["train"], "must say where the dashboard is"),
        ([*NOWHERE, "train", "--lr", "fast"], "--lr"),
        (["--to", "sulrm", "train"], "Did you mean slurm"),
        (["--to", "k8s", "train"], "--image, --volume"),
        (["--to", "k8s", "--image=i", "--volume=v:/v", "train", *RUN], "only writes YAML: type --dry-run"),
        ([*K8S, "--gres", "gpu:8", "train", *RUN], "unrecognized arguments: --gres gpu:8"),
        ([*K8S, "--gpus", "H100:8", "train", *RUN], "--gpus H100:8: must be a number"),
        (["--to=k8s", "--dry-run", "--image=i", "--volume=v", "train", *RUN], "--volume v: must be NAME:/PATH"),
        ([*K8S, "train", *RUN, "--run-dir", "/home/run"], "/home/run is outside of it"),
        ([*K8S, "train", *RUN, "--run-dir", "../../run"], "/run is outside of it"),
        ([*K8S, "train", *RUN, "--wandb-key", "0123456789abcdef"], "would have a secret"),
        ([*SLURM, "gpu", "train", *RUN], "gpu: not an option"),
        ([*SLURM, "--array=1-4", "train", *RUN], "--array=1-4: a run is one job"),
        ([*SLURM, "train", *RUN, "--ray-address", "auto"], "says which cluster; remove it"),
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
    (work / "helpers").mkdir()
    (work / "helpers/__init__.py").touch()
    (work / "helpers/deploy.yaml").write_text("a: !ref b\n---\nc: 1\n")
    (work / "helpers/old.yml").write_bytes(b"name: \xe9\n")
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
    stub += "; from slime_submit.job import main"
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


def test_only_variables_of_slime_are_settings() -> None:
    others = {"WANDB_MODE": "offline", "SEED": "1", "SLIME_HOST_IP": "10.0.0.1"}
    assert without_settings({**others, "SLIME_SEED": "2", "SLIME_WANDB_MODE": "online"}) == others


def test_a_directory_that_the_node_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"command": "train", "directory": str(tmp_path / "none")}))
    monkeypatch.setattr(sys, "argv", ["job", str(tmp_path)])
    assert job.main() == 2
    assert "the nodes need the directory of `slime submit`" in capsys.readouterr().err


def test_a_batch_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*SLURM, "--python", "/env/bin/python", "--partition", "gpu", "--time=1-0", "--gres", "gpu:8"]
    assert run([*words, "train", *RUN, "--run-dir", "out/a run", "--actor-num-nodes", "2"]) == 0
    [folder] = (tmp_path / "out" / "a run.jobs").iterdir()
    text = capsys.readouterr().out
    assert text == (folder / "job.sh").read_text()
    *options, step = text.splitlines()[1:]
    assert "#SBATCH --requeue" in options
    assert f"#SBATCH --output '{folder}/slurm-%j.out'" in options
    assert options[-4:] == [
        "#SBATCH --nodes 2",
        "#SBATCH --partition gpu",
        "#SBATCH --time=1-0",
        "#SBATCH --gres gpu:8",
    ]
    assert step.startswith("exec srun ")
    assert step.endswith(f"/env/bin/python -m slime_submit.allocation '{folder}'")
    assert folder.stat().st_mode & 0o077 == 0, "run.yaml may have a key"
    order = json.loads((folder / "job.json").read_text())
    assert (order["run_dir"], order["save"], order["id"]) == (str(tmp_path / "out/a run"),) * 2 + (folder.name,)

    assert run([*SLURM, "-N4", "train", *RUN]) == 0
    assert "--nodes 1" not in capsys.readouterr().out
    assert run([*SLURM, "--partition", "train", "train", *RUN]) == 0
    assert "#SBATCH --partition train\n" in capsys.readouterr().out
    assert run([*SLURM, "--directory", "sub", "train", *RUN]) == 0
    text = capsys.readouterr().out
    assert f"#SBATCH --chdir {tmp_path}/sub\n" in text
    assert f"allocation {tmp_path}/sub/" in text


@pytest.mark.parametrize("name", ["a" * 80, "2026-11-29", "\u00e9"])
def test_the_name_of_a_job_is_one_for_kuberay(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*K8S, "--nodes=2", "train", *RUN, "--run-dir", name]) == 0
    _, made = yaml.safe_load_all(capsys.readouterr().out)
    assert made["kind"] == "RayJob"
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])", made["metadata"]["name"])


def test_a_check_changes_nothing_of_the_job(tiny: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Mock(side_effect=presets.load_settings)
    monkeypatch.setattr(presets, "load_settings", load)
    here = tmp_path / "here"
    shutil.copytree(tiny.root, here / "data")
    monkeypatch.chdir(here)
    jobs = []
    for number, check in enumerate(([], ["--no-check"])):
        words = ["--to=slurm", "--dry-run", f"--directory=../there{number}", *check, "train"]
        assert run([*words, *TinyRun(Path("data")).argv(Path("out"))]) == 0
        [folder] = Path(f"../there{number}", "out.jobs").iterdir()
        jobs.append((folder / "run.yaml").read_text().replace(f"there{number}", "there").replace(folder.name, "ID"))
    assert jobs[0] == jobs[1]
    assert str(here) not in jobs[0]
    assert load.call_count == len(jobs)


def test_a_job_that_starts_again(tmp_path: Path) -> None:
    own = tmp_path / "run"
    order = {"id": "1", "run_dir": str(own), "save": str(own), "load": ""}
    own.mkdir()
    (own / "config.yaml").touch()  # of an earlier run, which --overwrite may replace
    assert job.resumed(order) == {}
    assert job.resumed(order) == {}, "killed before the run began"
    later = (tmp_path / "run.jobs" / "1" / "started").stat().st_mtime + 1
    os.utime(own / "config.yaml", (later, later))
    again = {"overwrite": False, "load": str(own)}
    assert job.resumed(order) == again
    assert job.resumed({**order, "load": "another"}) == {"overwrite": False}
    (own / "checkpoints" / "rollout_0000001").mkdir(parents=True)
    (own / "checkpoints" / "rollout_0000001" / "manifest.json").write_text("{}")
    assert job.resumed({**order, "load": "another"}).items() >= {**again, "finetune": False, "ckpt_step": None}.items()
    assert load_settings([*RUN, "--config", _written(tmp_path, job.resumed(order))]).args.load == str(own)


def _written(tmp_path: Path, settings: dict[str, object]) -> str:
    (tmp_path / "again.yaml").write_text(json.dumps(settings))
    return str(tmp_path / "again.yaml")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_pod_after_an_evicted_one_resumes(
    tiny: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pod = tmp_path / "pod"
    monkeypatch.setattr(manifests, "FOLDER", str(pod))
    words = ["--to=k8s", "--dry-run", "--no-check", "--image=i", f"--volume=claim:{tmp_path}"]
    words += [f"--python={sys.executable}", "train"]
    assert run([*words, *tiny.argv(tmp_path / "run", num_rollout=12, eval_interval=None)]) == 0
    secret, written = yaml.safe_load_all(capsys.readouterr().out)
    spec = written["spec"]["template"]["spec"]
    for item in spec["volumes"][0]["secret"]["items"]:  # a Secret's files are links into a folder of its version
        file = pod / "..1" / item["path"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secret["stringData"][item["key"]])
    (pod / "..data").symlink_to("..1")
    for path in (pod / "..1").iterdir():
        (pod / path.name).symlink_to(f"..data/{path.name}")
    command = spec["containers"][0]["command"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as evicted:
        assert evicted.stdout
        next(line for line in evicted.stdout if line.startswith("rollout 3/"))
        evicted.terminate()
        evicted.communicate(timeout=120)
    assert evicted.returncode == job.DRAINED
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "rollout 3/" in done.stdout) == (0, False), done.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 13))
