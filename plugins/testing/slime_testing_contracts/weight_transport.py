"""The contract of weight transports: engines get the trained weights, also after a refusal and in a resumed run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime_core.config.schema import Args
from slime_core.errors import WeightSyncError
from slime_core.models.hf_io import read_weights
from slime_core.rollout.stage import deliver
from slime_core.weights.sync import transport_traits
from slime_testing_contracts.base import Contract


class WeightTransportContract(Contract):
    """`send(weights, version, engines)` calls `engines.take` once per version, with a payload that engines can load."""

    kind = "weight_transports"

    @property
    def settings(self) -> Args:
        """Settings with a checkpoint of two tensors, and directories for files and for a host's copy."""
        assert self.folder is not None
        checkpoint = self.folder / "model"
        if not checkpoint.is_dir():
            checkpoint.mkdir()
            save_file(_weights(0.0), checkpoint / "model.safetensors")
            (checkpoint / "config.json").write_text("{}", encoding="utf-8")
        own = {
            "hf_checkpoint": str(checkpoint),
            "update_weight_disk_dir": str(self.folder / "weights"),
            "update_weight_local_checkpoint_dir": str(self.folder / "local"),
        }
        return super().settings.model_copy(update={**own, **self.args})

    def test_it_declares_its_traits(self) -> None:
        """Check the `TransportTraits`, and `deliver` if the class declares how its weights arrive."""
        transport_traits(self.resolved.obj, self.component)

    def test_engines_get_what_was_trained(self) -> None:
        """Send versions 1 to 3; version 3 differs from version 2 in a single element."""
        engines, sender = self._engines(), self.resolved.obj(self.settings)
        for version, scale in ((1, 0.0), (2, 1.0), (3, 1.0)):
            weights = _weights(scale)
            weights["a"][0, 0] += version
            metrics = engines.get(sender, weights, version)
            assert all(isinstance(value, int | float) for value in metrics.values()), f"metrics are numbers: {metrics}"
            engines.check(weights)

    def test_a_version_that_was_refused_can_be_sent_again(self) -> None:
        """Check that `send` raises the error; the next call has the same version and other weights."""
        engines, sender = self._engines(), self.resolved.obj(self.settings)
        engines.get(sender, _weights(0.0), 1)
        engines.refuses = True
        with pytest.raises(WeightSyncError, match="refused"):
            engines.get(sender, _weights(1.0), 2)
        engines.refuses = False
        engines.get(sender, _weights(2.0), 2)
        engines.check(_weights(2.0))

    def test_a_resumed_run_uses_numbers_again(self) -> None:
        """Check a new sender that begins at a version which the engines have had with other weights."""
        engines = self._engines()
        first = self.resolved.obj(self.settings)
        for version in (1, 2):
            engines.get(first, _weights(float(version)), version)
        engines.get(self.resolved.obj(self.settings), _weights(7.0), 2)
        engines.check(_weights(7.0))

    def _engines(self) -> _Engines:
        name, traits = self.component.rpartition(":")[2], self.resolved.obj.traits
        if traits.arrives_by is None and not hasattr(_Engine, f"update_weights_from_{name}"):
            pytest.skip("only engines that know it can tell what it hands over")
        return _Engines(self.settings, self.component)


class _Engine:
    """An engine that takes weights from each of the core's transports."""

    def __init__(self) -> None:
        self.served: dict[str, torch.Tensor] = {}

    async def update_weights_from_tensor(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.served = {name: tensor.detach().clone() for name, tensor in weights}

    update_weights_from_distributed = update_weights_from_tensor

    async def update_weights_from_disk(self, path: Path, version: int) -> None:
        await self.update_weights_from_tensor(read_weights(path), version)


class _Engines:
    """A `WeightEngines` for one engine in this process."""

    def __init__(self, settings: Any, transport: str) -> None:
        self._settings, self._transport = settings, transport
        self._engine = _Engine()
        self._dtypes: Mapping[str, torch.dtype] = {}
        self._version = self._taken = 0
        self.refuses = False

    def get(self, sender: Any, weights: Mapping[str, torch.Tensor], version: int) -> Mapping[str, float]:
        self._version, self._taken = version, 0
        metrics: Mapping[str, float] = sender.send(iter(weights.items()), version, self)
        return metrics

    def written(self, directory: Path) -> None:
        assert directory.is_dir(), f"{directory} is said to be written"

    def take(self, payload: Any, dtypes: Mapping[str, torch.dtype] | None = None) -> Mapping[str, float]:
        self._dtypes, self._taken = dtypes or {}, self._taken + 1
        if self.refuses:
            raise WeightSyncError("refused")
        engine: Any = self._engine
        asyncio.run(deliver(self._settings, engine, self._transport, payload, self._version))
        return {}

    def check(self, trained: Mapping[str, torch.Tensor]) -> None:
        version = self._version
        assert self._taken == 1, f"version {version}: send called engines.take {self._taken} times; once is right"
        served = self._engine.served
        assert served.keys() == trained.keys(), f"version {version}: sent {sorted(served)} of {sorted(trained)}"
        for name, tensor in trained.items():
            cast = tensor.to(self._dtypes.get(name, tensor.dtype))
            wrong = int((served[name].to(cast.dtype) != cast).sum())
            assert not wrong, f"version {version}: {wrong} elements of {name} are not those that were trained"


def _weights(scale: float) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(12.0).reshape(3, 4) * scale, "b": torch.full((2,), scale)}
