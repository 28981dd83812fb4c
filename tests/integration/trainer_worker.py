"""One data-parallel process of `test_trainer_data_parallel.py`: trains on its share and leaves a checkpoint.

Usage: trainer_worker.py JOB.json, under the environment torchrun would set.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from slime_core.config import Args
from slime_core.plugins.resolve import resolve
from slime_core.protocols import MicroBatchOutput
from slime_core.sample import TrainBatch


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    trainer = resolve("trainers", job["trainer"], origin="the test").obj(Args(**job["args"]))
    assert trainer.world_size == int(os.environ.get("WORLD_SIZE", "1"))
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
    trainer.save(Path(job["save"]))
    (Path(job["save"]) / f"metrics_{trainer.rank}.json").write_text(json.dumps(metrics))
    trainer.close()


if __name__ == "__main__":
    main()
