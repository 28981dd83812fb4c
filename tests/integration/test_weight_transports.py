"""A stranger's weight transport, a distribution outside the checkout, in a run of the embedded engine and trainer."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import Slime, TinyRun
from tests.run_files import gaps


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
    found = gaps(tmp_path / "run")
    assert len(found) == 2
    assert all(1e-5 < gap < 0.1 for gap in found), found
