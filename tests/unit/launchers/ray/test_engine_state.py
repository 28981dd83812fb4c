"""What an engine in the place of another is told: the pause and the memory that hold, nothing that is over."""

from __future__ import annotations

from slime_launcher_ray.engine_state import EngineState


def test_what_holds() -> None:
    state = EngineState()
    assert state.calls() == []
    state.note("pause", "retract")
    state.note("release_memory", None)
    state.note("abort", None)
    assert state.calls() == [("pause", "retract"), ("release_memory", ["kv_cache", "weights"])]
    state.note("resume")
    state.note("resume_memory", ("weights",))
    assert state.calls() == [("release_memory", ["kv_cache"])]
    state.note("resume_memory", None)
    assert state.calls() == []
