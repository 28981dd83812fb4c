"""Sample: aligned extension, storage, statuses."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.sample import NOT_SAMPLED, Sample, SampleStatus, admission
from slime_core.sample.provenance import Source, Span, TurnSpan


def _sampled(tokens, **meta):
    return {"tokens": tokens, "log_probs": [-0.5] * len(tokens), "meta_info": meta}


def test_extension_keeps_everything_aligned() -> None:
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(
        None, **_sampled([3, 4], weight_version="7", finish_reason={"type": "stop"}), text="ab"
    )
    sample.append_response_tokens(tokens=[5], trainable=False, text="!")
    sample.append_response_tokens(**_sampled([6], token_weight_versions=[8], weight_version="8"))
    assert sample.tokens == [1, 2, 3, 4, 5, 6]
    assert (sample.prompt_tokens, sample.response_tokens) == ([1, 2], [3, 4, 5, 6])
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == [-0.5, -0.5, 0.0, -0.5]
    assert sample.token_weight_versions == [7, 7, NOT_SAMPLED, 8]
    assert (sample.weight_versions, sample.response) == (["7", "8"], "ab!")
    assert sample.effective_response_length == 3


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"tokens": [3]}, "need their log_probs"),
        ({"tokens": [3], "log_probs": [-1.0, -2.0]}, "1 sampled tokens but 2 log_probs"),
        ({"tokens": [3], "log_probs": [0.5]}, "numbers <= 0"),
        ({"tokens": [3], "log_probs": [-1.0], "trainable": False}, "no policy sampled"),
        ({"tokens": [-3], "log_probs": [-1.0]}, "integers >= 0"),
        ({"tokens": [3], "log_probs": [-1.0], "meta_info": {"token_weight_versions": [1, 2]}}, "token_weight_versions"),
    ],
)
def test_what_cannot_be_aligned_is_refused_and_changes_nothing(bad, message) -> None:
    sample = Sample(index=4, tokens=[1])
    sample.append_response_tokens(**_sampled([2]))
    before = copy.deepcopy(sample)
    with pytest.raises(ValueError, match=message):
        sample.append_response_tokens(**bad)
    assert sample == before


_pieces = st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=6)


@given(_pieces)
def test_any_sequence_of_appends_stays_aligned_and_round_trips(pieces) -> None:
    sample = Sample(tokens=[7, 7], index=1, label="x")
    for trainable, n in pieces:
        sample.append_response_tokens(
            tokens=list(range(n)), log_probs=[-0.25] * n if trainable else None, trainable=trainable
        )
    sample.validate()
    assert len(sample.response_tokens) == sample.response_length == sum(n for _, n in pieces)
    sample.anything = {"kept": [1]}
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert again == sample
    assert again.anything == {"kept": [1]}


def test_a_failed_sample_has_no_reward_no_torn_response_and_a_reason_of_some_length() -> None:
    sample = Sample(index=3, tokens=[1, 2, 3], response_length=1, response="x", reward=1.0, loss_mask=[1])
    sample.fail("reward 'r'", ValueError("z" * 10_000))
    assert (sample.status, sample.reward, sample.response) == (Sample.Status.FAILED, None, "x")
    reason = sample.metadata["failure"]["error"]
    assert reason.startswith("ValueError: zzz")
    assert reason.endswith("... (10012 characters)")
    assert len(reason) < 2100
    torn = Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[1])
    torn.fail("generate", "half")
    torn.validate()
    assert (torn.tokens, torn.response_length, torn.loss_mask) == ([1], 0, None)


def test_a_prompt_is_generated_again_whatever_user_code_wrote_as_its_spans() -> None:
    for value, kept in (
        ([["system", 1], ["user", 2]], [("system", 1, ""), ("user", 2, "")]),
        ("none", None),
        (5, None),
    ):
        sample = Sample(prompt="p", tokens=[1, 2, 3, 4], response_length=1, loss_mask=[1, 1])
        sample.spans = value  # type: ignore[assignment]
        sample.fail("generate", "its mask has another length")
        assert (sample.tokens, sample.spans, sample.status) == ([1, 2, 3], kept, SampleStatus.FAILED)
    rows = [["system", 1], ["user", 2, "context"]]
    sample = Sample(tokens=[1, 2, 3], spans=rows)  # type: ignore[arg-type]
    assert Sample.from_dict(sample.to_dict()).spans == [("system", 1, ""), ("user", 2, "context")]


def test_withholding_leaves_a_tools_tokens_masked() -> None:
    spans = [Span(Source.USER, 2), Span(Source.SAMPLED, 2), Span(Source.TOOL, 1)]
    sample = Sample(index=0, tokens=[1, 2, 3, 4, 5], response_length=3, spans=spans, status=SampleStatus.COMPLETED)
    sample.withhold(0, 1, "too old")
    assert sample.loss_mask == [0, 1, 0]
    assert admission.problem(sample) is None


def test_turns_are_runs_of_sampled_tokens_with_what_was_noted_of_them() -> None:
    sample = Sample(tokens=[1, 2], index=3)
    sample.append_response_tokens(None, [5], [-0.1])
    sample.append_response_tokens(None, [6], [-0.2])  # a continued partial rollout
    assert sample.turns is None
    assert sample.known_turns() == [TurnSpan(0, 2)]
    sample.end_turn(0.5, role="solver", id="a", state="home")
    sample.append_response_tokens(None, [9, 9], trainable=False)
    sample.append_response_tokens(None, [7], [-0.3])
    sample.withhold(0, 1, "test")
    first, second = TurnSpan(0, 2, 0.5, "solver", "a", "home"), TurnSpan(4, 5)
    assert sample.known_turns() == [first, second]
    sample.append_response_tokens(None, [9], trainable=False)
    sample.end_turn(1.0)  # the reward arrives after the observation
    sample.end_turn(2.0)  # a turn without tokens
    assert sample.known_turns() == [first, TurnSpan(4, 5, 1.0), TurnSpan(6, 6, 2.0)]
    sample.append_response_tokens(None, [8], [-0.3])
    assert sample.known_turns()[-1] == TurnSpan(6, 7)
    for again in (copy.deepcopy(sample), Sample.from_dict(json.loads(json.dumps(sample.to_dict())))):
        assert again.turns == sample.turns
        assert again.known_turns() == sample.known_turns()
    assert admission.problem(sample) is None
    sample.turns = [TurnSpan(4, 9)]
    assert "in order within 7 tokens" in str(admission.problem(sample))
    sample.reset_for_retry()
    assert (sample.turns, sample.known_turns()) == (None, [])


@given(st.lists(st.tuples(st.sampled_from(["model", "tool", "end", "mask", "store"]), st.integers(0, 3)), max_size=12))
def test_turns_cover_the_models_tokens_whatever_is_done(moves: list[tuple[str, int]]) -> None:
    sample = Sample(tokens=[1, 2])
    for what, n in moves:
        if what == "model":
            sample.append_response_tokens(None, [5] * n, [-0.1] * n)
        elif what == "tool":
            sample.append_response_tokens(None, [9] * n, trainable=False)
        elif what == "end":
            sample.end_turn(float(n))
        elif what == "mask":
            sample.withhold(0, min(n, sample.response_length), "test")
        else:
            sample = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    turns = sample.known_turns()
    covered = [place for turn in turns for place in range(turn.first, turn.last)]
    assert covered == sorted(set(covered))
    by_model = {place for place, version in enumerate(sample.token_weight_versions) if version != NOT_SAMPLED}
    assert by_model == {place for place in covered if sample.response_tokens[place] == 5}
    assert [turn.reward for turn in turns if turn.reward is not None] == [float(n) for w, n in moves if w == "end"]
    assert admission.problem(sample) is None
