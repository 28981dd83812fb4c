"""A rollout split into siblings counts once: everything is as without fan-out, stage by stage.

Siblings are copies here, so that "the same as without" is defined: rewards, advantages, losses, weights after training,
filters' decisions, buffers' order and metrics must not move, however many copies each execution has.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_corrections.mis import MismatchImportanceSampling
from slime_corrections.truncated import TruncatedImportanceSampling
from slime_estimators.dr_grpo import constant
from slime_runs.metrics import eval_metrics, rollout_metrics

from slime_core.config.schema import Args
from slime_core.learning.corrector import Corrector
from slime_core.learning.learner import Learner
from slime_core.learning.loss import PolicyLoss
from slime_core.learning.report import GAP
from slime_core.plugins.resolve import resolve
from slime_core.plugins.signatures import construct
from slime_core.rollout.batch import make_batch
from slime_core.rollout.evaluate import eval_columns
from slime_core.rollout.fate import spread
from slime_core.rollout.staleness import staleness_metrics
from slime_core.sample import Group, PrefixCacheInfo, Sample, SpecInfo
from slime_core.sample.types import executions
from tests.toy_trainer import VOCAB, Ranks, ToyTrainer, make_args

torch.set_num_threads(1)

FILTERS = ("band", "length", "nonzero_std", "nonzero_std_with_fallback")
BUFFERS = ("curriculum", "fifo", "priority", "replay", "stratified")
COUNTS = [3, 1, 2, 4, 1, 1, 2, 3]
"""Siblings of each execution."""


def make_groups(seed: int = 0, num_groups: int = 2, size: int = 4, *, masked: bool = False) -> list[Group]:
    """Scored groups with uneven responses, tool tokens and truncations; log-probs near the toy trainer's."""
    rng = random.Random(seed)
    groups: list[Group] = []
    for g in range(num_groups):
        groups.append([])
        for i in range(size):
            sample = Sample(group_index=g, index=g * size + i, row=g, tokens=[1, 2])
            sample.metadata = {"source_name": f"s{g % 2}", "num_turns": rng.randint(1, 3), "greedy_baseline": 0.5}
            for turn in range(rng.randint(1, 2)):
                n = rng.randint(1, 4)
                sample.append_response_tokens(
                    tokens=[rng.randrange(VOCAB) for _ in range(n)],
                    log_probs=[-rng.uniform(1.0, 3.0) for _ in range(n)],
                    meta_info={
                        "weight_version": str(3 + turn),
                        "finish_reason": {"type": rng.choice(["stop", "length"])},
                    },
                )
                sample.append_response_tokens(tokens=[rng.randrange(VOCAB)], trainable=False)
            sample.reward = rng.choice([0.0, 0.5, 1.0])
            sample.prefix_cache_info = PrefixCacheInfo(rng.randint(0, 4), 5)
            sample.spec_info = SpecInfo(rng.randint(1, 3), 4, 2, 6)
            groups[-1].append(sample)
    if masked:
        groups[0][1].remove_sample = True
        groups[1][2].fail("generate", "no luck")
    return groups


def fan(groups: Sequence[Group], counts: Sequence[int]) -> list[Group]:
    """The same groups with so many copies of each sample in a row, as `SampleRunner` returns them."""
    left = iter(counts)
    fanned = []
    for group in groups:
        fanned.append([])
        for sample in group:
            siblings = [copy.deepcopy(sample) for _ in range(next(left))]
            for sibling in siblings:
                sibling.rollout_id = sample.index if len(siblings) > 1 else None
            fanned[-1] += siblings
    return fanned


def deal(groups: Sequence[Group], counts: Sequence[int]) -> list[Group]:
    """As `fan`, but every token is trained in one of the copies only."""
    dealt = fan(groups, counts)
    for siblings in executions(sample for group in dealt for sample in group):
        for place, sibling in enumerate(siblings):
            for t in range(sibling.response_length):
                if t % len(siblings) != place:
                    sibling.withhold(t, t + 1, "dealt to a sibling")
    return dealt


def rollout_args(**changes: Any) -> Args:
    return Args(**{"rollout_max_response_len": 16, "rollout_batch_size": 8, **changes})


# -- training --------------------------------------------------------------------------------------------

OBJECTIVES: dict[str, dict[str, Any]] = {
    "per_rollout": {},
    "tis": {"use_tis": True},
    "mis_sequence": {"use_tis": True, "tis_batch_normalize": True, "tis_level": "sequence", "tis_clip": 5.0},
}
OVER_TOKENS: dict[str, dict[str, Any]] = {
    "per_rollout": {},
    "per_token": {"calculate_per_token_loss": True},
    "whitened": {"normalize_advantages": True},
    "constant": {"custom_pg_loss_reducer_function_path": "constant"},
    "constant_per_token": {"custom_pg_loss_reducer_function_path": "constant", "calculate_per_token_loss": True},
    "mis_token": {"use_tis": True, "tis_batch_normalize": True, "tis_mode": "mask", "tis_clip": 3.0},
}
"""Means and sums over tokens, for which the siblings of a response that was dealt out are the response."""
OF_TOKENS = ("cispo", "dr_grpo", "grpo", "max_rl", "rloo")
"""Estimators whose advantages and losses of a token do not depend on the other tokens of its sample."""
OF_ROLLOUTS = ("cispo", "grpo", "gspo", "max_rl", "ppo", "remax", "rloo")
"""Those that do not bring a sum or a mean over tokens along, in which copies of a token count as often."""


def learn(
    name: str | None, groups: list[Group], world_size: int = 1, **changes: Any
) -> tuple[dict[str, float], torch.Tensor, list[float]]:
    """Metrics, weights after two optimizer steps, and the shaped rewards by sample, first siblings only."""
    kind = resolve("estimators", name, origin="test").obj if name else None
    brought = {**getattr(kind, "defaults", {}), **getattr(kind, "requires", {})}
    common = {"entropy_coef": 0.05, "use_kl_loss": True, "kl_loss_coef": 0.1, "global_batch_size": 4}
    sizes = {"rollout_max_response_len": 16, "rollout_batch_size": 8}
    args = make_args(**{**sizes, **common, **brought, **changes})
    assert kind is not None
    estimator = construct(kind, args)
    batch = make_batch(args, 0, groups, estimator, weight_version=5)
    ranks = Ranks(world_size)
    critics = [ToyTrainer(rank, ranks, role="critic") for rank in range(world_size)] if estimator.needs_values else None
    trainers = [ToyTrainer(rank, ranks) for rank in range(world_size)]
    corrector = None
    if args.use_tis:
        whole = MismatchImportanceSampling if args.tis_batch_normalize else TruncatedImportanceSampling
        corrector = Corrector(args, whole(args))
    reducer = (lambda *a: constant(*a, args=args)) if args.custom_pg_loss_reducer_function_path else None

    def work(rank: int) -> dict[str, float]:
        loss = PolicyLoss(args, estimator, corrector, reducer)
        critic = critics[rank] if critics else None
        return Learner(args, trainers[rank], estimator, loss, critic=critic).train(0, batch)

    with ThreadPoolExecutor(world_size) as pool:
        metrics = next(iter(list(pool.map(work, range(world_size)))))
    seen: dict[int, float] = {}
    for index, reward, mask in zip(batch.sample_indices, batch.rewards, batch.loss_masks, strict=True):
        if not any(mask):
            continue
        assert seen.setdefault(index, reward) == pytest.approx(reward), "copies are shaped alike"
    found = {k: v for k, v in metrics.items() if not k.startswith("perf/")}
    return found, trainers[0].weight.detach(), [seen[i] for i in sorted(seen)]


def check_same(
    name: str, groups: list[Group], counts: Sequence[int], world_size: int = 1, *, split: Any = fan, **changes: Any
) -> None:
    plain, weight, shaped = learn(name, groups, **changes)
    found, fanned_weight, fanned_shaped = learn(name, split(groups, counts), world_size, **changes)
    assert fanned_shaped == pytest.approx(shaped, abs=1e-6)
    torch.testing.assert_close(fanned_weight, weight, rtol=1e-5, atol=1e-6)
    assert found.keys() == plain.keys()
    for metric, value in plain.items():
        if metric == GAP if split is fan else metric.startswith(("rollout/masked_samples", "train/mis_")):
            continue  # copies: a mean over tokens; dealt out: of sequences, or of siblings that got no token
        assert found[metric] == pytest.approx(value, rel=1e-4, abs=1e-6), metric


@pytest.mark.parametrize(
    ("name", "objective"),
    [*((name, "per_rollout") for name in OF_TOKENS), *(("grpo", one) for one in OVER_TOKENS if one != "per_rollout")],
)
def test_a_response_dealt_out_over_siblings_trains_as_in_one(name: str, objective: str) -> None:
    check_same(name, make_groups(1), COUNTS, split=deal, **OVER_TOKENS[objective])
    check_same(name, make_groups(2, masked=True), COUNTS, 2, split=deal, **OVER_TOKENS[objective])


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(1, 4), min_size=8, max_size=8), st.sampled_from(OF_ROLLOUTS),
       st.sampled_from(sorted(OBJECTIVES)), st.booleans())  # fmt: skip
def test_any_counts(seed: int, counts: list[int], name: str, objective: str, masked: bool) -> None:
    check_same(name, make_groups(seed, masked=masked), counts, **OBJECTIVES[objective])


# -- filters and buffers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_decides_as_without_fan_out(name: str) -> None:
    decide = resolve("filters", name, origin="test").obj
    answers = set()
    for seed in range(40):
        plain = make_groups(seed, 1)
        for sample in plain[0] if seed % 4 == 0 else []:
            sample.reward = 0.1 * seed
        args = rollout_args(plugins={"length": {"min_mean": 4, "max_mean": 6}, "band": {"pass_reward": 0.5}})
        expected = decide(args, plain[0])
        answers.add(expected)
        assert decide(args, fan(plain, [1, 4, 2, 3])[0]) == expected
    assert len(answers) > 1


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_orders_and_chooses_as_without_fan_out(name: str) -> None:
    def play(fanned: bool) -> list[Any]:
        options = {"priority": {"reward": 1.0, "staleness": 0.5}, "curriculum": {"skip_probability": 1.0}}
        args = rollout_args(use_tis=True, plugins=options, rollout_seed=3)
        buffer = construct(resolve("buffers", name, origin="test").obj, args)
        groups = make_groups(7, 6)
        groups = fan(groups, [3, 1, 2, 4, 1, 1] * 4) if fanned else groups
        story: list[Any] = []
        buffer.begin_rollout(0, 5)
        buffer.observe(groups[:3], True)
        buffer.observe(groups[3:4], False)
        buffer.add(groups[4:])
        for rollout_id in (1, 2):
            buffer.begin_rollout(rollout_id, 5 + rollout_id)
            story.append([buffer.wants(Sample(row=row, metadata={"source_name": "s0"})) for row in range(5)])
            story.append([g[0].group_index for g in buffer.take(2)])
        state, metrics = buffer.state_dict(), buffer.take_metrics()
        again = construct(resolve("buffers", name, origin="test").obj, args)
        again.load_state_dict(state)
        story.append([[g[0].group_index, len(executions(g))] for g in again.take(9)])
        return [*story, metrics]

    assert play(fanned=True) == play(fanned=False)


def test_a_replayed_group_is_not_handed_out_again_before_it_was_trained_on() -> None:
    """Two copies in one batch would pass for siblings of one another."""
    args = rollout_args(use_tis=True, plugins={"replay": {"max_uses": 3, "share": 0.5}})
    buffer = construct(resolve("buffers", "replay", origin="test").obj, args)
    buffer.begin_rollout(0, 5)
    buffer.observe(fan(make_groups(1, 1), [2, 1, 1, 1]), True)
    (group,) = buffer.take(4)
    assert buffer.take(4) == []
    state = buffer.state_dict()
    again = construct(resolve("buffers", "replay", origin="test").obj, args)
    again.load_state_dict(state)
    assert again.take(4) == [], "nor after a restart"
    buffer.observe([group], True)
    assert len(buffer.take(4)) == 1


# -- metrics ---------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(1, 4), min_size=8, max_size=8), st.booleans())
def test_metrics_are_as_without_fan_out(seed: int, counts: list[int], masked: bool) -> None:
    groups = make_groups(seed, masked=masked)
    fanned = fan(groups, counts)
    args = rollout_args(log_passrate=True, log_multi_turn=True, log_correct_samples=True, rollout_max_response_len=5)
    assert rollout_metrics(args, fanned, 6) == pytest.approx(rollout_metrics(args, groups, 6))
    ages = [staleness_metrics(((g, 3) for g in found), 6) for found in (groups, fanned)]
    assert ages[0] == pytest.approx(ages[1])
    assert [spread(args, g) for g in fanned] == pytest.approx([spread(args, g) for g in groups])
    columns = [{"held": eval_columns(args, [s for g in found for s in g])} for found in (groups, fanned)]
    plain, found = (eval_metrics(c) for c in columns)
    assert found == pytest.approx(plain)
    assert {"eval/held", "eval/held-pass@1", "eval/held-pass@4", "eval/held-truncated_ratio"} <= found.keys()


def test_categories_of_mapping_rewards_count_executions() -> None:
    groups = make_groups(5)
    for group in groups:
        for sample in group:
            del sample.metadata["greedy_baseline"]
            sample.reward = {"score": float(sample.reward), "kind": "right" if sample.reward == 1 else "wrong"}
    args = rollout_args(reward_key="score", log_reward_category="kind", log_passrate=True)
    plain, found = rollout_metrics(args, groups, 6), rollout_metrics(args, fan(groups, COUNTS), 6)
    assert found == pytest.approx(plain)
    assert any(name.startswith("rollout/error_cat/") for name in found)
