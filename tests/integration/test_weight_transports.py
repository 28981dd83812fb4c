"""A stranger's weight transport, a distribution outside the checkout, in a run of the embedded engine and trainer."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from slime_core.learning.report import GAP
from tests.conftest import TinyRun

Slime = Callable[..., subprocess.CompletedProcess[str]]


def test_a_strangers_transport_serves_what_was_trained(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    slime("plugins", "new", "weight_transport", "half", "--dir", tmp_path / "mine")
    flags = {
        "num_rollout": 2, "plugin_dir": tmp_path / "mine", "update_weight_transport": "half",
        "check_weight_update_equal": True,
    }  # fmt: skip
    slime("train", *tiny.argv(tmp_path / "run", **flags))
    plugins = json.loads((tmp_path / "run" / "summary.json").read_text())["plugins"]
    (used,) = [plugin for plugin in plugins if plugin["kind"] == "weight_transports"]
    assert (used["name"], used["distribution"]) == ("half", "slime-weight-transport-half")
    # It serves bfloat16's values: in float32, rounding makes 1e-6.
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [row[GAP] for row in rows if GAP in row]
    assert len(gaps) == 2
    assert all(1e-5 < gap < 0.1 for gap in gaps), gaps


def test_what_is_not_there_is_said_before_anything_starts(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    done = slime("train", *tiny.argv(tmp_path / "run", update_weight_transport="detla"), check=False)
    assert done.returncode == 2
    assert "no weight_transports plugin 'detla'. Did you mean 'delta'?" in done.stderr
    assert not (tmp_path / "run").exists()
