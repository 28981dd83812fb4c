"""A stranger's run directory: no file of it costs much memory or time, and none ends a command with a traceback."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from collections.abc import Callable
from itertools import product
from pathlib import Path

import orjson
import pytest
import zstandard
from slime_data.saved import read_samples
from slime_runs import Run, files
from slime_runs.files import FOLDER, file_name, trained_name
from slime_runs.index import Filter
from slime_runs.overview import lines, overview
from slime_runs.trace import TraceIndex

from slime_core.errors import CheckpointError, DataError
from tests.made_run import MadeRun

SAMPLES = f"{FOLDER}/{file_name(1)}"
TEXTS = (
    "metrics.jsonl", "events.jsonl", "incidents.jsonl", "trace.jsonl", "config.yaml", "summary.json", "waits/a.json",
    f"{FOLDER}/{trained_name(1)}", SAMPLES, "checkpoints/latest", "checkpoints/rollout_0000003/ledger.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MadeRun(tmp_path_factory.mktemp("made") / "run").write()


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def _packed(*frames: bytes) -> bytes:
    return b"".join(zstandard.ZstdCompressor(level=3).compress(frame) for frame in frames)


def _footer(content: bytes) -> bytes:
    packed = _packed(content)
    length = len(packed).to_bytes(4, "little")
    return (0x184D2A5E).to_bytes(4, "little") + (len(packed) + 8).to_bytes(4, "little") + packed + length + b"slim"


def _wide(count: int) -> bytes:
    return b'{"index":1,"x":[' + b"{}," * count + b"{}]}\n"


def _keys(count: int) -> bytes:
    return b'{"index":1,"x":{' + b",".join(b'"%d":[]' % i for i in range(count)) + b"}}\n"


BOMBS: dict[str, Callable[[], bytes]] = {
    "rows": lambda: _packed(b'{"index":1}\n' * 4_000_000),
    "a wide row": lambda: _packed(_wide(6_000_000)),
    "a row of lists": lambda: _packed(b'{"index":1,"x":[' + b"[]," * 6_000_000 + b"[]]}\n"),
    "a row of keys": lambda: _packed(_keys(500_000)),
    "empty lines": lambda: _packed(b"\n" * 30_000_000),
    "frames": lambda: _packed(*(b'{"index":%d,"a":"%s"}\n' % (i, b"a" * 20_000_000) for i in range(20))),
    "many small frames": lambda: _packed(b'{"index":1}\n' * 1000) * 500,
    "deep": lambda: _packed(b'{"index":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"),
    "footer": lambda: _footer(b"[" + b"{}," * 8_000_000 + b"{}]"),
    "footer of samples": lambda: _footer(b'{"form":1,"texts":["completed"]}\n' + bytes(128 * 400_000)),
    "footers in footers": lambda: b"".join((0x184D2A5E).to_bytes(4, "little") + bytes(4) for _ in range(100_000)),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_file_of_samples_takes_little_memory(run: Path, bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are a tenth of the product's, so the bombs are small enough to be made quickly."""
    monkeypatch.setattr(files, "MOST_BYTES", 24 << 20)
    monkeypatch.setattr(files, "MOST_PARSED", 48 << 20)
    monkeypatch.setattr(files, "MOST_LINE", 6 << 20)
    monkeypatch.setattr(files, "most_unpacked", lambda size: ((24 << 20) + 64 * size, 512 + size // 2))
    content = BOMBS[bomb]()
    (run / SAMPLES).write_bytes(content)
    (run / FOLDER / trained_name(2)).write_bytes(content)
    tracemalloc.start()
    try:
        found = overview(Run(run))
        assert [total["rollout"] for total in found["last_rollouts"] if total["rollout"] != 1] == [0, 2, 3]
        assert all(one.text for one in Run(run).samples(Filter(rollout=2, data_set="")))
        Run(run).trained(2)
        assert tracemalloc.get_traced_memory()[1] < 130 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "kind"),
    [*product(TEXTS, ["pipe", "link"]), *product((TEXTS[0], SAMPLES), ["endless", "directory", "sparse", "loop"])],
)
def test_every_file_of_a_run_may_be_none(run: Path, name: str, kind: str, tmp_path: Path) -> None:
    """A link, even to a sound file, is not followed: it may name any file of who looks."""
    path = run / name
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(tmp_path / "aside")
    else:
        (tmp_path / "aside").write_text("{}\n")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.symlink_to({"endless": Path("/dev/zero"), "link": tmp_path / "aside", "loop": path}[kind])
    shown = Run(run)
    assert "\n".join(lines(overview(shown)))
    shown.timeline.update()
    shown.trained(1)
    left = list(shown.samples(Filter(data_set="")))
    assert {one.entry.rollout for one in left} >= {0, 2, 3}
    assert (1 in {one.entry.rollout for one in left}) == (name != SAMPLES)
    if "checkpoints" in name:
        with pytest.raises(CheckpointError, match="checkpoints/"):
            shown.history()


ODD_LINES = (
    b"{}", b"[]", b"5", b'{"step":"a"}', b'{"step":1,"rollout/raw_reward":"x"}', b'{"step":3,"kind":"x","text":"y"}',
    b'{"rollout_id":{},"check":5}', b'{"rollout_id":1,"check":["a"],"cause":7}', b'{"event":{}}', b'{"event":5}',
    b'{"e":"sample","t":5,"r":1}', b'{"e":"sample","t":[1,2],"r":1}', b'{"e":"run","t":"x","start":[]}',
    b'{"e":5,"t":[]}', b'{"e":"train","r":"x","t":["a"]}', b'{"e":"sample","r":1,"t":[1,2,3]}',
    b'{"step":1,"rollout/raw_reward":' + b"9" * 400 + b"}", b"\xff\xfe", b"[" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "incidents.jsonl", "trace.jsonl"])
def test_lines_of_another_hand_are_left_out(run: Path, name: str) -> None:
    with (run / name).open("ab") as file:
        file.writelines(line + b"\n" for line in ODD_LINES)
    shown = Run(run)
    assert "\n".join(lines(overview(shown)))
    assert all({"rollout_id", "check", "cause", "numbers"} <= one.keys() for one in shown.incidents())
    index = TraceIndex(run / "trace.jsonl")
    index.update()
    index.events(1)
    shown.parts()


@pytest.mark.parametrize(
    "row",
    [{}, {"index": 1}, {"prompt": None}, {"prompt": 5}, {"prompt": ["a"]}, {"prompt": {}}, {"response": 5},
     {"index": "a"}, {"tokens": 5}, {"kept": None}, {"kept": []}, {"metadata": []}, {"response_length": "a"}],
)  # fmt: skip
def test_a_row_of_another_hand_hides_no_other_file(run: Path, row: dict[str, object]) -> None:
    (run / SAMPLES).write_bytes(_packed(orjson.dumps(row) + b"\n"))
    (run / FOLDER / trained_name(1)).write_bytes(_packed(orjson.dumps(row) + b"\n"))
    (run / FOLDER / "shadow_0000001.jsonl.zst").write_bytes(_packed(orjson.dumps(row) + b"\n"))
    shown = Run(run)
    assert "\n".join(lines(overview(shown)))
    found = [(one.messages, one.text) for one in shown.samples(Filter(data_set=""))]
    assert len(found) > 40
    assert list(shown.samples(Filter(data_set=""), text="question"))


@pytest.mark.parametrize(
    "value", ["[" * 2000, "&a [1, *a]", "{a: &a [x, x], b: &b [*a, *a], c: [*b, *b]}", "2024-99-99", "!!python/x 1"]
)
def test_a_setting_of_another_hand_is_its_text(run: Path, value: str) -> None:
    (run / "config.yaml").write_text(f"seed: {value}  # flag\nnum_rollout: 7  # flag\n")
    found = Run(run).settings()
    assert found["seed"][0] == value
    assert found["num_rollout"] == (7, "flag")


@pytest.mark.parametrize("bomb", ["rows", pytest.param("frames", marks=pytest.mark.slow), "deep"])
def test_a_bomb_among_samples_that_are_exported_is_an_error(tmp_path: Path, bomb: str) -> None:
    path = tmp_path / file_name(0)
    path.write_bytes(BOMBS[bomb]())
    with pytest.raises(DataError, match=r"unpack to more samples than|no sample as JSON"):
        read_samples(path)
