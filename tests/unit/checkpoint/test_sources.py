"""What a directory with a model is."""

from __future__ import annotations

from pathlib import Path

import pytest
from slime_embedded.trainer.shared_settings import directory_of

from slime_core.checkpoint.sources import find_source, required_source
from slime_core.checkpoint.store import CheckpointStore
from slime_core.errors import CheckpointError


def hf(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_text("weights")


def megatron(directory: Path, folder: str) -> None:
    (directory / folder).mkdir(parents=True)
    (directory / folder / "metadata.json").write_text("{}")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Commits rollout_0000001 and rollout_0000003, of which the second has a critic and Megatron's files."""

    def write(directory: Path) -> None:
        hf(directory)
        megatron(directory, "trainer/model")
        hf(directory / "critic")

    store = CheckpointStore(tmp_path / "run/checkpoints")
    store.commit(1, {}, [hf])
    store.commit(3, {}, [write])
    return tmp_path / "run"


def test_formats(run: Path, tmp_path: Path) -> None:
    hf(tmp_path / "hf")
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/config.json").write_text("{}")
    megatron(tmp_path / "megatron", "model")
    assert find_source(tmp_path / "megatron") is None
    (tmp_path / "megatron/megatron.json").write_text('{"format": 1, "model_type": "qwen3", "dtype": "bfloat16"}')
    for path, text in [
        (tmp_path / "hf", "a model in HF format"),
        (tmp_path / "megatron", "a model in Megatron format"),
        (run, "a slime commit after rollout 4 (HF and Megatron format)"),
        (run / "checkpoints", "a slime commit after rollout 4 (HF and Megatron format)"),
        (run / "checkpoints/rollout_0000001", "a slime commit after rollout 2 (HF format)"),
    ]:
        assert str(find_source(path)) == text


def test_steps_and_parts(run: Path, tmp_path: Path) -> None:
    assert directory_of(run, 1) == str(run / "checkpoints/rollout_0000001")
    assert directory_of(run, folder="critic") == str(run / "checkpoints/rollout_0000003/critic")
    assert directory_of(run, 1, folder="critic") == str(run / "checkpoints/rollout_0000001")
    assert directory_of(tmp_path / "not there") == str(tmp_path / "not there")
    with pytest.raises(
        CheckpointError,
        match=r"no commit rollout_0000002 \(after rollout 3\); there are: rollout_0000001, ",
    ):
        find_source(run, 2)
    hf(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="not a run directory with commits to choose step 1 from"):
        find_source(tmp_path / "hf", 1)


def test_nothing_there_says_what_was_looked_for(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--ref-load x: no model there. Looked for an HF model .*megatron.json"):
        required_source(tmp_path, cite="--ref-load x")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(CheckpointError, match=r"a checkpoint of Megatron-LM .*: use the HF model"):
        required_source(tmp_path, cite="--ref-load x")


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_torn_commit_is_refused_by_every_path_that_leads_to_it(run: Path, name: str) -> None:
    commit = run / "checkpoints/rollout_0000003"
    (commit / name).write_text("w")
    for path in (run, commit.parent, commit):
        with pytest.raises(CheckpointError, match=rf"torn: {name} is missing or not as large"):
            find_source(path)
