"""Run files that stand somewhere else than where the command is typed: what they name is beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_core.cli.main import main
from slime_core.config import load_settings
from slime_core.config.spec import flag_specs
from tests.conftest import TinyRun

ROOT = Path(__file__).parents[2]
RUN = """
hf_checkpoint: models/tiny
prompt_data: data/train.jsonl@[10:20]
save: ../outputs/one
custom_rm_path: rewards.py:near
rm_type: exact
tools_path: [calculator, tools.py]
rollout_sample_hook_path: hooks.py:mark
eval_prompt_data: [held, data/held.jsonl, models/name, /data/all.jsonl]
save_debug_rollout_data: dump/{rollout_id}.jsonl
custom_config_path: own.yaml
plugin_dir: plugins
ref_load: ~/ref
plugins: {search: {corpus: ./corpus.jsonl, index: as is}}
custom: {words: ../words.txt, plain: words.txt}
sglang_chat_template: ./chat.jinja
"""
EVAL = """
defaults: {environment_path: worlds.py:Signs, rm_type: math}
datasets: [{name: held, path: data/held.jsonl, answer_path: answers.py:last}]
"""


def show(*words: str) -> Any:
    return load_settings(words, command="show", env={}).args


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; the run file is in `runs` below it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    Path("runs/run.yaml").write_text(RUN)
    Path("runs/eval.yaml").write_text(EVAL)
    Path("runs/own.yaml").write_text("load: before\nmine: ./here\n")
    return tmp_path


def test_what_a_run_file_names_is_beside_it(elsewhere: Path) -> None:
    args = show("--config", "runs/run.yaml")
    assert (args.hf_checkpoint, args.prompt_data) == ("runs/models/tiny", "runs/data/train.jsonl@[10:20]")
    assert (args.save, args.load) == ("outputs/one", "runs/before")
    assert (args.custom_rm_path, args.rm_type) == ("runs/rewards.py:near", "exact")
    assert args.tools_path == ["calculator", "runs/tools.py"]
    assert args.rollout_sample_hook_path == ["runs/hooks.py:mark"]
    assert args.eval_prompt_data == ["held", "runs/data/held.jsonl", "models/name", "/data/all.jsonl"]
    assert args.save_debug_rollout_data == "runs/dump/{rollout_id}.jsonl"
    assert (args.plugin_dir, args.ref_load) == (["runs/plugins"], "~/ref")


def test_where_the_meaning_is_unknown_a_dot_marks_a_path(elsewhere: Path) -> None:
    args = show("--config", "runs/run.yaml")
    assert args.plugins == {"search": {"corpus": "./runs/corpus.jsonl", "index": "as is"}}
    assert (args.words, args.plain, args.mine) == ("./words.txt", "words.txt", "./runs/here")
    assert args.sglang_chat_template == "./runs/chat.jinja"


def test_flags_and_variables_name_what_is_in_the_working_directory(elsewhere: Path) -> None:
    env = {"SLIME_REF_LOAD": "ref"}
    argv = ["--config", "runs/run.yaml", "--hf-checkpoint", "models/tiny", "--custom-rm-path", "rm.py"]
    args = load_settings(argv, command="show", env=env).args
    assert (args.hf_checkpoint, args.custom_rm_path, args.ref_load) == ("models/tiny", "rm.py", "ref")
    assert args.prompt_data == "runs/data/train.jsonl@[10:20]"


def test_a_file_given_by_its_whole_path_says_where_its_inputs_are(elsewhere: Path) -> None:
    args = show("--config", str(elsewhere / "runs/run.yaml"))
    assert args.hf_checkpoint == str(elsewhere / "runs/models/tiny")
    assert args.save == str(elsewhere / "outputs/one")


def test_the_record_of_a_run_is_a_run_file(elsewhere: Path) -> None:
    """As a run directory's config.yaml: read from anywhere, it is the same run."""
    settings = load_settings(["--config", "runs/run.yaml", "--critic-load", "c"], command="show", env={})
    Path("record.yaml").write_text(settings.to_yaml(directory=str(elsewhere)))
    again = show("--config", str(elsewhere / "record.yaml"))
    assert again.critic_load == str(elsewhere / "c")
    for name in ("hf_checkpoint", "prompt_data", "custom_rm_path", "save", "load"):
        assert getattr(again, name) == str(elsewhere / getattr(settings.args, name))
    assert again.plugins == {"search": {"corpus": str(elsewhere / "runs/corpus.jsonl"), "index": "as is"}}


def test_every_setting_that_speaks_of_files_says_what_it_holds() -> None:
    """A new one that forgets it would be looked for in the working directory."""
    no_path = {
        "no_save_optim",
        "wandb_mode",
        "config",
        "tb_experiment_name",
        "model_name",
        "memory_snapshot_dir",
    }  # without effect, and "." by default
    speaks = ("directory", "file", "checkpoint")
    missing = [
        spec.name
        for spec in flag_specs().values()
        if spec.kind == "str" and not spec.choices and not spec.holds and spec.name not in no_path
        and any(word in spec.help.split(":")[0].split(";")[0].lower() for word in speaks)
    ]  # fmt: skip
    assert missing == []


@pytest.mark.slow
def test_an_evaluation_is_resumed_from_another_directory(
    tiny: TinyRun, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was begun with paths relative to the first one."""
    (elsewhere / "inputs").symlink_to(tiny.root)
    argv = ["--hf-checkpoint", "inputs/model", "--eval-prompt-data", "held", "inputs/eval.jsonl", "--run-dir", "run"]
    argv += ["--custom-rm-path", "inputs/rm.py", "--rollout-max-response-len", "4", "--rm-workers", "1"]
    assert main(["eval", *argv]) == 0
    monkeypatch.chdir(elsewhere / "runs")
    assert main(["eval", "--resume", "../run"]) == 0
    assert f"written to {elsewhere / 'run' / 'eval.json'}" in capsys.readouterr().out


EXAMPLES = [file for file in ROOT.glob("examples/*/*.yaml") if "\nprepare_path: " in file.read_text()]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.parent.name)
def test_the_examples_run_files_may_be_used_from_anywhere(file: Path, elsewhere: Path) -> None:
    args = show("--config", str(file))
    for name in ("prepare_path", "environment_path", "custom_config_path"):
        value = getattr(args, name) or ""
        assert "." not in value or Path(value.partition(":")[0]).is_file()
    made = [args.hf_checkpoint, args.save or args.hf_checkpoint, *(args.eval_prompt_data or [])[1::2]]
    assert all(Path(path).is_relative_to(ROOT / "outputs") for path in made)
