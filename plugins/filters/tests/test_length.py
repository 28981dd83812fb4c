from __future__ import annotations

import pytest
from slime_filters.length import dynamic_filter

from slime_core import FilterDecision, Sample, SampleStatus, SlimeError
from slime_core.config import Args


def decide(*lengths: int, cut: int = 0, **options: object) -> FilterDecision:
    """A group with responses of these lengths, the first `cut` of them truncated."""
    samples = [Sample(tokens=[1] * (n + 1), response_length=n, status=SampleStatus.COMPLETED) for n in lengths]
    for sample in samples[:cut]:
        sample.status = SampleStatus.TRUNCATED
    return dynamic_filter(Args(plugins={"length": options}), samples)


@pytest.mark.parametrize(("cut", "reason"), [(0, None), (2, None), (3, "truncated"), (4, "truncated")])
def test_most_may_not_be_cut(cut: int, reason: str | None) -> None:
    assert decide(8, 8, 8, 8, cut=cut) == FilterDecision(keep=reason is None, reason=reason)


def test_the_mean_length_has_bounds() -> None:
    assert decide(1, 5, min_mean=3.0, max_mean=3.0)
    assert decide(1, 4, min_mean=3.0).reason == "too_short"
    assert decide(1, 6, max_mean=3.0).reason == "too_long"
    assert decide(10**6)


def test_fallback() -> None:
    assert decide(1, min_mean=3.0, fallback=True).keep_when_insufficient
    assert not decide(1, min_mean=3.0).keep_when_insufficient


def test_bounds_that_leave_nothing_are_refused() -> None:
    with pytest.raises(SlimeError, match=r"min_mean 5\.0 is above max_mean 4\.0"):
        decide(1, min_mean=5.0, max_mean=4.0)
