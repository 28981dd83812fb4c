"""The transport `delta`, its command, and the contract of transports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from slime_testing_contracts import CommandContract, WeightTransportContract
from slime_weight_transport_delta.apply import apply
from slime_weight_transport_delta.format import read_version, versions_in

from slime_core.config import Args, Settings
from slime_core.errors import ConfigError, WeightSyncError
from slime_core.launch.checks import check_component_settings
from slime_core.launch.components import Components, Resolver, named_transport
from slime_core.models.hf_io import read_weights
from slime_core.plugins.presets import load_settings
from slime_core.weights.sync import WeightSync, tensor_checksum


class TestDelta(WeightTransportContract):
    component = "delta"


class TestPullWeights(CommandContract):
    component = "pull_weights"


class Trainer:
    """float32 masters of a bfloat16 checkpoint."""

    def __init__(self) -> None:
        self.tensors = {"a": torch.linspace(-1, 1, 3000), "b": torch.ones(2, 2)}

    def named_weights(self) -> Any:
        return self.tensors.items()

    def train(self) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.tensors["a"][:30] += 0.5


class Receiver:
    """An engine in process, which computes in float32."""

    weight_transports: tuple[str, ...] = ("tensor",)
    engines = ("the engine",)

    def __init__(self, local: Path) -> None:
        self.local, self.fails, self.served, self.version = local, False, {}, 0

    def update_weights(self, transport: str, payload: Any, version: int) -> None:
        getattr(self, f"by_{transport}")(payload, version)

    def by_tensor(self, weights: Any, version: int) -> None:
        self.served, self.version = {n: t.clone() for n, t in weights}, version

    def by_delta(self, root: Path, version: int) -> None:
        apply(root, self.local, version)
        if self.fails:
            raise WeightSyncError("the engine died")
        self.by_tensor(((n, t.float()) for n, t in read_weights(self.local)), version)

    def differing_weights(self, weights: Any) -> None:
        return None

    def weight_checksums(self) -> dict[str, str]:
        return {name: tensor_checksum(tensor) for name, tensor in self.served.items()}


def make(tmp_path: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> tuple[WeightSync, Trainer, Receiver]:
    trainer, model = Trainer(), tmp_path / "model"
    model.mkdir(exist_ok=True)
    save_file({n: t.to(dtype) for n, t in trainer.tensors.items()}, model / "model.safetensors")
    (model / "config.json").write_text("{}")
    args = {
        "update_weight_transport": "delta", "update_weight_disk_dir": str(tmp_path / "run" / "weights"),
        "run_dir": str(tmp_path / "run"), "check_weight_update_equal": True, "hf_checkpoint": str(model),
        "update_weight_buffer_size": 2**20,
    }  # fmt: skip
    receiver = Receiver(tmp_path / "local")
    receiver.weight_transports = changes.pop("transports", receiver.weight_transports)
    post_write = changes.pop("post_write", None)
    sync = WeightSync(Args(**(args | changes)), trainer, receiver, post_write=post_write)
    return sync, trainer, receiver


def test_deltas_are_pushed_and_checked(tmp_path: Path) -> None:
    seen: list[Any] = []

    def post_write(args: Any, version_dir: str, rollout_engines: list[Any]) -> None:
        files = sorted(p.name for p in Path(version_dir).iterdir())
        seen.append((Path(version_dir).name, receiver.version, rollout_engines, files))

    sync, trainer, receiver = make(tmp_path, post_write=post_write)
    assert sync.push()["perf/update_weights_density"] == 0
    trainer.train()
    metrics = sync.push()
    assert metrics["perf/update_weights_density"] == pytest.approx(30 / 3004)
    assert 0 < metrics["perf/update_weights_wire_bytes"] < 1000
    assert torch.equal(receiver.served["a"], trainer.tensors["a"].bfloat16().float())
    # Complete, and before the engine has it.
    assert [s[:3] for s in seen] == [("weight_v000001", 0, ["the engine"]), ("weight_v000002", 1, ["the engine"])]
    assert seen[1][3] == ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    receiver.served["a"][5] += 1
    with pytest.raises(WeightSyncError, match=r"1 of 2 tensors served differ .*\(a\)"):
        sync.verify()


def test_an_engine_that_failed_gets_the_number_again_as_a_full_version(tmp_path: Path) -> None:
    sync, trainer, receiver = make(tmp_path)
    sync.push()
    trainer.train()
    receiver.fails = True
    with pytest.raises(WeightSyncError, match="the engine died"):
        sync.push()
    assert (sync.version, receiver.version) == (1, 1)
    assert list(versions_in(tmp_path / "run" / "weights")) == [1, 2]
    receiver.fails = False
    trainer.train()
    sync.push()
    assert read_version(tmp_path / "run" / "weights", 2).base_version is None
    assert torch.equal(receiver.served["a"], trainer.tensors["a"].bfloat16().float())
    assert list(versions_in(tmp_path / "run" / "weights")) == [2]


def test_bitwise_runs_need_a_float32_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a float32 --hf-checkpoint.*a is torch\.bfloat16"):
        make(tmp_path, true_on_policy_mode=True)
    make(tmp_path, torch.float32, true_on_policy_mode=True)


def test_an_engine_that_takes_no_tensors_of_this_process_takes_no_deltas(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'delta': this rollout engine does not take it; allowed: distributed, disk"):
        make(tmp_path, transports=("distributed", "disk"))


BASE = (
    *("--hf-checkpoint", "m", "--prompt-data", "d", "--rollout-batch-size", "2", "--num-rollout", "1"),
    *("--rollout-max-response-len", "8", "--rm-type", "exact"),
)


def settings(*flags: str) -> Settings:
    found = load_settings([*BASE, *flags], command="rollout", files=False)
    parts = Components(weight_transport=named_transport(Resolver(found)))
    check_component_settings(found, parts)
    return found


def test_two_directories_are_needed() -> None:
    args = settings("--update-weight-mode", "delta", "--save", "/run").args
    assert args.update_weight_disk_dir == "/run/weights"
    assert args.update_weight_local_checkpoint_dir == "/run/local_weights"
    with pytest.raises(ConfigError, match="are one directory"):
        settings(
            "--update-weight-mode", "delta", "--update-weight-disk-dir", "/d",
            "--update-weight-local-checkpoint-dir", "/d/../d",
        )  # fmt: skip

    with pytest.raises(ConfigError, match=r"mode 'delta' \(flag\) and --colocate .* exclude each other"):
        settings("--update-weight-mode", "delta", "--colocate")


def test_settings_of_deltas_alone_are_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    overwrite = ("--update-weight-delta-encoding", "overwrite")
    settings("--update-weight-transport", "delta", *overwrite)
    assert "without effect" not in caplog.text
    settings("--update-weight-transport", "disk", *overwrite)
    assert "without effect with --update-weight-transport disk: --update-weight-delta-encoding" in caplog.text
