"""`disk`: a directory in Hugging Face's layout for each weight version, which the engines load."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError

from slime_core.errors import WeightSyncError
from slime_core.models.hf_io import copy_assets, write_weights
from slime_core.protocols import Args, TransportTraits
from slime_core.protocols.weights import WeightEngines
from slime_weight_transport_delta.format import claim

logger = logging.getLogger(__name__)


def _remove(directory: Path) -> None:
    """Delete a version that no engine needs; the new one is served, so a failure is only logged."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        logger.warning("weights that are no longer needed could not be removed: %s", error)


class DiskTransport:
    """A weight transport that writes a directory per version and keeps the served one if an engine may need it."""

    traits = TransportTraits(writes_files=True)

    def __init__(self, args: Args) -> None:
        self._args = args
        self._root = Path(args.update_weight_disk_dir or Path(args.run_dir or "") / "weights")
        self._keeps = bool(args.use_fault_tolerance or args.rollout_external_engine_addrs or args.sglang_router_ip)
        self._kept: Path | None = None
        """Directory of the served version, for an engine that needs to be updated."""
        claim(self._root, args.run_dir or "")

    def send(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int, engines: WeightEngines
    ) -> Mapping[str, float]:
        """Write the version, have the engines load it, and remove the version that is no longer needed.

        Raises:
            ConfigError: The directory holds versions of another run.
            WeightSyncError: The version could not be written, or an engine refused it.
        """
        claim(self._root, self._args.run_dir or "")  # again: while it is empty, another run may claim it
        directory = self._root / f"weight_v{version:06d}"
        if directory.exists():
            shutil.rmtree(directory)
        try:
            copy_assets(self._args.hf_checkpoint, directory)
            write_weights(directory, weights, shard_bytes=int(self._args.save_shard_size * 1e9))
        except (OSError, SafetensorError) as error:  # the latter also when the disk is full
            shutil.rmtree(directory, ignore_errors=True)
            raise WeightSyncError(
                f"weight version {version} could not be written, so {version - 1} goes on being served:"
                f" {error}. Free space in {directory.parent}, or choose another --update-weight-disk-dir"
            ) from error
        engines.written(directory)
        written = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        measured = engines.take(directory)
        if not self._args.update_weight_disk_keep_files:
            # A recovered engine, or an external engine that was restarted, loads the served version again. So that
            # version stays until the next one is served.
            done, self._kept = (self._kept, directory) if self._keeps else (directory, None)
            if done is not None:
                _remove(done)
        return {"perf/update_weights_wire_bytes": float(written), **measured}
