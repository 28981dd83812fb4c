"""Weight sync: versions, transports, verification."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime_core.errors import ConfigError, WeightSyncError
from slime_core.models.hf_io import read_weights
from slime_core.weights.checksum import checksum_dtype, tensor_checksum
from slime_core.weights.sync import WeightSync, choose_transport

TOLD: list[int] = []


class Trainer:
    def __init__(self) -> None:
        self.tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 2) / 3}

    def named_weights(self):
        return self.tensors.items()


class Receiver:
    """Keeps what it is given, in its own dtype; may lose a tensor on the way."""

    def __init__(self, transports=("tensor", "disk"), dtype=torch.float32, corrupt=None) -> None:
        self.weight_transports, self.dtype, self.corrupt = transports, dtype, corrupt
        self.served, self.version, self.paths = {}, None, []

    def update_weights(self, weights, version):
        self.served = {name: tensor.to(self.dtype).clone() for name, tensor in weights}
        if self.corrupt:
            self.served[self.corrupt][0] += 1
        self.version = version

    def update_weights_from_disk(self, path: Path, version):
        self.paths.append((path, (path / "config.json").is_file()))
        self.update_weights(read_weights(path), version)

    def weight_checksums(self):
        return {name: tensor_checksum(tensor) for name, tensor in self.served.items()}


def _sync(tmp_path: Path, receiver: Receiver, **changes) -> WeightSync:
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    args = SimpleNamespace(
        update_weight_start_version=0, update_weight_transport="auto", update_weight_disk_dir=None, run_dir=tmp_path,
        update_weight_disk_keep_files=False, check_weight_update_equal=True, hf_checkpoint=tmp_path / "model",
    )  # fmt: skip
    vars(args).update(changes)
    return WeightSync(args, Trainer(), receiver, TOLD.append)


def test_versions_grow_by_one(tmp_path: Path) -> None:
    TOLD.clear()
    receiver = Receiver()
    sync = _sync(tmp_path, receiver, update_weight_start_version=3)
    sync.push()
    metrics = sync.push()
    assert sync.version == receiver.version == 5
    assert TOLD == [4, 5]
    assert metrics["perf/update_weights_time"] >= 0


def test_a_wider_trainer_is_compared_in_the_engines_dtype(tmp_path: Path) -> None:
    _sync(tmp_path, Receiver(dtype=torch.bfloat16)).push()


def test_a_tensor_that_differs_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"weight version 1: 1 of 2 tensors.*\(b\)"):
        _sync(tmp_path, Receiver(corrupt="b")).push()


@pytest.mark.parametrize("keep", [False, True])
def test_disk_transport(tmp_path: Path, keep: bool) -> None:
    receiver = Receiver(transports=("disk",))
    sync = _sync(tmp_path, receiver, update_weight_disk_keep_files=keep)
    sync.push()
    path, has_config = receiver.paths[0]
    assert path.name == "weight_v000001"
    assert has_config
    assert path.exists() == keep


def test_without_an_engine_nothing_happens(tmp_path: Path) -> None:
    sync = _sync(tmp_path, Receiver(transports=()))
    assert sync.push() == {}
    assert sync.version == 0


@pytest.mark.parametrize(
    ("wanted", "offered", "chosen"),
    [("auto", ("tensor", "disk"), "tensor"), ("nccl", ("tensor",), "tensor"), ("nccl", ("disk",), "disk"),
     ("disk", ("tensor", "disk"), "disk"), ("tensor", (), "none")],
)  # fmt: skip
def test_choice_of_transport(wanted: str, offered: tuple[str, ...], chosen: str) -> None:
    assert choose_transport(wanted, offered) == chosen


def test_a_transport_the_engine_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="allowed: disk"):
        choose_transport("tensor", ("disk",))


def test_checksums_tell_dtype_shape_and_bits_apart() -> None:
    x = torch.tensor([1.0, 2.0])
    sums = [x, x.double(), x.reshape(1, 2), torch.tensor([1.0, 2.0000002])]
    assert len({tensor_checksum(t) for t in sums}) == 4
    assert checksum_dtype(tensor_checksum(x.bfloat16())) is torch.bfloat16
    assert tensor_checksum(torch.ones(2, 3).t()) == tensor_checksum(torch.ones(3, 2))
