"""How many processes a run takes, and whose error is told when several fail."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slime_embedded.trainer.trainer import EmbeddedTrainer

from slime_core.config import load_settings
from slime_core.errors import ConfigError, PluginError, TrainError
from slime_core.launch.ranks import ASKED_TO_END, ERROR_FILE, RankEnd, first_error, processes_of, report


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


def settings_of(*argv: str) -> Any:
    return load_settings([*argv, "--device", "cpu", "--num-rollout", "1"], command="show", env={})


def asks(number: int | None) -> Any:
    return SimpleNamespace(processes=lambda settings: number)


@pytest.mark.parametrize(
    ("argv", "needed"),
    [((), 1), (("--actor-num-gpus-per-node", "8"), 8), (("--actor-num-gpus-per-node", "1"), 1)],
)
def test_the_embedded_trainer_takes_what_the_user_gave(argv: tuple[str, ...], needed: int) -> None:
    assert processes_of(settings_of(*argv), EmbeddedTrainer) == needed


def test_a_trainer_that_does_not_say_takes_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes_of(settings_of(), asks(None)) == processes_of(settings_of(), object) == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    for trainer in (asks(None), asks(4), object, None):
        assert processes_of(settings_of(), trainer) == 4
    with pytest.raises(ConfigError, match=r"needs 2 process\(es\) .* torchrun started 4: type torchrun --nproc-per-n"):
        processes_of(settings_of(), asks(2))
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE='many'"):
        processes_of(settings_of(), asks(2))


def test_several_nodes_take_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("--actor-num-nodes", "2", "--actor-num-gpus-per-node", "4")
    with pytest.raises(ConfigError, match="torchrun --nnodes 2 --nproc-per-node 4 "):
        processes_of(settings_of(*argv), EmbeddedTrainer)
    with pytest.raises(ConfigError, match="torchrun --nnodes 2 --nproc-per-node N "):
        processes_of(settings_of(*argv[:2]), EmbeddedTrainer)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert processes_of(settings_of(*argv), EmbeddedTrainer) == 8


# -- whose error -----------------------------------------------------------------------------------------


@pytest.fixture
def failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How a rank ended: what it raised, or only an exit status."""

    def fail(code: int = 1, error: Exception | None = None, ago: float = 0.0, log: Path | None = None) -> RankEnd:
        data: dict[str, Any] | None = None
        if error is not None:
            monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
            report(error)
            data = json.loads((tmp_path / "error.json").read_text())
            assert data is not None
            data["time"] -= ago
        return RankEnd(code, 7, data, log, 6)

    return fail


def test_the_earliest_report_counts(failure: Any) -> None:
    broken = failure(error=RuntimeError("connection closed by peer"))
    cause = failure(error=PluginError("the reward has no answer"), ago=10.0)
    found = first_error({0: broken, 1: cause, 2: failure(ASKED_TO_END)}, 4, 30)
    assert type(found) is PluginError
    assert str(found) == "rank 1 of 4: the reward has no answer"


def test_a_report_made_before_anything_was_closed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(file))
    cause = PluginError("the reward has no answer")
    report(cause)
    first = file.read_text()
    report(cause)  # on its way out
    assert file.read_text() == first


def test_an_unexpected_error_comes_with_its_traceback(failure: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def deep() -> None:
        raise KeyError("x")

    try:
        deep()
    except KeyError as error:
        found = first_error({0: failure(ASKED_TO_END), 1: failure(error=error)}, 2, 30)
    assert type(found) is TrainError
    assert str(found) == "rank 1 of 2 failed: KeyError: 'x'"
    assert "in deep" in capsys.readouterr().err


def test_a_rank_that_was_killed_goes_before_those_that_noticed(failure: Any, tmp_path: Path) -> None:
    log = tmp_path / "rank_1.log"
    log.write_text("before\nfirst\nlast\n"[1:])
    noticed = failure(error=RuntimeError("connection closed by peer"), ago=1.0)
    found = str(first_error({0: noticed, 1: failure(128 + 11, log=log)}, 2, 30))
    assert found == f"rank 1 of 2 (process 7) was killed by SIGSEGV; {log} ends with\nfirst\nlast"
    assert "if memory ran out" in str(first_error({0: noticed, 1: failure(128 + 9, log=log)}, 2, 30))


def test_without_an_agent_the_error_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(ERROR_FILE, raising=False)
    report(TrainError("loss is nan"))
    assert "loss is nan" in capsys.readouterr().err
