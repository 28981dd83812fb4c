"""The contract of functions that are told of weight files: they look at a version and leave it as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime_core.engines.scripted import ScriptedEngine
from slime_core.testing.base import Contract
from slime_core.weights.delta_writer import DeltaWriter


class WeightPostWriteContract(Contract):
    """`(args, version_dir, rollout_engines)`, once per version, whatever the version is like."""

    kind = "weight_post_writes"

    @pytest.mark.parametrize("version", [1, 2, 3], ids=["names the checkpoint", "delta", "full"])
    def test_it_leaves_the_version_as_it_is(self, version: int) -> None:
        """One that only names the checkpoint, one with a changed tensor, one that is a whole model."""
        assert self.folder is not None
        directory = self._written(version)
        before = _contents(directory)
        engine = ScriptedEngine([])
        answer = self.resolved.obj(self.settings, str(directory), [engine])
        assert answer is None, f"it returned {type(answer).__name__}, which has no effect"
        after = _contents(directory)
        changed = sorted(name for name in before if before[name] != after.get(name))
        assert not changed, f"it changed {', '.join(changed)}, which engines are about to read"

    def _written(self, version: int) -> Path:
        assert self.folder is not None
        checkpoint, weights = self.folder / "model", {"a": torch.zeros(64)}
        checkpoint.mkdir()
        save_file(weights, checkpoint / "model.safetensors")
        (checkpoint / "config.json").write_text("{}", encoding="utf-8")
        writer = DeltaWriter(self.folder / "weights", checkpoint, run=str(self.folder))
        if version == 3:
            weights["a"][0] = 1.0
            return writer.write(weights.items(), 3).directory
        written = writer.write(weights.items(), 1)
        if version == 2:
            weights["a"][0] = 1.0
            written = writer.write(weights.items(), 2)
        return written.directory


def _contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
