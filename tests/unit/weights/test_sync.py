"""Weight sync: versions, transports, verification."""

from __future__ import annotations

import errno
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_core.config import Args
from slime_core.errors import ConfigError, PluginSignatureError, WeightSyncError
from slime_core.models.hf_io import read_weights
from slime_core.weights.collective import FollowingWeights
from slime_core.weights.sync import WeightSync, checksum_dtype, choose_transport, tensor_checksum

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
        self.served, self.version, self.paths, self.engines = {}, None, [], ("the engine",)

    def update_weights(self, transport, payload, version):
        return getattr(self, f"by_{transport}")(payload, version)

    def by_tensor(self, weights, version):
        self.served = {name: tensor.to(self.dtype).clone() for name, tensor in weights}
        if self.corrupt:
            self.served[self.corrupt][0] += 1
        self.version = version

    def by_disk(self, path: Path, version):
        self.paths.append((path, (path / "config.json").is_file()))
        self.by_tensor(read_weights(path), version)

    def differing_weights(self, weights):
        return None

    def weight_checksums(self):
        return {name: tensor_checksum(tensor) for name, tensor in self.served.items()}


def _sync(tmp_path: Path, receiver: Receiver, post_write=None, **changes) -> WeightSync:
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    args = Args(run_dir=str(tmp_path), check_weight_update_equal=True, hf_checkpoint=str(tmp_path / "model"))
    args = args.model_copy(update=changes)
    return WeightSync(args, Trainer(), receiver, TOLD.append, post_write)


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
    seen: list[object] = []

    def written(args, version_dir, rollout_engines) -> None:
        seen.append((version_dir, rollout_engines, receiver.version))

    sync = _sync(tmp_path, receiver, written, update_weight_disk_keep_files=keep)
    sync.push()
    assert seen == [(str(tmp_path / "weights" / "weight_v000001"), ["the engine"], None)], "before the engine"
    path, has_config = receiver.paths[0]
    assert path.name == "weight_v000001"
    assert has_config
    assert path.exists() == keep


def test_a_served_version_that_cannot_be_removed_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A network file system refuses while a reader has a file open."""

    def busy(directory: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(directory))

    receiver = Receiver(transports=("disk",))
    sync = _sync(tmp_path, receiver)
    monkeypatch.setattr("shutil.rmtree", busy)
    sync.push()
    assert (receiver.version, sync.version) == (1, 1)
    assert "could not be removed" in caplog.text
    assert "weight_v000001" in caplog.text


def test_two_runs_never_share_a_directory_of_versions(tmp_path: Path) -> None:
    shared, first, second = tmp_path / "pushed", Receiver(transports=("disk",)), Receiver(transports=("disk",))
    keeps = {"update_weight_disk_dir": shared, "update_weight_disk_keep_files": True}
    sync = _sync(tmp_path, first, **keeps)
    other = _sync(tmp_path, second, run_dir=str(tmp_path / "other"), **keeps)  # the first has written nothing so far
    other.push()
    with pytest.raises(ConfigError, match=r"holds weight versions of .*other; choose another"):
        sync.push()
    with pytest.raises(ConfigError, match=r"holds weight versions of .*other; choose another"):
        _sync(tmp_path, first, **keeps).push()
    assert (first.version, second.version) == (None, 1)
    assert [path.name for path in shared.glob("weight_v*")] == ["weight_v000001"]


def test_a_full_disk_leaves_the_old_version_served(tmp_path: Path) -> None:
    receiver = Receiver(transports=("disk",))
    sync = _sync(tmp_path, receiver, update_weight_disk_dir=tmp_path / "pushed")
    sync.push()
    sync._trainer.tensors["a"] = torch.ones(100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # stands for a disk without space: writes fail
    try:
        with pytest.raises(WeightSyncError, match=r"version 2 could not be written, so 1 goes on .*weight-disk-dir"):
            sync.push()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (receiver.version, sync.version) == (1, 1)
    assert [path.name for path in (tmp_path / "pushed").iterdir()] == ["slime_weights.json"]
    sync.push()
    assert receiver.version == 2


@pytest.mark.parametrize(
    ("wanted", "offered", "colocate", "chosen"),
    [
        ("auto", ("tensor", "disk"), False, "tensor"),
        ("disk", ("tensor", "disk"), False, "disk"),
        ("tensor", (), False, "none"),
        # nccl means what it means in THUDM/slime
        ("nccl", ("tensor", "distributed", "disk"), False, "distributed"),
        ("nccl", ("tensor", "distributed", "disk"), True, "tensor"),
        ("nccl", ("distributed", "disk"), True, "distributed"),
        ("nccl", ("tensor", "disk"), False, "tensor"),
        ("nccl", ("disk",), False, "disk"),
    ],
)
def test_choice_of_transport(wanted: str, offered: tuple[str, ...], colocate: bool, chosen: str) -> None:
    assert choose_transport(wanted, offered, colocate=colocate) == chosen


@pytest.mark.parametrize("wanted", ["tensor", "slime-rl-core:tensor"])
def test_a_transport_the_engine_lacks_is_refused(tmp_path: Path, wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"does not take it; allowed: disk"):
        _sync(tmp_path, Receiver(transports=("disk",)), update_weight_transport=wanted)


CLASS = """from slime_core.protocols import TransportTraits
class Transport:
    def __init__(self, args): ...
    def send(self, weights, version, engines): ...
    traits = TransportTraits(arrives_by='tensor')
"""


def test_a_transport_that_cannot_deliver_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CLASS)
    with pytest.raises(PluginSignatureError, match=r"arrives by 'tensor' and has no async deliver"):
        _sync(tmp_path, Receiver(), update_weight_transport=f"{tmp_path}/mine.py")


def test_checksums_tell_values_dtype_and_shape_apart_and_not_strides() -> None:
    x = torch.arange(12, dtype=torch.bfloat16)
    changed = x.clone()
    changed[3] += 1
    others = [changed, x.view(3, 4), x.view(4, 3), x.float(), x.view(torch.float16), torch.tensor(1.0)]
    assert len({tensor_checksum(t) for t in [x, *others]}) == 7
    assert checksum_dtype(tensor_checksum(x)) is torch.bfloat16
    y = torch.randn(6, 4)
    assert tensor_checksum(y) == tensor_checksum(y.t().contiguous().t())
    assert tensor_checksum(y) == tensor_checksum(y.clone().requires_grad_())
    assert tensor_checksum(y[:1, 0]) == tensor_checksum(y[0, :1])  # one element, stride 4 and 1


def test_the_transport_is_the_one_that_the_started_engine_takes(tmp_path: Path) -> None:
    receiver = Receiver(transports=("distributed", "disk"))
    sync = _sync(tmp_path, receiver)
    assert sync.transport == "distributed"
    receiver.weight_transports = ("disk",)
    sync.push()
    assert sync.transport == "disk"
    assert receiver.paths


class Broadcasting(Receiver):
    """Measures its updates, and compares weights itself."""

    def by_distributed(self, weights, version):
        self.by_tensor(weights, version)
        return {"perf/update_weights_pause_time": 0.5}

    def differing_weights(self, weights):
        return [name for name, tensor in weights if not torch.equal(tensor, self.served[name])]

    def weight_checksums(self):
        raise AssertionError("it was asked for what it does not know")


def test_an_engine_may_compare_weights_itself(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"1 of 2 tensors served differ.*\(b\)"):
        _sync(tmp_path, Broadcasting(("distributed",), corrupt="b")).push()


@pytest.mark.parametrize("setting", [{"use_fault_tolerance": True}, {"rollout_external_engine_addrs": ["h:1"]}])
def test_for_engines_that_come_back_the_served_directory_stays_until_the_next(
    tmp_path: Path, setting: dict[str, Any]
) -> None:
    receiver = Receiver(transports=("disk",))
    sync = _sync(tmp_path, receiver, **setting)
    sync.push()
    sync.push()
    assert [path.exists() for path, _ in receiver.paths] == [False, True]


@pytest.mark.parametrize("transports", [("tensor",), ()])
def test_the_old_actor_is_what_was_pushed_last(tmp_path: Path, transports: tuple[str, ...]) -> None:
    sync = _sync(tmp_path, Receiver(transports), keep_old_actor=True)
    seen: list[int] = []
    sync._trainer.update_old_actor = lambda: seen.append(sync.version)
    sync.push()
    sync.push()
    assert seen == ([1, 2] if transports else [0, 0])
    follower = FollowingWeights(sync.args, sync._trainer)
    assert follower.push() == {}
    assert len(seen) == 3


def test_without_files_the_function_is_said_to_be_without_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _sync(tmp_path, Receiver(), lambda **_: None).push()
    assert not caplog.text  # a plugin's hook, which is there in every run
    _sync(tmp_path, Receiver(), lambda **_: None, custom_update_weight_post_write_path="mine.py").push()
    assert "without effect, since weights go by tensor" in caplog.text
