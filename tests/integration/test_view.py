"""`slime view` and `slime report`: who may look, what is answered, of which runs, and what a page may start."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from slime_runs import Run
from slime_runs.files import file_name, write_file
from slime_runs.index import Filter
from slime_runs.view.server import make_app, static_folder
from starlette.testclient import TestClient

from slime_core.cli.main import main
from tests.conftest import SLIME, TinyRun
from tests.made_run import MadeRun
from tests.until import wait_until

NASTY = (
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "\x1b[2J\x1b]0;owned\x07 \u202egnp.exe \u2066hidden\u2069 \x00",
    "x" * 1_000_000,
    "</script><!--",
)


@dataclass
class View:
    """A server, and a client that has its cookie."""

    url: str
    """With the token."""
    client: httpx.Client

    def ask(self, what: str, **parameters: Any) -> Any:
        answer = self.client.get(f"api/{what}", params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def viewed(*argv: Any) -> Iterator[View]:
    command = [SLIME, "view", *map(str, argv)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            line = process.stdout.readline()
            found = re.search(r"http://\S+", line)
            assert found, line + process.stderr.read()
            parts = urlsplit(found[0])
            with httpx.Client(
                base_url=f"{parts.scheme}://{parts.netloc}/", follow_redirects=True, timeout=60
            ) as client:
                assert client.get(found[0]).status_code == 200
                yield View(found[0], client)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def inside(path: Path) -> View:
    """The same without a process and its token."""
    return View("", TestClient(make_app(path), base_url="http://127.0.0.1"))


@pytest.fixture(scope="module")
def run_dir(tiny: TinyRun, slime: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("viewed") / "run"
    slime("train", *tiny.argv(save, num_rollout=2, eval_interval=1))
    return save


@pytest.fixture(scope="module")
def view(run_dir: Path) -> Iterator[View]:
    with viewed(run_dir) as found:
        yield found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, View]:
    folder = tmp_path_factory.mktemp("made")
    MadeRun(folder / "a", texts=NASTY).write()
    MadeRun(folder / "deeper" / "b", seed=1, rollouts=6).write()
    return folder, inside(folder)


def test_from_the_run_to_a_token_its_log_probs_and_its_reward(view: View) -> None:
    run = view.ask("run")
    assert run["state"] == "ended"
    assert run["rollouts"]["rollout"] == [0, 1]
    best = {name: column[0] for name, column in run["best"].items()}
    sample = view.ask("sample", rollout=best["rollout"], group=best["group_index"], sample=best["sample_index"])
    assert sample["reward"] == best["score"]
    assert sample["paid_by"][0]["name"].endswith("rm.py")
    tokens = sample["tokens"]
    assert "".join(tokens["texts"][tokens["prompt"] :]) == sample["text"]
    assert len(tokens["columns"]["engine"]) == len(tokens["mask"]) == sample["response_tokens"]
    assert tokens["columns"]["trainer"] == pytest.approx(tokens["columns"]["engine"], abs=1e-4)
    assert {source for source, *_ in tokens["spans"]} == {"template", "user", "sampled"}
    group = view.ask("group", rollout=best["rollout"], group=best["group_index"])
    rewards = [(one["sample_index"], one["part"], one["reward"]) for one in group["samples"]]
    assert len(rewards) == 4
    assert sorted(map(tuple, sample["siblings"])) == sorted(rewards)
    assert sum(one["advantage"] for one in group["samples"]) == pytest.approx(0, abs=1e-4)
    assert [event["event"] for event in group["events"]] == ["drawn", "generating", "scored", "taken", "trained"]


def test_what_pages_ask_for_besides(view: View) -> None:
    metrics = view.ask("metrics", name=["rollout/raw_reward", "none"], since=0)
    assert metrics["step"] == [1, 2]
    assert all(metrics["columns"]["rollout/raw_reward"])
    assert metrics["columns"]["none"] == [None, None]
    timeline = view.ask("timeline", rollout=1)
    assert {stage["what"] for stage in timeline["stages"]} >= {"rollout", "train", "push"}
    assert len([one for one in timeline["samples"] if not one["evaluation"]]) == 16
    evaluation = view.ask("evaluation", data_set="held")
    assert evaluation["rollouts"] == [0, 1, 2]
    assert len(evaluation["items"]) == 8
    rollout = view.ask("rollout", rollout=1)
    assert rollout["count"] == 16
    assert (rollout["before"], rollout["after"]) == (0, None)
    row = rollout["columns"]["data_row"][0]
    visits = view.ask("prompt", row=row)["visits"]
    assert {visit["events"][0]["row"] for visit in visits} == {row}
    assert view.ask("waits") == {"alive": False, "overdue": False, "processes": [], "unreadable": []}
    spent = view.ask("profile")
    assert {"rollouts", "  generating", "training", "weights", "else"} <= {name for name, _ in spent["rows"]}
    assert spent["trace"] is None
    assert "slime train --profile writes it" in view.client.get("trace").text


def places(columns: dict[str, list[Any]]) -> list[str]:
    """How a page asks for the texts of rows."""
    names = ("rollout", "data_set", "offset", "size", "place")
    return [
        f"{rollout}.{int(data_set is not None)}.{offset}.{size}.{place}"
        for rollout, data_set, offset, size, place in zip(*(columns[name] for name in names))
    ]


def test_rows_of_a_table_say_what_the_model_wrote(made: tuple[Path, View]) -> None:
    _, view = made
    columns = view.ask("rollout", run="a", rollout=2)["columns"]
    texts = view.ask("texts", run="a", at=places(columns))
    assert len(texts) == 16
    assert texts[4] == [f"question {columns['group_index'][4]}", f"answer {columns['sample_index'][4]} to 9"]
    assert texts[0] == ["question 8", NASTY[0]]
    assert texts[1][1].startswith(r"\x1b[2J")
    assert len(texts[2][1]) < 200
    (found,) = view.ask("texts", run="a", at=places(columns)[4:5], text="9")
    assert found[0].startswith("question 9")
    evaluated = view.ask("rollout", run="a", rollout=4, data_set="held")["columns"]
    assert view.ask("texts", run="a", at=places(evaluated))[5] == ["question 5", "answer 5 to 5"]
    items = {item["item"]: item["at"] for item in view.ask("evaluation", run="a", data_set="held")["items"]}
    assert view.ask("texts", run="a", at=[items[5]]) == [["question 5", "answer 5 to 5"]]


def test_only_who_has_the_token_may_look(view: View) -> None:
    base = str(view.client.base_url)
    for headers in ({}, {"cookie": f"slime_view_{view.client.base_url.port}=wrong"}):
        for path in ("", "api/runs", "static/main.js", "?token=wrong"):
            assert httpx.get(base + path, headers=headers).status_code == 401
    moved = httpx.get(view.url)
    assert (moved.status_code, moved.headers["location"]) == (303, "./")
    assert {"httponly", "samesite=lax"} <= set(moved.headers["set-cookie"].lower().split("; "))
    for header in ("host", "origin"):
        assert (
            view.client.get("api/runs", headers={header: "http://evil.example"[7 * (header == "host") :]}).status_code
            == 403
        )
    assert "default-src 'none'" in view.client.get("").headers["content-security-policy"]


@pytest.mark.parametrize(
    "question",
    [
        "run?run=../other",
        "run?run=/etc",
        "rollout?rollout=x",
        "sample?rollout=999",
        "samples?limit=0",
        "nothing",
        "group?rollout=0",
    ],
)
def test_a_wrong_question_is_answered_in_words(view: View, question: str) -> None:
    answer = view.client.get(f"api/{question}")
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["message"]


def test_a_directory_of_runs(made: tuple[Path, View]) -> None:
    folder, view = made
    found = view.ask("runs")
    assert {run["run"] for run in found["runs"]} == {"a", "deeper/b"}
    assert found["settings"].keys() == {"num_rollout", "seed"}
    for run in found["runs"]:
        assert run["changed"] - run["began"] == pytest.approx(10 * run["done"] - 0.9)
    compared = view.ask("compare", run=["a", "deeper/b"])
    assert compared["curves"]["reward"] in compared["metric_names"]
    curves = view.ask("metrics", run="a", name=["rollout/raw_reward", "train/loss"], since=0, times="true")
    assert curves["errors"] == {"rollout/raw_reward": [0.125] * len(curves["step"])}
    assert curves["seconds"] == pytest.approx([10 * step - 1 for step in curves["step"]])
    done = min(max(line["step"] for line in Run(folder / name).metrics()) for name in ("a", "deeper/b"))
    assert (compared["from"], compared["until"]) == (max(1, done - 9), done)
    worst = view.ask("samples", run="deeper/b", order="worst", limit=10, min_score=0.5)["columns"]["score"]
    assert worst == sorted(worst)
    assert worst[0] >= 0.5
    dropped = view.ask("rollout", run="deeper/b", rollout=1)["dropped_for"]
    assert dropped == {"6": "zero_std_0"}
    MadeRun(folder / "c").write()
    end = time.monotonic() + 60
    while len(view.ask("runs")["runs"]) < 3:
        assert time.monotonic() < end
    shutil.rmtree(folder / "c")


def test_what_a_model_wrote_is_escaped(made: tuple[Path, View]) -> None:
    _, view = made
    rows = view.ask("rollout", run="a", rollout=0)["columns"]
    for place, text in enumerate(NASTY):
        where = {"run": "a", "rollout": 0, "group": rows["group_index"][place], "sample": rows["sample_index"][place]}
        answer = view.ask("sample", **where)
        assert len(json.dumps(answer)) < 400_000
        shown = answer["text"]
        assert not set(shown) & {"\x1b", "\x07", "\x00", "\u202e", "\u2066"}
        assert shown.startswith(text[:8]) or "\\x1b[2J" in shown
    assert len(view.ask("search", run="a", rollout=0, text="OWNED")["found"]) == 1
    page = view.client.get("")
    assert "<script>alert" not in page.text


def test_a_report_is_one_file_that_model_text_cannot_leave(made: tuple[Path, View], tmp_path: Path, slime: Any) -> None:
    folder, _ = made
    output = tmp_path / "report.html"
    done = slime("report", folder / "a", "--output", output)
    assert ("make view-assets" in done.stderr) == (static_folder().name != "built")
    text = output.read_text()
    assert "<script>alert" not in text
    assert text.count("</script>") == (2 if static_folder().name == "built" else 3)
    assert not re.search(r"""(src|href)=["']?https?:""", text)
    stored = json.loads(re.search(r'id="stored">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    page = next(answer for name, answer in stored.items() if name.startswith('["run",'))
    samples = {name for name in stored if name.startswith('["sample",')}
    for order in ("best", "worst"):
        assert len(page[order]["text"]) == len(page[order]["rollout"]) > 0
        assert all(prompt.startswith("question") and response for prompt, response in page[order]["text"])
        for rollout, group, sample in zip(*(page[order][name] for name in ("rollout", "group_index", "sample_index"))):
            words = (f'["rollout","{rollout}"]', f'["group","{group}"]', f'["sample","{sample}"]')
            assert any(all(word in name for word in words) for name in samples)


@pytest.mark.slow
def test_a_report_replaces_a_report_and_nothing_else(
    made: tuple[Path, View], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = made
    for text in ("mine", "<!doctype html><title>mine</title>"):
        (tmp_path / "mine.html").write_text(text)
        assert main(["report", str(folder / "a"), "--output", str(tmp_path / "mine.html")]) == 2
        assert "mine.html is there already and is no report of slime's" in capsys.readouterr().err
        assert (tmp_path / "mine.html").read_text() == text
    assert main(["report", str(folder / "a"), "--output", str(tmp_path / "mine.html" / "x.html")]) == 2
    assert "mine.html/x.html: cannot be written: Not a directory" in capsys.readouterr().err
    for _ in range(2):
        assert main(["report", str(folder / "a"), "--output", str(tmp_path / "report.html")]) == 0


SCORES = {"reward": {"value": 0.25, "low": 0.1, "high": 0.5, "method": "wilson"}}
REPORT = {
    "hf_checkpoint": "m", "metrics": {"eval/held": 0.25}, "seconds": 1.5, "confidence": 0.95, "plugins": [],
    "datasets": {"held": {"prompts": 6, "samples_per_prompt": 1, "scores": SCORES}},
}  # fmt: skip


@pytest.mark.parametrize("finished", [pytest.param(True, marks=pytest.mark.slow), False])
def test_an_evaluation_has_a_state_and_its_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], finished: bool
) -> None:
    run = MadeRun(tmp_path / "outputs" / "eval", rollouts=0, evaluations=1).write()
    (run / "metrics.jsonl").unlink()
    (run / "eval").mkdir()
    (run / "eval" / "state.json").write_text(json.dumps({"finished": finished}))
    if finished:
        (run / "eval.json").write_text(json.dumps(REPORT))
    state = "ended" if finished else "stopped"
    page = inside(run).ask("run")
    assert (page["state"], page["of"]) == (state, None)
    assert page["evaluation"] == (REPORT if finished else None)
    assert page["evaluations"] == ({"held": [0.25, 0.25]} if finished else {})
    assert page["best"]["rollout"]
    assert main(["show", str(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{run}: {state}, evaluation, model")
    assert "0 of ?" not in shown
    assert ("0.1 to 0.5" in shown) == finished
    assert (f"slime eval --resume {run}" in shown) == (not finished)
    assert main(["runs", str(tmp_path / "outputs")]) == 0
    listed = capsys.readouterr().out
    assert re.search(rf"{state} +evaluation", listed)
    assert ("held 0.25" in listed) == finished


def test_a_renderer_is_shown_in_a_frame_that_runs_nothing(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site" / "toy-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[slime.renderers]\nboard = toy:board\nbroken = toy:broken\n")
    (info.parent / "toy.py").write_text(
        "def board(sample):\n    return f'<b>{sample.reward}</b><script>alert(1)</script>'\n"
        "def broken(sample):\n    raise KeyError('state')\n"
    )
    monkeypatch.syspath_prepend(info.parent)
    view = inside(run_dir)
    sample = view.ask("sample", rollout=0)
    assert sample["renderers"] == ["board", "broken"]
    where = {"rollout": 0, "group": sample["group_index"], "sample": sample["sample_index"]}
    drawn = view.client.get("rendered", params={"by": "board", **where})
    assert f"<b>{sample['reward']}</b>" in drawn.text
    assert drawn.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    failed = view.client.get("rendered", params={"by": "broken", **where})
    assert failed.status_code == 500
    assert "renderer 'broken' (toy): KeyError: 'state'" in failed.text


@pytest.mark.parametrize(
    "damage",
    ["killed", "no footers", "torn sample file", "torn lines", "other version", "a commit made again", "empty"],
)
def test_of_a_damaged_run_it_says_what_it_knows(tmp_path: Path, damage: str) -> None:
    run = MadeRun(tmp_path / "run").write()
    board = {"host": "elsewhere", "pid": 1}
    if damage == "killed":
        (run / "waits").mkdir()
        (run / "waits" / "elsewhere-1.json").write_text(json.dumps(board)[:-5])
    elif damage == "no footers":
        for path in (run / "samples").iterdir():
            path.write_bytes(path.read_bytes()[:-3])
    elif damage == "torn sample file":
        newest = run / "samples" / "rollout_0000003.jsonl.zst"
        newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    elif damage == "torn lines":
        for name in ("metrics.jsonl", "trace.jsonl", "incidents.jsonl"):
            with (run / name).open("ab") as file:
                file.write(b'{"step": 9, "e"')
        (run / "checkpoints" / "rollout_0000003" / "ledger.json").write_text("{")
    elif damage == "a commit made again":
        (run / "checkpoints" / "rollout_0000001.01").mkdir()
        (run / "checkpoints" / "rollout_0000001.01" / "model.safetensors").touch()
    elif damage == "other version":
        (run / "waits").mkdir()
        (run / "waits" / "elsewhere-1.json").write_text(json.dumps(board))
        (run / "metrics.jsonl").write_text('{"reward": 1}\n[1]\n{"step": 1, "rollout/raw_reward": 0.5}\n')
        (run / "summary.json").write_text("[]")
        for name in ("incidents.jsonl", "events.jsonl"):
            (run / name).write_text("[1]\n5\n")
    else:
        for name in ("samples", "checkpoints"):
            shutil.rmtree(run / name)
        (run / "metrics.jsonl").unlink()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    moved = tmp_path / "moved"
    run.rename(moved)
    view = inside(moved)
    found = view.ask("run")
    if damage in ("killed", "other version"):
        assert found["waits"]["unreadable"] == ["elsewhere-1.json"]
    rollouts = [0, 1, 2, 3] if damage not in ("torn sample file", "empty") else found["rollouts"]["rollout"]
    assert found["rollouts"]["rollout"] == rollouts
    assert found["state"] in ("stopped", "ended")
    assert view.ask("runs")["runs"][0]["run"] == "."
    view.ask("timeline", rollout=3)
    view.ask("prompt", row=1)
    view.ask("profile")
    for rollout in rollouts:
        assert view.ask("rollout", rollout=rollout)["count"] > 0
        assert view.ask("sample", rollout=rollout)["kept_weights"] == [0, 2][: 1 + (damage == "a commit made again")]
    assert {path: (moved / path.relative_to(run)).read_bytes() for path in before} == before


def test_a_run_that_has_begun_and_one_that_was_moved_away(tmp_path: Path) -> None:
    run, moved = MadeRun(tmp_path / "run", rollouts=2).write(), tmp_path / "moved"
    (run / "metrics.jsonl").unlink()
    began = [b'\n{"e":"run","t":%.1f,"start":%d}\n' % start for start in ((1795e6, 0), (1795e6 + 100, 2))]
    (run / "trace.jsonl").write_bytes((run / "trace.jsonl").read_bytes().join(began))
    with (run / "incidents.jsonl").open("ab") as incidents:
        incidents.write(b'{"rollout_id":1,"check":"ratio","cause":"first"}\n' * 2)
    (run / "checkpoints" / "rollout_0000001" / "tokenizer.json").write_text('{"version": "9')
    view = inside(run)
    assert view.ask("metrics", since=-1) == {"step": [], "columns": {}, "errors": {}}
    found = view.ask("run")
    assert (found["parts"], found["began"]) == ([[1795e6, 0], [1795e6 + 100, 2]], 1795e6)
    assert len(found["noticed"]) == 1
    assert view.ask("sample", rollout=1)["tokens"]["texts"] is None
    told = dict(view.ask("profile")["rows"])
    assert (told["  generating"], told["  only scoring"]) == pytest.approx((7.8, 2))
    before = view.ask("pulses")
    run.rename(moved)
    for what in ("run", "pulse", "metrics"):
        answer = view.client.get(f"api/{what}")
        assert answer.status_code == 404
        assert f"{run}: the run is not there any more" in answer.json()["error"]["message"]
    moved.rename(run)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert view.ask("pulses") != before


def test_what_cannot_be_read_is_said_and_hides_no_other_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("odd", "sound"):
        MadeRun(tmp_path / name, rollouts=1).write()
    write_file(tmp_path / "odd" / "samples" / file_name(0), [b'{"kept": 5}\n'])
    view = inside(tmp_path)
    assert view.ask("rollout", run="odd", rollout=0)["count"] == 0

    def summary(run: Run) -> dict[str, Any]:
        return {} if run.name == "sound" else {}["drained"]

    monkeypatch.setattr(Run, "summary", summary)
    answer = view.client.get("api/run", params={"run": "odd"})
    assert answer.status_code == 404
    assert f"{tmp_path / 'odd'}: cannot be read: KeyError" in answer.json()["error"]["message"]
    states = {run["run"]: run["state"] for run in view.ask("runs")["runs"]}
    assert states == {"odd": "unreadable", "sound": "ended"}
    for number in (2**63, -(2**64)):
        assert view.client.get("api/rollout", params={"run": "sound", "rollout": number}).status_code == 400


@pytest.mark.skipif(sys.platform != "linux", reason="addresses of Linux")
def test_what_cannot_be_shown_is_said_in_a_line(slime: Any, tmp_path: Path) -> None:
    nothing = slime("view", tmp_path, check=False)
    assert nothing.returncode
    assert "no runs there" in nothing.stderr


# -- a sample generated again, a group scored with another reward, notes --------------------------------------------


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
