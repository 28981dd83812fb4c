"""Fixtures for whole runs: a tiny random model with data, and the command as a subprocess."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from slime_core.launch.drain import collect_seldom
from tests import ports
from tests.zygote import ENVIRONMENT, MEGATRON, Zygote, share

# A shell that runs the tests in the background has them ignore ctrl-C, and so would every command they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# As Hypothesis's profile for CI, which it takes where CI is set: a busy machine is no failure. Its 100 examples a test
# took a tenth of the suite's time.
settings.register_profile(
    "busy", parent=settings(), deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy")
# It would parse every module of slime, seconds in each process, to try one of their 14,000 constants now and then.
providers: Any = sys.modules.get("hypothesis.internal.conjecture.providers")
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name that no path has is no reason to ask a server

Slime = Callable[..., subprocess.CompletedProcess[str]]
SLIME = str(Path(sys.executable).with_name("slime"))

FORKED = Path(__file__).with_name("forked_worker.py")

REWARD = '''
def reward(args, sample, **kwargs):
    """Share of digits in the response: a random model learns it within a few steps."""
    text = sample.response
    return sum(c.isdigit() for c in text) / max(len(text), 1)
'''
INLINE = """
from slime_core import RewardTraits, declares

declares(RewardTraits(execution="inline"))(reward)
"""
"""Without it a run starts a worker for the reward, which takes as long as the run."""


SHARED = ("cluster", "sglang_pair", "sglang_server", "vllm_server")
"""Session fixtures of `tests/backends` that cost seconds and memory: files that use one go to the same worker."""
MEASURED = "measured"
"""Property of a test (`record_property`) that is shown at the end of the session."""


def pytest_configure(config: pytest.Config) -> None:
    """Have the workers of pytest-xdist share the process that forks commands, and be forks of it themselves."""
    ENVIRONMENT.update(os.environ)
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        config.add_cleanup(share())
        if sys.platform == "linux":  # they find their pipes in /proc
            config.option.tx = [f"popen//python={sys.executable} {FORKED}" for _ in config.option.tx]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Ten thousand tests are no garbage: neither while they are collected nor whenever a test makes some."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        collect_seldom()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For `--dist loadgroup`: a file stays together, and so do files that share a fixture; these come first."""
    if not config.getoption("loadgroup", False):
        return
    groups: dict[Path, str] = {}
    for item in items:
        mark, used = item.get_closest_marker("xdist_group"), set(getattr(item, "fixturenames", ()))
        found = mark.args[0] if mark else next((name for name in SHARED if name in used), None)
        if found:
            groups.setdefault(item.path, found)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(groups.get(item.path, item.path.stem)))
    items.sort(key=lambda item: item.path not in groups)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Workers tell the groups by node ids. Without groups all is slower, and two clusters know one address."""
    if session.config.getoption("loadgroup", False) and any("@" not in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist did not take the groups of tests/conftest.py; see pytest's pin")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What passed tests have measured, also those of other processes."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == MEASURED:
                terminalreporter.write_line(f"{report.nodeid}: {value}")


@dataclass
class TinyRun:
    """Inputs of a run that takes a second or two."""

    root: Path

    def argv(self, save: Path | None = None, **changes: Any) -> list[str]:
        """Flags of `slime train`; a change to None leaves the flag out, True gives it without a value."""
        reward = "rm_in_workers.py" if "rm_workers" in changes else "rm.py"
        flags: dict[str, Any] = {
            "hf_checkpoint": self.root / "model",
            "prompt_data": self.root / "train.jsonl",
            "eval_prompt_data": ["held", self.root / "eval.jsonl"],
            "eval_interval": 2,
            "eval_temperature": 0.0,
            "input_key": "input",
            "label_key": "label",
            "apply_chat_template": True,
            "rollout_shuffle": True,
            "custom_rm_path": self.root / reward,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "num_steps_per_rollout": 2,
            "num_rollout": 4,
            "rollout_max_response_len": 8,
            "lr": "3e-3",
            "lr_decay_style": "constant",
            "num_threads": 1,
            # Each starts an interpreter, in a suite of hundreds of runs; both have tests of their own.
            "no_preflight": True,
            "rm_workers": 1,
            "save": save,
            "save_interval": 1 if save else None,
            "keep_checkpoints": 0 if save else None,
            **changes,
        }
        argv: list[str] = []
        for name, value in flags.items():
            if value is None or value is False:
                continue
            values = [] if value is True else value if isinstance(value, list) else [value]
            argv += [f"--{name.replace('_', '-')}", *map(str, values)]
        return argv


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A random 330k-parameter model, 200 sums, and a reward in a file."""
    from slime_commands.init import task
    from slime_commands.init.tiny_model import write_random_model

    root = tmp_path_factory.mktemp("tiny")
    write_random_model(root / "model", seed=0)
    train, held_out = task.split_problems()
    for name, problems in (("train", train[:200]), ("eval", held_out[:8])):
        rows = task.rl_rows(problems, "input", "label")
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "rm.py").write_text(REWARD + INLINE)
    (root / "rm_in_workers.py").write_text(REWARD)
    return TinyRun(root)


@pytest.fixture(scope="session")
def tiny_moe(tiny: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """`tiny` with a mixture of experts for a model."""
    from slime_testing_contracts.tiny import tiny_moe_model

    root = tmp_path_factory.mktemp("tiny-moe")
    for path in tiny.root.iterdir():
        (root / path.name).symlink_to(tiny_moe_model() if path.name == "model" else path)
    return TinyRun(root)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks commands from a process that has its imports done."""
    forking = Zygote()
    yield forking
    forking.close()


@pytest.fixture(scope="session")
def slime(zygote: Zygote) -> Slime:
    """Run the command: `slime("train", *flags)`; a non-zero exit fails the test unless `check=False`."""
    return _command(zygote, None)


@pytest.fixture(scope="session")
def program(zygote: Zygote) -> Slime:
    """Run `pytest`, or a script by its path, from a folder: `program("pytest", "-q", cwd=folder)`."""

    def run(name: Any, *argv: Any, cwd: Path, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in argv]
        return zygote.run(words, {**os.environ, **env}, timeout, program=str(name), cwd=cwd)

    return run


@pytest.fixture(scope="session")
def rank_zygote() -> Iterator[Zygote]:
    """`zygote` with Megatron imported, too."""
    forking = Zygote(MEGATRON)
    yield forking
    forking.close()


@pytest.fixture(scope="session")
def slime_ranks(rank_zygote: Zygote) -> Slime:
    """`slime` for runs on several ranks or on Megatron: the ranks are forks as well (`tests.forked_ranks`)."""
    return _command(rank_zygote, "tests.forked_ranks:install")


def without_start(said: str) -> str:
    """Standard error without the lines that tell of a start, of which a busy machine has more."""
    return "".join(line for line in said.splitlines(keepends=True) if not line.startswith("slime: starting "))


def _command(zygote: Zygote, before: str | None) -> Slime:
    def run(*argv: Any, check: bool = True, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
        done = zygote.run([str(word) for word in argv], {**os.environ, **env}, timeout, before)
        done.stderr = without_start(done.stderr)
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that cannot be obeyed, in this process: what it says; `status` is its exit status."""

    def run(*argv: Any, status: int = 2) -> str:
        from slime_core.cli.main import main

        capsys.readouterr()
        found = main([str(word) for word in argv])
        said = without_start(capsys.readouterr().err)
        assert found == status, said
        assert said.startswith("slime: error: ") or "\nslime: error: " in said, said
        assert "Traceback" not in said
        return said

    return run


@pytest.fixture
def free_port() -> int:
    """A port nobody listens on."""
    return ports.free_port()
