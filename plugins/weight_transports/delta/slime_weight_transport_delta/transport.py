"""The transport `delta`: versions that hold what changed, applied to a copy of the model on the engine's host.

A run with `--update-weight-mode delta` builds `DeltaTransport` in the trainer's process. Engines that have pullers
(SGLang's) take the directory of versions; to one that takes tensors of its own process, `deliver` brings them there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from slime_core.config import Settings
from slime_core.errors import ConfigError, WeightSyncError
from slime_core.models.hf_io import read_weights
from slime_core.protocols import Args, RolloutEngine, TransportTraits
from slime_core.protocols.weights import WeightEngines
from slime_weight_transport_delta.apply import apply
from slime_weight_transport_delta.writer import DeltaWriter, stored_dtypes


class DeltaTransport:
    """Constructed as `DeltaTransport(args)`; takes the directory of versions, or refuses another run's."""

    traits = TransportTraits(
        writes_files=True,
        arrives_by="tensor",
        uses=frozenset(
            {
                "update_weight_delta_checksum",
                "update_weight_delta_encoding",
                "update_weight_local_checkpoint_dir",
            }
        ),
    )

    def __init__(self, args: Args) -> None:
        assert args.update_weight_disk_dir is not None, "the run has derived one, since the traits say files"
        assert args.run_dir is not None, "every run has one"
        self._dtypes = _dtypes_sent(args)
        self._writer = DeltaWriter(
            Path(args.update_weight_disk_dir),
            Path(args.hf_checkpoint),
            run_dir=args.run_dir,
            encoding=args.update_weight_delta_encoding,
            checksum=args.update_weight_delta_checksum,
            shard_bytes=args.update_weight_buffer_size,
            keep_files=args.update_weight_disk_keep_files,
        )

    @classmethod
    def check_settings(cls, settings: Settings) -> list[str]:
        """Deltas are files, for engines that do not share the trainer's devices. Raises ConfigError."""
        args = settings.args
        chosen = settings.cite("update_weight_transport" if args.update_weight_mode == "full" else "update_weight_mode")
        if args.colocate:
            raise ConfigError(f"{chosen} and {settings.cite('colocate')} exclude each other; remove one.")
        if args.update_weight_local_checkpoint_dir is None and args.run_dir is not None:
            local = os.path.join(args.run_dir, "local_weights")
            settings.derive("update_weight_local_checkpoint_dir", local, "run_dir")
        both = ("update_weight_disk_dir", "update_weight_local_checkpoint_dir")
        paths = [os.path.realpath(getattr(args, name)) for name in both if getattr(args, name)]
        if len(set(paths)) < len(paths):
            raise ConfigError(
                f"{' and '.join(map(settings.cite, both))} are one directory;"
                " the second is a copy that each engine's host keeps for itself."
            )
        return []

    def send(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int, engines: WeightEngines
    ) -> Mapping[str, float]:
        """Write what changed; the engines get the directory of all versions."""
        written = self._writer.write(weights, version)
        engines.written(written.directory)
        measured = engines.take(self._writer.root, self._dtypes)
        self._writer.prune()
        return {
            **measured,
            "perf/update_weights_density": written.density,
            "perf/update_weights_wire_bytes": float(written.wire_bytes),
        }

    @staticmethod
    async def deliver(args: Args, engine: RolloutEngine, root: Path, version: int) -> Mapping[str, float] | None:
        """Bring the local copy to a version below `root`, and hand it over as tensors. Raises WeightSyncError."""
        assert args.update_weight_local_checkpoint_dir is not None, "check_settings sees to it"
        local = Path(args.update_weight_local_checkpoint_dir)
        await asyncio.to_thread(apply, Path(root), local, version)
        try:
            weights = list(read_weights(local))
        except (ConfigError, OSError) as error:
            raise WeightSyncError(f"{error}; the old weights still serve") from error
        return await engine.update_weights_from_tensor(weights, version)


def _dtypes_sent(args: Args) -> Mapping[str, torch.dtype]:
    """Deltas have the checkpoint's dtypes, as what the engines started with."""
    dtypes = stored_dtypes(Path(args.hf_checkpoint))
    narrow = sorted(name for name, dtype in dtypes.items() if dtype != torch.float32)
    if args.true_on_policy_mode and narrow:
        raise ConfigError(
            "--true-on-policy-mode with --update-weight-mode delta needs a float32 --hf-checkpoint: deltas have its"
            f" dtypes, and {narrow[0]} is {dtypes[narrow[0]]}"
        )
    return dtypes
