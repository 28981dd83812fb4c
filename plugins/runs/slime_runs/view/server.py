"""The pages and their JSON over HTTP; nothing but the user's note is written into a run.

    GET /            the page; its scripts ask for the rest
    GET /static/...  scripts and styles: `built/`, which `make view-assets` makes, or else the sources in `page/`
    GET /api/...     JSON of `run_pages`, `samples_page`, `sample_page`
    GET /rendered    a renderer's output for a sample
    GET /trace       the Perfetto trace of `slime train --profile`
    POST /api/...    the actions of `actions`, and the note

A run is named by its path below the served directory ("." is the directory itself).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import Field
from slime_serving.http.application import application
from slime_serving.http.bodies import JsonRoute
from slime_serving.http.errors import Refused, sglang_shape
from slime_serving.http.guard import Access
from slime_serving.http.streams import json_response
from slime_serving.http.threads import DeadlineThreads

from slime_core.files import open_regular
from slime_runs.index import Filter
from slime_runs.notes import write_note
from slime_runs.run import PROFILE, RunError, StoredSample, find_runs, is_run
from slime_runs.view import run_pages, sample_page, samples_page
from slime_runs.view.access import RENDERED_POLICY
from slime_runs.view.actions import Actions, NoteBody, Number, Place, ResampleBody, ScoreBody
from slime_runs.view.renderers import RendererError, render
from slime_runs.view.watched import UnreadableError, WatchedRun, readable

logger = logging.getLogger(__name__)

HERE = Path(__file__).parent
_LOOK_AGAIN = 2.0
"""Seconds between searches for new runs."""
_MOST_COMPARED = 12
_MOST_TEXTS = 200
_PIECE = 1 << 20
PlaceOfRow = Annotated[str, Field(pattern=r"^\d{1,18}(\.\d{1,18}){4}$")]
Order = Literal["rollout", "best", "worst"]


class Runs:
    """The runs below a directory, or the run in it."""

    def __init__(self, top: Path) -> None:
        """Find the runs. Raises RunError if there is no run."""
        self._top = top
        self._known: dict[str, WatchedRun] = {}
        self._looked = float("-inf")
        if len(runs := self.all()) == 1:
            # The first page of a long run waits for these. If the run cannot be read, the page shows the error.
            (one,) = runs.values()
            with suppress(UnreadableError), readable(one):
                one.index().rollouts()
                one.metrics()
                one.parts()

    def all(self) -> Mapping[str, WatchedRun]:
        """Return the runs by name, newest last. Raises RunError if there is no run any more."""
        if time.monotonic() - self._looked > _LOOK_AGAIN:
            paths = {run.path.relative_to(self._top).as_posix(): run.path for run in find_runs(self._top)}
            self._known = {name: self._known.get(name) or WatchedRun(path) for name, path in paths.items()}
            self._looked = time.monotonic()
        return self._known

    def __getitem__(self, name: str) -> WatchedRun:
        """Return the run of this name. Raises RunError if it is missing."""
        if name not in self._known and name not in self.all():
            raise RunError(f"no run {name[:200]!r} in {self._top}")
        if not is_run(self._known[name].path):
            raise RunError(f"{self._known[name].path}: the run is not there any more: moved, or deleted")
        return self._known[name]


def static_folder() -> Path:
    """Return the folder of the page's scripts."""
    built = HERE / "built"
    return built if (built / "main.js").is_file() else HERE / "page"


def warn_if_unbuilt() -> None:
    """Log a warning if the scripts are not built: pip builds a wheel of a checkout without them, and says nothing."""
    if static_folder().name != "built":
        logger.warning(
            "curves have no zoom, since the page's scripts were not built. Install a wheel of a release; in a checkout"
            " with Node: make view-assets, then install again"
        )


def make_app(top: Path, access: Access | None = None, *, acts: bool = True) -> FastAPI:
    """Return the application, without its token; with `acts` requests may start processes. Raises RunError."""
    found = Runs(top)
    app = application(access)

    @app.exception_handler(RunError)
    async def no_run(request: Request, error: RunError) -> Response:
        return json_response(sglang_shape(404, str(error)), 404)

    _add_run_routes(app, found)
    _add_over_time_routes(app, found)
    threads = DeadlineThreads()
    _add_sample_routes(app, found)
    _add_rendered(app, found, threads)
    _add_actions(app, found, threads, acts)

    @app.get("/", response_class=HTMLResponse)
    def page() -> FileResponse:
        return FileResponse(HERE / "page" / "index.html")

    app.mount("/static", StaticFiles(directory=static_folder()), name="static")
    return app


def _asked(found: Runs, name: str, ask: Callable[[WatchedRun], Any]) -> Response:
    run = found[name]
    with run.lock, readable(run):
        return json_response(ask(run))


def _compared(found: Runs, names: Sequence[str]) -> dict[str, Any]:
    if len(names) > _MOST_COMPARED:
        raise Refused(400, f"{len(names)} runs; at most {_MOST_COMPARED} are compared")
    watched = {name: found[name] for name in names}
    with ExitStack() as entered:
        for one in watched.values():
            entered.enter_context(one.lock)
        entered.enter_context(readable(*watched.values()))
        return run_pages.compared(watched)


def _add_run_routes(app: FastAPI, found: Runs) -> None:
    @app.get("/api/runs")
    def runs() -> Response:
        return json_response(run_pages.runs(found.all()))

    @app.get("/api/compare")
    def compare(run: Annotated[list[str], Query()]) -> Response:
        return json_response(_compared(found, sorted(set(run))))

    @app.get("/api/run")
    def one_run(run: str = ".") -> Response:
        return _asked(found, run, run_pages.run_page)

    @app.get("/api/pulse")
    def pulse(run: str = ".") -> Response:
        return _asked(found, run, run_pages.pulse)

    @app.get("/api/pulses")
    def pulses() -> Response:
        return json_response({"stamp": "".join(f"{name} {run.stamp()}" for name, run in found.all().items())})

    @app.get("/api/waits")
    def waits(run: str = ".") -> Response:
        return _asked(found, run, run_pages.waits)

    @app.get("/api/profile")
    def profile(run: str = ".") -> Response:
        return _asked(found, run, run_pages.profiled)

    @app.get("/trace")
    def trace(run: str = ".") -> Response:
        path = found[run].path / PROFILE
        try:
            file = open_regular(path)
        except OSError as error:
            raise RunError(f"{path} cannot be read ({error.strerror}): slime train --profile writes it") from error
        # Streamed in pieces without its size, since a running run appends to it.
        headers = {"content-disposition": 'attachment; filename="trace.json"'}
        return StreamingResponse(_pieces(file), media_type="application/json", headers=headers)

    @app.get("/api/metrics")
    def metrics(
        name: Annotated[list[str], Query()] = [], run: str = ".", since: Number = -1, times: bool = False,  # noqa: B006
    ) -> Response:  # fmt: skip
        return _asked(found, run, lambda it: run_pages.metrics(it, name, since, times=times))


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(_PIECE):
            yield piece


def _add_over_time_routes(app: FastAPI, found: Runs) -> None:
    @app.get("/api/timeline")
    def timeline(rollout: Number, run: str = ".") -> Response:
        return _asked(found, run, lambda it: run_pages.timeline(it, rollout))

    @app.get("/api/shadows")
    def shadows(run: str = ".") -> Response:
        return _asked(found, run, run_pages.shadow)

    @app.get("/api/evaluation")
    def evaluation(data_set: str, run: str = ".") -> Response:
        return _asked(found, run, lambda it: run_pages.evaluation(it, data_set))

    @app.get("/api/prompt")
    def prompt(row: Number, run: str = ".") -> Response:
        return _asked(found, run, lambda it: run_pages.prompt(it, row))


def _add_sample_routes(app: FastAPI, found: Runs) -> None:
    @app.get("/api/rollout")
    def rollout(rollout: Number, run: str = ".", data_set: str = "") -> Response:
        return _asked(found, run, lambda it: samples_page.rollout(it, rollout, data_set))

    @app.get("/api/samples")
    def samples(
        run: str = ".", order: Order = "rollout", limit: int = Query(200, ge=1, le=5000), data_set: str = "",
        status: str | None = None, fate: str | None = None, min_score: float | None = None,
        max_score: float | None = None, min_tokens: Number | None = None, max_tokens: Number | None = None,
    ) -> Response:  # fmt: skip
        wanted = Filter(
            data_set=data_set, status=status, fate=fate, min_score=min_score, max_score=max_score,
            min_tokens=min_tokens, max_tokens=max_tokens,
        )  # fmt: skip
        return _asked(found, run, lambda it: samples_page.table(it, wanted, order=order, limit=limit))

    @app.get("/api/texts")
    def texts(at: Annotated[list[PlaceOfRow], Query()], run: str = ".", text: str = "") -> Response:
        if len(at) > _MOST_TEXTS:
            raise Refused(400, f"{len(at)} texts; at most {_MOST_TEXTS} at a time")
        return _asked(found, run, lambda it: samples_page.texts(it, at, text))

    @app.get("/api/search")
    def search(rollout: Number, text: str, run: str = ".", data_set: str = "") -> Response:
        return _asked(found, run, lambda it: samples_page.search(it, rollout, data_set, text))

    @app.get("/api/group")
    def group(rollout: Number, group: Number, run: str = ".", data_set: str = "") -> Response:
        return _asked(found, run, lambda it: samples_page.group(it, rollout, data_set, group))

    @app.get("/api/sample")
    def sample(
        rollout: Number, sample: Number | None = None, group: Number | None = None, run: str = ".", data_set: str = "",
        part: Number | None = None, start: Number | None = None,
    ) -> Response:  # fmt: skip
        wanted = Filter(rollout=rollout, data_set=data_set, group_index=group, sample_index=sample, part=part)
        return _asked(found, run, lambda it: sample_page.sample(it, wanted, start))


def _add_rendered(app: FastAPI, found: Runs, threads: DeadlineThreads) -> None:
    @app.get("/rendered")
    async def rendered(
        by: str, rollout: Number, sample: Number | None = None, group: Number | None = None, run: str = ".",
        data_set: str = "", part: Number | None = None,
    ) -> Response:  # fmt: skip
        wanted = Filter(rollout=rollout, data_set=data_set, group_index=group, sample_index=sample, part=part)

        def work() -> str:
            one = found[run]
            with one.lock:
                stored = sample_page.find_sample(one, wanted)
            return render(by, stored.sample) or ""

        try:
            body = await threads.call(f"renderer {by[:80]!r}", work)
        except RendererError as error:
            raise Refused(500, str(error)) from error
        headers = {"content-security-policy": RENDERED_POLICY}
        return HTMLResponse(f"<!doctype html><meta charset=utf-8>{body}", headers=headers)


def _add_actions(app: FastAPI, found: Runs, threads: DeadlineThreads, acts: bool) -> None:
    actions = Actions(threads)
    app.router.route_class = JsonRoute

    def check_acts() -> None:
        """Raise Refused unless requests may change something or start processes."""
        if not acts:
            raise Refused(403, "notes and processes are for this machine's own address alone: leave out --host")

    async def stored(place: Place, *, group: bool) -> list[StoredSample]:
        """Return the sample, and with `group` its siblings, too. Raises Refused, RunError."""
        check_acts()
        wanted = Filter(
            rollout=place.rollout, data_set=place.data_set, group_index=place.group, sample_index=place.sample,
            part=place.part,
        )  # fmt: skip

        def work() -> list[StoredSample]:
            run = found[place.run]
            with run.lock:
                one = sample_page.find_sample(run, wanted)
                whole = group and one.entry.group_index is not None
                return (
                    list(run.stored(run.index().find(replace(wanted, sample_index=None, part=None))))
                    if whole
                    else [one]
                )

        return await threads.call("reading the sample", work)

    @app.post("/api/note")
    async def note(body: NoteBody) -> Response:
        check_acts()

        def work() -> str:
            run = found[body.run]
            write_note(run.path, body.text)
            return run.note()

        return json_response({"note": await threads.call("writing the note", work)})

    @app.post("/api/resample")
    async def resample(request: Request, body: ResampleBody) -> Response:
        (one,) = await stored(body, group=False)
        return json_response(await actions.resample(request, found[body.run], one, body))

    @app.post("/api/score")
    async def score(request: Request, body: ScoreBody) -> Response:
        return json_response(await actions.score(request, found[body.run], await stored(body, group=True), body))
