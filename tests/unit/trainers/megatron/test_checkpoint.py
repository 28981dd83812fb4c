"""One process: what a checkpoint holds and what of it is taken, with real Megatron."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_trainer_megatron.trainer import MegatronTrainer

from slime_core.errors import CheckpointError
from tests.backends.megatron import trainer_jobs as jobs
from tests.megatron_models import save_tiny
from tests.unit.trainers.megatron.steps import Make, equal, log_probs, step, weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "qwen3"
    save_tiny(directory, "qwen3-tied", num_hidden_layers=2)
    return directory


@pytest.fixture
def make(build: Make, model: Path) -> Make:
    return lambda role="actor", **flags: build(model, role, **flags)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def moments(trainer: MegatronTrainer) -> list[torch.Tensor]:
    states = [state for o in trainer.optimizer._torch_optimizers() for state in o.state.values()]
    return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]


def test_moved_reference_and_old_actor_are_there_again(make: Make, tmp_path: Path) -> None:
    flags = {"use_kl_loss": True, "keep_old_actor": True}
    trainer = make(**flags)
    step(trainer)
    trainer.update_reference()
    step(trainer)
    trainer.update_old_actor()
    step(trainer)
    trainer.save(tmp_path)
    again = make(**flags)
    again.load(tmp_path)
    for role in ("ref", "old_actor", "actor"):
        assert equal(log_probs(again, role), log_probs(trainer, role))
    assert not equal(log_probs(again, "ref"), log_probs(again, "old_actor"))
    assert not equal(log_probs(again, "actor"), log_probs(again, "old_actor"))
    again.save(tmp_path / "next")
    assert (tmp_path / "next/trainer/reference").is_dir()


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], Any]:
    """After two steps: the directory, the weights, and the random state."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoint"
    trainer = MegatronTrainer(jobs.settings(model))
    try:
        step(trainer)
        step(trainer)
        trainer.save(directory)
        return directory, weights(trainer), torch.get_rng_state()
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("flags", "steps", "has_moments", "has_rng"),
    [
        ({}, 2, True, True),
        ({"finetune": True}, 0, False, False),
        ({"no_load_optim": True}, 0, False, True),
        ({"no_load_rng": True}, 2, True, False),
        ({"no_load_optim": True, "no_load_rng": True, "lr": 0.5}, 0, False, False),
        ({"lr": 0.5, "override_opt_param_scheduler": True}, 2, True, True),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_what_is_taken(
    make: Make, saved: Any, flags: dict[str, Any], steps: int, has_moments: bool, has_rng: bool
) -> None:
    directory, expected, state = saved
    trainer = make(**flags)
    torch.manual_seed(77)
    trainer.load(directory)
    assert same(weights(trainer), expected)
    assert trainer.optimizer.steps == steps
    assert any(bool(moment.any()) for moment in moments(trainer)) == has_moments
    assert torch.equal(torch.get_rng_state(), state) == has_rng
    assert trainer.optimizer.scheduler.schedule.lr == flags.get("lr", 1e-2)


@pytest.mark.parametrize(
    ("saves", "loads", "message"),
    [
        ({"no_save_optim": True}, {}, "--no-save-optim: add --no-load-optim"),
        ({"no_save_rng": True}, {}, "--no-save-rng: add --no-load-rng"),
        ({}, {"lr": 0.5}, "lr 0.01 then, 0.5 now; add --override-opt-param-scheduler"),
        ({}, {"use_stateless_adam": True}, "--use-stateless-adam differs"),
    ],
)
def test_what_does_not_fit(
    make: Make, tmp_path: Path, saves: dict[str, Any], loads: dict[str, Any], message: str
) -> None:
    trainer = make(**saves)
    trainer.save(tmp_path)
    assert (tmp_path / "trainer/optimizer").is_dir() == ("no_save_optim" not in saves)
    with pytest.raises(CheckpointError, match=message):
        make(**loads).load(tmp_path)
    make(**loads, no_load_optim=True, no_load_rng=True).load(tmp_path)


def test_another_number_of_processes_goes_on_with_process_zeros_states(
    make: Make, saved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, _, state = saved
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for path in directory.iterdir():
        (copy / path.name).symlink_to(path)
    (copy / "trainer").unlink()
    (copy / "trainer").mkdir()
    for path in (directory / "trainer").iterdir():
        (copy / "trainer" / path.name).symlink_to(path)
    facts = json.loads((directory / "trainer/state.json").read_text())
    (copy / "trainer/state.json").unlink()
    (copy / "trainer/state.json").write_text(json.dumps({**facts, "processes": 4}))
    make().load(copy)
    assert torch.equal(torch.get_rng_state(), state)
    assert "saved by 4 processes and this run has 1" in caplog.text
    with pytest.raises(CheckpointError, match=r"training draws random numbers \(dropout\).*--no-load-rng"):
        make(hidden_dropout=0.1).load(copy)


@pytest.mark.parametrize("file", ["trainer/state.json", "trainer/model/.metadata", "trainer/optimizer/__0_0.distcp"])
def test_a_torn_file_is_an_error(make: Make, saved: Any, tmp_path: Path, file: str) -> None:
    import shutil

    copy = tmp_path / "checkpoint"
    shutil.copytree(saved[0], copy)
    path = copy / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"cannot be read|do not fit"):
        make().load(copy)
