"""Submitting and following a job whose server answers badly. Real job servers: `tests/backends/ray/test_nodes.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from ray.job_submission import JobDetails, JobStatus, JobType
from slime_launcher_ray import submit

from slime_core.errors import ConfigError, SlimeError

LINES = ["job one\n", "rollout 1/2\n", "rollout 2/2\n"]
BROKEN = [RuntimeError("close code 1006"), aiohttp.ServerDisconnectedError(), ConnectionError("refused")]


class Server:
    """A client of a job server; what it answers one call after the other, errors raised."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.submitted: list[str] = []

    def submit_job(self, *, submission_id: str, **_: Any) -> str:
        self.submitted.append(submission_id)
        self._next()
        return submission_id

    def _next(self) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def get_job_info(self, job_id: str) -> JobDetails:
        status, code = self._next()
        return JobDetails(
            type=JobType.SUBMISSION, entrypoint="it", status=status, driver_exit_code=code, message="no such node"
        )

    def get_job_logs(self, job_id: str) -> str:
        return "".join(self._next())

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        for text in self._next():
            if isinstance(text, Exception):
                raise text
            yield text


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "_LOOK", 0.0)


def followed(*answers: Any) -> int:
    return submit.follow(Server(*answers), "one")  # type: ignore[arg-type]


RUNS, ENDED = (JobStatus.RUNNING, None), (JobStatus.SUCCEEDED, 0)


@pytest.mark.parametrize("error", BROKEN, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "answers",
    [
        lambda error: [RUNS, [*LINES[:2], error], RUNS, LINES, ENDED, LINES],
        lambda error: [RUNS, [error], error, error, ENDED, LINES],
        lambda error: [error, RUNS, LINES[:1], ENDED, error, ENDED, LINES],
    ],
    ids=["between lines", "before them", "at the end"],
)
def test_a_broken_connection_costs_no_line_and_doubles_none(
    error: Exception, answers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert followed(*answers(error)) == 0
    assert capsys.readouterr().out == "".join(LINES)


def test_a_connection_that_ends_before_the_job_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Ray's dashboard closes it in order when it loses the agent's."""
    assert followed((JobStatus.PENDING, None), RUNS, LINES[:1], (JobStatus.FAILED, 2), LINES) == 2
    assert capsys.readouterr().out == "".join(LINES)


def test_how_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert followed((JobStatus.STOPPED, None), []) == submit.STOPPED_STATUS
    assert capsys.readouterr().err == "slime: job one was stopped\n"
    with pytest.raises(SlimeError, match="job one failed: no such node"):
        followed((JobStatus.FAILED, None), [])


def test_a_server_that_answers_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "_PATIENCE", -1.0)
    with pytest.raises(SlimeError, match=r"the job server does not answer \(refused\)"):
        followed(ConnectionError("refused"))


BUSY = RuntimeError("Request failed with status code 500: Traceback ... TimeoutError.")


def submitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *answers: Any, job_id: str | None = None) -> Server:
    server = Server(*answers)
    monkeypatch.setattr(submit, "JobSubmissionClient", lambda address: server)
    client, name = submit.submit("http://head:8265", tmp_path, "python", job_id, {})
    assert client is server
    assert set(server.submitted) == {name}, "each try under the same name, so that no job is there twice"
    assert name == job_id or job_id is None
    return server


def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert len(submitted(monkeypatch, tmp_path, BUSY, RuntimeError("No available agent"), None).submitted) == 3


def test_what_the_server_refuses_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--address http://head:8265: no entrypoint"):
        submitted(monkeypatch, tmp_path, RuntimeError("no entrypoint"))
