from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.sample import provenance
from slime_core.sample.provenance import NOT_SAMPLED, Source, Span

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
