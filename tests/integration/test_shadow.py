"""Shadow rewards and filters: what they make of a run is kept beside it, and the run is the same without them."""

from __future__ import annotations

from typing import Any

import pytest
from slime_runs import Run
from slime_runs.shadows import summary
from slime_runs.view.server import make_app
from starlette.testclient import TestClient

from tests.conftest import TinyRun

SHADOWS = """
import random

calls = 0


def long(args, sample):
    random.random()
    sample.response = "mine now"  # of a copy
    return float(sample.response_length)


async def broken(args, sample):
    random.seed(0)
    raise OSError("no service")


def keeps(args, samples):
    samples[0].reward = -1.0
    return samples[0].group_index % 2 == 0
"""


@pytest.fixture(scope="module")
def runs(tiny: TinyRun, slime: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run, str]:
    """Without shadows, with them, and what that printed."""
    root = tmp_path_factory.mktemp("shadow")
    file = root / "shadows.py"
    file.write_text(SHADOWS)
    plain, shadowed = root / "plain", root / "shadowed"
    common = {"num_rollout": 2, "save_interval": None}
    slime("train", *tiny.argv(plain, run_dir=plain, **common))
    flags = ["--shadow-rm-path", f"{file}:long", "--shadow-rm-path", f"{file}:broken"]
    flags += ["--shadow-rm-path", tiny.root / "rm.py", "--shadow-filter-path", f"{file}:keeps"]
    done = slime("train", *tiny.argv(shadowed, run_dir=shadowed, **common), *flags)
    return Run(plain), Run(shadowed), done.stderr


def test_training_is_the_same_without_them(runs: tuple[Run, Run, str]) -> None:
    plain, shadowed, _ = runs
    rows = [[sample.row for sample in run.samples()] for run in (plain, shadowed)]
    for row in (row for each in rows for row in each):
        row.pop("prefix_cache_info", None)
        row.pop("non_generation_time", None)
    assert rows[0] == rows[1]
    weights = [next((run.path / "checkpoints").glob("rollout_*/model.safetensors")).read_bytes() for run in runs[:2]]
    assert weights[0] == weights[1]


def test_what_they_make_of_it_is_kept(runs: tuple[Run, Run, str]) -> None:
    _, run, said = runs
    for rollout in range(2):
        rows, stored = run.shadow(rollout), {s.entry.key: s for s in run.samples() if s.entry.data_set is None}
        assert len(rows) == 16
        for key, row in rows.items():
            paid = {spec.rpartition("/")[2]: value for spec, value in row["rewards"].items()}
            assert paid == {"rm.py": stored[key].entry.score, "shadows.py:long": stored[key].entry.response_tokens}
            assert list(row["filters"].values()) == [row["group_index"] % 2 == 0]
            assert row["kept"]
    assert said.count("no service") == 1
    found = {spec.rpartition("/")[2]: of for spec, of in summary(run).items()}
    assert found["rm.py"]["agree"] == 1.0
    assert found["rm.py"]["rank_correlation"] == pytest.approx(1.0)
    assert found["shadows.py:keeps"] == {"groups": 8, "agree": 0.5}
    assert found["shadows.py:long"]["samples"] == 32


def test_it_is_read_in_show_and_sample_by_sample(runs: tuple[Run, Run, str], slime: Any) -> None:
    run = runs[1]
    assert "shadows.py:keeps: agrees on 50.0% of 8 groups" in slime("show", run.path).stdout
    shown = slime("samples", "show", run.path, "--disagree", "-n", 2).stdout
    assert shown.count("shadow: ") == 2
    assert "shadows.py:long pays " in shown
    assert slime("samples", "show", runs[0].path, "--disagree", check=False).returncode == 1


def test_the_page_shows_what_they_differ_on(runs: tuple[Run, Run, str]) -> None:
    _, run, _ = runs
    view = TestClient(make_app(run.path), base_url="http://127.0.0.1")
    found = view.get("api/shadows").json()
    assert found["specs"] == summary(run)
    columns = found["columns"]
    assert columns["rollout"] == [1] * 16 + [0] * 16
    first = {name: column[0] for name, column in columns.items()}
    where = {"rollout": 1, "group": first["group_index"], "sample": first["sample_index"]}
    sample = view.get("api/sample", params=where).json()
    assert sample["shadow"] == {name: first[name] for name in ("rewards", "filters", "kept")}
