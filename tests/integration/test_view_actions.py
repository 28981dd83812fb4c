"""What the page of `slime view` does besides looking: a sample generated again, a group scored with another reward."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from slime_runs import Run
from slime_runs.index import Filter
from slime_runs.view.server import make_app
from starlette.testclient import TestClient

from slime_core.cli.main import main
from tests.conftest import TinyRun
from tests.integration.test_view import View, viewed
from tests.made_run import MadeRun
from tests.until import wait_until


@pytest.fixture(scope="module")
def run_dir(tiny: TinyRun, slime: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("acted") / "run"
    slime("train", *tiny.argv(save, num_rollout=2, save_interval=1))
    return save


@pytest.fixture(scope="module")
def view(run_dir: Path) -> Iterator[View]:
    with viewed(run_dir) as found:
        yield found


@pytest.fixture(scope="module")
def place(run_dir: Path) -> dict[str, Any]:
    entry = next(Run(run_dir).samples(Filter(rollout=1, data_set=""), limit=1)).entry
    return {"rollout": 1, "group": entry.group_index, "sample": entry.sample_index}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.name.endswith("-shm")}


@pytest.mark.slow
def test_a_group_is_scored_by_another_reward_and_again_when_its_file_changes(
    view: View, run_dir: Path, place: dict[str, Any], tmp_path: Path
) -> None:
    before, file = contents(run_dir), tmp_path / "longer.py"
    file.write_text("def reward(args, sample):\n    return float(len(sample.response))\n")
    wish = {**place, "reward": str(file)}
    told = view.client.post("api/score", json=wish).json()
    stored = list(Run(run_dir).samples(Filter(rollout=1, group_index=place["group"], data_set="")))
    assert [one["sample_index"] for one in told["outcomes"]] == [one.entry.sample_index for one in stored]
    assert [one["old"] for one in told["outcomes"]] == [one.row["reward"] for one in stored]
    assert [one["new"] for one in told["outcomes"]] == [len(one.text) for one in stored]
    again = view.client.post("api/score", json={**wish, "seen": told["state"]}).json()
    assert again == {"state": told["state"], "unchanged": True}
    file.write_text("def reward(args, sample):\n    raise ValueError('\\x1b[2J no number')\n")
    changed = view.client.post("api/score", json={**wish, "seen": told["state"]}).json()
    assert not changed["unchanged"]
    assert all(r"\x1b[2J no number" in one["error"] and one["new"] is None for one in changed["outcomes"])
    file.write_text("def reward(:\n")
    refused = view.client.post("api/score", json=wish)
    assert refused.status_code == 400
    assert str(file) in refused.json()["error"]["message"]
    assert contents(run_dir) == before


@pytest.mark.slow
def test_a_sample_is_generated_again_as_it_was_and_otherwise(view: View, run_dir: Path, place: dict[str, Any]) -> None:
    before = contents(run_dir)
    (same,) = view.client.post("api/resample", json=place, timeout=300).json()
    stored = view.ask("sample", **place)
    assert (same["first_difference"], same["kept"], same["weights"]["step"]) == (None, 0, 1)
    assert same["tokens"]["ids"] == stored["tokens"]["ids"]
    assert same["reward"] == stored["reward"]
    other = view.client.post(
        "api/resample", json={**place, "temperature": 5.0, "times": 3, "from_token": 1}, timeout=300
    )
    assert [one["kept"] for one in other.json()] == [1, 1, 1]
    assert any(one["first_difference"] is not None for one in other.json())
    refused = view.client.post("api/resample", json={**place, "weights": 99}, timeout=300)
    assert refused.status_code == 400
    assert "the weights after 99 rollouts were not kept" in refused.json()["error"]["message"]
    assert contents(run_dir) == before


@pytest.mark.slow
def test_one_at_a_time_and_no_longer_than_its_page_is_open(view: View, place: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import pathlib, time\n\n\ndef reward(args, sample):\n"
        f"    pathlib.Path({str(tmp_path / 'begun')!r}).touch()\n    time.sleep(3600)\n"
    )
    wish = {**place, "reward": str(tmp_path / "endless.py")}
    quick = {**place, "reward": "random"}
    url = view.client.base_url
    leaving = HTTPConnection(url.host, url.port or 80)
    cookies = "; ".join(f"{name}={value}" for name, value in view.client.cookies.items())
    leaving.request("POST", "/api/score", json.dumps(wish), {"Content-Type": "application/json", "Cookie": cookies})
    wait_until(lambda: (tmp_path / "begun").exists())
    assert view.ask("pulse")["state"] == "ended"
    busy = view.client.post("api/score", json=quick)
    assert busy.status_code == 409
    assert "endless.py is going on" in busy.json()["error"]["message"]
    leaving.close()
    wait_until(lambda: view.client.post("api/score", json=quick).status_code != 409)


def test_it_is_only_for_who_has_the_token_and_from_this_page(view: View, place: dict[str, Any]) -> None:
    base, wish = str(view.client.base_url), {**place, "reward": "random"}
    assert httpx.post(base + "api/score", json=wish).status_code == 401
    assert view.client.post("api/score", json=wish, headers={"origin": "http://evil.example"}).status_code == 403
    assert view.client.post("api/score", data={"reward": "random"}).status_code == 415
    assert view.client.get("api/score", params=wish).status_code == 405
    for wrong in ({"reward": ""}, {"reward": "random", "part": "x"}, {"reward": "random", "shell": "x"}):
        assert view.client.post("api/score", json={**place, **wrong}).status_code == 400
    assert view.client.post("api/resample", json={"rollout": 999, "sample": 0}).status_code == 404


def test_others_machines_start_nothing_here(run_dir: Path, place: dict[str, Any]) -> None:
    client = TestClient(make_app(run_dir, acts=False), base_url="http://127.0.0.1")
    for what, wish in (("score", {**place, "reward": "random"}), ("note", {"text": "mine"})):
        refused = client.post(f"api/{what}", json=wish)
        assert refused.status_code == 403
        assert "leave out --host" in refused.json()["error"]["message"]
    assert Run(run_dir).note() == ""


def test_a_note_is_kept_in_the_run_and_shown_in_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        MadeRun(tmp_path / name, rollouts=1).write()
    client = TestClient(make_app(tmp_path), base_url="http://127.0.0.1")
    before = client.get("api/pulses").json()
    assert main(["runs", str(tmp_path / "a"), "--note", "half the rate\nof b"]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("half the rate of b")
    assert client.get("api/pulses").json() != before, "open pages show it"
    assert client.post("api/note", json={"run": "b", "text": " the best \n"}).json() == {"note": "the best"}
    assert (tmp_path / "b/note.txt").read_text() == "the best\n"
    notes = {run["run"]: run["note"] for run in client.get("api/runs").json()["runs"]}
    assert notes == {"a": "half the rate\nof b", "b": "the best"}
    assert client.post("api/note", json={"run": "b", "text": 10_001 * "x"}).status_code == 400
    assert client.post("api/note", json={"run": "../b", "text": "x"}).status_code == 404
    for folder, text in ((tmp_path, "x"), (tmp_path / "a", 10_001 * "x")):
        assert main(["runs", str(folder), "--note", text]) == 2
    assert main(["runs", str(tmp_path / "a"), "--note", ""]) == 0
    assert [Run(tmp_path / name).note() for name in "ab"] == ["", "the best"]
