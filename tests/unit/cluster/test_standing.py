"""What an engine in the place of another is told: the pause and the memory that hold, nothing that is over."""

from __future__ import annotations

from slime_launcher_ray.standing import Standing


def test_what_holds() -> None:
    standing = Standing()
    assert standing.calls() == []
    standing.note("pause", "retract")
    standing.note("release_memory", None)
    standing.note("abort", None)
    assert standing.calls() == [("pause", "retract"), ("release_memory", ["kv_cache", "weights"])]
    standing.note("resume")
    standing.note("resume_memory", ("weights",))
    assert standing.calls() == [("release_memory", ["kv_cache"])]
    standing.note("resume_memory", None)
    assert standing.calls() == []
