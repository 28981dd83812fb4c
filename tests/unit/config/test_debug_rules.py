"""Dumps and half a loop: what follows, and the words when settings contradict each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slime_core.config import Settings
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError

Load = Callable[..., Settings]


def test_loading_means_training_only_and_needs_neither_data_nor_reward() -> None:
    argv = "--hf-checkpoint /m --rollout-batch-size 4 --num-rollout 2 --load-debug-rollout-data d/{rollout_id}.jsonl"
    s = load_settings(argv.split(), env={})
    assert s.args.debug_train_only
    assert str(s.origins["debug_train_only"]) == "derived: load_debug_rollout_data"
    assert any("nothing is generated" in w for w in s.warnings)


def test_dump_details_names_both_dumps_unless_they_are_named(load: Load) -> None:
    s = load("--dump-details", "D", "--save-debug-train-data", "t/{rollout_id}")
    assert s.args.save_debug_rollout_data == "D/rollout_data/{rollout_id}.jsonl"
    assert s.args.save_debug_train_data == "t/{rollout_id}"


def test_rollouts_without_training_are_saved_in_the_run_directory(load: Load) -> None:
    s = load("--debug-rollout-only", "--save", "out", "--save-interval", "1", "--load", "out")
    assert s.args.save_debug_rollout_data == "out/rollouts/rollout_{rollout_id:07d}.jsonl"
    assert sum("nothing is trained" in w for w in s.warnings) == 2


def test_a_name_that_promises_a_pickle_is_warned_about(load: Load) -> None:
    s = load("--save-debug-rollout-data", "d/{rollout_id}.pt")
    assert any("JSON lines" in w for w in s.warnings)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--debug-train-only", r"--debug-train-only.* needs --load-debug-rollout-data FILE"),
        ("--load-debug-rollout-data-subsample 0.5", r"needs --load-debug-rollout-data FILE"),
        ("--debug-rollout-only --load-debug-rollout-data d/{rollout_id}", r"--debug-rollout-only.*contradicts"),
        ("--save-debug-rollout-data d/{step}", r"the only placeholder is \{rollout_id\}"),
        ("--save-hf d/{step} --save s --save-interval 1", r"--save-hf.*the only placeholder"),
        ("--save-debug-train-data d.jsonl", r"overwrite each other; put \{rollout_id\} into it"),
        ("--save-debug-rollout-data d/{rollout_id} --save-debug-train-data ./d/{rollout_id}", r"are the same file"),
        ("--save-debug-rollout-data d/{rollout_id} --load-debug-rollout-data d/{rollout_id}", r"are the same file"),
    ],
)
def test_refused(load: Load, argv: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*argv.split())


@pytest.mark.parametrize("command", ["rollout", "eval"])
def test_commands_that_do_not_train_refuse_saved_samples(command: str) -> None:
    argv = "--hf-checkpoint /m --prompt-data p --rollout-batch-size 4 --load-debug-rollout-data d/{rollout_id}"
    with pytest.raises(ConfigError, match=rf"slime {command} does not train; use slime train"):
        load_settings(argv.split(), command=command, env={})
