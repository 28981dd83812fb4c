"""What admission lets in, what it refuses, and how a refused sample ends."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_agent_base_url.trajectory import Trajectory
from slime_data.converted import batch_from_columns

from slime_core import Sample, SampleStatus
from slime_core.config import Args
from slime_core.errors import RolloutError
from slime_core.rollout import staleness
from slime_core.rollout.batch import make_batch
from slime_core.sample import admission, provenance
from slime_core.sample.provenance import NOT_SAMPLED, Source, Span
from tests.sweeps import sweep

ARGS = Args(reward_key=None)


def by_hand(**changes: Any) -> Sample:
    """As THUDM/slime's multi-turn examples put samples together: nobody told spans."""
    fields: dict[str, Any] = {
        "index": 5, "group_index": 0, "prompt": "p", "tokens": [1, 2, 3, 4, 5, 6], "response_length": 4,
        "loss_mask": [1, 1, 0, 1], "rollout_log_probs": [-0.5, -0.25, 0.0, -1.0], "reward": 1.0,
        "status": SampleStatus.COMPLETED,
    }  # fmt: skip
    return Sample(**{**fields, **changes})


def told(**changes: Any) -> Sample:
    sample = by_hand(tokens=[1, 2], response_length=0, loss_mask=None, rollout_log_probs=None)
    sample.append_response_tokens(None, [3, 4], [-0.5, -0.25], meta_info={"weight_version": "3"})
    sample.append_response_tokens(None, [5], trainable=False)
    sample.append_response_tokens(None, [6], [-1.0], meta_info={"weight_version": "4"})
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def test_code_that_knows_no_spans_keeps_working() -> None:
    for sample in (by_hand(), by_hand(spans=[Span(Source.USER, 2)]), told(spans=None)):
        assert admission.admit([sample]) == []
        assert sample.spans == [("user", 2, ""), ("sampled", 2, ""), ("tool", 1, ""), ("sampled", 1, "")]
        assert sample.loss_mask == [1, 1, 0, 1]
    bare = by_hand(loss_mask=None, rollout_log_probs=None)
    assert admission.admit([bare]) == []
    assert bare.loss_mask == [1, 1, 1, 1]


def test_a_mask_that_withholds_is_kept_and_recorded() -> None:
    sample = told(loss_mask=[0, 1, 0, 1])
    assert admission.admit([sample]) == []
    assert sample.loss_mask == [0, 1, 0, 1]
    assert sample.spans == [
        ("user", 2, ""), ("sampled", 1, "loss_mask"), ("sampled", 1, ""), ("tool", 1, ""), ("sampled", 1, "")
    ]  # fmt: skip


LISTS = (
    *("loss_mask", "rollout_log_probs", "teacher_log_probs", "token_weight_versions", "turns"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts"),
)
REFUSED: list[tuple[Callable[[], Sample], str]] = [
    (lambda: told(loss_mask=[1, 1, 1, 1]), "loss_mask trains response token 2, which is tool"),
    (lambda: told(loss_mask=[1, "0", 0, 1]), "loss_mask has the entry '0'; each is 0 or 1"),
    (lambda: told(status="done"), "status is 'done'; one of pending, completed,"),
    (lambda: by_hand(loss_mask=[1] * 4, token_weight_versions=[3, 3, NOT_SAMPLED, 3]), "trains response token 2"),
    (lambda: told(spans=[Span(Source.USER, 2), Span(Source.SAMPLED, 2)]), "spans cover 4 tokens and the sample has 6"),
    (lambda: told(spans=[["nobody", 6]]), "expected \\[source, length\\]"),
    (lambda: told(spans=[Span(Source.USER, 3), Span(Source.SAMPLED, 3)]), "token 0 is user and has log-prob -0.5"),
    (lambda: told(spans=[Span(Source.USER, 2), Span(Source.SAMPLED, 4)]), "token_weight_versions has -1 for it"),
    (
        lambda: told(
            rollout_log_probs=[-0.5, 0.0, 0.0, -1.0],
            spans=[Span(Source.USER, 2), Span(Source.SAMPLED, 1), Span(Source.TOOL, 2), Span(Source.SAMPLED, 1)],
        ),
        "tokens 1 to 2 are tool, and token_weight_versions says",
    ),
    (lambda: told(rollout_log_probs=[-0.5, float("nan"), 0.0, -1.0]), "token 1 was sampled with log-prob nan"),
    (lambda: told(rollout_log_probs=[-0.5, 0.25, 0.0, -1.0]), "sampled with log-prob 0.25"),
    (lambda: told(rollout_log_probs=[-0.5, -0.5, -0.5, -1.0]), "token 2 is tool and has log-prob -0.5"),
    (lambda: told(rollout_log_probs=[-0.5]), "rollout_log_probs has 1 entries for 4 tokens"),
    (lambda: told(token_weight_versions=[3, 3, NOT_SAMPLED, 2]), "version 2, after one of version 3"),
    (lambda: told(tokens=[3, 4, 5, 6], spans=None), "no prompt tokens"),
    *((lambda name=name: told(**{name: 5}), f"{name} is int; expected a list") for name in LISTS),
]


@sweep("make, message", REFUSED)
def test_what_is_refused_is_data(make: Callable[[], Sample], message: str) -> None:
    sample, good = make(), told()
    before = copy.deepcopy(sample)
    problem = admission.problem(sample)
    assert problem is not None
    assert sample == before
    assert "\n" not in problem
    with pytest.raises(ValueError, match=message):
        raise ValueError(problem)
    batch = make_batch(ARGS, 0, [[sample, good]], None)
    assert sample.status == SampleStatus.FAILED
    assert sample.metadata["failure"] == {"where": "admission", "error": f"error: {problem}"}
    assert batch.loss_masks[1] == [1, 1, 0, 1]
    assert not any(batch.loss_masks[0])


def test_a_sampled_token_that_stands_for_an_image() -> None:
    """5 was a tool's, 6 was sampled; without images neither means anything."""
    pictured = told(multimodal_train_inputs={"pixel_values": [[0.5]]})
    assert admission.problem(pictured, image_token=5) is None
    assert admission.problem(told(), image_token=6) is None
    assert admission.admit([pictured], image_token=6) == [pictured]
    reason = pictured.metadata["failure"]["error"]
    assert reason.startswith("error: response token 3 was sampled and is 6, the token of images")


# -- what a generate function returns --------------------------------------------------------------------


def drawn(**changes: Any) -> Sample:
    return Sample(prompt="p", tokens=[1, 2], spans=[Span(Source.TEMPLATE, 1), Span(Source.USER, 1)], **changes)


def test_spans_of_code_that_does_not_know_them_are_forgotten() -> None:
    sample = drawn()
    given = admission.Drawn.of(sample)
    sample.tokens, sample.response_length, sample.loss_mask = [1, 2, 3, 4], 2, [1, 0]
    assert given.problem(sample, same=True) is None
    assert admission.settled(sample)[0] == [("template", 1, ""), ("user", 1, ""), ("sampled", 1, ""), ("tool", 1, "")]
    sample.tokens, sample.response_length = [9, 1, 2, 3, 4], 2  # its own way to encode the prompt, with a BOS
    assert given.problem(sample, same=True) is None
    assert admission.settled(sample)[0] == [("user", 3, ""), ("sampled", 1, ""), ("tool", 1, "")]


def test_sampled_tokens_stand_after_the_prompt_they_were_sampled_after() -> None:
    sample = drawn()
    given = admission.Drawn.of(sample)
    sample.append_response_tokens(None, [3], [-1.0])
    assert given.problem(sample, same=True) is None
    other = drawn()
    other.tokens = [9, 8, 7]  # a prompt of the function's own, before anything was sampled
    other.append_response_tokens(None, [3], [-1.0])
    assert given.problem(other, same=True) is None
    assert admission.problem(other) is None
    sample.tokens[0] = 9
    problem = given.problem(sample, same=True)
    assert problem is not None
    assert "prompt's tokens are neither those that were drawn nor those that" in problem
    assert given.problem(sample, same=False) is None, "another sample has a prompt of its own"
    trajectory = Trajectory.of(sample)
    trajectory.replace_lossy(0, [9, 9], "compaction")
    trajectory.write(sample, 1)
    assert given.problem(sample, same=True) is None


def test_a_response_that_is_text_gets_ids_and_no_log_probs() -> None:
    sample = drawn(response="yes")
    assert admission.is_text(sample)
    assert admission.take_text(sample, [7, 8]) is None
    assert (sample.tokens, sample.response_length, sample.status) == ([1, 2, 7, 8], 2, SampleStatus.COMPLETED)
    assert admission.admit([sample]) == []
    assert sample.spans == [Span(Source.TEMPLATE, 1), Span(Source.USER, 1), Span(Source.TEXT, 2)]
    assert sample.loss_mask == [1, 1]
    masked = drawn(response="yes", loss_mask=[0, 1], status=SampleStatus.TRUNCATED)
    assert admission.take_text(masked, [7, 8]) is None
    assert admission.admit([masked]) == []
    assert (masked.loss_mask, masked.status) == ([0, 1], SampleStatus.TRUNCATED)
    wrong = drawn(response="yes", loss_mask=[1, 1, 1])
    assert "loss_mask has 3 entries and the response, given as text, has 2 tokens" in str(
        admission.take_text(wrong, [7, 8])
    )


def test_a_removed_sample_whose_fields_do_not_fit_is_data() -> None:
    batch = make_batch(ARGS, 0, [[told(remove_sample=True, loss_mask=[1]), told()]], None)
    assert [sum(mask) for mask in batch.loss_masks] == [0, 3]
    assert batch.tokens[0] == [2, 0], "only its row is left"


# -- the weight versions of a batch ----------------------------------------------------------------------


def of_versions(versions: list[int], **changes: Any) -> Sample:
    n = max(len(versions), 2)
    fields: dict[str, Any] = {"tokens": [1, *[2] * n], "response_length": n, "reward": 1.0}
    return Sample(**{**fields, "token_weight_versions": versions, **changes})


def test_versions_are_a_column_only_where_a_token_is_stale() -> None:
    fresh = [of_versions([4, 4]), of_versions([4, NOT_SAMPLED, 4])]
    batch = make_batch(ARGS, 0, [fresh], None, weight_version=4)
    assert batch.token_weight_versions is None
    assert batch.weight_version == 4
    batch = make_batch(ARGS, 0, [[*fresh, of_versions([3, 4])]], None, weight_version=4)
    assert batch.token_weight_versions == [[4, 4], [4, NOT_SAMPLED, 4], [3, 4]]
    by_call = of_versions([], weight_versions=["default", 3, "4"])  # a generate function may note numbers
    assert staleness.version_span([by_call], unknown=4) == (3, 3)
    batch = make_batch(ARGS, 0, [[*fresh, by_call]], None, weight_version=4)
    assert batch.token_weight_versions == [[4, 4], [4, NOT_SAMPLED, 4], [3, 3]]
    assert batch.to_rollout_data()["token_weight_versions"] == batch.token_weight_versions
    assert "weight_version" not in batch.to_rollout_data()


def test_a_users_columns_bring_versions_or_take_the_samples() -> None:
    columns = {
        "tokens": [[1, 2, 3]],
        "response_lengths": [2],
        "rewards": [1.0],
        "loss_masks": [[1, 1]],
    }
    samples = [of_versions([1, 3])]
    assert batch_from_columns(0, samples, columns, 3).token_weight_versions == [[1, 3]]
    given = {**columns, "token_weight_versions": [[2, 2]]}
    assert batch_from_columns(0, samples, given, 3).token_weight_versions == [[2, 2]]
    with pytest.raises(RolloutError, match="row 0 of token_weight_versions has 1 entries for a response of 2 tokens"):
        batch_from_columns(0, samples, {**columns, "token_weight_versions": [[2]]}, 3)


# -- provenance ------------------------------------------------------------------------------------------

SPANS = st.lists(
    st.builds(Span, st.sampled_from(Source), st.integers(1, 5), st.sampled_from(["", "a", "b"])), max_size=8
).map(provenance.joined)


def per_token(spans: list[Span]) -> list[tuple[Source, str]]:
    return [(s.source, s.withheld) for s in spans for _ in range(s.length)]


@given(SPANS, st.integers(0, 45), st.integers(0, 45))
def test_parts_and_withholding_are_what_they_are_token_by_token(spans: list[Span], first: int, last: int) -> None:
    tokens = per_token(spans)
    assert per_token(provenance.part(spans, first, last)) == tokens[first:last]
    first, last = min(first, last), max(first, last)
    expected = [
        (source, "why" if first <= i < last and source in provenance.TRAINABLE and not reason else reason)
        for i, (source, reason) in enumerate(tokens)
    ]
    withheld = provenance.withhold(spans, first, last, "why")
    assert per_token(withheld) == expected
    assert withheld == provenance.joined(withheld)


@given(SPANS, st.integers(0, 45))
def test_the_mask_is_what_is_sampled_or_shown_and_not_withheld(spans: list[Span], prompt_length: int) -> None:
    expected = [int(source in ("sampled", "demonstration", "text") and not why) for source, why in per_token(spans)]
    assert provenance.loss_mask(spans, prompt_length) == expected[prompt_length:]


@pytest.mark.parametrize(
    ("mask", "versions", "log_probs", "expected"),
    [
        (None, [], None, [("sampled", 4, "")]),
        ([1, 1, 0, 0], [], None, [("sampled", 2, ""), ("tool", 2, "")]),
        ([1, 1, 0, 0], [], [-1.0, 0.0, -2.0, 0.0], [("sampled", 2, ""), ("sampled", 1, "loss_mask"), ("tool", 1, "")]),
        (None, [3, 3, NOT_SAMPLED, 4], None, [("sampled", 2, ""), ("tool", 1, ""), ("sampled", 1, "")]),
        ([0, 1, 1, 1], [3, 3, NOT_SAMPLED, 4], None,
         [("sampled", 1, "loss_mask"), ("sampled", 1, ""), ("tool", 1, ""), ("sampled", 1, "")]),
    ],
)  # fmt: skip
def test_a_response_nobody_told_of(
    mask: list[int] | None, versions: list[int], log_probs: list[float] | None, expected: list[Span]
) -> None:
    assert provenance.response_spans(4, mask, versions, log_probs) == expected
