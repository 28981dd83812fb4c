"""TensorBoard event files: scalars, histograms, texts.

Written here record by record, and not by its `SummaryWriter`, whose thread dies with a traceback on a full disk.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_hooks.trackers.numbers import Rollout, Tracked, histogram

_BUCKETS = 30


class TensorBoard:
    """A file below `TENSORBOARD_DIR`, or in `tensorboard/` of the run directory."""

    def __init__(self, run: Tracked) -> None:
        self._run = run
        self._writer: Any = None

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the scalars."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._summary(step, [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()])

    def rollout(self, found: Rollout) -> None:
        """Add the histograms, and the texts as a table."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, histo=_histogram(numbers))
            for name, numbers in found.distributions.items()
            if numbers
        ]
        texts = [f"    {t.prompt}\n    -> {t.response}\n\nreward {t.reward}" for t in found.texts]
        if texts:
            values.append(_text("rollout/samples", texts))
        self._summary(found.step, values)

    def close(self) -> None:
        """End the file."""
        if self._writer:
            self._writer.close()

    def _summary(self, step: int, values: list[Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write(step=step, summary=Summary(value=values))

    def _open(self) -> None:
        """Begin the file with the first numbers: the imports take a tenth of a second, which would delay a rollout."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        args = self._run.args
        root = Path(os.environ.get("TENSORBOARD_DIR", self._run.run_dir / "tensorboard"))
        directory = root.joinpath(*(part for part in (args.tb_project_name, args.tb_experiment_name) if part))
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter(open(directory / name, "wb", buffering=0))  # noqa: SIM115  # closed at the end
        first = (args.start_rollout_id or 0) + 1
        self._write(step=first, file_version="brain.Event:2")
        # Readers drop the numbers that an earlier part of the run has from this step on.
        self._write(step=first, session_log=SessionLog(status=SessionLog.START))

    def _write(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if self._writer is None:
            self._open()
        self._writer.write(Event(wall_time=time.time(), **content).SerializeToString())
        self._writer.flush()


def _histogram(values: Sequence[float]) -> Any:
    from tensorboard.compat.proto.histogram_pb2 import HistogramProto

    counts, edges = histogram(values, _BUCKETS)
    return HistogramProto(
        min=min(values), max=max(values), num=len(values), sum=sum(values), sum_squares=sum(v * v for v in values),
        bucket_limit=edges[1:].tolist(), bucket=counts.tolist(),
    )  # fmt: skip


def _text(tag: str, lines: Sequence[str]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(lines))])
    tensor = TensorProto(dtype=DT_STRING, string_val=[line.encode() for line in lines], tensor_shape=shape)
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(tag=tag, tensor=tensor, metadata=SummaryMetadata(plugin_data=plugin))
