from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from slime_commands.eval.record import EvalRecord, read_groups, read_state

from slime_core.errors import DataError
from slime_core.sample import Group, Sample


def group(number: int, size: int = 2) -> Group:
    made = []
    for i in range(size):
        sample = Sample(group_index=number, index=number * size + i, tokens=[1, 2], label="x")
        sample.append_response_tokens(None, [5, 6], [-0.1, -1 / 3], text="ab")
        sample.reward, sample.status = 0.5, Sample.Status.COMPLETED
        made.append(sample)
    return made


def written(tmp_path: Path) -> Path:
    record = EvalRecord(tmp_path, {"a": 1})
    record.begin()

    async def add() -> None:
        await asyncio.gather(*(record.add("x", n, group(n, size)) for n, size in ((4, 2), (0, 1), (2, 3))))

    asyncio.run(add())
    record.close()
    return tmp_path / "eval" / "x.jsonl"


def test_groups_come_back_as_they_were(tmp_path: Path) -> None:
    path = written(tmp_path)
    record = EvalRecord(tmp_path, {"a": 1})
    record.open(["x", "nothing yet"])
    assert {n: [s.to_dict() for s in g] for n, g in record.finished("x").items()} == {
        n: [s.to_dict() for s in group(n, size)] for n, size in ((4, 2), (0, 1), (2, 3))
    }
    assert (record.kept, record.done, record.finished("nothing yet")) == (3, 3, {})
    record.finish()
    assert list(read_groups(path)[0]) == [0, 2, 4]
    state = read_state(tmp_path)
    assert state is not None
    assert (state["finished"], state["plan"]) == (True, {"a": 1})


@pytest.mark.slow
def test_wherever_the_file_is_torn_the_groups_before_are_kept_and_it_goes_on(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    ends = [read_groups(path)[1]]
    for length in range(len(whole) - 1, -1, -1):
        path.write_bytes(whole[:length])
        groups, end = read_groups(path)
        assert end <= length
        if end != ends[-1]:
            ends.append(end)
        if length % 97 == 0:
            record = EvalRecord(tmp_path, {})
            record.open(["x"])
            asyncio.run(record.add("x", 9, group(9)))
            record.close()
            assert set(read_groups(path)[0]) == {*groups, 9}
    assert len(ends) == 4


def test_damage_before_the_end_is_told(tmp_path: Path) -> None:
    path = written(tmp_path)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b"{broken", *lines[2:]]))
    with pytest.raises(DataError, match=r"x\.jsonl:2: no line of an evaluation: JSONDecodeError"):
        read_groups(path)
    (tmp_path / "eval" / "state.json").write_text('{"schema": 7}')
    with pytest.raises(DataError, match=r"not the record .* \(schema 1\)"):
        read_state(tmp_path)
