"""`examples/agent_base_url` at reduced size: the agent runs unchanged, and its score is printed before and after."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from slime_sandbox_local import isolation_here

# Looked for, not imported: that takes seconds, and only the agent needs them.
if not (find_spec("openai") and find_spec("anthropic")):
    pytest.skip("openai and anthropic are not installed", allow_module_level=True)
EXAMPLE = Path(__file__).parents[2] / "examples" / "agent_base_url"


@pytest.mark.slow
@pytest.mark.skipif(not isolation_here().complete, reason=str(isolation_here().missing))
@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_agent_base_url(
    client: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    sys.modules.pop("run", None)
    import run

    small = ["--num-rollout", "1", "--rollout-batch-size", "1", "--n-samples-per-prompt", "2", "--eval-interval", "1"]
    monkeypatch.setattr(run, "PROMPTS", run.PROMPTS[:25])
    dump = tmp_path / "rollout_{rollout_id}.jsonl"
    small += ["--skip-eval-before-train"] if client == "anthropic" else []  # each agent imports its client, for seconds
    further = [*small, "--n-samples-per-eval-prompt", "1", "--no-preflight", "--save-debug-rollout-data", str(dump)]
    assert run.run([str(tmp_path / "x"), "--client", client, *further]) == 0
    assert "share of digits in the agent's answers" in capsys.readouterr().out
    samples = [json.loads(line) for line in (tmp_path / "rollout_0.jsonl").read_text().splitlines()]
    assert len(samples) == 2
    for sample in samples:
        agent = sample["metadata"]["agent"]
        assert agent["program"]["code"] == 0, agent
        assert (agent["turns"], agent["turns_trained"], agent["test"]["code"]) == (2, 2, 0)
        assert 0 <= sample["reward"] <= 1
