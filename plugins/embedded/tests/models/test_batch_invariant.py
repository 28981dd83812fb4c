"""Bits do not depend on the batch: engine against trainer, and against the ordinary forward pass to tolerance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_embedded.engine.core import CoreOptions, EngineCore
from slime_embedded.models.batch_invariant import BatchInvariantForward, SequenceTiles
from slime_embedded.models.decoder import Decoder
from slime_embedded.models.logprobs import token_log_probs
from slime_embedded.trainer.trainer import EmbeddedTrainer

from slime_core.config import Args
from slime_core.models.config import load_model_config
from slime_core.models.hf_io import read_weights
from tests.batches import train_batch
from tests.tiny_models import VARIANTS

SLOW = pytest.mark.slow
MakeModel = Callable[..., tuple[Path, Any]]


@pytest.mark.parametrize("variant", ["llama-biases", "qwen2", "qwen3"])
def test_forward_and_gradients_are_those_of_the_decoder(variant: str, make_model: MakeModel) -> None:
    directory, _ = make_model(variant)
    config = load_model_config(directory)
    decoder = Decoder.from_weights(config, read_weights(directory))
    lengths = [5, 70, 1, 130]
    ids, targets = torch.randint(0, 97, (2, sum(lengths)))
    tiles, forward = SequenceTiles.of(lengths, torch.device("cpu")), BatchInvariantForward(decoder)
    results = []
    for hidden in (
        decoder.hidden(ids, lengths),
        forward.hidden(ids, tiles.positions, tiles.attend(forward.scale)),
    ):
        if not results:
            log_probs, entropy = token_log_probs(
                hidden, decoder.head_weight, targets, temperature=0.7, with_entropy=True
            )
        else:
            log_probs, entropy = forward.token_log_probs(hidden, targets, 0.7, with_entropy=True)
        assert entropy is not None
        decoder.zero_grad()
        (log_probs.sum() + 0.3 * entropy.sum()).backward()
        gradients = [p.grad.clone() for p in decoder.parameters() if p.grad is not None]
        results.append([log_probs.detach(), entropy.detach(), *gradients])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4)


def test_recompute_changes_no_bit(make_model: MakeModel) -> None:
    directory, _ = make_model("qwen3")
    config = load_model_config(directory)
    ids, lengths = torch.randint(0, 97, (40,)), [33, 7]
    found = []
    for recompute in (False, True):
        decoder = Decoder.from_weights(config, read_weights(directory), recompute=recompute)
        forward, tiles = BatchInvariantForward(decoder), SequenceTiles.of(lengths, torch.device("cpu"))
        hidden = forward.hidden(ids, tiles.positions, tiles.attend(forward.scale))
        hidden.square().sum().backward()
        found.append([hidden.detach(), *(p.grad for p in decoder.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _sampled(directory: Path, seed: int) -> list[Any]:
    """Sequences of many lengths, sampled together, with shared prefixes and changing batches."""
    core = EngineCore(
        load_model_config(directory), read_weights(directory), options=CoreOptions(batch_invariant=True, max_running=5)
    )
    generator = torch.Generator().manual_seed(seed)
    prefix = torch.randint(3, 97, (70,), generator=generator).tolist()
    sequences = []
    for i, (length, answer) in enumerate([(3, 100), (3, 9), (1, 40), (60, 80), (64, 2), (65, 1), (20, 150), (7, 33)]):
        prompt = prefix[: length // 2] + torch.randint(3, 97, (length - length // 2,), generator=generator).tolist()
        params = {"temperature": 0.7, "max_new_tokens": answer, "ignore_eos": True, "sampling_seed": i}
        sequences.append(core.add_request(prompt, params, str(i)))
        if i == 1:  # the same prompt again, which copies the row
            sequences.append(core.add_request(prompt, {**params, "sampling_seed": 99}, "twin"))
    while core.has_work:
        core.step()
    return sequences


@pytest.mark.parametrize("variant", [pytest.param(name, marks=() if name == "qwen3" else SLOW) for name in VARIANTS])
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=SLOW)])
@pytest.mark.timeout(900)  # two threads that wait for each other take long where others work
def test_engine_and_trainer_agree_bit_for_bit(variant: str, threads: int, make_model: MakeModel) -> None:
    directory, _ = make_model(variant)
    torch.set_num_threads(threads)
    try:
        sequences = _sampled(directory, seed=3)
        n = len(sequences)
        responses = [len(s.log_probs) for s in sequences]
        batch = train_batch([[1] * r for r in responses], tokens=[s.tokens for s in sequences])
        args = Args(
            hf_checkpoint=str(directory), true_on_policy_mode=True, rollout_temperature=0.7, dtype="float32", lr=1e-3,
            lr_decay_style="constant", lr_decay_iters=1,
            device="cpu",
        )  # fmt: skip
        trainer = EmbeddedTrainer(args)
        engine = [torch.tensor(s.log_probs) for s in sequences]
        for micro_batches in ([list(range(n))], [[i] for i in range(n)], [[2, 0], [8, 1, 3], [4, 5, 6, 7]]):
            for i, found in enumerate(trainer.log_probs(batch, micro_batches)):
                assert torch.equal(found, engine[i]), (variant, i)
        seen = {}

        def loss_fn(output: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            values = torch.split(output.log_probs, [responses[i] for i in output.positions])
            seen.update(zip(output.positions, (v.detach() for v in values)))
            return -output.log_probs.sum() / sum(responses), {}

        trainer.train_step(batch, [[2, 0, 4], [8, 1, 3, 5, 6, 7]], loss_fn, with_entropy=True)
        assert all(torch.equal(seen[i], engine[i]) for i in range(n))
        trainer.close()
    finally:
        torch.set_num_threads(1)
