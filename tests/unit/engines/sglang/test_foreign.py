"""--sglang-* and --router-* from the command line: what is printed, and what start-up does not read."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slime_core.cli.main import main
from slime_core.config import load_settings
from slime_core.errors import ConfigError

NOTE = "(slime's own list, as no SGLang is installed here or named by --engine-python)"


@pytest.fixture
def _shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_engine_sglang.flag_list.find_python", lambda _: None)


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["config", "show", "--lr", "1e-5"]])
def test_start_up_reads_no_list(argv: list[str]) -> None:
    code = (
        f"import sys\nfrom slime_core.cli.main import main\nassert main({argv!r}) == 0\n"
        "bad = [m for m in ('torch', 'slime_engine_sglang.flag_list', 'slime_engine_sglang.arguments')"
        " if m in sys.modules]\nprint('\\nloaded', bad)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "loaded []"


def test_a_flag_loads_no_torch() -> None:
    code = (
        "import sys\nfrom slime_core.config import load_settings\n"
        "load_settings(['--sglang-tokenizer-mode', 'auto'], command='show', env={})\n"
        "print([m for m in ('torch', 'transformers', 'aiohttp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.usefixtures("_shipped")
@pytest.mark.parametrize("command", [["train"], ["sft"], ["eval"], ["rollout"], ["check"], ["config", "show"]])
def test_help_sglang_lists_every_flag(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help-sglang"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert f"SGLang (SGLang 0.5.23 {NOTE}; taken by: sglang):" in lines
    assert f"SGLang's router (sglang-router 0.3.2 {NOTE}; taken by: sglang):" in lines
    assert "  --sglang-ep-size, --sglang-expert-parallel-size, --sglang-ep N" in lines
    of_tp_size = " ".join(out.split("--sglang-tensor-parallel-size N")[1].split("\n  --")[0].split())
    assert (
        of_tp_size
        == "Slime's to set, whatever the default: --rollout-num-gpus-per-engine is tp_size * pp_size; set one of them."
    )
    assert "  --sglang-config TEXT" not in lines, "that name is a setting of slime's"
    assert sum(line.startswith("  --") for line in lines) == 530 - 1 + 98
    assert "Plugin options" not in out


@pytest.mark.usefixtures("_shipped")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--sglang-mem-fracton-static 0.8", "--sglang-mem-fracton-static: SGLang 0.5.23 {} has no such flag. Did you"
         " mean --sglang-mem-fraction-static?"),
        ("--router-polcy x", "--router-polcy: sglang-router 0.3.2 {} has no such flag. Did you mean --router-policy?"),
        ("--sglang-router-iq h", "--sglang-router-iq: SGLang 0.5.23 {} has no such flag. Did you mean"
         " --sglang-router-ip?"),
        ("--router-policy x", "--router-policy (flag): invalid choice: 'x' (choose from 'cache_aware', 'manual',"
         " 'power_of_two', 'random', 'round_robin')"),
        ("--sglang-log-requests-level 7",
         "--sglang-log-requests-level (flag): invalid choice: 7 (choose from 0, 1, 2, 3)"),
        ("--sglang-cuda-graph-bs-decode 1 x", "--sglang-cuda-graph-bs-decode (flag): invalid int value: 'x'"),
    ],
)  # fmt: skip
def test_refusals(argv: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(argv.split(), command="show", env={})
    assert str(caught.value) == message.format(NOTE)


@pytest.mark.usefixtures("_shipped")
def test_with_another_engine_they_end_in_one_warning() -> None:
    argv = ["--sglang-mem-fraction-static", "0.8", "--router-policy", "random"]
    (warning,) = load_settings([*argv, "--rollout-engine", "embedded"], command="show", env={}).warnings
    assert warning == (
        "without effect with --train-backend embedded and --rollout-engine embedded:"
        " --router-policy random (flag), --sglang-mem-fraction-static 0.8 (flag)"
    )
    assert load_settings(argv, command="show", env={}).warnings == []
