"""What the ranks of `test_weight_sync.py` run: steps of the Megatron trainer, its weights to an engine after each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from slime_trainer_megatron.trainer import MegatronTrainer

from slime_core.models.hf_io import read_weights
from slime_core.protocols import MicroBatchOutput
from slime_core.rollout.stage import deliver
from slime_core.sample import TrainBatch
from slime_core.weights.collective import FollowingWeights
from slime_core.weights.sync import WeightSync

RESPONSE = 6
PROMPT = list(range(20, 34))
PARAMS = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}


class Receiver:
    """A real engine, as `RolloutStage` hands weights to it."""

    def __init__(self, args: Any, engine: Any) -> None:
        self._args, self.engine, self._loop = args, engine, asyncio.Runner()
        self._loop.run(engine.start())

    @property
    def weight_transports(self) -> tuple[str, ...]:
        return tuple(self.engine.weight_transports)

    @property
    def engines(self) -> Sequence[object]:
        return [self.engine]

    def update_weights(self, transport: str, payload: Any, version: int) -> Any:
        return self._loop.run(deliver(self._args, self.engine, transport, payload, version))

    def differing_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str] | None:
        compare = getattr(self.engine, "differing_weights", None)
        return None if compare is None else list(self._loop.run(compare(weights)))

    def weight_checksums(self) -> Mapping[str, str]:
        return dict(self._loop.run(self.engine.weight_checksums()))

    def generated(self) -> tuple[list[int], list[float]]:
        """Tokens after `PROMPT`, and the log-probs they were drawn with."""
        found = self._loop.run(self.engine.generate(PROMPT, dict(PARAMS)))
        return found.token_ids, found.log_probs

    def close(self) -> None:
        self._loop.run(self.engine.stop())
        self._loop.close()


def batch(tokens: Sequence[list[int]], response: int = RESPONSE) -> TrainBatch:
    count = len(tokens)
    return TrainBatch(
        rollout_id=0, tokens=[list(ids) for ids in tokens], response_lengths=[response] * count,
        loss_masks=[[1] * response] * count, rewards=[1.0] * count, raw_rewards=[0.0] * count, truncated=[0] * count,
        sample_indices=list(range(count)), group_indices=[0] * count, rollout_ids=list(range(count)),
        rollout_mask_sums=[response] * count,
    )  # fmt: skip


def random_batch() -> TrainBatch:
    generator = torch.Generator().manual_seed(0)
    return batch([torch.randint(3, 90, (9 + i,), generator=generator).tolist() for i in range(4)])


def likelier(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -output.log_probs.sum(), {}


def pushed(args: Any, engine: str, transports: Sequence[str], folder: str) -> dict[str, Any]:
    """Transport -> what rank 0 saw after a step and a push; on the others how often they went through the weights."""
    trainer = MegatronTrainer(args)
    receiver = None
    try:
        leads = trainer.groups.rank == 0
        if leads:
            receiver = Receiver(args, _engine(engine, args))
        seen: dict[str, Any] = {}
        data = random_batch()
        for number, transport in enumerate(transports):
            args.update_weight_transport = transport
            args.update_weight_start_version = 10 * number
            args.run_dir = Path(folder) / f"{number}"
            args.update_weight_disk_dir = str(Path(folder) / "weights") if transport == "delta" else None
            trainer.train_step(data, [[0, 1], [2, 3]], likelier)
            weights: Any = WeightSync(args, trainer, receiver) if receiver else FollowingWeights(args, trainer)
            weights.push()
            seen[transport] = _compared(trainer, receiver)
        return seen
    finally:
        if receiver is not None:
            receiver.close()
        trainer.close()


def _engine(name: str, args: Any) -> Any:
    from slime_embedded.engine.engine import EmbeddedEngine
    from slime_engine_http.api.engine import HttpEngine

    class Launched(HttpEngine):
        """Whose servers see this machine's shared memory, as those do that a run has launched."""

        async def _find_workers(self) -> Any:
            pool, router = await super()._find_workers()
            for worker in pool.workers:
                worker.owned = True
            return pool, router

    return {"http": Launched, "embedded": EmbeddedEngine}[name](args)


def _compared(trainer: MegatronTrainer, receiver: Receiver | None) -> dict[str, Any]:
    """Largest gap between the log-probs that the engine drew with and the trainer's, and how far weights have moved."""
    drawn = torch.zeros(PARAMS["max_new_tokens"], 2, dtype=torch.float64)
    if receiver is not None:
        tokens, log_probs = receiver.generated()
        drawn = torch.tensor([tokens, log_probs], dtype=torch.float64).T.contiguous()
    torch.distributed.broadcast(drawn, 0)
    tokens = [int(token) for token in drawn[:, 0]]
    (own,) = trainer.log_probs(batch([PROMPT + tokens], len(tokens)), [[0]])
    start = dict(read_weights(Path(trainer.args.hf_checkpoint)))
    names = [(name, float((tensor - start[name]).abs().max())) for name, tensor in trainer.named_weights()]
    return {"gap": float((own.double() - drawn[:, 1]).abs().max()), "moved": dict(names)}
