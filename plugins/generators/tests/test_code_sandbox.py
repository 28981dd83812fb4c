from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from slime_generators import code_sandbox
from slime_generators.code_sandbox import HISTORY, STATS, find_code, generate
from slime_runs.prefix import Beginning, begun
from slime_sandbox_local import SandboxError, isolation_here
from slime_testing_contracts import CharTokenizer, Reply, ScriptedEngine

from slime_core import GenerateContext, Sample, SampleStatus
from slime_core.config import Args
from slime_core.errors import ConfigError
from slime_core.protocols import GenerateTraits, traits_of

pytestmark = pytest.mark.skipif(not isolation_here().complete, reason=f"no complete isolation here: {isolation_here()}")
TOKENIZER = CharTokenizer()


def prompt(**metadata: Any) -> Sample:
    return Sample(index=0, prompt="12*34=?", tokens=TOKENIZER.encode("12*34=?"), metadata=metadata)


def run(script: Any, *samples: Sample, limit: int = 600, concurrency: int = 4, **options: Any) -> list[Sample]:
    """Play each sample against an engine of its own; afterwards no sandbox is left."""
    args = Args(
        plugins={"code_sandbox": {"observation": "[{result}]", "timeout": 20.0, **options}},
        sandbox_concurrency=concurrency,
    )
    params = {"max_new_tokens": limit, "stop": None}

    async def play() -> list[Sample]:
        engines = [ScriptedEngine(script if callable(script) else list(script)) for _ in samples]
        results = await asyncio.gather(
            *(generate(args, s, dict(params), context=GenerateContext(e, TOKENIZER)) for s, e in zip(samples, engines))
        )
        assert all("</code>" in request.sampling_params["stop"] for e in engines for request in e.requests)
        from slime_sandbox_local import pool as module

        assert [p.live for p in module._pools[asyncio.get_running_loop()].values()] == [0]
        return list(results)

    return asyncio.run(play())


def test_state_stays_between_calls_and_observations_are_not_trained_on() -> None:
    (sample,) = run(["<code>x = 12 * 34</code>", "<code>print(x)\nx + 1</code>", "409"], prompt())
    text = "<code>x = 12 * 34</code><|end|>[(no output)]<code>print(x)\nx + 1</code><|end|>[408\n409]409<|end|>"
    assert TOKENIZER.decode(sample.response_tokens) == text
    assert sample.status == SampleStatus.COMPLETED
    assert sample.loss_mask is not None
    shown = [token for token, trained in zip(sample.response_tokens, sample.loss_mask) if not trained]
    assert TOKENIZER.decode(shown) == "[(no output)][408\n409]"
    stats = sample.metadata[STATS]["python"]
    assert (stats["calls"], stats["errors"], stats["timeouts"], stats["replayed"]) == (2, 0, 0, 0)
    assert sample.metadata["num_turns"] == 3
    assert sample.non_generation_time > 0


@pytest.mark.slow
def test_code_that_never_ends_costs_its_state_and_says_so() -> None:
    script = [
        "<code>x = 1</code>",
        "<code>print('so far', flush=True)\nwhile True: pass</code>",
        "<code>x</code>",
        "no",
    ]
    (sample,) = run(script, prompt(), timeout=2.0)
    assert "[so far\nerror: time limit of 2 s; the interpreter was restarted, names are gone]" in sample.response
    assert "NameError: name 'x' is not defined" in sample.response
    stats = sample.metadata[STATS]["python"]
    assert (stats["timeouts"], stats["restarts"]) == (1, 1)


def test_an_interrupted_sample_gets_its_state_back() -> None:
    (sample,) = run(["<code>x = 41</code>", Reply("<code>x", "abort")], prompt())
    assert sample.status == SampleStatus.ABORTED
    assert sample.metadata[HISTORY] == ["x = 41"]
    (again,) = run([" + 1</code>", "42"], sample)
    assert again.status == SampleStatus.COMPLETED
    assert again.response.endswith("<code>x + 1</code>[42]42")
    assert again.metadata[STATS]["python"]["replayed"] == 1


def test_a_response_that_was_cut_back_has_the_state_of_that_place() -> None:
    """`slime resample --from-token` cuts back: code of the turns that were cut does not run again."""
    (sample,) = run(["<code>x = 1</code>", "<code>x = 2</code>", "done"], prompt())
    turn = len(TOKENIZER.encode("<code>x = 1</code><|end|>[(no output)]", add_special_tokens=False))
    cut = begun(Args(), sample, Beginning(turn, None, None), TOKENIZER, None)
    (again,) = run(["<code>print(x)</code>", "ok"], cut)
    assert again.response == "<code>x = 1</code><|end|>[(no output)]<code>print(x)</code>[1]ok"
    assert again.metadata[HISTORY] == ["x = 1", "print(x)"]
    assert code_sandbox._since_restart(["", None, "x = 1", ""]) == ["x = 1", ""]


def test_a_sample_that_was_reset_begins_with_an_interpreter_of_its_own() -> None:
    left = prompt(code_pending=30, **{HISTORY: ["x = 5"]})
    (sample,) = run(["<code>print(x)</code>", "done"], left)
    assert (sample.status, sample.metadata[HISTORY]) == (SampleStatus.COMPLETED, ["print(x)"])
    assert "NameError" in sample.response


def test_more_samples_than_sandboxes() -> None:
    def script(number: int) -> Callable[[Any], str]:
        def reply(request: Any) -> str:
            turn = TOKENIZER.decode(request.input_ids).count("[")
            return (f"<code>x = {number}</code>", "<code>x += 1</code>", "<code>x</code>", "done")[turn]

        return reply

    samples = [prompt(number=n) for n in range(3)]
    args_of = {id(s): script(int(s.metadata["number"])) for s in samples}

    async def play() -> None:
        args = Args(plugins={"code_sandbox": {"observation": "[{result}]"}}, sandbox_concurrency=1)
        await asyncio.gather(
            *(
                generate(
                    args, s, {"max_new_tokens": 600}, context=GenerateContext(ScriptedEngine(args_of[id(s)]), TOKENIZER)
                )
                for s in samples
            )
        )

    asyncio.run(play())
    for sample in samples:
        assert f"[{sample.metadata['number'] + 1}]done" in sample.response


async def test_a_cancelled_sample_leaves_no_sandbox() -> None:
    args = Args(plugins={"code_sandbox": {"observation": "[{result}]"}}, sandbox_concurrency=2)
    engine = ScriptedEngine(["<code>import time; time.sleep(1000)</code>"])
    call = generate(args, prompt(), {"max_new_tokens": 600}, context=GenerateContext(engine, TOKENIZER))
    task = asyncio.create_task(call)
    from slime_sandbox_local import pool as module

    loop = asyncio.get_running_loop()
    while not any(i for p in module._pools.get(loop, {}).values() for i in p._busy.values()):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [p.live for p in module._pools[loop].values()] == [0]


def test_turns_and_tokens_are_limited_and_errors_shown() -> None:
    (sample,) = run(lambda request: "<code>1</code>", prompt(), max_turns=2)
    assert sample.status == SampleStatus.TRUNCATED
    assert sample.response.count("<code>") == 2
    (sample,) = run(["<code>'x' * 100</code>"], prompt(), limit=60)
    assert sample.status == SampleStatus.TRUNCATED
    assert "xxx" not in sample.response
    (sample,) = run(["<code>1/0</code>", "no"], prompt())
    assert 'File "<code>", line 1, in <module>\nZeroDivisionError: division by zero]' in sample.response
    assert sample.metadata[STATS]["python"]["errors"] == 1
    (sample,) = run(["<code>'x' * 1000</code>", "no"], prompt(), output_tokens=20)
    assert " ... (cut)]" in sample.response


@pytest.mark.parametrize(
    ("turn", "form", "code"),
    [
        ("so <code>a\nb</code><|end|>", "tag", "a\nb"),
        ("<code>a</code> then", "tag", None),
        ("<code>a</code><code>b</code>", "tag", "b"),
        ("```python\na\n```", "fence", "a"),
        ("```bash\na\n```", "fence", None),
        ("```python\na", "fence", None),
        ("```python\na\n```\n```python\nb\n```\n", "fence", "b"),
    ],
)
def test_code_is_found(turn: str, form: Any, code: str | None) -> None:
    assert find_code(turn, form) == code


def test_a_machine_that_cannot_isolate_ends_the_run_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(mode: str) -> None:
        raise SandboxError(f"{mode} needs user namespaces")

    monkeypatch.setattr("slime_sandbox_local.isolation.require_isolation", refuses)
    check: Any = traits_of(generate, GenerateTraits).check
    with pytest.raises(ConfigError, match=r"^--sandbox-isolation require: require needs user namespaces$"):
        check(Args(sandbox_isolation="require"), training=True)
