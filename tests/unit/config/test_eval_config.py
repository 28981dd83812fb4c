from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime_core.config import Settings
from slime_core.errors import ConfigError

Load = Callable[..., Settings]


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_pairs_fall_back_to_evaluation_then_rollout_settings(load: Load) -> None:
    argv = "--eval-prompt-data a x.jsonl@[0:9] --eval-prompt-data b y.parquet --eval-interval 1 --label-key answer"
    more = "--eval-temperature 0 --rollout-top-p 0.9 --n-samples-per-eval-prompt 4 --eval-input-key q --rollout-stop s"
    a, b = load(*argv.split(), *more.split()).args.eval_datasets
    assert (a.name, a.path, b.name, b.path) == ("a", "x.jsonl@[0:9]", "b", "y.parquet")
    assert (a.temperature, a.top_p, a.n_samples_per_eval_prompt) == (0.0, 0.9, 4)
    assert (a.input_key, a.label_key, a.max_response_len, a.stop, a.rm_type) == ("q", "answer", 16, ["s"], "math")


def test_file_data_set_wins_over_defaults_over_flags(load: Load) -> None:
    Path("e.yaml").write_text(
        "eval:\n"
        "  defaults: {max_response_len: 4096, top_p: 0.7, rm_type: f1}\n"
        "  datasets:\n"
        "    - {name: aime, path: a.jsonl, rm_type: deepscaler, n_samples_per_eval_prompt: 16, top_p: 0.5}\n"
        "    - name: own\n"
        "      path: b.jsonl\n"
        "      custom_rm_path: m.f\n"
        "      metadata_overrides: {level: 3}\n"
    )
    a, b = load("--eval-config", "e.yaml", "--rollout-top-k", "7").args.eval_datasets
    assert (a.rm_type, a.n_samples_per_eval_prompt, a.top_p, a.max_response_len, a.top_k) == (
        "deepscaler",
        16,
        0.5,
        4096,
        7,
    )
    assert (b.rm_type, b.custom_rm_path, b.top_p, b.metadata_overrides) == (None, "m.f", 0.7, {"level": 3})


def test_mapping_form_and_root_without_eval(load: Load) -> None:
    Path("e.yaml").write_text("datasets:\n  aime:\n    path: a.jsonl\n    app_service: x\n")
    s = load("--eval-config", "e.yaml")
    assert [(d.name, d.path) for d in s.args.eval_datasets] == [("aime", "a.jsonl")]
    assert s.warnings == ["e.yaml:4: 'app_service' has no effect."]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasets:\n  - name: a\n    path: p\n    temprature: 1\n",
         "e.yaml:4: unknown evaluation setting 'temprature'. Did you mean temperature?"),
        ("defaults:\n  path: p\ndatasets: []\n", "e.yaml:2: unknown evaluation setting 'path'. Known: "),
        ("data: []\n", "e.yaml:1: unknown key 'data'; expected 'defaults' and 'datasets'."),
        ("datasets:\n  - name: a\n", "e.yaml:2: an evaluation data set needs 'path'."),
        ("datasets: 3\n", "e.yaml: 'datasets' must be a list of mappings with 'name' and 'path'."),
        ("datasets:\n  - a\n", "e.yaml:2: expected a mapping with 'name' and 'path'."),
        ("datasets:\n  - {name: a, path: p, top_p: 2}\n", "e.yaml:2: top_p 2: must be less than or equal to 1"),
        ("datasets:\n  - {name: a, path: p, top_k: 0}\n",
         "e.yaml:2: top_k 0: must be -1 (all tokens) or at least 1"),
        ("datasets:\n  - {name: a, path: !!set p}\n", "e.yaml:2: not valid YAML: could not determine a constructor"),
        ("datasets:\n  - {name: a, path: p}\n  - {name: a, path: q}\n",
         "e.yaml: evaluation data set 'a' is named twice; names must differ."),
    ],
)  # fmt: skip
def test_file_errors(load: Load, text: str, message: str) -> None:
    Path("e.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load("--eval-config", "e.yaml")
    assert str(caught.value).startswith(message)


def test_a_missing_file_is_named_with_its_flag(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"^--eval-config 'none.yaml' \(SLIME_EVAL_CONFIG env\): no such file$"):
        load(env={"SLIME_EVAL_CONFIG": "none.yaml"})


def test_half_a_pair_is_an_error(load: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        load("--eval-prompt-data", "aime", "aime.jsonl", "b.jsonl")
    assert str(caught.value) == (
        "--eval-prompt-data 'aime' 'aime.jsonl' 'b.jsonl' (flag): expected pairs of a name and a path,"
        " e.g. --eval-prompt-data aime data/aime.jsonl"
    )


def test_reward_of_every_data_set_is_enough_to_evaluate(load: Load) -> None:
    Path("e.yaml").write_text("datasets:\n  - {name: a, path: p, rm_type: f1}\n  - {name: b, path: p}\n")
    argv = ["--hf-checkpoint", "/m", "--eval-config", "e.yaml", "--eval-max-response-len", "8"]
    with pytest.raises(ConfigError, match=r"^no reward"):
        load(*argv, base=False, command="eval")
    Path("e.yaml").write_text("datasets:\n  - {name: a, path: p, rm_type: f1}\n")
    load(*argv, base=False, command="eval")
