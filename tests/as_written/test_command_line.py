"""What people type first: help, words of other trainers, and slips."""

from __future__ import annotations

from pathlib import Path

import pytest
from slime_commands.check.other_trainers import _OURS
from slime_commands.plugins.command import _COMMANDS as PLUGINS

from slime_core.cli.main import main
from slime_core.config.flags import FIRST
from slime_core.config.spec import flag_specs
from slime_core.plugins.manager import current_registry

ACTIONS = {
    "config": ["show"],
    "convert": ["hf-to-megatron", "megatron-to-hf"],
    "engines": ["plan"],
    "ledger": ["show", "verify"],
    "models": ["list", "show", "args"],
    "plugins": [*PLUGINS],
    "rewards": ["replay", "score"],
    "samples": ["filter"],
    "submit": ["train", "sft"],
    "tokens": ["check"],
}
"""Commands with words of their own behind them."""


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What an accepted command line prints."""
    assert main(list(argv)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refusal(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """The one line that a refused command line prints."""
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


COMMANDS = [name.replace("_", "-") for name in current_registry().names("commands")]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_at_every_word(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([command], *([command, action] for action in ACTIONS.get(command, []))):
        text = said(capsys, *words, "--help")
        assert text.startswith("usage: slime " + command), words
        assert "not known" not in text, words


@pytest.mark.parametrize("command", FIRST)
def test_the_first_page_fits_two_screens(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = said(capsys, command, "--help").splitlines()
    assert 30 < len(lines) <= 104
    assert max(map(len, lines)) <= 120
    asked = " ".join(FIRST[command].values()).split()
    assert all(
        any(line.split()[:1] in ([flag_specs()[name].flag], [f"{flag_specs()[name].flag},"]) for line in lines)
        for name in asked
    )
    assert f"slime {command} --help-all" in " ".join(lines[:5])


def test_all_of_the_settings_are_one_flag_away(capsys: pytest.CaptureFixture[str]) -> None:
    words = set(said(capsys, "train", "--help-all").replace(",", " ").split())
    assert [s.flag for s in flag_specs().values() if s.flag not in words] == []
    assert {"--set", "--tensor-model-parallel-size", "--sglang-*"} <= words


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("train --learning-rate 1e-6", "unknown flag --learning-rate: slime's is --lr."),
        ("train --num_generations=8", "unknown flag --num_generations: slime's is --n-samples-per-prompt."),
        ("sft --per-device-train-batch-size 4", "slime's is --micro-batch-size N or --use-dynamic-batch-size"),
        ("train --max-completion-length 512", "slime's is --rollout-max-response-len."),
        (
            "train --beta 0.04",
            "slime's is --use-kl-loss --kl-loss-coef X (a loss term) or --kl-coef X (in",
        ),
        ("train actor_rollout_ref.rollout.n=8", "slime's is --n-samples-per-prompt."),
        (
            "train actor_rollout_ref.actor.optim.lr=1e-6",
            "unknown flag actor_rollout_ref.actor.optim.lr: slime's is --lr",
        ),
        ("train --model.name x --max-async-level 2", "unknown flag --model.name: slime's is --hf-checkpoint."),
        ("train data.train_batch_size=64", "slime's is --rollout-batch-size N (prompts per rollout) or"),
        ("train --lr-decay-style cosin", "inverse-square-root, WSD. Did you mean cosine?"),
        ("train --advantage-estimator grpoo", "Did you mean 'grpo'?"),
        ("config show --async-mode ful", "must be one of one-step, full. Did you mean full?"),
        ("check --for trian", "Did you mean train?"),
        ("rewards scor", "Did you mean score?"),
        ("plugins lst", "Did you mean list?"),
        ("train --lr 1 run.yaml", "unexpected argument 'run.yaml'; every setting is a flag, see `slime train"),
        ("train --lr 1 run.yaml", "Did you mean --config run.yaml?"),
        ("train nowhere.yaml", "nowhere.yaml"),
        ("resume outputs/demo", "To resume a run: slime train --config RUN/config.yaml --load RUN."),
        ("merge outputs/demo", "slime export"),
        ("config show --device gpu", "Did you mean cuda?"),
        ("plugins new trackers csv", "Did you mean 'hooks'?"),
        ("report outputs/demo --colour", "slime report: unrecognized arguments: --colour"),
        ("compare outputs/demo", "name two runs or more: slime compare outputs/demo OTHER_RUN"),
        ("show nowhere", "nowhere: no such directory"),
        ("show pyproject.toml", "pyproject.toml: is a file, not a run directory"),
    ],
)
def test_a_slip_is_answered_with_what_to_type(line: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer in refusal(capsys, line)


@pytest.mark.parametrize("command", ["train", "sft", "eval", "rollout", "check", "plan", "config show"])
def test_a_run_file_may_stand_first(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lrr: 1\n")
    assert f"{file}:1: unknown setting 'lrr'" in refusal(capsys, f"{command} {file}")


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [said(capsys, *words) for words in (("help", "compare"), ("compare", "--help"))]
    assert asked[0] == asked[1]
    assert "usage: slime compare" in asked[0]


def test_keys_of_other_trainers_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("lr: 1e-6\nmax_new_tokens: 512\n")
    told = refusal(capsys, f"train --config {tmp_path / 'run.yaml'}")
    assert "run.yaml:2: unknown setting 'max_new_tokens'" in told
    assert "slime's is --rollout-max-response-len." in told


def test_every_name_of_ours_is_a_flag_and_none_of_theirs_is() -> None:
    ours = {flag for spec in flag_specs().values() for flag in (spec.flag, spec.off_flag) if flag}
    named = {word for text in _OURS for word in text.split() if word.startswith("--")}
    assert named - {"--sglang-mem-fraction-static"} <= ours
    assert {f"--{word}" for words in _OURS.values() for word in words.split()}.isdisjoint(ours)
