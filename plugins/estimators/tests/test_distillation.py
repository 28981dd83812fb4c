"""The loss `distillation`: divergences against sums over a small vocabulary, unbiased estimates, and runs of it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_estimators.distillation import Options, pack_likeliest, unpack_likeliest
from slime_estimators.distillation.divergence import estimate
from slime_estimators.distillation.loss import Distillation, _likeliest
from slime_testing_contracts.tiny import tiny_model

from slime_core.config import load_settings
from slime_core.errors import ConfigError, TrainError
from slime_core.estimator import EstimatorBase
from slime_core.launch.checks import check_component_settings
from slime_core.launch.components import resolve_components
from slime_core.learning.loss import PolicyLoss
from slime_core.learning.tensors import TrainTensors
from slime_core.rollout.batch import make_batch as batch_of
from slime_core.sample import Sample, SampleStatus, TrainBatch
from slime_core.sample.provenance import TurnSpan
from tests.toy_trainer import VOCAB, ToyTrainer, make_args, make_batch
from tests.toy_trainer import learn as toy_learn

torch.set_num_threads(1)
V, BETA = 7, 0.3
DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")


# -- the formulas ----------------------------------------------------------------------------------------


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p * (p / q).log()).sum()


def true_divergence(name: str, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    m = BETA * q + (1 - BETA) * p
    return {"reverse_kl": kl(p, q), "forward_kl": kl(q, p), "jsd": BETA * kl(q, m) + (1 - BETA) * kl(p, m)}[name]


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a policy, and probabilities of a teacher and of an older policy."""
    generator = torch.Generator().manual_seed(seed)
    logits, teacher, old = (1.5 * torch.randn(V, generator=generator, dtype=torch.float64) for _ in range(3))
    return logits, teacher.softmax(0), old.softmax(0)


def estimates(
    logits: torch.Tensor, q: torch.Tensor, b: torch.Tensor, name: str, k: int, tail: str = "sampled"
) -> torch.Tensor:
    """The estimate for each sampled token, [V]."""
    log_p, ids = logits.log_softmax(0), q.topk(k).indices
    rows = torch.arange(V)
    return estimate(
        log_p[ids].expand(V, k), q.log()[ids].expand(V, k), log_p, q.log(), b.log(),
        torch.ones(V, k, dtype=torch.bool), torch.isin(rows, ids), divergence=name, beta=BETA, tail=tail,
    )  # fmt: skip


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("k", [0, 1, 3, V])
def test_value_and_gradient_are_unbiased_at_every_truncation(name: str, k: int) -> None:
    """The mean over all tokens that an older policy may have sampled is the sum over the vocabulary."""
    for seed in range(2):
        logits, q, b = distributions(seed)
        leaf = logits.clone().requires_grad_()
        true = true_divergence(name, leaf.softmax(0), q)
        (gradient,) = torch.autograd.grad(true, leaf)
        mean = (b * estimates(leaf, q, b, name, k)).sum()
        (found,) = torch.autograd.grad(mean, leaf)
        torch.testing.assert_close(mean, true, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, gradient, rtol=1e-11, atol=1e-12)
        if k == V:
            values = estimates(logits, q, b, name, k)
            assert values.tolist() == pytest.approx([true.item()] * V, rel=1e-12), "without a tail"


def test_the_bias_of_a_sum_over_the_likeliest_tokens() -> None:
    """ms-swift #10079: the plain sum is not least at the teacher, nor at least 0; MOPD's terms and a bucket are."""
    _, q, b = distributions(1)
    ids, leaf = q.topk(3).indices, q.log().clone().requires_grad_()
    p = leaf.softmax(0)
    plain = (p[ids] * (p[ids] / q[ids]).log()).sum()
    assert torch.autograd.grad(plain, leaf)[0].abs().max() > 0.05, "it pulls a policy away that is the teacher already"
    outside = (q.log() - 2.0 * torch.isin(torch.arange(V), ids)).softmax(0)
    assert (outside[ids] * (outside[ids] / q[ids]).log()).sum() < -0.1
    for tail in ("sampled", "bucket", "drop"):
        again = q.log().clone().requires_grad_()
        found = estimates(again, q, b, "reverse_kl", 3, tail)
        assert found.abs().max() < 1e-12
        assert torch.autograd.grad(found.sum(), again)[0].abs().max() < 1e-12
    for name in DIVERGENCES:
        for seed in range(5):
            logits, q, b = distributions(seed)
            true = true_divergence(name, logits.softmax(0), q)
            bucket, drop = (estimates(logits, q, b, name, 3, tail)[0] for tail in ("bucket", "drop"))
            assert 0 <= bucket <= true + 1e-12
            assert 0 <= drop <= true + 1e-12


log_probs = st.one_of(st.floats(-1e4, 0.0), st.sampled_from([0.0, -1e-8, -1e4, -88.0]))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(log_probs, log_probs, st.booleans()), min_size=3, max_size=3),
    st.tuples(log_probs, log_probs, st.floats(-40.0, 0.0), st.booleans()),
    st.sampled_from(DIVERGENCES), st.sampled_from(["sampled", "bucket", "drop"]),
)  # fmt: skip
def test_everything_is_finite(rows: list[Any], own: tuple[float, float, float, bool], name: str, tail: str) -> None:
    top_p, top_q = (torch.tensor([[row[i] for row in rows]]).requires_grad_() for i in (0, 1))
    p, q, b = (torch.tensor([value]).requires_grad_() for value in own[:3])
    known = torch.tensor([[row[2] for row in rows]])
    found = estimate(
        top_p, top_q.detach(), p, q.detach(), b.detach(), known, torch.tensor([own[3]]), divergence=name, tail=tail
    )
    gradients = torch.autograd.grad(found.sum(), [top_p, p], allow_unused=True)
    assert torch.isfinite(found).all()
    assert all(g is None or torch.isfinite(g).all() for g in gradients)


# -- the loss --------------------------------------------------------------------------------------------


def args_of(chosen: dict[str, Any] | None = None, **changes: Any) -> Any:
    given = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": "t", "opd_kl_coef": 0.0, "entropy_coef": 0.0}
    return make_args(**{**given, "loss_type": "distillation", "plugins": {"distillation": chosen or {}}, **changes})


learn = partial(toy_learn, loss=Distillation)


def unrewarded(rows: int = 8, **columns: Any) -> TrainBatch:
    batch = make_batch(rows, **columns)
    batch.rewards = [0.0] * rows
    return batch


def mean_divergence(batch: TrainBatch, trainer: ToyTrainer, name: str) -> float:
    """The mean over samples of the means over trained tokens, over the whole vocabulary."""
    total = 0.0
    for tokens, mask in zip(batch.tokens, batch.loss_masks):
        rows = torch.tensor(tokens)[-len(mask) - 1 : -1]
        pairs = ((weight.detach().T[rows]).softmax(-1) for weight in (trainer.weight, trainer.teacher))
        values = [true_divergence(name, p, q).item() for p, q in zip(*pairs)]
        total += sum(value * m for value, m in zip(values, mask)) / sum(mask)
    return total / len(batch)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_whole_vocabulary_is_the_true_divergence_and_falls(name: str) -> None:
    batch = unrewarded()
    chosen = {"divergence": name, "top_k": 2 * VOCAB, **({"beta": BETA} if name == "jsd" else {})}
    metrics, trainer = learn(args_of(chosen), batch)
    assert trainer.calls == ["log_probs actor 8", "over_logits teacher", "train_step"]
    before = mean_divergence(batch, ToyTrainer(), name)
    assert metrics["train/divergence"] == pytest.approx(before, rel=1e-5)
    assert metrics["train/loss"] == pytest.approx(before, rel=1e-5)
    assert metrics["train/teacher_top_mass"] == pytest.approx(1.0)
    assert metrics["train/outside_top"] == 0.0
    assert mean_divergence(batch, trainer, name) < before


def test_the_sampled_token_alone_is_the_gap_in_the_advantages() -> None:
    """The first step of `--use-opd` with the policy loss, without logits."""
    batch = make_batch()
    _, trainer = learn(args_of({"coef": 0.7}), batch)
    assert "over_logits" not in str(trainer.calls)
    _, other = learn(args_of(opd_kl_coef=0.7, loss_type="policy_loss"), batch, loss=PolicyLoss)
    assert (trainer.weight - ToyTrainer().weight).abs().max() > 1e-3
    torch.testing.assert_close(trainer.weight, other.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chosen", [{"top_k": 3}, {"top_k": 3, "tail": "bucket", "divergence": "jsd"}, {}])
def test_no_split_over_ranks_and_micro_batches_changes_anything(chosen: dict[str, Any]) -> None:
    batch = unrewarded(siblings=True, shift=-0.2)
    whole, trainer = learn(args_of(chosen, micro_batch_size=8, global_batch_size=2), batch)
    for world_size, size in ((1, 1), (2, 2)):
        args = args_of(chosen, micro_batch_size=size, global_batch_size=2)
        found, other = learn(args, batch, world_size)
        assert found == pytest.approx(whole, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(other.weight, trainer.weight, rtol=1e-6, atol=1e-7)


def test_a_teacher_on_a_server_is_the_same_teacher() -> None:
    local, server = unrewarded(), unrewarded()
    teacher, parts = ToyTrainer(), [list(range(8))]
    log_probs, ids, top = teacher.over_logits(server, parts, partial(_likeliest, 3), role="teacher")
    server.teacher_log_probs = [part.tolist() for part in log_probs]
    pairs = [[list(zip(*row)) for row in zip(t.tolist(), i.tolist())] for i, t in zip(ids, top)]
    server.train_metadata = [pack_likeliest(rows, 3) for rows in pairs]
    _, here = learn(args_of({"top_k": 3}), local)
    args = args_of({"top_k": 3}, opd_type="sglang", opd_teacher_load=None)
    _, there = learn(args, server)
    torch.testing.assert_close(there.weight, here.weight, rtol=1e-6, atol=1e-7)
    server.train_metadata[5] = None
    with pytest.raises(TrainError, match=r"sample 105 has no .* 3 likeliest .*--rm-type on_policy_distillation"):
        learn(args, server)


def test_masked_samples_need_no_teacher() -> None:
    batch = unrewarded()
    batch.loss_masks[0] = [0] * len(batch.loss_masks[0])
    batch.rollout_mask_sums[0] = 0
    batch.teacher_log_probs = [[math.nan if not m else -1.0 for m in mask] for mask in batch.loss_masks]
    rows = [[[(-0.1, 3)] if m else None for m in mask] for mask in batch.loss_masks]
    batch.train_metadata = [None, *(pack_likeliest(row, 1) for row in rows[1:])]
    metrics, trainer = learn(args_of({"top_k": 1}, opd_type="sglang", opd_teacher_load=None), batch)
    assert torch.isfinite(trainer.weight).all()
    assert all(value == value for name, value in metrics.items() if name.startswith("train/"))


def test_the_actor_with_a_prompt_that_says_more_is_its_own_teacher() -> None:
    """A bigram model sees the last token before the response; that of the teacher's prompt takes its place."""
    batch, prompts = unrewarded(), [[(i + 3) % VOCAB] if i % 2 else None for i in range(8)]
    batch.train_metadata = [{"teacher_prompt": prompt} for prompt in prompts]
    args = args_of({"top_k": VOCAB}, opd_type="self", opd_teacher_load=None)
    metrics, trainer = learn(args, batch)
    weight, total = ToyTrainer().weight.detach(), 0.0
    for prompt, tokens, mask in zip(prompts, batch.tokens, batch.loss_masks):
        rows = tokens[-len(mask) - 1 :]
        p = weight.T[rows[0]].softmax(-1)
        q = p if prompt is None else weight.T[prompt[-1]].softmax(-1)
        total += kl(p, q).item() * mask[0] / sum(mask) / 8
    assert metrics["train/divergence"] == pytest.approx(total, rel=1e-4)
    assert metrics["rollout/opd_reverse_kl"] != 0.0
    batch.train_metadata = None
    metrics, trainer = learn(args, batch)
    assert metrics["train/divergence"] == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(trainer.weight.detach(), weight, rtol=0, atol=1e-6)


# -- turns -----------------------------------------------------------------------------------------------


def weights_of(chosen: dict[str, Any], rollout_id: int = 0, own: list[float] | None = None) -> list[list[float]]:
    batch = make_batch(2)
    batch.rollout_id, masks = rollout_id, [torch.ones(6), torch.ones(2)]
    batch.response_lengths = [6, 2]
    batch.turns = [[TurnSpan(0, 2), TurnSpan(3, 4), TurnSpan(4, 6)], [TurnSpan(0, 2)]]
    batch.train_metadata = None if own is None else [{"teacher_turn_weights": own}, None]
    loss = Distillation(args_of(chosen), EstimatorBase(args_of()))
    return [part.tolist() for part in loss._turn_weights(batch, TrainTensors(masks))]


def test_turns_have_weights() -> None:
    assert weights_of({}) == [[1.0] * 6, [1.0] * 2]
    assert weights_of({"turn_weights": [1.0, 0.5]}) == [[1, 1, 1, 0.5, 0.5, 0.5], [1, 1]]
    assert weights_of({"turn_weights": [0.5]}, own=[2.0, 0.0, 1.0]) == [[1, 1, 1, 0, 0.5, 0.5], [0.5, 0.5]]
    depth = {"first_turns": 1, "turn_every": 10}
    assert [weights_of(depth, rollout)[0] for rollout in (9, 10, 20)] == [
        [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]
    ]  # fmt: skip
    assert weights_of({"first_turns": 2}, 1000)[0] == [1, 1, 1, 1, 0, 0]
    with pytest.raises(TrainError, match=r"'teacher_turn_weights'.* has 2 weights for 3 turns"):
        weights_of({}, own=[1.0, 1.0])


def test_weights_of_turns_of_a_removed_sample_are_not_read() -> None:
    samples = [
        Sample(index=i, group_index=0, tokens=[1, 2, 3, 4], response_length=3, loss_mask=[1, 0, 1], reward=1.0)
        for i in range(2)
    ]
    for sample in samples:
        sample.turns = [TurnSpan(0, 1), TurnSpan(2, 3)]
        sample.rollout_log_probs, sample.status = [-1.0] * 3, SampleStatus.COMPLETED
        sample.train_metadata = {"teacher_turn_weights": [2.0, 3.0]}
    samples[1].remove_sample = True
    batch = batch_of(args_of(), 0, [samples], None)
    loss = Distillation(args_of(), EstimatorBase(args_of()))
    weights = loss._turn_weights(batch, TrainTensors([torch.tensor(mask) for mask in batch.loss_masks]))
    assert weights[0].tolist() == [2, 1, 3]


def test_a_turn_of_weight_0_leaves_the_policy_alone() -> None:
    """Responses are two turns; the second has no weight, so tokens after its states keep their logits."""
    batch = unrewarded()
    batch.turns = [[TurnSpan(0, 1), TurnSpan(1, n)] for n in batch.response_lengths]
    metrics, trainer = learn(args_of({"top_k": VOCAB, "first_turns": 1}), batch)
    moved = (trainer.weight - ToyTrainer().weight).detach().abs().amax(0) > 0
    first = {tokens[-len(mask) - 1] for tokens, mask in zip(batch.tokens, batch.loss_masks)}
    assert {token for token in range(VOCAB) if moved[token]} == first
    whole, _ = learn(args_of({"top_k": VOCAB}), batch)
    assert metrics["train/divergence"] == pytest.approx(whole["train/divergence"]), "of all turns"
    assert metrics["train/loss"] < whole["train/loss"]


# -- settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"tail": "bucket"}, "tail bucket with top_k 0 compares nothing"),
        ({"turn_every": 2}, "turn_every adds turns to first_turns, which is not given"),
        ({"beta": 0.4}, "beta has no effect with divergence reverse_kl"),
        ({"turn_weights": [-1.0]}, "greater than or equal to 0"),
        ({"divergence": "js"}, "'reverse_kl', 'forward_kl' or 'jsd'"),
    ],
)
def test_options_that_contradict(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**chosen)


BASE = ["--hf-checkpoint", "m", "--prompt-data", "p", "--rm-type", "math", "--rollout-max-response-len", "8"]
OPD = ["--use-opd", "--opd-type", "self"]
DISTIL = [*BASE, "--loss-type", "distillation", "--num-rollout", "1", "--rollout-batch-size", "1"]


def checked(argv: list[str]) -> Any:
    found = load_settings(argv, env={})
    parts, _ = resolve_components(found)
    check_component_settings(found, parts)
    return found.args


def test_settings_of_a_run() -> None:
    assert checked([*DISTIL, *OPD]).opd_kl_coef == 0.0
    assert checked([*DISTIL, *OPD, "--opd-kl-coef", "0.5"]).opd_kl_coef == 0.5
    with pytest.raises(ConfigError, match=r"--loss-type 'distillation' .* needs a teacher; type --use-opd"):
        checked(DISTIL)
    cut = ["--use-sampling-mask", "--rollout-top-p", "0.9", "--set", "plugins.distillation.top_k=4"]
    with pytest.raises(ConfigError, match=r"--use-sampling-mask.*plugins.distillation.top_k 4"):
        checked([*DISTIL, *OPD, *cut])
    moving = [*DISTIL, "--set", "plugins.distillation.teacher_rate=0.05"]
    local = ["--use-opd", "--opd-type", "local", "--opd-teacher-load", str(tiny_model())]
    assert checked([*moving, *local])
    with pytest.raises(ConfigError, match=r"teacher_rate 0.05 moves a teacher in the trainer; type --opd-type local"):
        checked([*moving, *OPD])
    for more, said in ((["--lora-rank", "4"], "the teacher is the base"), (["--train-backend", "fsdp"], "keeps its")):
        with pytest.raises(ConfigError, match=f"teacher_rate 0.05: .*{said}"):
            checked([*moving, *local, *more])


def test_columns_travel_as_text() -> None:
    packed = pack_likeliest([[(-0.5, 7), (-1.25, 90_000)], None, [(-2.0, 1)]], 2)
    found = unpack_likeliest(packed, 3)
    assert found is not None
    assert found[0].tolist() == [[7, 90_000], [-1, -1], [1, -1]]
    np.testing.assert_array_equal(found[1], np.array([[-0.5, -1.25], [0, 0], [-2.0, 0]], "f4"))
    assert unpack_likeliest({}, 3) is None
    with pytest.raises(ValueError, match="cannot reshape"):
        unpack_likeliest(packed, 4)
