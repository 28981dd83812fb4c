"""Slurm itself, of Debian's slurm-wlm, on this machine: one slurmctld, and a slurmd for each of two nodes.

Jobs run as the user of the tests. Processes of a node are told apart by their slurmd's environment, so that a test can
end all of them as the loss of the machine does.
"""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from slime_submit.slurm import look

from tests.conftest import TinyRun
from tests.ports import free_port
from tests.zygote import Zygote

ROLLOUTS = 5
"""Rollouts of `unbroken`, and of the runs that are compared with it."""
NODES = ("slime-test-1", "slime-test-2")
GRACE_S, KILL_WAIT_S = 60, 60
"""Seconds of grace in partition `graceful`, and between SIGTERM and SIGKILL."""
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_CONFIG = """
ClusterName=slime
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
AuthInfo=socket={root}/munge.sock
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=300
KillWait={kill_wait}
ReturnToService=2
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
{nodes}
PartitionName=graceful Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace}
PartitionName=low Nodes=ALL PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


@dataclass
class Slurm:
    """The cluster."""

    root: Path

    def start_node(self, name: str) -> None:
        subprocess.run(["slurmd", "-N", name], check=True, timeout=60, env={**os.environ, "SLIME_TEST_NODE": name})

    def bring_back(self, name: str) -> None:
        self.start_node(name)
        # Refused if the node, which registers itself, is back already.
        subprocess.run(["scontrol", "update", f"NodeName={name}", "State=RESUME"], capture_output=True, timeout=60)

    def lose_node(self, name: str) -> None:
        """End a node with all that runs on it, at once."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                of_step = process.environ().get("SLURMD_NODENAME") == name
                if of_step or process.environ().get("SLIME_TEST_NODE") == name:
                    process.kill()
        # What slurmctld finds out by itself after SlurmdTimeout.
        command = ["scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=lost"]
        subprocess.run(command, capture_output=True, timeout=60)

    def until(self, job: str, reached: Callable[[dict[str, str]], bool], seconds: float = 300) -> dict[str, str]:
        """Wait for a state of the job and return its fields; Slurm's delay of a requeued job is left out."""
        end = time.monotonic() + seconds
        while not reached(fields := look(job)):
            assert time.monotonic() < end, fields
            if fields["JobState"] == "PENDING" and fields["Restarts"] != "0":
                command = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
                subprocess.run(command, capture_output=True, timeout=60)
            time.sleep(0.5)
        return fields

    def preempt(self) -> str:
        """Submit a job that takes both nodes for a second from jobs of lower priority; return its id."""
        words = ["--parsable", "--partition=high", "--nodes=2", "--exclusive", f"--output={self.root}/high.out"]
        done = subprocess.run(
            ["sbatch", *words, "--wrap", "sleep 1"], check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout.strip()

    def idle(self) -> None:
        """Cancel what is left of a test, and wait until both nodes are free."""
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], check=True, timeout=60)
        end = time.monotonic() + 300
        while (states := self.states()) != {"idle"}:
            assert time.monotonic() < end, states
            time.sleep(0.5)

    def states(self) -> set[str]:
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-p", "low", "-o", "%T"], capture_output=True, text=True, timeout=60
        )
        return set(done.stdout.split())


@pytest.fixture(scope="session")
def started_slurm() -> Iterator[Slurm]:
    """Start the daemons for `slurm`; tests do not use it."""
    if lacking := [program for program in _PROGRAMS if not shutil.which(program)]:
        pytest.skip(f"needs Slurm: `make slurm`, or apt-get install slurm-wlm munge ({', '.join(lacking)} not on PATH)")
    with TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as name:  # short enough for a socket
        root = Path(name)
        key, state = root / "munge.key", root / "state"
        key.write_bytes(os.urandom(64))
        key.chmod(0o400)
        state.mkdir()
        nodes = [
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={free_port()} CPUs=2" for name in NODES
        ]
        config = root / "slurm.conf"
        config.write_text(
            _CONFIG.format(
                root=root, port=free_port(), user=getpass.getuser(), kill_wait=KILL_WAIT_S, grace=GRACE_S,
                nodes="\n".join(nodes),
            )
        )  # fmt: skip
        before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(config)
        slurm = Slurm(root)
        munge = [f"--{option}={root}/munge.{end}" for option, end in
                 (("socket", "sock"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))]  # fmt: skip
        try:
            subprocess.run(["munged", "--force", f"--key-file={key}", *munge], check=True, timeout=60)
            subprocess.run(["slurmctld"], check=True, timeout=60)
            for node in NODES:
                slurm.start_node(node)
            slurm.idle()
            yield slurm
        finally:
            for node in NODES:
                slurm.lose_node(node)
            for program in ("slurmctld", "munge"):
                with suppress(FileNotFoundError, psutil.NoSuchProcess):
                    process = psutil.Process(int((root / f"{program}.pid").read_text()))
                    process.terminate()
                    process.wait(60)
            os.environ.pop("SLURM_CONF")
            if before is not None:
                os.environ["SLURM_CONF"] = before


@pytest.fixture
def slurm(started_slurm: Slurm) -> Iterator[Slurm]:
    """The cluster, both of whose nodes are free."""
    yield started_slurm
    started_slurm.idle()


@pytest.fixture(scope="session")
def unbroken(tiny: TinyRun, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run without Slurm; do not change it."""
    save = tmp_path_factory.mktemp("unbroken") / "run"
    done: Any = zygote.run(["train", *tiny.argv(save, num_rollout=ROLLOUTS)], dict(os.environ), 120)
    assert done.returncode == 0, done.stderr
    return save
