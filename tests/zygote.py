"""`slime ...`, pytest or a script as a process of its own, without the seconds that importing torch and so on take.

One process imports what every run imports and forks for each command; the child has its own memory, working directory,
environment and output, as a fresh one would. Runs `python -m tests.zygote SOCKET [MODULE ...]`; `Zygote` is the tests'
side. Tests about start-up, signals and kills start real processes instead.

The workers of pytest-xdist share one: `share` starts `python -m tests.zygote PATH` below the process that started them.
It imports once it is needed, and forks for each connection to PATH a process that forks that connection's commands.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from slime_core.config.flags import SettingsParser
from slime_core.plugins import discovery
from tests.forked_worker import SHARED, START_S, connection_to

ROOT = Path(__file__).parents[1]
IMPORTED = (
    "numpy.random", "packaging.requirements", "packaging.tags", "torch.utils._device", "transformers",
    "transformers.models.auto", "transformers.models.auto.auto_factory", "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto", "transformers.models.encoder_decoder",
    "transformers.models.qwen3.configuration_qwen3", "transformers.tokenization_utils_tokenizers",
    "slime_core.cli.main", "slime_core.cli.train", "slime_core.config.load", "slime_core.data.prompts",
    "slime_embedded.engine.engine", "slime_embedded.engine.loading", "slime_core.launch.inline",
    "slime_core.learning.learner", "slime_core.checkpoint.run_dir",
    "slime_core.plugins.presets", "slime_core.rollout.evaluate", "slime_embedded.trainer.trainer",
    "numpy.ma", "slime_buffers.fifo", "slime_runs.inspect.attacked_reward", "slime_commands.plan.check",
    "slime_commands.check.check", "slime_commands.check.overlap", "slime_core.plugins.commands",
    "slime_core.config.eval_config",
    "slime_hooks.invariants.batches", "slime_hooks.invariants.of_rewards", "slime_hooks.invariants.of_steps",
    "slime_hooks.invariants.of_tokens", "slime_hooks.invariants.of_updates", "slime_hooks.invariants.trained",
    "slime_models.qwen3", "slime_rewards.signatures", "slime_runs.show_command",
    "slime_trainer_megatron.arguments.defaults", "slime_trainer_megatron.arguments.fields",
    "slime_trainer_megatron.arguments.flags", "slime_trainer_megatron.arguments.owned",
    "slime_trainer_megatron.hookspecs",
    "slime_commands.eval.command", "slime_commands.eval.generation", "slime_commands.eval.record",
    "slime_core.plugins.answers", "slime_data.buffer_functions", "slime_data.flat_source", "slime_data.greedy_baseline",
    "slime_data.layouts", "slime_data.named_rewards", "slime_engine_sglang.foreign", "slime_engine_vllm.flags",
    "slime_estimators.grpo", "slime_generators.single_turn", "slime_hooks.adaptive_kl", "slime_hooks.invariants",
    "slime_hooks.shadow", "slime_hooks.trackers.progress", "slime_hooks.trackers.tensorboard", "slime_hub.fetch",
    "slime_launcher_ray.plugin", "slime_runs.loop_lag", "slime_runs.metrics", "slime_runs.profiler",
    "slime_runs.sample_metrics", "slime_runs.scores", "slime_runs.store", "slime_trainer_megatron.arguments",
    "rich.console", "rich.table", "tensorboard.compat.proto.event_pb2", "tensorboard.summary.writer.record_writer",
    "zstandard",
)  # fmt: skip
"""What a run imports."""
MEGATRON = (
    "tests.light_megatron", "megatron.core.models.gpt", "megatron.core.optimizer", "megatron.core.pipeline_parallel",
    "slime_trainer_megatron.trainer", "torch.distributed.launcher.api",
)  # fmt: skip
"""What a run on several ranks imports besides, on either trainer."""
ANSWER_S = 90.0
"""For a killed process to be gone, on a machine with much else to do."""
ENVIRONMENT: dict[str, str] = {}
"""Environment of the process that forks; `tests/conftest.py` fills it before any test changes its own."""


def share() -> Callable[[], None]:
    """Start a process that the processes started from here on share; return what ends it and waits for its end."""
    folder = tempfile.mkdtemp(prefix="slime-zygote-")
    path = f"{folder}/socket"
    command = [sys.executable, "-m", "tests.zygote", path]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    os.environ[SHARED] = path

    def end() -> None:
        del os.environ[SHARED]
        process.communicate(timeout=ANSWER_S)
        shutil.rmtree(folder)

    return end


class Zygote:
    """Starts the process when first used; `close` ends it.

    Args:
        more: Modules to import besides.
    """

    def __init__(self, more: Sequence[str] = ()) -> None:
        self._more = more
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def run(
        self,
        argv: list[str],
        env: dict[str, str],
        timeout: float,
        before: str | None = None,
        *,
        program: str = "slime",
        cwd: str | Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run one command to its end. Raises TimeoutExpired, and kills it, when it takes longer.

        Args:
            argv: Words after the program.
            env: The whole environment.
            timeout: Seconds.
            before: `module:function` that the fork calls before it becomes the command.
            program: `slime`, `pytest` (as `python -m pytest`), or the path of a script.
            cwd: Working directory; that of the tests by default.
        """
        connection = self._connected()
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            order = {"argv": argv, "env": env, "cwd": str(cwd or os.getcwd()), "out": str(out), "err": str(err)}
            order |= {"program": program}
            order |= {"before": before} if before else {}
            connection.sendall(json.dumps(order).encode() + b"\n")
            pid = int(self._line(START_S))  # the first answer waits for the imports
            try:
                status = int(self._line(timeout))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                self._line(ANSWER_S)
                raise subprocess.TimeoutExpired([program, *argv], timeout, out.read_bytes(), err.read_bytes()) from None
            return subprocess.CompletedProcess(
                [program, *argv], status, out.read_text(errors="replace"), err.read_text(errors="replace")
            )

    def close(self) -> None:
        """Hang up, which ends the process, or this connection's fork of a shared one."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.wait(timeout=ANSWER_S)

    def _connected(self) -> socket.socket:
        if self._connection is None and SHARED in os.environ:
            self._connection = connection_to(os.environ[SHARED])
            self._connection.sendall(json.dumps(self._more).encode() + b"\n")
        elif self._connection is None:
            self._connection, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.zygote", str(theirs.fileno()), *self._more],
                    cwd=ROOT,
                    env=ENVIRONMENT or None,
                    pass_fds=[theirs.fileno()],
                )
        return self._connection

    def _line(self, timeout: float) -> str:
        """One line of an answer, read byte by byte since there is never more than one."""
        assert self._connection is not None
        deadline, line = time.monotonic() + timeout, b""
        while not line.endswith(b"\n"):
            self._connection.settimeout(max(0.01, deadline - time.monotonic()))
            byte = self._connection.recv(1)
            assert byte, "the process that forks has ended"
            line += byte
        return line.decode()


def _import(modules: Sequence[str]) -> None:
    with warnings.catch_warnings(action="ignore"):
        for module in modules:
            importlib.import_module(module)
    discovery.discovered()  # each command finds the same plugins of the checkout: their files are parsed once
    SettingsParser(())  # and has the same flags
    gc.collect()
    gc.freeze()  # no command has to look through what was imported


def _listen(path: str) -> None:
    """Give each connection to a fork that has the modules of its first line; ends with standard input."""
    forks: dict[str, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(64)
        while listening in select.select([0, listening], [], [])[0]:
            connection, _ = listening.accept()
            line = b""
            while not line.endswith(b"\n"):
                line += connection.recv(1)
            if not forks:
                _import(IMPORTED)
            if (more := line.decode()) not in forks:
                forks[more], theirs = socket.socketpair()
                if os.fork() == 0:
                    for other in (listening, connection, *forks.values()):
                        other.close()
                    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                    _import(json.loads(more))
                    _fork_for_each(theirs)
                theirs.close()
            socket.send_fds(forks[more], [b"."], [connection.fileno()])
            connection.close()
    for fork in forks.values():
        fork.close()
    _wait_for_all()


def _fork_for_each(connections: socket.socket) -> NoReturn:
    """Fork for each connection that comes; ends when no more can come."""
    while (received := socket.recv_fds(connections, 1, 1))[0]:
        with socket.socket(fileno=received[1][0]) as connection:
            if os.fork() == 0:
                connections.close()
                _serve(connection)
                os._exit(0)
    _wait_for_all()
    os._exit(0)


def _wait_for_all() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _serve(connection: socket.socket) -> None:
    """Run the commands of one connection, one after the other."""
    with connection, connection.makefile("rb") as orders:
        for line in orders:
            pid = os.fork()
            if pid == 0:
                connection.detach()
                be_the_command(json.loads(line))
            connection.sendall(f"{pid}\n".encode())
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            connection.sendall(f"{status}\n".encode())


def be_the_command(order: dict[str, Any]) -> None:
    """Turn this fork into the command; never returns."""
    status = 1
    try:
        for target, path in enumerate((order.get("in"), order.get("out"), order.get("err"))):
            if path is None:
                continue
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND if target else os.O_RDONLY)
            os.dup2(file, target)
            os.close(file)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 -- the process's own
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["env"])
        program = order.get("program", "slime")
        sys.argv = [program, *order["argv"]]
        # As the console script has it: the folder it lies in, not the repository.
        places = {"slime": Path(sys.executable).parent, "pytest": order["cwd"], "-c": ""}
        sys.path[0] = str(places.get(program, Path(program).parent))
        sys.path[1:1] = [folder for folder in order["env"].get("PYTHONPATH", "").split(os.pathsep) if folder]
        if "before" in order:
            module, function = order["before"].split(":")
            getattr(importlib.import_module(module), function)()
        status = _run(program, order["argv"])
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # What the end of an interpreter does, but for the parts that belong to the parent.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(program: str, argv: list[str]) -> int:
    """Exit status."""
    if program == "pytest":
        import pytest

        return int(pytest.main(argv))
    if program == "-c":  # of a worker of pytest-xdist
        random.seed()  # three workers would take the same ports
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        exec(argv[0], {"__name__": "__main__"})
        return 0
    if program != "slime":
        runpy.run_path(program, run_name="__main__")
        return 0
    from slime_core.cli.main import main

    return int(main() or 0)  # reads sys.argv, and ends as the console script does


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        _import([*IMPORTED, *sys.argv[2:]])
        _serve(socket.socket(fileno=int(sys.argv[1])))
    else:
        _listen(sys.argv[1])
    os._exit(0)  # it takes seconds to take all modules apart
