"""Weights on disk: one file, or shards with an index."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime_core.errors import ConfigError
from slime_core.models.config import load_model_config
from slime_core.models.hf_io import INDEX, WEIGHTS, read_weights, weight_files, write_weights

TENSORS = {f"layer.{i}.weight": torch.full((10, 10), float(i)) for i in range(7)}


def test_a_small_model_is_one_file_as_safetensors_writes_it(tmp_path: Path) -> None:
    write_weights(tmp_path / "a", TENSORS.items())
    save_file(TENSORS, tmp_path / "expected", metadata={"format": "pt"})
    assert [path.name for path in (tmp_path / "a").iterdir()] == [WEIGHTS]
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "expected").read_bytes()


def test_a_large_one_is_read_back_from_shards(tmp_path: Path) -> None:
    write_weights(tmp_path, TENSORS.items(), shard_bytes=900)
    assert [path.name for path in weight_files(tmp_path)] == [
        f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)
    ]
    found = dict(read_weights(tmp_path))
    assert list(found) == list(TENSORS)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert f'"total_size": {7 * 400}' in (tmp_path / INDEX).read_text()


def test_transformers_reads_the_index(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from tests.megatron_models import save_tiny

    model = save_tiny(tmp_path / "one", "qwen3")
    write_weights(tmp_path / "one", list(read_weights(tmp_path / "one")), shard_bytes=10_000)
    assert not (tmp_path / "one" / WEIGHTS).exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "one").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_no_more_than_a_shard_is_held(tmp_path: Path) -> None:
    """When a tensor is asked for, those two shards back have been let go."""
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []

    def weights():  # type: ignore[no-untyped-def]
        for i in range(8):
            tensor = torch.zeros(100)
            alive.append(weakref.ref(tensor))
            yield f"t{i}", tensor
            del tensor
            assert sum(ref() is not None for ref in alive) <= 3

    write_weights(tmp_path, weights(), shard_bytes=800)


def test_an_error_on_the_way_leaves_the_model_that_was_there(tmp_path: Path) -> None:
    write_weights(tmp_path, TENSORS.items())

    def failing():  # type: ignore[no-untyped-def]
        yield from list(TENSORS.items())[:5]
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        write_weights(tmp_path, failing(), shard_bytes=900)
    assert dict(read_weights(tmp_path)).keys() == TENSORS.keys()


def test_a_kill_between_two_shards_leaves_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_weights(tmp_path, TENSORS.items(), shard_bytes=900)
    replace, replaced = os.replace, list[Path]()

    def killed(source: Path, target: Path) -> None:
        if replaced:
            raise KeyboardInterrupt
        replace(source, target)
        replaced.append(target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_weights(tmp_path, [(name, tensor + 100) for name, tensor in TENSORS.items()], shard_bytes=900)
    with pytest.raises(ConfigError, match="no weights"):
        dict(read_weights(tmp_path))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"hidden_size": 10**9}, "hidden_size is 1000000000; allowed: 1 to 1000000"),
        ({"num_attention_heads": 0}, "num_heads is 0; allowed: 1 to 10000"),
        ({"hidden_size": "big"}, "is not a whole number, or 0"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0.0"),
        ({"max_position_embeddings": 10**15}, "max_position_embeddings is"),
        ({"hidden_size": 10**5, "num_hidden_layers": 1000}, "config.json is of a model of"),
    ],
)
def test_sizes_of_no_model_are_refused(
    sizes: dict[str, Any], said: str, make_model: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(make_model("qwen3")[0], directory)
    config = json.loads((directory / "config.json").read_text())
    load_model_config(directory)
    (directory / "config.json").write_text(json.dumps({**config, **sizes}))
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_model_config(directory)
