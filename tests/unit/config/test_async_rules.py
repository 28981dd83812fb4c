"""What `--async` excludes, and what is said of settings without effect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime_core.config import Settings
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError

Load = Callable[..., Settings]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--async --colocate",
            r"--async \(flag\) and --colocate \(flag\) exclude each other: trainer and engines work",
        ),
        ("--async --offload-train", r"--async \(flag\) and --offload-train \(flag\) exclude each other"),
        ("--async --true-on-policy-mode", r"--async .* --true-on-policy-mode .* exclude each other"),
        ("--async --max-staleness 0", r"--max-staleness 0 \(flag\): --async-mode one-step .* so 1 is the least"),
        ("--async --max-staleness 2 --partial-rollout", r"need --staleness-policy mask in --async-mode one-step"),
        ("--async --async-mode full --rollout-function-path sft", r"--async-mode 'full' .* calls no rollout function"),
        ("--async --async-mode two-step", r"--async-mode 'two-step'"),
        ("--async --update-weights-interval 0", r"--update-weights-interval '0'"),
    ],
)
def test_refused(load: Load, flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*flags.split())


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--max-staleness 2", "--max-staleness 2 (flag) has no effect without --async,"),
        ("--eval-in-background", "--eval-in-background (flag) has no effect without --async,"),
        ("--update-weights-interval 5 --colocate", "--update-weights-interval 5 (flag) has no effect without --async,"),
        ("--async --async-buffer-groups 8", "--async-buffer-groups 8 (flag) has no effect with --async-mode one-step"),
        ("--async --staleness-policy drop", "--staleness-policy 'drop' (flag) has no effect without --max-staleness."),
        ("--async --eval-in-background", "--eval-in-background (flag) has no effect without --eval-interval."),
        ("--async --debug-rollout-only", "--async (flag) has no effect with --debug-rollout-only"),
    ],
)
def test_without_effect(load: Load, flags: str, warning: str) -> None:
    assert [w for w in load(*flags.split()).warnings if w.startswith(warning)]


@pytest.mark.parametrize(
    "flags",
    [
        "--async --update-weights-interval 3 --max-staleness 1",
        "--async --max-staleness 2 --partial-rollout --staleness-policy mask",
        "--async --async-mode full --max-staleness 0 --staleness-policy drop --async-buffer-size 2",
    ],
)
def test_accepted(load: Load, flags: str) -> None:
    assert not [w for w in load(*flags.split()).warnings if "async" in w or "stale" in w]


def test_the_buffer_holds_a_batch_unless_told_otherwise(load: Load) -> None:
    settings = load("--async", "--async-mode", "full")
    assert settings.args.async_buffer_groups == settings.args.rollout_batch_size
    assert str(settings.origins["async_buffer_groups"]) == "derived: rollout_batch_size"


def test_the_buffer_counts_rollouts(load: Load) -> None:
    """1 is one-step; more is continuous generation."""
    one, more = load("--async", "--async-buffer-size", "1"), load("--async", "--async-buffer-size", "4")
    assert (one.args.async_mode, more.args.async_mode) == ("one-step", "full")
    assert more.args.async_buffer_groups == 4 * more.args.rollout_batch_size
    assert str(more.origins["async_mode"]) == "derived: async_buffer_size 4"
    with pytest.raises(ConfigError, match=r"has one rollout ahead; choose --async-mode full"):
        load("--async", "--async-buffer-size", "4", "--async-mode", "one-step")
    with pytest.raises(ConfigError, match="are both set; use one"):
        load("--async", "--async-mode", "full", "--async-buffer-size", "4", "--async-buffer-groups", "8")


@pytest.mark.parametrize("key", ["async", "async_training"])
def test_files_and_variables_may_spell_it_as_the_flag_is(load: Load, tmp_path: Path, key: str) -> None:
    (tmp_path / "run.yaml").write_text(f"{key}: true\n")
    settings = load("--config", str(tmp_path / "run.yaml"))
    assert settings.args.async_training
    assert settings.cite("async_training") == f"--async ({tmp_path}/run.yaml:1)"
    again = tmp_path / "again.yaml"
    again.write_text(settings.to_yaml(changed=True))
    assert load_settings(["--config", str(again)], env={}).args.async_training
