from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from slime_agent_base_url import AgentServer, serving
from slime_generators.agent import generate
from slime_sandbox_local import isolation_here
from slime_testing_probes.scripted import CharTokenizer, Reply, ScriptedEngine

from slime_core import GenerateContext, Sample, SampleStatus
from slime_core.config import Args
from slime_core.errors import ConfigError
from tests.until import until

pytest.importorskip("openai")
PROGRAMS = Path(__file__).with_name("programs.py")
PARAMS = {"max_new_tokens": 200, "temperature": 1.0, "skip_special_tokens": False}
needs_isolation = pytest.mark.skipif(not isolation_here().complete, reason=str(isolation_here().missing))


SCRIPT = """
import json, os, sys, urllib.request

task = json.load(open("task.json"))
body = {"model": "policy", "messages": [{"role": "user", "content": task["prompt"]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]
open("answer.txt", "w").write(answer)
print("asked", file=sys.stderr)
"""


def running(command: str) -> bool:
    """Whether a process with this command line exists on this machine."""
    wanted = command.replace(" ", "\0").encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().rstrip(b"\0") == wanted:
                return True
        except OSError:
            continue
    return False


def run(engine: ScriptedEngine, sample: Sample | None = None, **own: Any) -> list[Sample]:
    tokenizer = CharTokenizer()
    sample = sample or Sample(index=4, group_index=1, prompt="1+1=?", tokens=tokenizer.encode("1+1=?"), label="2")
    args = Args(plugins={"agent": own})
    return asyncio.run(generate(args, sample, dict(PARAMS), context=GenerateContext(engine, tokenizer)))


@needs_isolation
def test_a_script_in_the_sandbox_asks_and_is_tested(tmp_path: Path) -> None:
    script, check = tmp_path / "agent.py", tmp_path / "check.py"
    script.write_text(SCRIPT, encoding="utf-8")
    check.write_text("import sys; sys.exit(open('answer.txt').read() != '2')", encoding="utf-8")
    (sample,) = run(
        ScriptedEngine(["2"]),
        command=f"{sys.executable} agent.py",
        files={"agent.py": str(script)},
        test_command="python3 check.py",
        test_files={"check.py": str(check)},
        timeout=120,
    )
    assert sample.metadata["agent"]["program"]["code"] == 0, sample.metadata["agent"]
    assert sample.metadata["agent"]["program"]["stderr"].strip().endswith("asked")
    assert sample.reward == 1.0
    assert sample.response == "2<|end|>"
    assert sample.non_generation_time > 0


@pytest.mark.slow
@needs_isolation
def test_a_program_that_hangs_is_killed_with_its_children_and_tested_as_it_stands(tmp_path: Path) -> None:
    script = tmp_path / "agent.sh"
    marker = f"sleep 98{os.getpid()}"
    script.write_text(f"echo half > answer.txt; {marker} & {marker}", encoding="utf-8")
    (sample,) = run(
        ScriptedEngine([]),
        command="sh agent.sh",
        files={"agent.sh": str(script)},
        timeout=2,
        test_command="cat answer.txt; echo score 0.5",
        reward="printed",
    )
    assert sample.status == SampleStatus.FAILED, "it asked for nothing, so there is nothing to train on"
    assert sample.metadata["agent"]["program"]["timed_out"]
    assert "score 0.5" in sample.metadata["agent"]["test"]["stdout"]
    assert not running(marker)


@needs_isolation
async def test_a_run_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    marker = f"sleep 97{os.getpid()}"
    tokenizer = CharTokenizer()
    args = Args(plugins={"agent": {"command": marker}})
    sample = Sample(index=4, prompt="x", tokens=[1])
    task = asyncio.ensure_future(
        generate(args, sample, dict(PARAMS), context=GenerateContext(ScriptedEngine([]), tokenizer))
    )
    async with asyncio.timeout(60):
        while not running(marker):
            await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while running(marker):
            await asyncio.sleep(0.05)


@needs_isolation
@pytest.mark.parametrize(
    ("test_command", "reward"),
    [
        ("echo passed 3 of 4: -1.5e0", -1.5),
        pytest.param("echo 1; exit 1", 0.0, marks=pytest.mark.slow),
        pytest.param("", 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_printed_reward_is_the_number_at_the_end(test_command: str, reward: float) -> None:
    own: Any = {"program": f"{PROGRAMS}:ask", "reward": "printed", "test_command": test_command}
    (sample,) = run(ScriptedEngine(["2"]), **own)
    assert sample.reward == reward


@needs_isolation
def test_a_program_that_crashes_after_its_question_is_data() -> None:
    (sample,) = run(ScriptedEngine(["2"]), program=f"{PROGRAMS}:ask_and_crash", test_command="test -f answer.txt")
    assert sample.metadata["agent"]["program"]["error"] == "KeyError: 'a bug of the program'"
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, 1.0)


@needs_isolation
def test_a_result_that_json_cannot_hold_is_kept_as_text() -> None:
    (sample,) = run(ScriptedEngine(["2"]), program=f"{PROGRAMS}:ask_and_count")
    assert sample.response == "2<|end|>"
    assert sample.metadata["agent"]["program"]["result"] == "{('turn', 1): 'asked'}"


async def test_endpoints_whose_users_left_while_they_started_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[AgentServer] = []
    begun, may_start = asyncio.Event(), asyncio.Event()

    class Slow(AgentServer):
        async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
            begun.set()
            await may_start.wait()
            await super().start(host, port)
            started.append(self)

    monkeypatch.setattr("slime_agent_base_url.harness.AgentServer", Slow)
    context = GenerateContext(ScriptedEngine([]), CharTokenizer())

    async def use() -> None:
        async with serving(Args(), context):
            pass

    task = asyncio.ensure_future(use())
    await begun.wait()
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, may_start.set)
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: bool(started))
    assert [t for t in asyncio.all_tasks() if t.get_name() == "slime-http-server"] == []


@needs_isolation
def test_an_interruption_kills_the_program(tmp_path: Path) -> None:
    (sample,) = run(ScriptedEngine([Reply("so", "abort")]), program=f"{PROGRAMS}:ask_and_hang")
    assert (sample.status, sample.response_length) == (SampleStatus.ABORTED, 0)


@needs_isolation
def test_samples_at_the_same_time_share_the_endpoints() -> None:
    async def several() -> list[list[Sample]]:
        tokenizer = CharTokenizer()
        context = GenerateContext(ScriptedEngine(lambda request: "ok<|end|>"), tokenizer)
        args = Args(plugins={"agent": {"program": f"{PROGRAMS}:ask"}})
        samples = [Sample(index=n, prompt=f"row {n}", tokens=[1]) for n in range(4)]
        done = await asyncio.gather(*(generate(args, s, dict(PARAMS), context=context) for s in samples))
        assert [t.get_name() for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []
        return done

    prompts = [CharTokenizer().decode(s.prompt_tokens) for (s,) in asyncio.run(several())]
    assert prompts == [f"<|user|>row {n}<|end|><|assistant|>" for n in range(4)], "each answer is in its own session"


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="one of them"):
        run(ScriptedEngine([]))
    with pytest.raises(ConfigError, match="timeout"):
        run(ScriptedEngine([]), command="true", timeout=0)
