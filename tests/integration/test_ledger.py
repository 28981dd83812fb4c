"""`slime ledger verify` and `show` on a run. Kills at every event are in `tests/backends/kill`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from slime_core.cli.main import main
from tests.conftest import TinyRun

pytestmark = pytest.mark.slow

ROLLOUTS = 4
FILTER = """
def keep(args, samples, **kwargs):
    return samples[0].group_index % 5 != 2
"""


@pytest.fixture(scope="module")
def save(tiny: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with partial rollouts and a dynamic filter."""
    root = tmp_path_factory.mktemp("ledger")
    (root / "filter.py").write_text(FILTER)
    save = root / "run"
    flags = {
        "num_rollout": ROLLOUTS, "over_sampling_batch_size": 6, "partial_rollout": True, "save": save, "load": save,
        "eval_interval": None, "eval_prompt_data": None,
        "dynamic_sampling_filter_path": f"{root / 'filter.py'}:keep",
    }  # fmt: skip
    assert main(["train", *tiny.argv(**flags)]) == 0
    return save


def _verify(save: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    status = main(["ledger", "verify", str(save), *options])
    return status, capsys.readouterr().out


def test_verify_counts_groups_of_every_commit(save: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = _verify(save, capsys)
    assert (status, "the ledger holds" in said) == (0, True), said
    status, said = _verify(save, capsys, "--json")
    facts = json.loads(said)["facts"]
    assert (facts["trained"], facts["trained_again"], facts["rollouts"]) == (4 * ROLLOUTS, 0, ROLLOUTS)
    assert facts["segments"] == ROLLOUTS
    assert sum(facts["dropped"].values()) >= 3
    assert facts["groups"] == 4 * ROLLOUTS + sum(facts["dropped"].values()) + facts["open"].get("buffered", 0)
    for rollout_id in range(ROLLOUTS):
        assert _verify(save, capsys, "--commit", str(rollout_id + 1))[0] == 0


def test_show(save: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*options: str) -> list[str]:
        assert main(["ledger", "show", str(save), *options]) == 0
        return capsys.readouterr().out.splitlines()

    assert any(line.split() == ["trained", str(4 * ROLLOUTS)] for line in shown())
    history = shown("--group", "0")
    assert [line.split()[6] for line in history] == ["drawn", "generating", "scored", "taken", "trained"]
    assert "row " in history[0]
    assert [line.split()[1] for line in shown("--state", "dropped")][:2] == ["2", "7"]
    assert main(["ledger", "show", str(save), "--state", "lost"]) == 2
    assert "no such state; there are: drawn" in capsys.readouterr().err
    assert main(["ledger", "show", str(save), "--group", "999"]) == 2
    assert "no such group" in capsys.readouterr().err


def test_what_is_wrong_ends_with_status_1(save: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = _verify(tmp_path, capsys)
    assert (status, "no commit there" in said) == (1, True)
    commit = save / "checkpoints" / f"rollout_{ROLLOUTS - 1:07d}"
    segment = save / "checkpoints" / "ledger" / orjson.loads((commit / "ledger.json").read_bytes())["segment"]["name"]
    content = segment.read_bytes()
    try:
        segment.write_bytes(content.replace(b"trained", b"drained", 1))
        status, said = _verify(save, capsys)
        assert status == 1
        assert said.splitlines()[0].startswith(f"{segment}: ledger segment is not what its commit names")
        assert said.splitlines()[-1].endswith("does not hold: 1 problem")
        found: dict[str, Any] = json.loads(_verify(save, capsys, "--json")[1])
        assert (found["holds"], len(found["problems"])) == (False, 1)
    finally:
        segment.write_bytes(content)
    (commit / "ledger.json").rename(commit / "away")
    try:
        status, said = _verify(save, capsys)
        assert (status, "torn: ledger.json is missing" in said) == (1, True)
    finally:
        (commit / "away").rename(commit / "ledger.json")
