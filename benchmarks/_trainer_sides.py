"""Process of one rank of one side of `trainers.py`: runs "step", "export" and "copy" as requested on its stdin.

`trainers.py` starts it with the job as JSON in argv[1], and reads one line of JSON per answer. All sides take the same
optimizer step: the same weights, samples and micro-batches, the clipped surrogate loss of GRPO summed over response
tokens and divided by their number, gradients clipped to norm 1, AdamW. The old log-probs are those of the first step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _measure import PeakMemory, resident, wait_for
from trainer import LR, make_samples, micro_batches, train_batch

from slime_core.config import Args
from slime_core.protocols import MicroBatchOutput

Metrics = dict[str, float]
SETTINGS = {"lr": LR, "lr_decay_style": "constant", "clip_grad": 1.0, "weight_decay": 0.0, "adam_eps": 1e-8}
CLIP_LOW, CLIP_HIGH = 0.8, 1.28


class Surrogate:
    """GRPO's loss of one step, independent of the side that computes the log-probs.

    Args:
        samples: (tokens, response length) of all ranks.
        device: Device of the log-probs.
        rank: Data-parallel rank, which has every `ranks`-th of the samples.
        ranks: Number of data-parallel ranks.
    """

    def __init__(self, samples: list[tuple[list[int], int]], device: str, rank: int, ranks: int) -> None:
        self.samples, self._device = samples[rank::ranks], device
        generator = torch.Generator().manual_seed(0)
        self._advantages = torch.randn(len(samples), generator=generator).tolist()[rank::ranks]
        self._tokens = sum(response for _, response in samples)
        self._old: dict[int, torch.Tensor] = {}

    def __call__(self, output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        lengths = [self.samples[p][1] for p in output.positions]
        for position, log_probs in zip(output.positions, torch.split(output.log_probs.detach(), lengths)):
            self._old.setdefault(position, log_probs.clone())
        old = torch.cat([self._old[p] for p in output.positions])
        weights = torch.tensor([self._advantages[p] for p in output.positions], device=self._device)
        advantages = weights.repeat_interleave(torch.tensor(lengths, device=self._device))
        ratio = (output.log_probs - old).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(CLIP_LOW, CLIP_HIGH) * advantages)
        loss = -surrogate.sum() / self._tokens
        return loss, {"loss": loss, "log_probs": output.log_probs.sum() / self._tokens}


def slime_trainer(job: dict[str, Any]) -> Any:
    """Return the trainer that `job["trainer"]` names."""
    layout = {"tensor_model_parallel_size": job["tensor"], "pipeline_model_parallel_size": job["pipeline"]}
    args = Args(
        hf_checkpoint=job["model"], device=job["device"], dtype=job["dtype"], distributed_timeout_minutes=5,
        model_impl=job["impl"], **SETTINGS,
    )  # fmt: skip
    if job["trainer"] == "embedded":
        from slime_embedded.trainer.trainer import EmbeddedTrainer

        return EmbeddedTrainer(args)
    if job["trainer"] == "fsdp":
        from slime_embedded.fsdp.trainer import FsdpTrainer

        return FsdpTrainer(args)
    from slime_trainer_megatron.trainer import MegatronTrainer

    return MegatronTrainer(args.model_copy(update={k: v for k, v in layout.items() if v > 1}))


def slime_step(trainer: Any, loss_fn: Surrogate) -> Callable[[], Metrics]:
    batch, micro = train_batch(loss_fn.samples), micro_batches(len(loss_fn.samples))
    return lambda: dict(trainer.train_step(batch, micro, loss_fn).metrics)


def plain_step(job: dict[str, Any], samples: list[tuple[list[int], int]], loss_fn: Surrogate) -> Callable[[], Metrics]:
    """Return a step of transformers and torch alone; bfloat16 is autocast over float32 weights."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    device, single = job["device"], job["single"]
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation=job["attention"]
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def log_probs(positions: list[int]) -> torch.Tensor:
        """Return [R] log-probs of the response tokens, samples end to end: padded to the longest, or one pass each."""
        longest = max(len(samples[i][0]) for i in positions)
        ids = torch.zeros(len(positions), longest, dtype=torch.long)
        attention = torch.zeros_like(ids)
        for row, i in enumerate(positions):
            ids[row, : len(samples[i][0])] = torch.tensor(samples[i][0])
            attention[row, : len(samples[i][0])] = 1
        ids, attention = ids.to(device), attention.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=job["dtype"] == "bfloat16"):
            logits = model(input_ids=ids, attention_mask=None if single else attention, use_cache=False).logits
        found = torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        parts = []
        for row, i in enumerate(positions):
            length, response = len(samples[i][0]), samples[i][1]
            parts.append(found[row, length - response - 1 : length - 1])
        return torch.cat(parts)

    def step() -> Metrics:
        optimizer.zero_grad()
        totals: Metrics = {}
        for positions in micro_batches(len(samples)):
            for taken in [[p] for p in positions] if single else [positions]:
                loss, metrics = loss_fn(MicroBatchOutput(taken, log_probs(taken)))
                loss.backward()
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + value.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {**totals, "grad_norm": norm.item()}

    return step


def timed(work: Callable[[], Any], device: str) -> tuple[Any, float, float]:
    """Run `work` and return its result, the seconds, and the seconds of this process's processor time."""
    wait_for(device)
    started, used = time.perf_counter(), time.process_time()
    found = work()
    wait_for(device)
    return found, time.perf_counter() - started, time.process_time() - used


class StepRank:
    """Runs "step" requests; the caller uses the first step as a warm-up."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._device = job["device"]
        cuda = self._device.startswith("cuda")
        _import(job)
        before = resident(cuda)
        samples = make_samples(job["samples"], job["vocab"])
        ranks = job["data"]
        loss_fn = Surrogate(samples, self._device, job["rank"] % ranks, ranks)
        if job["trainer"] == "plain":
            self._step = plain_step(job, samples, loss_fn)
        else:
            self._step = slime_step(slime_trainer(job), loss_fn)
        self._peak, self._before = 0.0, before

    def step(self) -> dict[str, Any]:
        with PeakMemory(self._device) as memory:
            metrics, wall, cpu = timed(self._step, self._device)
        self._peak = max(self._peak, memory.total)
        return {"wall": wall, "cpu": cpu, "metrics": metrics, "peak": self._peak, "before": self._before}


class ExportRank:
    """Runs "export" requests (all of `named_weights`, into buckets on rank 0) and "copy" requests (the same bytes,
    memory to memory)."""

    def __init__(self, job: dict[str, Any]) -> None:
        from slime_engine_http.weights.buckets import Buffers

        self._device, self._bucket = job["device"], job["bucket_mib"] << 20
        self._trainer = slime_trainer(job)
        self._leads = job["rank"] == 0
        host = not self._device.startswith("cuda")
        self._buffers = Buffers(shared=host, keep=False, device=None if host else torch.device(self._device))
        weights = [tensor.clone() for _, tensor in self._trainer.named_weights()]
        self._source = weights if self._leads else []
        self._target = [torch.empty_like(tensor) for tensor in self._source]

    def export(self) -> dict[str, Any]:
        nbytes, wall, cpu = timed(self._export, self._device)
        return {"wall": wall, "cpu": cpu, "bytes": nbytes}

    def _export(self) -> int:
        from slime_engine_http.weights.buckets import group_tensors

        weights, total = self._trainer.named_weights(), 0
        if not self._leads:
            assert not list(weights)
            return 0
        for named, _ in group_tensors(weights, self._bucket):
            total += self._buffers.fill(named).nbytes
        return total

    def copy(self) -> dict[str, Any]:
        def work() -> None:
            for source, target in zip(self._source, self._target, strict=True):
                target.copy_(source)

        _, wall, cpu = timed(work, self._device)
        return {"wall": wall, "cpu": cpu}


def _import(job: dict[str, Any]) -> None:
    """Import the modules that the side needs, so that the measured memory does not include imports."""
    if job["trainer"] == "plain":
        import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    elif job["trainer"] in ("embedded", "fsdp"):
        pass
    else:
        import megatron.core.models.gpt
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel  # noqa: F401
        import slime_trainer_megatron.trainer  # noqa: F401


def main() -> None:
    job = json.loads(sys.argv[1])
    # Libraries print to stdout, but the caller reads only lines of JSON.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(job["threads"])
    rank: Any = StepRank(job) if job["what"] == "step" else ExportRank(job)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(getattr(rank, line.strip())()), file=answers, flush=True)


if __name__ == "__main__":
    main()
