"""Job of a rank of `test_trainer_data_parallel.py`: train on its share and leave a checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from slime_core.config import Args
from slime_core.plugins.resolve import resolve
from slime_core.protocols import MicroBatchOutput
from slime_core.sample import TrainBatch


def trained(job: dict[str, Any], save: str) -> tuple[list[dict[str, float]], list[str]]:
    """Return the metrics of the steps and what was logged."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    trainer = resolve("trainers", job["trainer"], origin="the test").obj(Args(**job["args"]))
    if job["load"]:
        trainer.load(Path(job["load"]))
    metrics = []
    for columns in job["batches"]:
        whole = TrainBatch(**columns)
        batch = whole.select(range(trainer.rank, len(whole), trainer.world_size))
        total = sum(whole.response_lengths)
        micro_batches = [[i] for i in range(len(batch))]
        if job["args"].get("use_opd"):  # each sample's weight is what its teacher says of it
            taught = trainer.log_probs(batch, micro_batches, role="teacher")
            batch.rewards = [reward * part.mean().item() for reward, part in zip(batch.rewards, taught, strict=True)]

        def loss_fn(
            output: MicroBatchOutput, batch: TrainBatch = batch, total: int = total
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            parts = torch.split(output.log_probs, [batch.response_lengths[i] for i in output.positions])
            weighted = [batch.rewards[i] * part.sum() for i, part in zip(output.positions, parts, strict=True)]
            loss = -torch.stack(weighted).sum() / total
            return loss, {"loss": loss}

        before = trainer.log_probs(batch, micro_batches)
        metrics.append(trainer.train_step(batch, micro_batches, loss_fn).metrics)
        count = trainer.all_reduce(torch.tensor([float(sum(len(part) for part in before))]))
        assert count.item() == total
    word = trainer.broadcast(json.dumps(metrics).encode() if trainer.rank == 0 else None)
    assert json.loads(word) == metrics, "ranks disagree about the metrics"
    trainer.save(Path(save))
    trainer.close()
    left = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert not any("gloo" in name for name in left), "a thread of gloo's may abort the process at its end"
    return metrics, logged
