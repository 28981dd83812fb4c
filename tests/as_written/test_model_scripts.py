"""`source scripts/models/NAME.sh`, and what its two arrays say."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from slime_core.cli import main as frame

ROOT = Path(__file__).resolve().parents[2]
NAMED = (
    *("glm4.5", "glm4.6", "glm4.7", "glm-z1-9B", "glm4-9B", "qwen3-4B", "qwen3-8B", "qwen3-30B-A3B", "qwen2.5-7B"),
    *("deepseek-v3", "deepseek-v3.1", "deepseek-r1", "llama3-8B", "llama3-70B", "kimi-k2", "moonlight-16B"),
)


def sourced(name: str, command: str, **env: str) -> list[str]:
    """The words of a command line after the script was sourced, one a line."""
    script = f"set -eu; source scripts/models/{name}.sh; printf '%s\\n' {command}"
    bash = ["bash", "-c", script]
    done = subprocess.run(bash, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_every_model_that_is_spoken_of_has_a_script() -> None:
    assert [name for name in NAMED if not (ROOT / "scripts" / "models" / f"{name}.sh").is_file()] == []


@pytest.mark.parametrize("given", [{}, {"HF_CHECKPOINT": "/my models/a"}, {"MEGATRON_CHECKPOINT": "/m"}])
def test_the_checkpoint_is_where_the_variables_say(given: dict[str, str]) -> None:
    """Unquoted, too, as in `${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`, where no path has a space."""
    flags = {"HF_CHECKPOINT": "--hf-checkpoint", "MEGATRON_CHECKPOINT": "--initial-megatron-checkpoint"}
    expected = [word for variable, path in given.items() for word in (flags[variable], path)]
    assert sourced("qwen3-4B", '--num-rollout 1 "${CKPT_ARGS[@]}"', **given)[2:] == expected
    words = sourced("deepseek-v3", "${MODEL_ARGS[@]} ${CKPT_ARGS[@]} --hf-checkpoint /b", HF_CHECKPOINT="/a")
    assert words[-4:] == ["--hf-checkpoint", "/a", "--hf-checkpoint", "/b"]
    assert "[0]*3+[1]*58" in words


def test_without_a_checkpoint_the_error_says_where_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    words = sourced("qwen3-4B", '--num-rollout 1 "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}"')
    assert frame.main(["train", *words]) == 2
    told = capsys.readouterr().err
    assert "--hf-checkpoint is required" in told
    assert "HF_CHECKPOINT" in told
