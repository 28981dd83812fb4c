"""The contract of functions that are told of weight files: they look at a version and leave it as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slime_core.engines.scripted import ScriptedEngine
from slime_core.plugins.manager import current_registry
from slime_core.plugins.resolve import resolve
from slime_core.testing.contracts.base import Contract


class WeightPostWriteContract(Contract):
    """`(args, version_dir, rollout_engines)`, once per version, whatever the version is like."""

    kind = "weight_post_writes"

    def test_it_leaves_the_version_as_it_is(self) -> None:
        """Of every installed transport that writes files: two versions, the second with a changed tensor."""
        for ref in (ref for ref in current_registry() if ref.kind == "weight_transports"):
            transport = resolve(ref.kind, ref.name).obj
            if transport.traits.writes_files:
                self._told(transport, ref.name)

    def _told(self, transport: Any, name: str) -> None:
        assert self.folder is not None
        checkpoint, weights = self.folder / f"model-{name}", {"a": torch.zeros(64)}
        checkpoint.mkdir()
        save_file(weights, checkpoint / "model.safetensors")
        (checkpoint / "config.json").write_text("{}", encoding="utf-8")
        settings = self.settings
        settings.hf_checkpoint, settings.update_weight_disk_dir = str(checkpoint), str(self.folder / f"weights-{name}")
        sender = transport(settings)
        for version in (1, 2):
            sender.send(iter(weights.items()), version, _Look(self.resolved.obj, settings))
            weights["a"][0] = 1.0


@dataclass(frozen=True)
class _Look:
    """`WeightEngines` that have the function told, and look at what it left."""

    function: Callable[..., Any]
    settings: Any

    def written(self, directory: Path) -> None:
        """Tell it."""
        before = _contents(directory)
        answer = self.function(self.settings, str(directory), [ScriptedEngine([])])
        assert answer is None, f"it returned {type(answer).__name__}, which has no effect"
        after = _contents(directory)
        changed = sorted(name for name in before if before[name] != after.get(name))
        assert not changed, f"it changed {', '.join(changed)}, which engines are about to read"

    def take(self, payload: Any, dtypes: Mapping[str, torch.dtype] | None = None) -> Mapping[str, float]:
        """No engine does."""
        return {}


def _contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
