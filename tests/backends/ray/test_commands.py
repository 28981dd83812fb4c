"""What is no plain `slime train`, on a cluster: supervised, epochs, hooks, saved samples, rollouts alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.backends.ray.actors import files
from tests.conftest import TinyRun
from tests.image_runs import PICTURED, SAMPLES, argv, serving, write_inputs
from tests.run_files import timeless

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]

_HOOK = """
from pathlib import Path

import slime_core


class Seen:
    @slime_core.hookimpl
    def slime_rollout_end(self, rollout_id, groups, metrics):
        shown = [len(group) for group in groups]
        Path("seen.txt").open("a").write(f"{rollout_id} {shown} {groups[0][0].response_length > 0}\\n")


seen = Seen()
"""


def test_sft_by_epochs(tiny: TinyRun, cluster: str, typed: Any, tmp_path: Path) -> None:
    from slime_commands.init import task

    rows, _ = task.warmup_rows(task.split_problems()[0], seed=0)
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:64]))
    flags: list[object] = ["--hf-checkpoint", tiny.root / "model", "--prompt-data", "sft.jsonl"]
    flags += ["--input-key", "messages", "--rollout-batch-size", 32, "--global-batch-size", 16, "--num-epoch", 2]
    flags += ["--lr", "2e-3", "--save-interval", 100, "--num-threads", 1, "--no-preflight"]
    typed("sft", *flags, "--save", "here")
    typed("sft", *flags, "--save", "there", "--ray-address", cluster)
    assert len(timeless(tmp_path / "there")) == 4
    assert timeless(tmp_path / "there") == timeless(tmp_path / "here")
    assert files(tmp_path / "there") == files(tmp_path / "here")
    logs = sorted(path.stem for path in (tmp_path / "there" / "actors").glob("*.log"))
    assert logs == ["rollout", "trainer-rank-0"], "supervised rows need no engine"


def test_saved_samples_and_hooks(tiny: TinyRun, cluster: str, typed: Any, tmp_path: Path) -> None:
    plugin = tmp_path / "plugins" / "seen"
    plugin.mkdir(parents=True)
    (plugin / "seen_hook.py").write_text(_HOOK)
    (plugin / "pyproject.toml").write_text(
        '[project]\nname = "slime-seen"\nversion = "1"\n'
        '[project.entry-points."slime.plugins"]\nseen = "seen_hook:seen"\n'
    )
    flags = {"num_rollout": 2, "save_interval": 2, "eval_interval": None, "eval_prompt_data": None}
    joined = ["--ray-address", cluster, "--plugin-dir", "plugins"]
    first = tiny.argv(None, **flags, dump_details="details")
    typed("train", *first, "--save", "first", *joined)
    lines = (tmp_path / "seen.txt").read_text().splitlines()
    assert lines == [f"{rollout} [4, 4, 4, 4] True" for rollout in (0, 1)]

    saved = {**flags, "load_debug_rollout_data": "details/rollout_data/{rollout_id}.jsonl"}
    again = tiny.argv(None, **saved, prompt_data=None, custom_rm_path=None)
    done = typed("train", *again, "--save", "again", *joined[:2])
    assert "nothing is generated" in done.stderr
    first_files, again_files = files(tmp_path / "first"), files(tmp_path / "again")
    [weights] = [name for name in again_files if name.endswith("model.safetensors")][:1]
    assert first_files[weights] == again_files[weights]


def test_images(cluster: str, typed: Any, tmp_path: Path) -> None:
    """From the rollout's actor to the server and to the trainer's."""
    write_inputs(tmp_path)
    with serving() as (server, _):
        typed(*argv(tmp_path, tmp_path / "here", server))
        typed(*argv(tmp_path, tmp_path / "there", server), "--ray-address", cluster)
        asked = [body.get("image_data") for body in server.asked("/generate")]
    assert sum(images is not None for images in asked) == 4 * PICTURED * SAMPLES, "two rollouts of two runs"
    assert timeless(tmp_path / "there") == timeless(tmp_path / "here")
    assert files(tmp_path / "there") == files(tmp_path / "here")


def test_rollouts_alone_say_that_they_are_here(tiny: TinyRun, typed: Any, tmp_path: Path) -> None:
    flags = tiny.argv(tmp_path / "run", num_rollout=1, eval_interval=None, debug_rollout_only=True)
    done = typed("train", *flags, "--launcher", "ray")
    assert "--launcher 'ray' (flag): without effect with --debug-rollout-only" in done.stderr
