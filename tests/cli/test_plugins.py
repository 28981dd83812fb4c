from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.cli.main import main
from tests.conftest import TinyRun
from tests.strangers import forgotten


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLIME_PLUGIN_DIR", "")
    monkeypatch.setenv("SLIME_NO_PLUGINS", "0")
    monkeypatch.delenv("SLIME_PLUGINS", raising=False)
    with forgotten():  # the next test's modules are elsewhere
        yield


def write(directory: Path, distribution: str, name: str, body: str) -> None:
    module = "cliplug_" + distribution.replace("-", "_")
    folder = directory / distribution
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text(body)
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{distribution}"\nversion = "1.0"\n'
        f'[project.entry-points."slime.rewards"]\n{name} = "{module}:reward"\n'
    )


REWARD = 'def reward(args, sample):\n    """Half a point for everyone."""\n    return 0.5\n'


def test_list_is_a_table_of_where_things_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["KIND", "NAME", "FROM", "DESCRIPTION"]
    (row,) = [line for line in lines if line.startswith("rewards ") and " exact " in line]
    assert "slime-rl 0.1.0" in row
    assert row.endswith("  Reward 1.0 when the final answer equals the label, else 0.0")
    kinds = ["\n".join(lines).count("\n\n"), len({line.split()[0] for line in lines[1:] if line})]
    assert kinds[0] == kinds[1] - 1  # an empty line between two kinds


def test_list_reads_descriptions_from_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "acme-reward", "acme", '"""Half a point.\n\nMore."""\n' + REWARD)
    write(tmp_path, "acme-odd", "acme_odd", "this is no Python")
    assert main(["plugins", "list", "--kind", "rewards", "--plugin-dir", str(tmp_path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if " acme" in line]
    assert [row.split("  ")[-1].strip()[:22] for row in rows] == ["Half a point", "not usable (acme-odd):"]


def test_check_reports_conflicts_and_broken_plugins_which_list_survives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "acme-one", "same", REWARD)
    write(tmp_path, "acme-two", "same", REWARD)
    write(tmp_path, "acme-broken", "broken", "import nothing_of_the_sort\n")
    write(tmp_path, "acme-wrong", "wrong", "def reward(sample):\n    return 1.0\n")
    arguments = ["plugins", "list", "--kind", "rewards", "--plugin-dir", str(tmp_path)]
    assert main(arguments) == 0
    capsys.readouterr()
    assert main([*arguments, "--check"]) == 1
    problems = capsys.readouterr().err
    assert "'same' is offered by acme-one 1.0" in problems
    assert "No module named 'nothing_of_the_sort'" in problems
    assert "found reward(sample)" in problems


def test_check_of_what_is_here_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list", "--check"]) == 0, capsys.readouterr().err


def test_check_of_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for target, said in ((tmp_path, "no plugin in this folder"), ("none-such", "no folder and no distribution with")):
        assert main(["plugins", "check", str(target)]) == 2
        assert said in capsys.readouterr().err


def test_show_a_name_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", "rewards/f1"]) == 0
    shown = capsys.readouterr().out
    assert "--rm-type, --custom-rm-path" in shown
    assert "slime_rewards/f1.py:" in shown
    assert "SQuAD" in shown
    file = tmp_path / "my_rm.py"
    file.write_text(REWARD)
    assert main(["plugins", "show", f"rewards:{file}"]) == 0
    shown = capsys.readouterr().out
    assert f"{file}:1" in shown
    assert "Half a point for everyone." in shown


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ("rewards/exakt", "Did you mean 'exact'?"),
        ("rewads/exact", "Did you mean 'rewards'?"),
        ("nosuch", "write KIND/NAME or KIND:SPEC"),
        ("qwen3", "several are called so: megatron_models/qwen3, models/qwen3; write KIND/NAME"),
        ("./nope", "slime plugins show ./nope: no such folder"),
    ],
)
def test_show_explains_a_wrong_name(component: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", component]) == 2
    assert message in capsys.readouterr().err


OPTIONS = """
from slime_core import PluginOptions, options

class Options(PluginOptions):
    factor: float = 2.0
    '''What the reward is.'''

def reward(args, sample):
    return options(args, "acme", Options).factor
"""


def test_show_has_options_hash_and_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "acme-reward", "acme", OPTIONS)
    assert main(["plugins", "show", "rewards/acme", "--plugin-dir", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["plugins.acme.factor", "float", "2.0", "What", "the", "reward", "is."] in lines
    assert ["type:", "--rm-type", "acme"] in lines
    (found,) = [line for line in lines if line[:2] == ["source", "hash:"]]
    assert (found[2], len(found[3])) == ("sha256", 64)


def test_functions_of_hooks_are_shown_and_loaded_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def log_eval(rollout_id, args, data, extra_metrics):\n    return True\n")
    assert main(["plugins", "show", f"slime_log_eval:{file}"]) == 0
    shown = capsys.readouterr().out
    assert f"--custom-eval-rollout-log-function-path {file}" in shown
    assert "called as:   (rollout_id, args, data, extra_metrics) -> bool" in shown
    assert main(["config", "show", "--custom-eval-rollout-log-function-path", f"{file}:log"]) == 2
    assert "has no 'log'" in capsys.readouterr().err
    assert main(["plugins", "new", "slime_log_eval", "mine", "--dir", str(tmp_path)]) == 0
    assert (tmp_path / "slime-hook-mine").is_dir()


def test_list_says_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "acme-reward", "acme", REWARD)
    monkeypatch.setenv("SLIME_PLUGINS", "other")
    assert main(["plugins", "list", "--plugin-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "acme" not in shown.out
    assert "left out by SLIME_PLUGINS='other': acme-reward" in shown.err


TYPED = '"""Reward."""\nfrom slime_core import Args, Sample\n\n' + REWARD.replace(
    "(args, sample)", "(args: Args, sample: Sample) -> float"
)


def test_tiers_say_what_a_plugin_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from slime_commands.plugins.tiers import lacking

    from slime_core.plugins.registry import ComponentRef
    from slime_core.plugins.resolve import resolve

    (tmp_path / "bare.py").write_text("def reward(args, sample):\n    return 1.0\n")
    bare = resolve("rewards", str(tmp_path / "bare.py")).obj
    ref = ComponentRef("rewards", "x", "x:y", distribution="x", requires=("slime-rl-core", "other>1"))
    assert lacking(ref, bare) == [
        "py.typed in its package", "annotations of reward", "a docstring",
        "a version range of slime-rl-core in its requirements",
    ]  # fmt: skip
    write(tmp_path, "acme-typed", "typed", TYPED)
    assert main(["plugins", "check", "--json", "--no-contract", str(tmp_path / "acme-typed")]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["tier"], line["lacks"][0]) == ("", "py.typed in its package")
    assert [line for line in line["lacks"] if "annotations" in line or "docstring" in line] == []


@pytest.mark.slow
def test_check_runs_the_bare_suite_of_what_has_no_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "acme-good", "good", REWARD)
    write(tmp_path, "acme-bad", "bad", "def reward(args, sample):\n    return float(len(sample.label))\n")
    write(tmp_path, "acme-worse", "worse", "def reward(sample):\n    return 1.0\n")
    file = tmp_path / "my_rm.py"
    file.write_text(REWARD)
    assert main(["plugins", "check", str(tmp_path), f"rewards:{file}", "--json"]) == 1
    lines = {line["plugin"]: line for line in json.loads(capsys.readouterr().out)}
    assert [line["ok"] for line in lines.values()] == [False, True, False, True]
    bad = lines["rewards/bad (acme-bad 1.0)"]["message"]
    assert "test_another_label_is_read_or_refused[None]" in bad
    assert "it raised TypeError" in bad
    assert "found reward(sample)" in lines["rewards/worse (acme-worse 1.0)"]["message"]
    assert "tests passed" in lines[f"rewards:{file}"]["message"]
    tiers = ["broken", "tested", "broken", ""]
    assert [line["tier"] for line in lines.values()] == tiers
    assert "tier: tested, since it lacks py.typed" in lines["rewards/good (acme-good 1.0)"]["message"]


def test_doctor_has_an_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "acme-broken", "broken", "import nothing_of_the_sort\n")
    assert main(["doctor", "--plugin-dir", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "error: broken: reward 'broken' (acme-broken 1.0)" in shown
    assert f"way out: edit {tmp_path / 'acme-broken'}; then: slime plugins check {tmp_path / 'acme-broken'}" in shown
    assert main(["doctor", "--plugin-dir", str(tmp_path), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert findings[0]["level"] == "error"
    assert main(["doctor", "outputs/run"]) == 2
    assert "for a run: slime why --learning outputs/run" in capsys.readouterr().err


def test_trace_reports_components_and_hooks(tiny: TinyRun, tmp_path: Path, slime) -> None:
    done = slime("plugins", "trace", "--", "train", *tiny.argv(tmp_path / "run", num_rollout=1))
    report = done.stdout[done.stdout.index("components\n") :]
    rows = [line.split() for line in report.splitlines()]
    (reward,) = [row for row in rows if row and row[0] == "--custom-rm-path"]
    assert f"{tiny.root / 'rm.py'}:2" in reward
    (estimator,) = [row for row in rows if row and row[0] == "--advantage-estimator"]
    assert "slime-rl" in estimator
    (step,) = [row for row in rows if row[:2] == ["slime_log_metrics", "slime-rl-core:jsonl"]]
    assert int(step[2]) > 0
    assert float(step[3]) > 0


def test_help_ends_with_the_options_of_what_is_selected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "acme-reward", "acme", OPTIONS)
    assert main(["train", "--help"]) == 0
    assert "Plugin options:\n  name a component" in capsys.readouterr().out
    (tmp_path / "run.yaml").write_text(f"rm_type: acme\nplugin_dir: [{tmp_path}]\n")
    for argv in (["--rm-type", "acme", "--plugin-dir", str(tmp_path)], ["--config", str(tmp_path / "run.yaml")]):
        assert main(["train", "--help", *argv]) == 0
        tail = capsys.readouterr().out.splitlines()[-1]
        assert tail == "  --set plugins.acme.factor=FLOAT  What the reward is. (default: 2.0)"
    assert main(["train", "--help", "--rm-type", "nobodys"]) == 0
    assert "not known: --rm-type: no rewards plugin 'nobodys'" in capsys.readouterr().out


def test_wrong_options_stop_a_run_before_it_starts(tiny: TinyRun, tmp_path: Path, slime) -> None:
    write(tmp_path, "acme-reward", "acme", OPTIONS)
    flags = {"custom_rm_path": None, "rm_type": "acme", "plugin_dir": tmp_path}
    done = slime("train", *tiny.argv(tmp_path / "run", **flags, set="plugins.acme.factr=3"), check=False)
    assert done.returncode == 2
    assert "plugins.acme.factr 3 (flag): reward 'acme' (acme-reward 1.0) has no option 'factr'." in done.stderr
    assert "Did you mean plugins.acme.factor?" in done.stderr
    assert not (tmp_path / "run").exists()
    done = slime("rollout", *tiny.argv(tmp_path / "run", **flags, num_rollout=1, set="plugins.acme.factor=3"))
    assert "reward 3.000" in done.stdout
