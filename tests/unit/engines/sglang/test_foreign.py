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


def test_start_up_reads_no_list() -> None:
    code = (
        "import sys\nfrom slime_core.cli.main import main\nassert main(['train', '--help']) == 0\n"
        "bad = [m for m in ('torch', 'slime_engine_sglang.flag_list', 'slime_engine_sglang.arguments')"
        " if m in sys.modules]\nprint('\\nloaded', bad)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "loaded []"


@pytest.mark.usefixtures("_shipped")
def test_help_sglang_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help-sglang"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert f"SGLang (SGLang 0.5.23 {NOTE}; taken by: sglang):" in lines
    assert f"SGLang's router (sglang-router 0.3.2 {NOTE}; taken by: sglang):" in lines
    assert "  --sglang-ep-size, --sglang-expert-parallel-size, --sglang-ep N" in lines
    assert "Slime's to set" in out.split("--sglang-tensor-parallel-size N")[1].split("\n  --")[0]
    assert "  --sglang-config TEXT" not in lines, "that name is a setting of slime's"
    assert sum(line.startswith("  --") for line in lines) == 530 - 1 + 98
    assert "Plugin options" not in out


@pytest.mark.usefixtures("_shipped")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--sglang-mem-fracton-static 0.8", "SGLang 0.5.23 .*Did you mean --sglang-mem-fraction-static"),
        ("--router-polcy x", "sglang-router 0.3.2 .*Did you mean --router-policy"),
        ("--router-policy x", "'x' .*'cache_aware', 'manual', 'power_of_two', 'random', 'round_robin'"),
        ("--sglang-cuda-graph-bs-decode 1 x", "invalid int value: 'x'"),
    ],
)
def test_refusals(argv: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{argv.split()[0]}.*{message}"):
        load_settings(argv.split(), command="show", env={})
