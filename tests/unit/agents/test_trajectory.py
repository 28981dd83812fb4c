"""The trajectory against a reference that keeps one row per token and never runs anything together."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_agent_base_url.trajectory import Trajectory

from slime_core import Sample, SampleStatus
from slime_core.sample import GenerationOutput, admission
from slime_core.sample.provenance import NOT_SAMPLED, Source, TurnSpan

CONTEXT = [s for s in Source if s is not Source.SAMPLED]


@dataclass
class Row:
    token: int
    source: Source
    log_prob: float = 0.0
    version: int = NOT_SAMPLED
    trained: bool = False


@dataclass
class Reference:
    rows: list[Row]
    lossy: list[tuple[int, int]] = field(default_factory=list)
    """(start, sampled tokens dropped)"""


def sampled(ids: list[int], version: int, finish: str = "stop", text: str = "x") -> GenerationOutput:
    meta = {"finish_reason": {"type": finish}, "weight_version": str(version), "prompt_tokens": 3}
    return GenerationOutput(ids, [-(t % 7) / 8 for t in ids], text, meta)


IDS = st.lists(st.integers(0, 99), max_size=5)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), IDS, st.sampled_from(CONTEXT)),
        st.tuples(st.just("sample"), IDS, st.integers(0, 2), st.sampled_from(["stop", "abort", "length"])),
        st.tuples(st.just("fork"), st.booleans()),
        st.tuples(st.just("withhold"), st.floats(0, 1), st.floats(0, 1)),
        st.tuples(st.just("lossy"), st.floats(0, 1), IDS),
        st.tuples(st.just("resume")),
        st.tuples(st.just("store")),
    ),
    max_size=12,
)


def step(trajectory: Trajectory, reference: Reference, move: tuple[Any, ...]) -> None:
    kind, rows, size = move[0], reference.rows, len(reference.rows)
    if kind == "add":
        trajectory.add(move[1], move[2], "text")
        rows += [Row(t, move[2]) for t in move[1]]
    elif kind == "sample":
        version = max(0, trajectory.last_version) + move[2]
        output = sampled(move[1], version, move[3])
        trajectory.add_sampled(output)
        rows += [Row(t, Source.SAMPLED, p, version, True) for t, p in zip(output.token_ids, output.log_probs)]
    elif kind == "withhold":
        first, last = sorted((int(move[1] * size), int(move[2] * size)))
        trajectory.withhold(first, last, "reason")
        for row in rows[first:last]:
            row.trained = False
    elif kind == "lossy":
        start = int(move[1] * size)
        trajectory.replace_lossy(start, move[2], "compaction")
        reference.lossy.append((start, sum(row.source == Source.SAMPLED for row in rows[start:])))
        reference.rows[start:] = [Row(t, Source.TEMPLATE) for t in move[2]]


def check(trajectory: Trajectory, reference: Reference) -> None:
    rows = reference.rows
    assert trajectory.tokens == [row.token for row in rows]
    assert trajectory.log_probs == [row.log_prob for row in rows]
    assert trajectory.weight_versions == [row.version for row in rows]
    assert trajectory.loss_mask == [int(row.trained) for row in rows]
    assert [s.source for s in trajectory.spans for _ in range(s.length)] == [row.source for row in rows]
    assert all(a[0] != b[0] or a[2] != b[2] for a, b in zip(trajectory.spans, trajectory.spans[1:])), "run-length"
    found = [(note["start"], note["sampled"]) for note in trajectory.metadata.get("lossy", [])]
    assert found == reference.lossy


def written(trajectory: Trajectory, prompt_length: int) -> Sample:
    sample = trajectory.write(Sample(index=4, prompt="p", reward=1.0), prompt_length)
    sample.status = SampleStatus.COMPLETED
    return sample


def check_written(trajectory: Trajectory, reference: Reference) -> None:
    prompt_length = min(3, len(trajectory))  # as where it was interrupted
    sample = written(trajectory, prompt_length)
    rows = reference.rows[prompt_length:]
    assert sample.loss_mask == [int(row.trained) for row in rows]
    assert sample.token_weight_versions == [row.version for row in rows]
    if prompt_length:
        assert admission.problem(sample) is None
        before = copy.deepcopy(sample)
        assert admission.admit([sample]) == []
        assert sample == before, "the door has nothing to add"


@given(STEPS)
def test_any_interleaving_keeps_all_columns_aligned(moves: list[tuple[Any, ...]]) -> None:
    prompt = Sample(index=4, prompt="p", tokens=[7, 8, 9])
    live = [(Trajectory.of(prompt), Reference([Row(t, Source.USER) for t in (7, 8, 9)]))]
    for move in moves:
        trajectory, reference = live[0]
        if move[0] == "fork":
            branch = trajectory.fork(), Reference([replace(row) for row in reference.rows], list(reference.lossy))
            live.insert(0 if move[1] else len(live), branch)
        elif move[0] in ("resume", "store"):  # an interruption: the sample is kept, and gone on with
            sample = trajectory.write(Sample(index=4, prompt="p"), min(3, len(trajectory)))
            if move[0] == "store":
                sample = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
            again = Trajectory.of(sample)
            again.metadata = trajectory.metadata
            live[0] = again, reference
            for row in reference.rows[:3]:  # of a prompt nothing is known but who wrote it
                row.log_prob, row.version = 0.0, NOT_SAMPLED
        else:
            step(trajectory, reference, move)
        for pair in live:
            check(*pair)
    for pair in live:
        check_written(*pair)


@given(st.lists(st.tuples(IDS, st.sampled_from(["sampled", "tool", "template", "withhold"])), max_size=8))
def test_appending_to_samples_tells_the_same_as_a_trajectory(pieces: list[tuple[list[int], str]]) -> None:
    sample = Sample(prompt="p", tokens=[1, 2])
    trajectory = Trajectory.of(sample)
    for ids, kind in [([5], "sampled"), *pieces]:
        if kind == "sampled":
            output = sampled(ids, 3)
            sample.append_response_tokens(None, ids, output.log_probs, meta_info=output.meta_info, text=output.text)
            trajectory.add_sampled(output)
        elif kind == "withhold":
            sample.withhold(0, sample.response_length // 2, "role")
            trajectory.withhold(2, 2 + sample.response_length // 2, "role")
        else:
            sample.append_response_tokens(None, ids, trainable=False, text="t", source=kind)
            trajectory.add(ids, Source(kind), "t")
    told = trajectory.write(Sample(prompt="p", tokens=[1, 2]))
    assert told == sample


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (GenerationOutput([1, 2], [-1.0], "", {}), "2 sampled tokens but 1 log-probs"),
        (GenerationOutput([1], [float("-inf")], "", {}), "finite"),
        (GenerationOutput([1], [0.5], "", {}), "finite numbers <= 0"),
        (GenerationOutput([1], [-1.0], "", {"weight_version": "4"}), "must not decrease: \\[4\\] after 5"),
        (GenerationOutput([1], [-1.0], "", {"token_weight_versions": [5, 6]}), "1 sampled tokens but 2 weight"),
        (GenerationOutput([-1], [-1.0], "", {"weight_version": "5"}), "integers >= 0"),
    ],
)
def test_what_cannot_have_been_sampled_is_refused_and_changes_nothing(output: GenerationOutput, message: str) -> None:
    trajectory = Trajectory.of(Sample(tokens=[1]))
    trajectory.add_sampled(sampled([2], 5))
    before = copy.deepcopy(trajectory.__dict__)
    with pytest.raises(ValueError, match=message):
        trajectory.add_sampled(output)
    assert trajectory.__dict__ == before


def test_routed_experts_go_along_and_are_forgotten_with_their_tokens() -> None:
    trajectory = Trajectory.of(Sample(tokens=[1, 2]))
    output = sampled([3, 4], 1)
    output.meta_info["routed_experts"] = [[[1]], [[2]], [[3]]]
    trajectory.add_sampled(output)
    trajectory.add([5], Source.TOOL)
    sample = trajectory.write(Sample())
    assert [sample.rollout_routed_experts[i] for i in range(4)] == [[[1]], [[2]], [[3]], [[-1]]]
    trajectory.replace_lossy(3, [9, 9, 9], "realigned")
    sample = trajectory.write(Sample())
    assert [sample.rollout_routed_experts[i] for i in range(5)] == [[[1]], [[2]], [[-1]], [[-1]], [[-1]]]


def test_what_tokens_were_sampled_among_stays_with_them_over_turns() -> None:
    """Context has none; once a sampled token comes without, nothing is known, which `--use-sampling-mask` refuses."""
    sample = Sample(tokens=[1, 2], index=0)
    sample.append_response_tokens(None, [5, 6], [-0.1, -0.2], meta_info={"output_token_sampling_mask": [[5, 7], [6]]})
    sample.append_response_tokens(None, [8], trainable=False)
    assert (sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets) == ([5, 7, 6], [0, 2, 3, 3])
    trajectory = Trajectory.of(sample)
    trajectory.add([3], Source.TOOL)
    lossy, blind = trajectory.fork(), trajectory.fork()
    trajectory.add_sampled([4], [-0.5], 0, meta_info={"output_token_sampling_mask": [[2, 4]]})
    written = trajectory.write(copy.deepcopy(sample))
    assert written.rollout_top_p_token_ids == [5, 7, 6, 2, 4]
    assert written.rollout_top_p_token_offsets == [0, 2, 3, 3, 3, 5]
    written.validate()
    lossy.replace_lossy(3, [8, 8], "rewritten")
    assert lossy.write(copy.deepcopy(sample)).rollout_top_p_token_offsets == [0, 2, 2, 2]
    blind.add_sampled([4], [-0.5], 0)
    assert blind.write(sample).rollout_top_p_token_ids is sample.rollout_top_p_token_offsets is None
    sample.append_response_tokens(None, [4], [-0.5])
    assert sample.rollout_top_p_token_offsets is None


def test_recorded_turns_stay_until_their_tokens_are_replaced() -> None:
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(None, [5], [-0.1])
    sample.end_turn(0.5)
    trajectory = Trajectory.of(sample)
    trajectory.add([9], Source.TOOL)
    trajectory.add_sampled([7], [-0.2], 0)
    trajectory.write(sample)
    assert sample.known_turns() == [TurnSpan(0, 1, 0.5), TurnSpan(2, 3)]
    trajectory.replace_lossy(1, [3, 4], "the history was shortened")
    trajectory.add_sampled([8], [-0.2], 0)
    trajectory.write(sample)
    assert (sample.turns, sample.known_turns()) == (None, [TurnSpan(2, 3)])
