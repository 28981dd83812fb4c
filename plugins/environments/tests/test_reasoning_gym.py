from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from slime_environments.reasoning_gym import LevelRows, answer_in, level_specs
from slime_environments.reasoning_gym.tasks import HASH_SEEDED, TaskRows, check_hash_seed, pack, score, unpack

from slime_core.errors import ConfigError

COLUMNS = {"input": "input", "label": "label", "metadata": "metadata"}
SHOW = (
    "import reasoning_gym, sys\n"
    "for name in sys.argv[1:]:\n"
    "    d = reasoning_gym.create_dataset(name, seed=42, size=1000)\n"
    "    print(name, [(d[i]['question'], d[i]['answer']) for i in range(3)])\n"
)


def rows(name: str, **config: Any) -> TaskRows:
    return TaskRows({"name": name, "config": {"seed": 1, "size": 50, **config}}, COLUMNS, None)


@pytest.mark.parametrize("name", ["chain_sum", "leg_counting", "mini_sudoku", "arc_1d", "knights_knaves", "countdown"])
def test_a_row_that_went_through_json_is_scored_as_the_entry(name: str) -> None:
    made = rows(name)
    for index in (0, 7):
        row = json.loads(json.dumps(made[index]))
        facts = row["metadata"]["reasoning_gym"]
        entry = made._dataset[index]
        assert unpack(facts["entry"]) == entry
        for answer in (entry["answer"], "zzz", None, "1"):
            assert score(facts, answer) == (made._dataset.score_answer(answer, entry), None)


def test_tuples_matter_to_verifiers() -> None:
    made = rows("rearc")
    entry = made._dataset[0]
    plain = json.loads(json.dumps(entry))
    assert made._dataset.score_answer(entry["answer"], plain) < 1.0, "the reason that rows are packed"
    assert score(made[0]["metadata"]["reasoning_gym"], entry["answer"]) == (1.0, None)


def test_packing_keeps_what_json_does_not() -> None:
    value = {"a": (1, [2.5, None, (True,)]), 3: {"__tuple__": "x"}, "b": {}}
    assert unpack(json.loads(json.dumps(pack(value)))) == value
    with pytest.raises(ConfigError, match="holds a object"):
        pack(object())


def test_a_verifier_that_raises_gives_nothing() -> None:
    value, problem = score(rows("prime_factorization")[0]["metadata"]["reasoning_gym"], "zzz")
    assert value == 0.0
    assert str(problem).startswith("ValueError")


def test_items_depend_on_seed_and_index_alone() -> None:
    assert rows("chain_sum")[3] == rows("chain_sum")[3]
    assert rows("chain_sum")[3]["input"] != rows("chain_sum", seed=2)[3]["input"]
    assert rows("chain_sum").fingerprint() != rows("chain_sum", max_terms=9).fingerprint()


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
