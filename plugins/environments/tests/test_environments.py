"""Tasks of reasoning-gym as data, reward and environment, and OpenEnv servers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import WSMsgType, web
from slime_environments.reasoning_gym import LevelRows, answer_in, level_specs
from slime_environments.reasoning_gym.tasks import HASH_SEEDED, TaskRows, check_hash_seed, pack, score, unpack
from slime_testing_contracts import DataSourceContract, EnvironmentContract, RecipeContract, RewardContract
from slime_testing_contracts.samples import answered_sample

from slime_core import RewardCaller, Sample
from slime_core.errors import ConfigError, EnvironmentTimeoutError, PluginError
from slime_core.protocols.environment import Turn

COLUMNS = {"input": "input", "label": "label", "metadata": "metadata"}
SHOW = (
    "import reasoning_gym, sys\n"
    "for name in sys.argv[1:]:\n"
    "    d = reasoning_gym.create_dataset(name, seed=42, size=1000)\n"
    "    print(name, [(d[i]['question'], d[i]['answer']) for i in range(3)])\n"
)


def rows(name: str, **config: Any) -> TaskRows:
    return TaskRows({"name": name, "config": {"seed": 1, "size": 50, **config}}, COLUMNS, None)


@pytest.mark.parametrize("name", ["chain_sum", "mini_sudoku", "knights_knaves"])
def test_a_row_that_went_through_json_is_scored_as_the_entry(name: str) -> None:
    made = rows(name)
    for index in (0, 7):
        row = json.loads(json.dumps(made[index]))
        facts = row["metadata"]["reasoning_gym"]
        entry = made._dataset[index]
        assert unpack(facts["entry"]) == entry
        for answer in (entry["answer"], "zzz", None, "1"):
            assert score(facts, answer) == (made._dataset.score_answer(answer, entry), None)


def test_packing_keeps_what_json_does_not() -> None:
    made = rows("rearc")
    entry = made._dataset[0]
    plain = json.loads(json.dumps(entry))
    assert made._dataset.score_answer(entry["answer"], plain) < 1.0, "the reason that rows are packed"
    assert score(made[0]["metadata"]["reasoning_gym"], entry["answer"]) == (1.0, None)
    value = {"a": (1, [2.5, None, (True,)]), 3: {"__tuple__": "x"}, "b": {}}
    assert unpack(json.loads(json.dumps(pack(value)))) == value
    with pytest.raises(ConfigError, match="holds a object"):
        pack(object())


def test_a_verifier_that_raises_gives_nothing() -> None:
    value, problem = score(rows("prime_factorization")[0]["metadata"]["reasoning_gym"], "zzz")
    assert value == 0.0
    assert str(problem).startswith("ValueError")


def test_tasks_that_depend_on_the_hash_seed_are_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="type PYTHONHASHSEED=0 before the command"):
        check_hash_seed({"name": "word_ladder", "config": {}})
    with pytest.raises(ConfigError, match="word_ladder"):
        check_hash_seed({"name": "composite", "config": {"datasets": [{"name": "word_ladder"}]}})
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    check_hash_seed({"name": "word_ladder", "config": {}})


@pytest.mark.slow
def test_they_do_depend_on_it_and_others_do_not() -> None:
    names = ["isomorphic_strings", "ransom_note", "word_ladder", "chain_sum", "leg_counting"]
    shown = []
    for seed in ("1", "2"):
        command = [sys.executable, "-c", SHOW, *names]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
        shown.append(done.stdout.splitlines())
    differ = {a.split()[0] for a, b in zip(*shown, strict=True) if a != b}
    assert differ == HASH_SEEDED & set(names)


def test_every_level_of_a_curriculum_is_looked_at_first() -> None:
    spec = {"name": "chain_sum", "config": {"seed": 1, "size": 5, "max_terms": 99, "allow_negation": True}}
    made = LevelRows(spec, COLUMNS, None, 2)
    facts = made[0]["metadata"]["reasoning_gym"]
    config = facts["spec"]["config"]
    assert (facts["level"], config["max_terms"], config["max_digits"]) == (2, 4, 3), "the curriculum's"
    assert config["allow_negation"], "the user's"
    assert score(facts, made[0]["label"]) == (1.0, None)
    before = made.fingerprint()
    made.go_to(0)
    assert made.fingerprint() == before
    assert made[0]["metadata"]["reasoning_gym"]["spec"]["config"]["max_digits"] == 1
    with pytest.raises(ConfigError, match=r"level 99: the curriculum of 'chain_sum' has 0 to \d"):
        LevelRows(spec, COLUMNS, None, 99)
    with pytest.raises(ConfigError, match="none for the task 'acre'"):
        level_specs({"name": "acre", "config": {}})
    with pytest.raises(ConfigError, match=r"level 2: .*rotation must be in range"):
        level_specs({"name": "caesar_cipher", "config": {}})


def test_wrong_settings_are_told() -> None:
    with pytest.raises(ConfigError, match=r"task 'leg_countin': .*Did you mean 'leg_counting'\?"):
        rows("leg_countin")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'legs'"):
        rows("leg_counting", legs=3)


@pytest.mark.parametrize(
    ("response", "how", "answer"),
    [
        ("so <answer>a</answer> or <answer> b </answer>", "tag", "b"),
        ("so b", "tag", None),
        (r"\boxed{a} \boxed{b}", "boxed", "b"),
        (" b <|end|>", "text", "b"),
    ],
)
def test_where_the_answer_is(response: str, how: str, answer: str | None) -> None:
    assert answer_in(response, how) == answer


ANSWER = "214"
ENTRY = {"question": "57 + 87 + 70 =", "answer": ANSWER, "metadata": {"source_dataset": "chain_sum", "source_index": 0}}
ITEM = {"reasoning_gym": {"spec": {"name": "chain_sum", "config": {"seed": 3, "size": 5}}, "index": 0, "entry": ENTRY}}
"""Written out: to make it takes the import of reasoning_gym, a second in each process that collects the tests."""


class TestSource(DataSourceContract):
    component = "reasoning_gym"
    args = {"plugins": {"reasoning_gym": {"task": "basic_arithmetic", "size": 6}}}


class TestCompositeSource(DataSourceContract):
    component = "reasoning_gym"
    datasets = [{"name": "leg_counting", "weight": 2.0, "config": {"max_animals": 3}}, {"name": "spell_backward"}]
    args = {"plugins": {"reasoning_gym": {"task": "composite", "size": 6, "datasets": datasets}}}


class TestCurriculumSource(DataSourceContract):
    component = "reasoning_gym"
    args = {"plugins": {"reasoning_gym": {"size": 6, "curriculum": True, "level_window": 2}}}

    def rollouts(self, source: Any, rewards: list[float]) -> list[int]:
        """Rollouts of one group each, all of whose samples get the reward; the level of each."""
        levels = []
        for number, reward in enumerate(rewards):
            source.begin_rollout(number, number)
            (group,) = source.get_samples(1)
            for sample in group:
                sample.reward, sample.status = reward, Sample.Status.COMPLETED
            source.observe([group], True)
            levels.append(group[0].metadata["reasoning_gym"]["level"])
            assert source.take_metrics()["rollout/reasoning_gym/level"] == levels[-1]
        return levels

    def test_the_level_moves_with_recent_success_and_is_resumed(self) -> None:
        rewards = [1.0, 0.5, 1.0, 0.9, 0.0, 1.0, 0.1, 0.1, 0.0, 0.0, 1.0]
        whole = self.build()
        levels = self.rollouts(whole, rewards)
        assert levels == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0], "after two groups each: stay, up, stay, down, stay at 0"
        for end in (3, 5):
            first, second = self.build(), self.build()
            assert self.rollouts(first, rewards[:end]) == levels[:end]
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            assert self.rollouts(second, rewards[end:]) == levels[end:]
            assert second.state_dict() == whole.state_dict()

    def test_scores_of_another_level_do_not_move_it(self) -> None:
        source = self.build()
        source.begin_rollout(0, 0)
        (old,) = source.get_samples(1)
        self.rollouts(source, [1.0, 1.0])
        source.begin_rollout(2, 2)
        for sample in old:
            sample.reward, sample.status = 1.0, Sample.Status.COMPLETED
        source.observe([old, old], True)
        assert self.rollouts(source, [0.5]) == [1]


class TestReward(RewardContract):
    component = "reasoning_gym"
    examples = [
        ("", f"It is <answer>{ANSWER}</answer>", None, 1.0),
        ("", f"{ANSWER}", None, 0.0),
        ("", "<answer>no</answer>", None, 0.0),
    ]

    @pytest.fixture(autouse=True)
    def _items(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The suite's samples become items of the task, which is all that the reward scores."""

        def item(*args: Any, **keywords: Any) -> Sample:
            sample = answered_sample(*args, **keywords)
            sample.metadata.update(ITEM)
            return sample

        monkeypatch.setattr("slime_testing_contracts.reward.answered_sample", item)


class TestEnvironment(EnvironmentContract):
    component = "reasoning_gym"
    metadata = ITEM
    actions = ("<answer>1</answer>", f"<answer>{ANSWER}</answer>")
    args = {"plugins": {"reasoning_gym": {"tries": 3}}}
    ends = True


class TestRecipe(RecipeContract):
    component = "reasoning_gym"
    args = {"plugins": {"reasoning_gym": {"eval_size": 4}}}

    @property
    def settings(self) -> SimpleNamespace:
        settings = super().settings
        settings.eval_prompt_data = ["heldout", f"{self.folder}/rg/heldout.jsonl"]
        return settings

    def test_its_rows_are_scored(self) -> None:
        self.resolved.obj(self.settings)
        lines = Path(self.settings.eval_prompt_data[1]).read_text(encoding="utf-8").splitlines()
        assert len(lines) == 4
        for row in map(json.loads, lines):
            sample = Sample(response=f"<answer>{row['label']}</answer>", metadata=row["metadata"])
            caller = RewardCaller(TestReward().resolved, self.settings)
            assert asyncio.run(caller.score([sample], False)) == [1.0]


class Server:
    """A counting game behind OpenEnv's WebSocket messages, and behind POST with episodes; in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.started = threading.Event()
        self.open = self.resets = self.steps = self.refused = 0
        self.refuse = 0
        self.episodes: dict[str, int] = {}
        self.url = ""
        self.runner: web.AppRunner | None = None
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        assert self.started.wait(60)

    def _serve(self) -> None:
        self.loop.run_until_complete(self._start())
        self.started.set()
        self.loop.run_forever()

    async def _start(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/ws", self._ws), web.post("/reset", self._reset), web.post("/step", self._step)])
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    def stop(self) -> None:
        assert self.runner is not None
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)
        self.loop.close()

    def _answer(self, count: int, text: str) -> dict[str, Any]:
        return {"observation": {"message": text}, "reward": float(count), "done": count >= 3}

    async def _ws(self, request: web.Request) -> web.StreamResponse:
        if self.refused < self.refuse:
            self.refused += 1
            raise web.HTTPServiceUnavailable
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.open += 1
        count = 0
        async for message in socket:
            if message.type != WSMsgType.TEXT:
                break
            told = json.loads(message.data)
            if told["type"] == "reset":
                self.resets += 1
                count = 0
                data = self._answer(0, f"seed {told['data'].get('seed')}")
            elif told["type"] == "step":
                self.steps += 1
                words = told["data"].get("message")
                if words is None:
                    error = {"message": "message: Field required", "code": "VALIDATION_ERROR"}
                    await socket.send_json({"type": "error", "data": error})
                    continue
                if words == "hang":
                    await asyncio.sleep(600)
                if words == "break":
                    error = {"message": "division by zero", "code": "EXECUTION_ERROR"}
                    await socket.send_json({"type": "error", "data": error})
                    continue
                count += 1
                data = self._answer(count, f"heard {words}")
            else:
                break
            await socket.send_json({"type": "observation", "data": data})
        self.open -= 1
        return socket

    async def _reset(self, request: web.Request) -> web.Response:
        if self.refused < self.refuse:
            self.refused += 1
            assert request.transport is not None
            request.transport.close()
        body = await request.json()
        self.resets += 1
        self.episodes[body["episode_id"]] = 0
        return web.json_response(self._answer(0, f"seed {body.get('seed')}"))

    async def _step(self, request: web.Request) -> web.Response:
        self.steps += 1
        body = await request.json()
        if body["action"].get("message") == "break":
            assert request.transport is not None
            request.transport.close()
        self.episodes[body["episode_id"]] += 1
        return web.json_response(self._answer(self.episodes[body["episode_id"]], f"heard {body['action']['message']}"))


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


class _OpenEnv(EnvironmentContract):
    component = "openenv"
    actions = ("a", "b", "c")
    ends = True
    transport = "websocket"

    @pytest.fixture(autouse=True)
    def _served(self, server: Server) -> None:
        self.server = server
        self.own: dict[str, Any] = {"url": server.url, "transport": self.transport}

    @property
    def settings(self) -> Any:
        settings = super().settings
        settings.plugins = {"openenv": self.own}
        return settings


class TestOverWebSocket(_OpenEnv):
    component = "openenv"

    def test_steps_are_of_one_session(self) -> None:
        first, steps = self.play(("a", "b", "c"))
        assert first == "seed 7"
        assert [step.observation for step in steps] == ["heard a", "heard b", "heard c"]
        assert [step.reward for step in steps] == [1.0, 2.0, 3.0]
        assert [step.done for step in steps] == [False, False, True]

    def test_what_the_server_does_not_take_is_told(self) -> None:
        self.own["action_field"] = ""
        _, (text, wrong, right) = self.play(("a", '{"other": 1}', '{"message": "x"}'))
        assert text.observation == "Write the action as one JSON object."
        assert "message: Field required" in str(wrong.observation)
        assert right.observation == "heard x"

    def test_an_error_of_the_server_is_raised(self) -> None:
        with pytest.raises(PluginError, match="EXECUTION_ERROR: division by zero"):
            self.play(("break",))
        assert self.server.steps == 1

    def test_connecting_is_tried_again(self) -> None:
        self.server.refuse = 2
        self.play(("a",))
        assert self.server.refused == 2
        self.server.refuse = 5
        with pytest.raises(PluginError, match="OpenEnv server"):
            self.play(("a",))

    @pytest.mark.slow
    async def test_a_step_that_hangs_ends_and_its_session_too(self) -> None:
        sample = self.sample()
        session = await self.open(sample)
        await session.reset(sample)
        session._step_timeout = 2.0
        with pytest.raises(EnvironmentTimeoutError):
            await session.step("hang", Turn(0, "hang", [], "stop"))
        await session.close()
        await asyncio.sleep(0)
        assert self.server.steps == 1, "never tried again"


class TestOverHttp(_OpenEnv):
    component = "openenv"
    transport = "http"

    def test_an_episode_is_kept_by_its_id(self) -> None:
        _, steps = self.play(("a", "b", "c"))
        assert [step.reward for step in steps] == [1.0, 2.0, 3.0]
        assert len(self.server.episodes) == 1

    def test_a_reset_is_tried_again_and_a_step_is_not(self) -> None:
        self.server.refuse = 1
        self.play(("a",))
        steps = self.server.steps
        with pytest.raises(PluginError):
            self.play(("break",))
        assert self.server.steps == steps + 1
