"""A node that does not see the command's run directory says so, with its name and the path."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from slime_launcher_ray.shared_paths import check_shared, inputs, write_token

from slime_core.config import Args
from slime_core.errors import ConfigError


def test_seen(tmp_path: Path) -> None:
    check_shared("rollout", write_token(tmp_path / "run" / "actors"), patience=0.0)


def test_a_directory_of_the_same_path_is_not_the_same(tmp_path: Path) -> None:
    token = write_token(tmp_path / "actors")
    token.unlink()
    with pytest.raises(ConfigError) as caught:
        check_shared("trainer rank 3", token, patience=0.0)
    assert f"trainer rank 3 on {socket.gethostname()}: node does not see {token}" in str(caught.value)


def test_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    needed = inputs(Args(hf_checkpoint="model", prompt_data="train.jsonl@[0:10]", load=None))
    assert needed == (tmp_path / "model",)
    token = write_token(tmp_path / "actors")
    check_shared("rollout", token, needed)
    (tmp_path / "model").rmdir()
    with pytest.raises(ConfigError, match=f"rollout on {socket.gethostname()}: node does not see {tmp_path}/model,"):
        check_shared("rollout", token, needed)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not see"):
        check_shared("rollout", tmp_path / "none" / "token", patience=0.0)
