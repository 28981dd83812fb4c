"""The frame of the command line: help, dispatch, exit statuses, and that it is light."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core import __version__
from slime_core.cli import main as frame
from slime_core.errors import CheckpointError, ConfigError, PluginNotFoundError, SlimeError
from slime_core.protocols import Command

HEAVY = ("torch", "transformers", "numpy", "fastapi", "ray")


def imported(code: str, cwd: Path) -> set[str]:
    """Top-level modules loaded once `code` has run in a fresh interpreter."""
    script = f"import sys, contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    {code}\n"
    script += "print(' '.join({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=cwd, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_help_loads_neither_torch_nor_pydantic(tmp_path: Path) -> None:
    modules = imported("from slime_core.cli.main import main; assert main(['--help']) == 0", tmp_path)
    assert modules.isdisjoint({*HEAVY, "pydantic", "yaml"})


@pytest.mark.parametrize("argv", [["config", "show"], pytest.param(["train", "--help"], marks=pytest.mark.slow)])
def test_settings_load_no_torch(argv: list[str], tmp_path: Path) -> None:
    modules = imported(f"from slime_core.cli.main import main; assert main({argv!r}) == 0", tmp_path)
    assert "pydantic" in modules
    assert modules.isdisjoint(HEAVY)


def test_overview_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main([]) == 0
    text = capsys.readouterr().out
    groups = {"train": "train sft", "data": "rollout", "look at a run": "show why", "plugins": "doctor version"}
    for group, commands in groups.items():
        members = text.partition(f"\n\n{group}:\n")[2].partition("\n\n")[0]
        assert all(f"\n  {command} " in f"\n{members}" for command in commands.split()), group
    for spelling in ("--version", "-V", "version"):
        assert frame.main([spelling]) == 0
        assert capsys.readouterr().out == f"slime {__version__}\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("no"), 2),
        (PluginNotFoundError("no"), 2),
        (CheckpointError("no"), 1),
        (SlimeError("no"), 1),
        (SystemExit("no"), 1),
    ],
)
def test_errors_are_one_line_and_a_status(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr("slime_core.plugins.commands.load", lambda argv: Command(stop))
    assert frame.main(["config"]) == status
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "slime: error: no\n")


def test_a_bug_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(argv: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("slime_core.plugins.commands.load", lambda argv: Command(stop))
    with pytest.raises(ZeroDivisionError):
        frame.main(["config"])


def test_a_broken_pipe_of_the_command_is_not_taken_for_a_reader_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(argv: list[str]) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("slime_core.plugins.commands.load", lambda argv: Command(stop))
    reader, writer = os.pipe()
    with open(reader), open(writer, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(sys, "stderr", pipe)
        with pytest.raises(BrokenPipeError):
            frame.main(["config"])


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m slime_core config show --json | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.stdout, done.stderr) == ("{\n", "")
    assert done.returncode == 0


def test_config_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("lr: 1e-4\nseed: 3\n")
    monkeypatch.setenv("SLIME_SEED", "4")
    assert frame.main(["config", "show", "--config", "run.yaml", "--eps-clip", "0.1", "--ci-test"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    for line in (
        "lr: 0.0001  # run.yaml:1",
        "seed: 4  # SLIME_SEED env",
        "eps_clip: 0.1  # flag",
        "gamma: 1.0  # default",
    ):
        assert line in lines
    assert "# eps_clip_high: 0.1  # derived: eps_clip" in lines
    assert captured.err == "slime: warning: without effect in this version: --ci-test (flag)\n"
    assert frame.main(["config", "show", "--config", "run.yaml", "--json", "--changed"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["lr"] == {"value": 1e-4, "origin": "run.yaml:1"}
    assert "gamma" not in shown
    assert frame.main(["config", "show", "--for", "train"]) == 2
    assert capsys.readouterr().err.startswith("slime: error: --hf-checkpoint is required: a directory in Hugging Face")


def test_a_run_whose_reader_leaves_does_not_look_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(arguments: object) -> int:
        print("a line", flush=True)
        return 0

    for only_prints, status in ((False, 141), (True, 0)):
        command = Command(said, only_prints=only_prints)
        monkeypatch.setattr("slime_core.plugins.commands.load", lambda argv, command=command: command)
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w", encoding="utf-8") as pipe:
            monkeypatch.setattr(sys, "stdout", pipe)
            assert frame.main(["said"]) == status


@pytest.mark.parametrize(
    "words",
    [
        "plan --num-cpus nan",
        "plan --gpu-memory-gib inf",
        "rehearse --seconds nan",
        "plugins search --timeout nan",
        "pull-weights --source a --local-dir b --timeout inf",
    ],
)
def test_no_number_and_infinity_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(words.split()) == 2
    *_, flag, value = words.split()
    assert f"{flag} {value}" in capsys.readouterr().err
