from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slime_commands.plugins.tracing import Trace, report, watched

from slime_core.config import Args
from slime_core.errors import PluginError
from slime_core.plugins.manager import build_manager
from slime_core.plugins.resolve import resolve

HOOKS = """
import time
from slime_core import hookimpl

@hookimpl
def slime_weights_updated(weight_version):
    deadline = time.perf_counter() + 0.02
    while time.perf_counter() < deadline:
        pass
    if weight_version == 3:
        raise ValueError("three")
"""


@pytest.fixture
def seen() -> Iterator[Trace]:
    with watched() as trace:
        yield trace


def test_hooks_are_timed_per_plugin(write_plugin, plugin_dir: Path, seen: Trace) -> None:
    write_plugin("thing-hooks", {"slime.plugins": {"watch": "plug_thing_hooks"}}, HOOKS)
    manager = build_manager(Args(plugin_dir=[str(plugin_dir)]))
    manager.hook.slime_weights_updated(weight_version=1)
    with pytest.raises(PluginError, match=r"'watch' \(thing-hooks 1\.0\): slime_weights_updated raised .*three"):
        manager.hook.slime_weights_updated(weight_version=3)
    calls = seen.calls["slime_weights_updated", "thing-hooks:watch"]
    assert (calls.times, calls.errors) == (2, 1)
    assert 0.02 <= calls.slowest <= calls.seconds
    assert calls.seconds >= 0.04
    (row,) = [line.split() for line in report(seen).splitlines() if "thing-hooks:watch" in line]
    assert (row[0], row[2], row[-1]) == ("slime_weights_updated", "2", "1")


def test_answers_say_who_and_where(tmp_path: Path, seen: Trace) -> None:
    file = tmp_path / "my_rm.py"
    file.write_text("\n\ndef reward(args, sample):\n    return 1.0\n")
    resolve("rewards", str(file), origin="--custom-rm-path (flag)")
    resolve("rewards", "exact", origin="--rm-type (run.yaml:3)")
    resolve("rewards", "exact", origin="--rm-type (run.yaml:3)")
    shown = report(seen)
    (mine,) = [line for line in shown.splitlines() if line.startswith("--custom-rm-path (flag)")]
    assert f"{file}:3" in mine
    (exact,) = [line for line in shown.splitlines() if line.startswith("--rm-type (run.yaml:3)")]
    assert "rewards/exact" in exact
    assert "slime-rl 0.1.0" in exact
    assert exact.split()[-1] == "2"


def test_nothing_is_kept_while_no_trace_is_on() -> None:
    with watched() as stopped:
        pass
    resolve("rewards", "exact")
    assert not stopped.answers
    assert "none was resolved" in report(stopped)
