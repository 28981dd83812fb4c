"""Two trainers, one life cycle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_core.config import Args
from slime_core.errors import CheckpointError
from slime_core.launch.roles import Trainers


class Recorded:
    def __init__(self, log: list[str], role: str, fails: bool = False) -> None:
        if fails and role == "critic":
            raise MemoryError
        self.log, self.role = log, role
        log.append(f"build {role}")

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log.append(f"{self.role} -> {directory.name}")

    def load(self, directory: Path) -> None:
        self.log.append(f"{self.role} <- {directory.name}")

    def close(self) -> None:
        self.log.append(f"close {self.role}")


def build(log: list[str], *, critic: bool = True, finetune: bool = False, fails: bool = False) -> Trainers:
    def make(args: Any, *, role: str = "actor") -> Any:
        return Recorded(log, role, fails)

    return Trainers(Args(finetune=finetune), make, with_critic=critic)


def test_the_actor_is_first_in_and_last_out(tmp_path: Path) -> None:
    log: list[str] = []
    trainers = build(log)
    trainers.save(tmp_path / "commit")
    trainers.load(tmp_path / "commit")
    trainers.close()
    assert log == [
        "build actor", "build critic", "actor -> commit", "critic -> critic", "actor <- commit", "critic <- critic",
        "close critic", "close actor",
    ]  # fmt: skip


def test_a_critic_that_cannot_be_built_closes_the_actor() -> None:
    log: list[str] = []
    with pytest.raises(MemoryError):
        build(log, fails=True)
    assert log == ["build actor", "close actor"]


def test_a_checkpoint_without_a_critic(tmp_path: Path) -> None:
    log: list[str] = []
    build(log, critic=False).save(tmp_path / "commit")
    with pytest.raises(CheckpointError, match=r"saved by a run without a critic.*--finetune"):
        build(log).load(tmp_path / "commit")
    log.clear()
    build(log, finetune=True).load(tmp_path / "commit")
    assert log == ["build actor", "build critic", "actor <- commit"]
    build(log).save(tmp_path / "both")
    log.clear()
    build(log, critic=False).load(tmp_path / "both")
    assert log == ["build actor", "actor <- both"]


def test_each_role_gets_its_own_settings() -> None:
    seen: dict[str, Any] = {}

    def make(args: Any, *, role: str = "actor") -> Any:
        seen[role] = (args.lr, args.critic_lr, args.clip_grad, args.use_kl_loss)
        return Recorded([], role)

    roles = {"critic": {"lr": 0.5, "clip_grad": 2.0}}
    args = Args(role_settings=roles, lr=1.0, critic_lr=0.1, clip_grad=1.0, use_kl_loss=True)
    Trainers(args, make, with_critic=True)
    assert seen == {"actor": (1.0, 0.1, 1.0, True), "critic": (0.5, None, 2.0, False)}
