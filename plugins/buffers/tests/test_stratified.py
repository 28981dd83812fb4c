from __future__ import annotations

from collections import Counter

import pytest
from slime_buffers.stratified import Buffer

from slime_core import Sample, SlimeError
from slime_core.config import Args


def make(**options: object) -> Buffer:
    return Buffer(Args(plugins={"stratified": options}))


def prompt(source: str | None, row: int | None = None) -> Sample:
    return Sample(row=row, metadata={} if source is None else {"source_name": source})


def sources(groups: list[list[Sample]]) -> str:
    return "".join(g[0].metadata.get("source_name", "-") for g in groups)


def test_waiting_groups_come_in_turns() -> None:
    buffer = make()
    buffer.add([[prompt(name)] for name in "aaaaabbc"])
    assert sources(buffer.take(6)) == "abcaba"
    assert sources(buffer.take(9)) == "aa"


def test_given_shares() -> None:
    buffer = make(shares={"a": 3, "b": 1})
    buffer.add([[prompt(name)] for name in "a" * 60 + "b" * 60])
    assert Counter(sources(buffer.take(40))) == {"a": 30, "b": 10}


def test_a_source_that_comes_anew_has_no_credit() -> None:
    buffer = make()
    buffer.add([[prompt("a")] for _ in range(50)])
    buffer.take(40)
    buffer.add([[prompt("b")] for _ in range(10)])
    assert Counter(sources(buffer.take(8))) == {"a": 4, "b": 4}


def test_no_source_starves() -> None:
    buffer = make(shares={"a": 1000.0})
    buffer.add([[prompt("b")]])
    for _ in range(1001):
        buffer.add([[prompt("a")]])
    assert "b" in sources(buffer.take(1002))


def test_groups_without_a_source_are_one_of_their_own() -> None:
    buffer = make(shares={"": 2.0})
    buffer.add([[prompt(name)] for name in (None, None, None, None, "a", "a")])
    assert Counter(sources(buffer.take(3))) == {"-": 2, "a": 1}


def test_every_prompt_is_used_in_the_end() -> None:
    buffer, used, data = make(max_passes=3, look_ahead=1000), Counter(), "a" * 20 + "b"
    for _epoch in range(8):
        for row, source in enumerate(data):
            used[row] += buffer.wants(prompt(source, row))
    assert min(used.values()) >= 2, "passed over three times at most, in eight epochs"


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(SlimeError, match=r"plugins\.stratified\.shares\.a"):
        make(shares={"a": 0})
