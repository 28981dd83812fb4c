"""Rank 0 may work alone for longer than the others' collective calls may wait."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 8.0
"""Each is within it although other tests want the processors, and a machine may stand still for a moment."""
WORKER = textwrap.dedent("""
    import os, sys, threading

    from slime_core.launch.roles import Follower, Leader
    from slime_embedded.trainer.parallel import DataParallel

    minutes, slow, what = float(sys.argv[1]) / 60, 1.25 * float(sys.argv[1]), sys.argv[2]
    print("imported", flush=True)
    assert sys.stdin.readline() == "meet\\n"
    peers = DataParallel("cpu", minutes)

    try:
        if peers.rank:
            Follower(peers, None, None).run()
        else:
            leader = Leader(peers, minutes if what != "silent" else 60.0)
            try:
                for _ in range(2):
                    threading.Event().wait(slow)
                    if what == "fails":
                        raise ValueError("no engine came up")
            except ValueError as error:
                leader.end(error)
                raise
            leader.end()
    finally:
        peers.close()  # as a run does: torch's threads may abort a process that ends with them
    print("both have been through", flush=True)
""")


def two_ranks(what: str) -> list[tuple[int, str]]:
    """Exit status and output of both."""
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-c", WORKER, str(DEADLINE_S), what]
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env = {"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **place}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        ranks.append(subprocess.Popen(command, env=env, text=True, **pipes))  # type: ignore[call-overload]
    try:
        for rank in ranks:  # their deadline counts from here, and importing may take one of them longer
            assert rank.stdout.readline() == "imported\n"
        for rank in ranks:
            rank.stdin.write("meet\n")
            rank.stdin.flush()
        texts = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, text) for rank, text in zip(ranks, texts, strict=True)]


def test_rank_0_may_be_at_work_for_longer_than_the_deadline() -> None:
    assert two_ranks("slow") == [(0, "both have been through\n")] * 2


def test_without_a_word_the_wait_ends_at_the_deadline() -> None:
    (_, _), (status, text) = two_ranks("silent")
    assert status != 0
    assert "both have been through" not in text


def test_a_failure_of_rank_0_reaches_the_other() -> None:
    (first, said), (second, told) = two_ranks("fails")
    assert first != 0
    assert second != 0
    assert "ValueError: no engine came up" in said
    assert "RolloutError: rank 0 failed: ValueError: no engine came up" in told
