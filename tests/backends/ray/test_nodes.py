"""Several nodes, by Ray's own cluster utility (raylets of this machine), jobs submitted to them, and nodes that go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from ray._private.utils import write_ray_address
from ray.cluster_utils import Cluster

from tests.backends.ray.actors import actors, begun, ended, files
from tests.backends.whole_runs import hold, release, running
from tests.conftest import SLIME, TinyRun
from tests.run_files import timeless

pytestmark = [pytest.mark.backends, pytest.mark.timeout(900)]

_WHERE = """
import json, os, sys

import ray
from beside_it import score
from slime_core import RewardTraits, declares


@declares(RewardTraits(execution="inline"))
def reward(args, sample, **kwargs):
    return score(sample.response)

if log := os.environ.get("SLIME_TEST_WHERE"):
    node = "the command" if sys.argv[0].endswith("slime") else ray.get_runtime_context().get_node_id()
    with open(log, "a") as file:
        file.write(json.dumps({"file": __file__, "node": node}) + "\\n")
"""
_BESIDE = "def score(text):\n    return sum(c.isdigit() for c in text) / max(len(text), 1)\n"
_CHANGES_ITSELF = """
with open(__file__, "a") as file:
    file.write("# read once more\\n")


def reward(args, sample, **kwargs):
    return 1.0
"""


@dataclass
class Nodes:
    """A cluster of two nodes with two CPUs each, beside a head that only leads."""

    cluster: Any
    workers: list[Any]
    dashboard: str

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return str(self.cluster.address)

    def add(self) -> None:
        """One more of the two."""
        node = self.cluster.add_node(num_cpus=2, object_store_memory=128 << 20, dashboard_agent_listen_port=0)
        self.workers.append(node)

    def remove(self, pid: int) -> Any:
        """The node that a process lives on goes at once, as by loss of power."""
        parents = {parent.pid for parent in psutil.Process(pid).parents()}
        [node] = [node for node in self.workers if parents & {p.process.pid for p in node.all_processes["raylet"]}]
        self.workers.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)
        return node


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    # Who serves chooses the ports: one that is looked for before may be another's when it is wanted.
    head = {"num_cpus": 0, "object_store_memory": 128 << 20, "include_dashboard": True}
    head |= {"dashboard_port": None, "dashboard_agent_listen_port": 0}
    # Ray hands a job to the cluster that a file in its directory names, and each cluster of this machine writes there
    # when it starts: another worker's cluster got this one's jobs. A short path, for the sockets in it.
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:
        cluster = Cluster(initialize_head=True, head_node_args={**head, "temp_dir": directory})
        write_ray_address(cluster.head_node.gcs_address, directory)
        found = Nodes(cluster, [], f"http://{cluster.head_node.address_info['webui_url']}")
        for _ in range(2):
            found.add()
        yield found
        cluster.shutdown()


def _slime(argv: list[str], cwd: Path, status: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [SLIME, *argv], cwd=cwd, capture_output=True, text=True, timeout=400, env={**os.environ, **env}
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture
def reward_file(tmp_path: Path) -> str:
    """A reward with a module beside it, as a relative path."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "rm.py").write_text(_WHERE)
    (tmp_path / "files" / "beside_it.py").write_text(_BESIDE)
    return "files/rm.py:reward"


def test_ranks_on_two_nodes(tiny: TinyRun, nodes: Nodes, reward_file: str, typed: Any, tmp_path: Path) -> None:
    where = tmp_path / "where.jsonl"
    changes: dict[str, Any] = {"num_rollout": 2, "save_interval": 2, "custom_rm_path": reward_file}
    changes["train_backend"] = "embedded"
    one = tiny.argv(None, **changes, actor_num_gpus_per_node=2)
    two = tiny.argv(None, **changes, actor_num_nodes=2, actor_num_gpus_per_node=1)
    typed("train", *one, "--save", "here")
    joined = ["--save", "there", "--ray-address", nodes.address]
    done = _slime(["train", *two, *joined], tmp_path, SLIME_TEST_WHERE=str(where))
    assert timeless(tmp_path / "there") == timeless(tmp_path / "here")
    assert files(tmp_path / "there") == files(tmp_path / "here")

    command, *actors = [json.loads(line) for line in where.read_text().splitlines()]
    assert command == {"file": str(tmp_path / "files" / "rm.py"), "node": "the command"}
    assert len(actors) == 4, "two ranks, rollout, engine"
    assert len({actor["node"] for actor in actors}) == 2
    assert all("/runtime_resources/" in actor["file"] for actor in actors), actors

    plan = typed("plan", *two, "--save", "there", "--num-gpus", "0").stdout.splitlines()
    begin = done.stdout.splitlines().index("3 CPU places on 2 nodes")
    table = done.stdout.splitlines()[begin : begin + 5]
    assert [f"  {line}" for line in table] == plan[(at := plan.index("  3 CPU places on 2 nodes")) : at + 5]
    assert table[2].split()[:3] == ["0", "0", "0"]
    assert table[3].split()[:3] == ["1", "0", "1"]


def test_more_nodes_than_there_are(tiny: TinyRun, nodes: Nodes, tmp_path: Path) -> None:
    flags = tiny.argv(tmp_path / "run", train_backend="embedded", actor_num_nodes=4, actor_num_gpus_per_node=1)
    done = _slime(["train", *flags, "--ray-address", nodes.address], tmp_path, 2)
    assert "--actor-num-nodes 4: the Ray cluster has 2 nodes" in done.stderr


def test_other_code_on_a_node(tiny: TinyRun, nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "rm.py").write_text(_CHANGES_ITSELF)
    flags = tiny.argv(tmp_path / "run", custom_rm_path="rm.py")
    done = _slime(["train", *flags, "--ray-address", nodes.address], tmp_path, 2)
    assert "slime: error: the nodes do not have the code that this command has" in done.stderr
    assert "rm.py': source hash" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_job(tiny: TinyRun, nodes: Nodes, reward_file: str, tmp_path: Path) -> None:
    where = tmp_path / "where.jsonl"
    flags = tiny.argv(None, num_rollout=1, custom_rm_path=reward_file, eval_interval=None, eval_prompt_data=None)
    own = ["--address", nodes.dashboard, "--python", sys.executable]
    done = _slime(
        ["submit", *own, "train", *flags, "--save", "run"], tmp_path, SLIME_TEST_WHERE=str(where), SLIME_LR="4e-3"
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("job raysubmit_"), done
    assert any(line.startswith("rollout 1/1") for line in lines), done
    assert timeless(tmp_path / "run")[-1]["step"] == 1
    assert "lr: 0.003" in (tmp_path / "run" / "config.yaml").read_text(), "flags lie above the environment"
    files = [json.loads(line)["file"] for line in where.read_text().splitlines()]
    assert files[0] == str(tmp_path / "files" / "rm.py"), "checked here"
    assert all("/runtime_resources/" in file for file in files[1:]), files

    again = _slime(["submit", *own, "--no-check", "train", *flags, "--save", "run"], tmp_path, 2)
    assert "already" in again.stdout, again  # the job's own error, and its exit status


def test_a_job_goes_on_without_its_command(tiny: TinyRun, nodes: Nodes, tmp_path: Path) -> None:
    from ray.job_submission import JobSubmissionClient
    from slime_launcher_ray.submit import follow

    last = {"num_rollout": 4, "custom_rollout_log_function_path": hold(tmp_path, 3)}
    flags = tiny.argv(tmp_path / "run", **last, eval_interval=None, eval_prompt_data=None)
    own = ["--address", nodes.dashboard, "--python", sys.executable, "--job-id", "goes-on"]
    with running([SLIME, "submit", *own, "train", *flags], tmp_path, tmp_path / "log") as command:
        command.until("rollout 1/")
        os.kill(command.pid, signal.SIGINT)
        assert command.fail(60) == 130
    release(tmp_path)
    stop = f"`ray job stop goes-on --address {nodes.dashboard}` stops it"
    assert f"slime: job goes-on goes on; {stop}" in command.said()
    assert "Traceback" not in command.said()
    assert follow(JobSubmissionClient(nodes.dashboard), "goes-on") == 0
    assert [line["step"] for line in timeless(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.timeout(600)
def test_a_job_that_is_stopped(
    tiny: TinyRun, nodes: Nodes, slime: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray.job_submission import JobSubmissionClient
    from slime_launcher_ray.submit import follow

    flags = tiny.argv(tmp_path / "run", num_rollout=10_000, eval_interval=None, eval_prompt_data=None)
    own = ["--address", nodes.dashboard, "--python", sys.executable, "--job-id", "stopped", "--no-wait"]
    done = _slime(["submit", *own, "train", *flags], tmp_path)
    assert "`ray job logs -f stopped" in done.stdout
    assert "rollout " not in done.stdout, "it does not wait"
    until, second = time.monotonic() + 400, "rollout_0000001"  # or a later one: the last two are kept
    while not any(path.name >= second for path in (tmp_path / "run" / "checkpoints").glob("rollout_*")):
        assert time.monotonic() < until
        time.sleep(0.2)
    ray = str(Path(sys.executable).with_name("ray"))
    subprocess.run(
        [ray, "job", "stop", "stopped", "--address", nodes.dashboard], check=True, timeout=120, capture_output=True
    )
    assert follow(JobSubmissionClient(nodes.dashboard), "stopped") == 143
    assert "slime: job stopped was stopped" in capsys.readouterr().err
    assert slime("ledger", "verify", tmp_path / "run").returncode == 0
    ended(tmp_path / "run")


@pytest.mark.parametrize("of", ["a rank alone", "the engine"])
def test_a_node_that_goes(of: str, tiny: TinyRun, nodes: Nodes, slime: Any, tmp_path: Path) -> None:
    restarts = {"max_trainer_restarts": 1, "ray_placement_timeout": 15} if of == "a rank alone" else {}
    two = {"train_backend": "embedded", "actor_num_nodes": 2, "actor_num_gpus_per_node": 1, "num_rollout": 10_000}
    with begun(tiny, nodes.address, tmp_path, **two, **restarts) as run:
        pids = actors(tmp_path / "run")
        raylet = {name: psutil.Process(pid).ppid() for name, pid in pids.items()}
        alone = next(name for name in pids if name.startswith("trainer") and raylet[name] != raylet["engine"])
        node = nodes.remove(pids[alone if of == "a rank alone" else "engine"])
        try:
            assert run.fail(200) == 1
        finally:
            nodes.add()
    lines = run.said().splitlines()
    [line] = [line for line in lines if line.startswith("slime: error:")]
    assert f"node {node.node_id[:8]})" in run.said(), "which one"
    if of == "a rank alone":
        assert any("restart 1 of 1 from rollout_" in line for line in lines)
        assert "a node of the run went, and no other took its place within 15 s" in line
    else:
        assert " died in " in line
    reached = max(line["step"] for line in timeless(tmp_path / "run")) + 1
    flags = tiny.argv(tmp_path / "run", load=tmp_path / "run", num_rollout=reached)
    assert "resumed from" in slime("train", *flags, timeout=300).stdout
    assert slime("ledger", "verify", tmp_path / "run").returncode == 0
