"""The page's actions: generate a stored sample again, and score stored answers with another reward.

Each action runs a command, `slime resample` or `slime rewards replay`, in a separate process, so that the model or the
reward cannot harm the server. Nothing is written into the run. One action runs at a time; it ends at a deadline, or
when its page is closed.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field
from slime_serving.http.bodies import Body
from slime_serving.http.errors import Refused
from slime_serving.http.streams import unless_disconnected
from slime_serving.http.threads import DeadlineThreads

from slime_core.data.dumps import to_json
from slime_core.text import plain
from slime_core.workers.process import Guarded, python
from slime_runs.notes import LONGEST
from slime_runs.numbering import shown_number
from slime_runs.run import StoredSample
from slime_runs.view.sample_page import tokens_of
from slime_runs.view.samples_page import parts_of
from slime_runs.view.watched import WatchedRun

_DEADLINE_S = 600.0
_LONGEST_ERROR = 4000
"""Characters of an error."""
_CONFIG = "config.yaml"


Number = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Integer within the range of the index."""


class Place(Body):
    """The place of a sample in a run."""

    run: str = "."
    rollout: Number
    data_set: str = ""
    group: Number | None = None
    sample: Number | None = None
    part: Number | None = None


class ResampleBody(Place):
    """The request for `slime resample`, with its flags."""

    from_token: Annotated[int, Field(ge=0)] = 0
    weights: int | None = None
    """Number of rollouts that the weights were trained on; None: the weights that sampled the answer."""
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    times: Annotated[int, Field(ge=1, le=16)] = 1
    tool_answer: Annotated[str | None, Field(max_length=100_000)] = None


class ScoreBody(Place):
    """The request for `slime rewards replay --with reward` on the sample's group."""

    reward: Annotated[str, Field(min_length=1, max_length=4096)]
    """Reward as a name, pkg.mod:attr or file.py."""
    seen: str | None = None
    """State of the reward's file whose scores the page already has."""


class NoteBody(Body):
    """The user's note on a run."""

    run: str = "."
    text: Annotated[str, Field(max_length=LONGEST)]


class Actions:
    """The actions of a server."""

    def __init__(self, threads: DeadlineThreads, deadline: float = _DEADLINE_S) -> None:
        self._threads, self._deadline = threads, deadline
        self._now: str | None = None

    async def resample(
        self, request: Request, run: WatchedRun, found: StoredSample, asked: ResampleBody
    ) -> list[dict[str, Any]]:
        """Generate the sample again; return each result with its comparison to the stored one. Raises Refused."""
        entry = found.entry
        if entry.sample_index is None or entry.part:
            raise Refused(400, "slime resample knows samples by their number, and this one has none of its own")
        with tempfile.TemporaryDirectory(prefix="slime-view-") as folder:
            given: dict[str, Any] = {
                "--rollout": shown_number(entry.rollout, entry.data_set),
                "--eval": entry.data_set,
                "--from-token": asked.from_token or None,
            }
            given |= {"--weights": asked.weights, "--temperature": asked.temperature, "--times": asked.times}
            if asked.tool_answer is not None:
                answer = Path(folder) / "tool_answer.txt"
                answer.write_text(asked.tool_answer, encoding="utf-8")
                given["--tool-answer"] = answer
            argv = ["resample", run.path, entry.sample_index, *_flags(given), "--json"]
            what = f"resampling sample {entry.sample_index}"
            printed = await self._command(request, what, argv, Path(folder))

        def made() -> list[dict[str, Any]]:
            with run.lock:
                return [_again(run, found, json.loads(line)) for line in printed.splitlines()]

        return await self._threads.call("reading what came out", made)

    async def score(
        self, request: Request, run: WatchedRun, stored: Sequence[StoredSample], asked: ScoreBody
    ) -> dict[str, Any]:
        """Return old and new reward of each answer of the group, and the reward file's "state". Raises Refused."""
        state = _state(asked.reward)
        if asked.seen is not None and asked.seen == state:
            return {"state": state, "unchanged": True}
        with tempfile.TemporaryDirectory(prefix="slime-view-") as folder:
            file = Path(folder) / "samples.jsonl"
            rows = [{name: value for name, value in one.row.items() if name != "kept"} for one in stored]
            file.write_bytes(b"".join(to_json(row, "a kept sample") + b"\n" for row in rows))
            config = run.path / _CONFIG
            given = {"--with": asked.reward, "--config": config if config.is_file() else None}
            argv = ["rewards", "replay", file, *_flags(given), "--json"]
            printed = await self._command(request, f"scoring with {asked.reward}", argv, Path(folder))
        (told,) = json.loads(printed).values()
        return {"state": state, "unchanged": False, "outcomes": [_outcome(one) for one in told["outcomes"]]}

    async def _command(self, request: Request, what: str, argv: Sequence[Any], folder: Path) -> str:
        """Run a command and return its output. Raises Refused with the command's error if it fails."""
        if self._now is not None:
            raise Refused(409, f"{plain(self._now, 200)} is going on; wait for it, or close its page, which ends it")
        self._now = what
        child = Guarded("slime " + str(argv[0]))
        out, err = folder / "out", folder / "err"
        try:
            with out.open("wb") as stdout, err.open("wb") as stderr:
                words = [*python(), "-m", "slime_core", *map(str, argv)]
                child.start(words, stdout=stdout.fileno(), stderr=stderr.fileno())
            # The thread ends with the child, which is killed when the request is gone.
            ended = await unless_disconnected(request, asyncio.to_thread(child.wait, self._deadline))
        finally:
            await asyncio.to_thread(child.kill)
            self._now = None
        printed = out.read_text(encoding="utf-8", errors="replace")
        if ended is None:
            raise Refused(504, f"{plain(what, 200)} took longer than {self._deadline:g} s and was ended")
        if ended and not printed:
            raise Refused(400, _said(err) or f"{plain(what, 200)}: {child.ending()}")
        return printed


def _flags(given: dict[str, Any]) -> list[str]:
    # With "=", so that no value is taken for a flag.
    return [f"{flag}={value}" for flag, value in given.items() if value is not None]


def _said(err: Path) -> str:
    """Return the error without the messages before it."""
    text = err.read_text(encoding="utf-8", errors="replace")
    at = text.rfind("slime: error: ")
    return plain(text[at + len("slime: error: ") :] if at >= 0 else text[-_LONGEST_ERROR:], _LONGEST_ERROR).strip()


def _again(run: WatchedRun, stored: StoredSample, told: dict[str, Any]) -> dict[str, Any]:
    again = StoredSample(stored.entry, told["sample"])
    return {
        **{name: told[name] for name in ("weights", "kept", "first_difference", "log_prob_distance")},
        "reward": parts_of(told["sample"].get("reward")),
        "status": told["sample"]["status"],
        "tokens": tokens_of(run, again, {}, None),
    }


def _outcome(one: dict[str, Any]) -> dict[str, Any]:
    error = one["error"]
    return {
        "sample_index": one["index"], "old": parts_of(one["old"]), "new": parts_of(one["new"]),
        "error": None if error is None else plain(error, _LONGEST_ERROR), "answer": plain(one["response"], 300),
    }  # fmt: skip


def _state(spec: str) -> str | None:
    """Return the state of a reward's file (time and size); None if the reward is no file."""
    path = Path(spec.partition(":")[0])
    try:
        found = path.stat() if path.suffix == ".py" else None
    except (OSError, ValueError):
        return None
    return None if found is None else f"{found.st_mtime_ns}/{found.st_size}"
