"""The contract of trainers: log-probs, values, optimizer steps, and a state that is restored bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from slime_core.ops import l2_norm
from slime_core.plugins.signatures import declared
from slime_core.protocols import Args, MicroBatchOutput, StepResult, TrainerTraits, traits_of
from slime_core.sample import TrainBatch
from slime_testing_contracts.base import Contract
from slime_testing_contracts.engine_reference import weights
from slime_testing_contracts.tiny import tiny_model, tiny_moe_model

LENGTHS = (3, 1, 6, 4)
_MIS = {
    "custom_tis_function_path": "mis", "tis_clip": 2.0, "tis_level": "token", "tis_mode": "truncate", "use_rs": True,
    "rs_level": "sequence", "rs_lower_bound": 0.5, "rs_upper_bound": 2.0, "use_tis": True,
}  # fmt: skip
SPLITS = ([[0, 1, 2, 3]], [[2], [3, 0], [1]])


def example_batch(num_tokens: int = 14) -> TrainBatch:
    """Return four samples of the tiny model's tokens; the last token of the third sample is masked."""
    generator = torch.Generator().manual_seed(6)
    tokens = [torch.randint(2, num_tokens, (3 + n,), generator=generator).tolist() for n in LENGTHS]
    masks = [[1] * n for n in LENGTHS]
    masks[2][-1] = 0
    return TrainBatch(
        rollout_id=0, tokens=tokens, response_lengths=list(LENGTHS), loss_masks=masks, rewards=[0.0] * 4,
        raw_rewards=[0.0] * 4, truncated=[0] * 4, sample_indices=list(range(4)), group_indices=[0, 0, 1, 1],
        rollout_ids=list(range(4)), rollout_mask_sums=[sum(mask) for mask in masks],
    )  # fmt: skip


class TrainerContract(Contract):
    """The suite of trainers, on one process; `args` sets a learning rate with a visible effect."""

    kind = "trainers"
    tolerance: ClassVar[float] = 2e-3
    """Largest allowed difference of log-probs to a float32 forward pass."""
    default_args: ClassVar[Mapping[str, Any]] = {
        "num_threads": 1, "lr": 1e-3, "lr_decay_style": "constant", "lr_warmup_iters": 0, "num_rollout": 10,
        "global_batch_size": 4, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_steps_per_rollout": 1,
        "train_iters": 10,
    }  # fmt: skip

    @property
    def settings(self) -> Args:
        """Settings with a tiny random model as `hf_checkpoint`."""
        return super().settings.model_copy(update={"hf_checkpoint": str(tiny_model()), **self.args})

    @contextmanager
    def built(self, **keywords: Any) -> Iterator[Any]:
        """Yield a trainer and close it at the end."""
        trainer = self.resolved.obj(self.settings, **keywords)
        try:
            yield trainer
        finally:
            trainer.close()

    def step(self, trainer: Any, micro_batches: Sequence[Sequence[int]]) -> dict[str, float]:
        """Return the metrics of `step_result`."""
        return self.step_result(trainer, micro_batches).metrics

    def step_result(self, trainer: Any, micro_batches: Sequence[Sequence[int]]) -> StepResult:
        """Run a step of supervised learning; the loss is minus the mean log-prob of the unmasked tokens."""
        batch = example_batch()
        total = sum(map(sum, batch.loss_masks))

        def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mask = torch.tensor([m for p in output.positions for m in batch.loss_masks[p]], dtype=torch.float32)
            loss = -(output.log_probs * mask.to(output.log_probs.device)).sum() / total
            return loss, {"loss": loss.detach()}

        result = trainer.train_step(batch, micro_batches, loss_fn)
        assert isinstance(result, StepResult), f"train_step() returns a StepResult; found {type(result).__name__}"
        return result

    def test_log_probs_are_the_models(self) -> None:
        """Check for a float32 tensor [response_length] per sample, without gradient, for every split of the samples."""
        from slime_embedded.models.decoder import Decoder

        from slime_core.models.config import load_model_config

        batch = example_batch()
        decoder = Decoder.from_weights(load_model_config(tiny_model()), weights().items())
        temperature = self.settings.rollout_temperature
        with self.built() as trainer:
            for micro_batches in SPLITS:
                found = trainer.log_probs(batch, micro_batches)
                shapes = [tuple(part.shape) for part in found]
                assert shapes == [(n,) for n in LENGTHS], f"expected shapes {[(n,) for n in LENGTHS]}; found {shapes}"
                for part, tokens, length in zip(found, batch.tokens, LENGTHS):
                    assert part.dtype == torch.float32, f"log-probs are float32; found {part.dtype}"
                    assert not part.requires_grad, "log_probs() carries a gradient"
                    with torch.no_grad():
                        logits = decoder(torch.tensor(tokens), [len(tokens)])[-length - 1 : -1] / temperature
                    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[-length:])[:, None])[:, 0]
                    gap = (part.cpu() - expected).abs().max().item()
                    assert gap <= self.tolerance, f"log-probs are up to {gap:.2g} from a plain forward pass"

    def test_entropy_comes_along(self) -> None:
        """Check that entropies have the same shapes and are not negative, and that log-probs equal `log_probs`."""
        batch = example_batch()
        with self.built() as trainer:
            log_probs, entropy = trainer.log_probs_and_entropy(batch, SPLITS[1])
            alone = trainer.log_probs(batch, SPLITS[1])
        assert [tuple(part.shape) for part in entropy] == [(n,) for n in LENGTHS], "one entropy per response token"
        assert all(bool((part >= 0).all()) for part in entropy), "an entropy is negative"
        for one, other in zip(log_probs, alone):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

    def test_over_logits_reads_whole_distributions(self) -> None:
        """Check that `over_logits` returns the rows of `log_probs`, in all their columns; skip a trainer without it."""

        def read(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scores = logits.log_softmax(-1)
            return scores.gather(1, targets[:, None])[:, 0], scores.exp()

        batch = example_batch()
        with self.built() as trainer:
            if not hasattr(trainer, "over_logits"):
                pytest.skip("it has no over_logits")
            for micro_batches in SPLITS:
                expected = trainer.log_probs(batch, micro_batches)
                log_probs, wholes = trainer.over_logits(batch, micro_batches, read, role="actor")
                for one, other, whole in zip(log_probs, expected, wholes, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
                    torch.testing.assert_close(whole.sum(-1), torch.ones_like(one), rtol=1e-5, atol=1e-5)

    def test_steps_lower_a_loss(self) -> None:
        """Run ten steps of supervised learning; check the loss and the metrics `loss`, `grad_norm` and `lr`."""
        with self.built() as trainer:
            losses = [self.step(trainer, SPLITS[0]) for _ in range(10)]
        missing = {"loss", "grad_norm", "lr"} - losses[0].keys()
        assert not missing, f"train_step must report {sorted(missing)}"
        assert losses[0]["grad_norm"] > 0, "the gradient of the first step is zero"
        first, last = losses[0]["loss"], losses[-1]["loss"]
        assert last < first, f"ten steps raised the loss from {first:.4f} to {last:.4f}"

    def test_a_step_returns_the_log_probs_before_it(self) -> None:
        """Check that a step returns detached log-probs by position, as `log_probs`, for its micro-batches only."""
        chosen = SPLITS[1][:2]
        with self.built() as trainer:
            before = trainer.log_probs(example_batch(), SPLITS[0])
            found = self.step_result(trainer, chosen).log_probs
        assert sorted(found) == sorted(i for part in chosen for i in part), f"of other samples: {sorted(found)}"
        for position, part in found.items():
            assert not part.requires_grad, "the log-probs in a StepResult carry a gradient"
            gap = (part - before[position]).abs().max().item()
            assert gap <= self.tolerance, f"a step's log-probs are up to {gap:.2g} from those before it"

    def test_no_split_changes_the_step(self) -> None:
        """Check that gradients and metrics are summed over micro-batches."""
        outcomes = []
        for micro_batches in SPLITS:
            with self.built() as trainer:
                metrics = self.step(trainer, micro_batches)
                outcomes.append((metrics["loss"], metrics["grad_norm"]))
        assert outcomes[1] == pytest.approx(outcomes[0], rel=1e-3), (
            f"(loss, grad_norm) depend on the micro-batches: {outcomes[0]} in one, {outcomes[1]} in three"
        )

    @pytest.mark.parametrize("normalized", [False, True])
    def test_rows_that_a_correction_rejects_move_nothing_else(self, normalized: bool) -> None:
        """Check that the rewards of a group rejected by `mis` do not change the update of the other group, bit for bit.

        In verl's pull request 6452, rejected rows remained in the statistics of accepted rows.
        """
        from slime_corrections.mis import MismatchImportanceSampling

        from slime_core.estimator import EstimatorBase
        from slime_core.learning.corrector import Corrector
        from slime_core.learning.learner import Learner
        from slime_core.learning.loss import PolicyLoss

        settings = {**_MIS, "compute_advantages_and_returns": True, "normalize_advantages": normalized, **self.args}
        args = self.settings.model_copy(update=settings)
        outcomes = []
        for of_rejected in ([1.0, -1.0], [700.0, 0.0]):
            batch = example_batch()
            with self.built() as trainer:
                sampled = [part.tolist() for part in trainer.log_probs(batch, SPLITS[0])]
                batch.rollout_log_probs = [[p - 9.0 for p in part] for part in sampled[:2]] + sampled[2:]
                batch.rewards = batch.raw_rewards = [*of_rejected, 1.0, -1.0]
                estimator = EstimatorBase(args)
                loss: Any = PolicyLoss(args, estimator, Corrector(args, MismatchImportanceSampling(args)))
                metrics = Learner(args, trainer, estimator, loss).train(0, batch)
                rejected = metrics["train/mis_rejected_fraction"]
                outcomes.append({name: part.detach().cpu().clone() for name, part in trainer.named_weights()})
            assert 0 < rejected < 1, f"a group of two is to be rejected; train/mis_rejected_fraction is {rejected}"
        initial = weights()
        assert any(not torch.equal(part.float(), initial[name].float()) for name, part in outcomes[0].items())
        wrong = [name for name, part in outcomes[0].items() if not torch.equal(part, outcomes[1][name])]
        assert not wrong, f"rewards of rejected rows changed {wrong[:5]}"

    def test_weights_have_the_checkpoints_names(self) -> None:
        """Check that `named_weights` has all HF names and shapes, with the loaded values."""
        expected = weights()
        with self.built() as trainer:
            found = {name: tensor.detach().cpu().float() for name, tensor in trainer.named_weights()}
        wrong = sorted(found.keys() ^ expected.keys())
        assert not wrong, f"named_weights() and the checkpoint differ in {wrong[:5]}"
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor.float()), f"{name} is not what the checkpoint holds"

    def test_a_saved_trainer_goes_on_bit_for_bit(self) -> None:
        """Check that a loaded trainer continues exactly, with optimizer state; `save` writes an HF-layout model."""
        directory = Path(str(self.folder)) / "checkpoint"
        directory.mkdir()
        with self.built() as trainer:
            self.step(trainer, SPLITS[1])
            trainer.save(directory)
            expected = self.step(trainer, SPLITS[1])
            weights_then = {name: tensor.detach().clone() for name, tensor in trainer.named_weights()}
        assert (directory / "config.json").is_file(), "save() must write an HF-layout model: there is no config.json"
        with self.built() as trainer:
            trainer.load(directory)
            found = self.step(trainer, SPLITS[1])
            for name, tensor in trainer.named_weights():
                assert torch.equal(tensor, weights_then[name]), f"after save and load the next step differs in {name}"
        differ = {k: (expected[k], found.get(k)) for k in ("loss", "grad_norm", "lr") if expected[k] != found.get(k)}
        assert not differ, f"after save and load the next step reports other numbers: {differ}"

    def test_offloading_changes_no_bit(self) -> None:
        """Compare steps, weights and checkpoints with and without `offload`; skipped without `offload`."""
        if not hasattr(self.resolved.obj, "offload"):
            pytest.skip("its class has no `offload`")
        directory = Path(str(self.folder)) / "offloaded"
        directory.mkdir()
        with self.built() as trainer:
            self.step(trainer, SPLITS[1])
            expected = self.step(trainer, SPLITS[1])
            weights_then = {name: tensor.detach().clone() for name, tensor in trainer.named_weights()}
        with self.built() as trainer:
            trainer.offload()  # as before the first rollout
            trainer.offload()
            trainer.onload()
            self.step(trainer, SPLITS[1])
            trainer.offload()
            trainer.save(directory)
            trainer.onload()
            trainer.onload()
            found = [self.step(trainer, SPLITS[1])]
            trainer.offload()
            for name, tensor in trainer.named_weights():
                assert torch.equal(tensor, weights_then[name]), f"after offload and onload a step differs in {name}"
        with self.built() as trainer:
            trainer.load(directory)
            found.append(self.step(trainer, SPLITS[1]))
        for metrics in found:
            differ = {k: (expected[k], metrics.get(k)) for k in ("loss", "grad_norm") if expected[k] != metrics.get(k)}
            assert not differ, f"after offload and onload a step reports other numbers: {differ}"

    def test_a_critic_answers_values(self) -> None:
        """Check for a float32 value per response token; skipped for a trainer without the keyword `role`."""
        if not declared(self.resolved.obj, ("role",)):
            pytest.skip("it has no critic: its class takes no keyword `role`")
        batch = example_batch()
        with self.built() as actor, self.built(role="critic") as critic:
            assert actor.world_size == critic.world_size
            for micro_batches in SPLITS:
                found = critic.values(batch, micro_batches)
                shapes = [tuple(part.shape) for part in found]
                assert shapes == [(n,) for n in LENGTHS], f"expected shapes {[(n,) for n in LENGTHS]}; found {shapes}"
                assert all(torch.isfinite(part).all() for part in found), "a value is not finite"

    def test_log_probs_are_over_what_was_sampled_among(self) -> None:
        """Check log-probs with `TrainBatch.rollout_top_p_*`; skipped if the class does not declare `sampling_mask`.

        The test also checks a whole step against the gradient of the kept tokens' log-probs, computed in float64 from
        the logits of a plain pass.
        """
        from slime_embedded.models.decoder import Decoder

        from slime_core.models.config import load_model_config

        if not traits_of(self.resolved.obj, TrainerTraits).sampling_mask:
            pytest.skip("its traits do not say `sampling_mask`")
        decoder = Decoder.from_weights(load_model_config(tiny_model()), weights().items()).double()
        temperature, vocab = self.settings.rollout_temperature, decoder.config.vocab_size
        batch, generator = example_batch(), torch.Generator().manual_seed(8)
        kept: list[list[list[int]]] = []
        for i, (tokens, length) in enumerate(zip(batch.tokens, LENGTHS)):
            sizes = [(i + token) % 4 for token in tokens[-length:]]
            drawn = [torch.randperm(vocab, generator=generator)[:size].tolist() for size in sizes]
            kept.append([sorted({*ids, t}) if ids else [] for ids, t in zip(drawn, tokens[-length:])])
        batch.rollout_top_p_token_ids = [[t for ids in row for t in ids] for row in kept]
        batch.rollout_top_p_token_offsets = [list(accumulate(map(len, row), initial=0)) for row in kept]
        expected = []
        for row, tokens, length in zip(kept, batch.tokens, LENGTHS):
            z = decoder(torch.tensor(tokens), [len(tokens)])[-length - 1 : -1].double() / temperature
            expected.append(torch.stack([
                at[t] - at[ids or list(range(vocab))].logsumexp(0) for at, ids, t in zip(z, row, tokens[-length:])
            ]))  # fmt: skip
        total = sum(map(sum, batch.loss_masks))
        masks = [torch.tensor(mask, dtype=torch.float32) for mask in batch.loss_masks]
        torch.autograd.backward(-(torch.cat(expected) * torch.cat(masks)).sum() / total)
        norm = float(l2_norm(p.grad for p in decoder.parameters() if p.grad is not None))

        def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mask = torch.cat([masks[p] for p in output.positions]).to(output.log_probs.device)
            loss = -(output.log_probs * mask).sum() / total
            return loss, {"loss": loss.detach()}

        for micro_batches in SPLITS:
            with self.built() as trainer:
                found = trainer.log_probs(batch, micro_batches)
                metrics = trainer.train_step(batch, micro_batches, loss_fn).metrics
            gap = max((a.cpu() - b.detach()).abs().max().item() for a, b in zip(found, expected))
            assert gap <= self.tolerance, f"log-probs are up to {gap:.2g} from those over the kept tokens"
            assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-2), "the gradient is not that of these log-probs"

    def test_given_experts_are_used(self) -> None:
        """Check routing replay; skipped for a trainer whose class does not declare `routing_replay`."""
        from slime_embedded.models.decoder import Decoder
        from slime_embedded.models.routing import FREE, Routing

        from slime_core.models.config import load_model_config
        from slime_core.models.hf_io import read_weights

        if not traits_of(self.resolved.obj, TrainerTraits).routing_replay:
            pytest.skip("its traits do not say `routing_replay`")
        checkpoint = tiny_moe_model(dense_layer=False)
        settings = self.settings.model_copy(update={"hf_checkpoint": str(checkpoint)})
        decoder = Decoder.from_weights(load_model_config(checkpoint), read_weights(checkpoint))
        temperature = settings.rollout_temperature
        batch, generator = example_batch(), torch.Generator().manual_seed(8)
        shapes = [(len(tokens) - 1, 3, 8) for tokens in batch.tokens]
        given = [torch.rand(shape, generator=generator).topk(2).indices for shape in shapes]
        trainer = self.resolved.obj(settings)
        try:
            batch.routed_experts = [experts.numpy().astype("int32") for experts in given]
            for micro_batches in SPLITS:
                found = trainer.log_probs(batch, micro_batches)
                for part, experts, tokens, length in zip(found, given, batch.tokens, LENGTHS):
                    ids, last = torch.tensor(tokens), torch.full((1, 3, 2), FREE)
                    with torch.no_grad():
                        hidden = decoder.hidden(ids, [len(ids)], routing=Routing(torch.cat((experts, last))))
                        logits = (hidden @ decoder.head_weight.T)[-length - 1 : -1] / temperature
                    expected = torch.log_softmax(logits, -1).gather(1, ids[-length:, None])[:, 0]
                    gap = (part.cpu() - expected).abs().max().item()
                    assert gap <= self.tolerance, f"with given experts log-probs are up to {gap:.2g} off"
            batch.routed_experts = [np.full((*shape[:2], 2), FREE, np.int32) for shape in shapes]
            trainer.log_probs(batch, SPLITS[1])
            for recorded, length in zip(batch.routed_experts, LENGTHS):
                assert (recorded[-length:] >= 0).all(), "log_probs() leaves -1 where it chose experts for a response"
        finally:
            trainer.close()
