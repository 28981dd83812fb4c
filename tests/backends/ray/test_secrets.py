"""No file and no line of a run on Ray holds a key or password that its reward prints, logs or hands on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyRun
from tests.integration.test_secrets_of_a_run import IN_ENVIRONMENT, KEY, LOUD, PASSWORD

pytestmark = [pytest.mark.backends, pytest.mark.timeout(300)]


@pytest.mark.parametrize("function", ["worker", "inline"])
def test_what_a_reward_prints_and_logs(function: str, tiny: TinyRun, cluster: str, slime: Any, tmp_path: Path) -> None:
    (tmp_path / "rm.py").write_text(LOUD, encoding="utf-8")
    reward = f"{tmp_path / 'rm.py'}:{function}"
    changes = {"custom_rm_path": reward, "rm_url": f"http://me:{PASSWORD}@127.0.0.1:9", "wandb_key": KEY}
    argv = tiny.argv(tmp_path / "run", num_rollout=1, eval_interval=None, eval_prompt_data=None, **changes)
    done = slime("train", *argv, "--ray-address", cluster, check=False, HF_TOKEN=IN_ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    found = {str(path): path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    found |= {"stdout": done.stdout.encode(), "stderr": done.stderr.encode()}
    log = next(data for name, data in found.items() if name.endswith("actors/rollout.log"))
    assert [
        word for word in (b"ZeroDivisionError", b"ValueError: GET", b"child: GET", b"said") if word not in log
    ] == []
    secrets = [text.encode() for text in (KEY, PASSWORD, IN_ENVIRONMENT)]
    assert {name for name, data in found.items() if any(secret in data for secret in secrets)} == set()
