"""Precedence, provenance, and what happens to keys nobody knows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_core.config import Settings, load_settings
from slime_core.errors import ConfigError
from tests.sweeps import sweep

Load = Callable[..., Settings]


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def show(*argv: str, env: dict[str, str] | None = None) -> Settings:
    return load_settings(argv, command="show", env=env or {})


def test_each_layer_wins_over_the_one_before() -> None:
    Path("a.yaml").write_text("lr: 1e-3\nmin-lr: 1e-5\nseed: 1\nweight_decay: 0.1\nadam_beta2: 0.9\n")
    Path("b.yaml").write_text("seed: 2\n")
    Path("custom.yaml").write_text("adam_beta2: 0.8\n")
    s = show(
        *["--config", "a.yaml", "--config", "b.yaml", "--custom-config-path", "custom.yaml", "--lr", "5e-3"],
        env={"SLIME_LR": "9", "SLIME_WEIGHT_DECAY": "0.2"},
    )
    got = {
        n: (getattr(s.args, n), str(s.origins[n]))
        for n in ["lr", "min_lr", "seed", "weight_decay", "adam_beta1", "adam_beta2"]
    }
    assert got == {
        "lr": (5e-3, "flag"),
        "min_lr": (1e-5, "a.yaml:2"),
        "seed": (2, "b.yaml:1"),
        "weight_decay": (0.2, "SLIME_WEIGHT_DECAY env"),
        "adam_beta1": (0.9, "default"),
        "adam_beta2": (0.8, "custom.yaml:1"),
    }


def test_arguments_of_python_win_and_are_flags_for_other_processes() -> None:
    arguments = {
        "lr": 2e-3, "preflight": False, "use_kl_loss": True, "disable_rewards_normalization": True, "save": Path("out"),
        "eval_prompt_data": ["sums", "sums.jsonl"], "plugins": {"math": {"strict": True}}, "seed": None,
        "sglang_mem_fraction_static": 0.3,
    }  # fmt: skip
    s = load_settings(["--lr", "1e-4"], command="show", env={}, arguments=arguments)
    assert (s.args.lr, str(s.origins["lr"])) == (2e-3, "argument lr")
    assert (s.args.preflight, s.args.rewards_normalization, s.args.save) == (False, False, "out")
    assert s.is_given("lr")
    again = load_settings(s.argv, command="show", env={})
    assert again.to_dict() == s.to_dict()
    for wrong, message in (
        ({"lrr": 1}, "argument lrr=1: no such setting. Did you mean lr?"),
        ({"lr": "x"}, "argument lr"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_settings([], command="show", env={}, arguments=wrong)


def test_switches_can_be_set_and_unset_from_every_layer() -> None:
    Path("a.yaml").write_text("group_rm: true\ndisable-grpo-std-normalization: true\nrollout_shuffle: true\n")
    s = show(
        "--config", "a.yaml", "--no-group-rm", "--n-samples-per-prompt", "2", env={"SLIME_ROLLOUT_SHUFFLE": "false"}
    )
    assert (s.args.group_rm, s.args.grpo_std_normalization, s.args.rollout_shuffle) == (False, False, False)
    assert str(s.origins["grpo_std_normalization"]) == "a.yaml:2"
    s = show("--config", "a.yaml", "--grpo-std-normalization", "--n-samples-per-prompt", "2")
    assert s.args.grpo_std_normalization is True
    s = show(env={"SLIME_DISABLE_REWARDS_NORMALIZATION": "true"})
    assert s.args.rewards_normalization is False
    assert str(s.origins["rewards_normalization"]) == "SLIME_DISABLE_REWARDS_NORMALIZATION env"


def test_lists_and_mappings_from_every_layer() -> None:
    Path("a.yaml").write_text("rollout_stop: [x, y]\napply_chat_template_kwargs: {enable_thinking: false}\n")
    s = show("--config", "a.yaml", "--plugin-dir", "d e", "--plugin-dir", "f")
    assert s.args.rollout_stop == ["x", "y"]
    assert s.args.apply_chat_template_kwargs == {"enable_thinking": False}
    assert s.args.plugin_dir == ["d e", "f"]
    s = show("--rollout-stop", "a b", "c", "--rollout-top-k", "-1", env={"SLIME_PLUGIN_DIR": "/p:/q"})
    assert s.args.rollout_stop == ["a b", "c"]
    assert s.args.plugin_dir == ["/p", "/q"]
    for text in ("", ":"):
        assert show(env={"SLIME_PLUGIN_DIR": text}).args.plugin_dir == [], "nothing is not the working directory"
    s = show(env={"SLIME_ROLLOUT_STOP": '["a b", "c"]', "SLIME_APPLY_CHAT_TEMPLATE_KWARGS": '{"a": 1}'})
    assert s.args.rollout_stop == ["a b", "c"]
    assert s.args.apply_chat_template_kwargs == {"a": 1}
    assert show("--prompt-data", "d.jsonl@[-10:]").args.prompt_data == "d.jsonl@[-10:]"


def test_plugin_options_merge_and_are_typed() -> None:
    Path("a.yaml").write_text("plugins:\n  math: {tolerance: 1e-3, timeout: 2}\n")
    s = show("--config", "a.yaml", "--set", "plugins.math.tolerance=1e-6", "--set", "plugins.f1.lower=true")
    assert s.args.plugins == {"math": {"tolerance": 1e-6, "timeout": 2}, "f1": {"lower": True}}
    assert str(s.origins["plugins"]) == "flag"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plugins.math", "--set 'plugins.math' (flag): expected NAME.KEY=VALUE, e.g. plugins.math.tolerance=1e-6"),
        ("lr=1", "--set 'lr=1' (flag): lr is a setting of its own; use --lr."),
        ("custom.lr=abc", "--lr 'abc' (--set custom.lr): must be a number"),
        ("custom.copy=1", "--set custom.copy: 'copy' cannot be an attribute of args; rename it."),
        ("custom.a.b=1", "--set 'custom.a.b=1' (flag): expected NAME.KEY=VALUE, e.g. plugins.math.tolerance=1e-6"),
        (
            "math.tolerance=1",
            "--set 'math.tolerance=1' (flag): 'math' is not a mapping; for an option of a plugin write"
            " --set plugins.math.tolerance=... (mappings: plugins, multimodal_keys, apply_chat_template_kwargs,"
            " train_env_vars)",
        ),
    ],
)
def test_set_says_what_it_takes(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        show("--set", text)
    assert str(caught.value) == message


def test_a_missing_file_is_named_with_its_layer() -> None:
    Path("a.yaml").write_text("lr: 1\ncustom_config_path: none.yaml\n")
    with pytest.raises(ConfigError, match=r"^--custom-config-path 'none.yaml' \(a.yaml:2\): no such file$"):
        show("--config", "a.yaml")
    with pytest.raises(ConfigError, match=r"^--config 'none.yaml' \(SLIME_CONFIG env\): no such file; `slime init`"):
        show(env={"SLIME_CONFIG": "none.yaml"})


@pytest.mark.parametrize("several", ["my run.yaml:b.yaml", '["my run.yaml", "b.yaml"]'])
def test_the_environment_names_one_file_or_several(several: str) -> None:
    Path("my run.yaml").write_text("lr: 1\n")
    Path("b.yaml").write_text("lr: 2\n")
    assert show(env={"SLIME_CONFIG": "my run.yaml"}).args.lr == 1.0
    assert show(env={"SLIME_CONFIG": several}).args.lr == 2.0


def test_custom_keys_become_attributes_and_cannot_bypass_checks() -> None:
    Path("mine.yaml").write_text("my_turns: 4\nsearch: {top_k: 3}\nrollout_top_p: 0.5\n")
    s = show("--custom-config-path", "mine.yaml")
    assert (s.args.my_turns, s.args.search, s.args.rollout_top_p) == (4, {"top_k": 3}, 0.5)
    assert s.custom == ("my_turns", "search")
    assert str(s.origins["my_turns"]) == "mine.yaml:1"
    Path("mine.yaml").write_text("my_turns: 4\nrollout_temperature: 0\n")
    with pytest.raises(ConfigError, match=r"^--rollout-temperature 0 \(mine.yaml:2\): must be greater than 0$"):
        show("--custom-config-path", "mine.yaml")
    Path("mine.yaml").write_text("model_dump: 4\n")
    with pytest.raises(ConfigError, match=r"^mine.yaml:1: 'model_dump' cannot be an attribute of args; rename it.$"):
        show("--custom-config-path", "mine.yaml")
    Path("main.yaml").write_text("custom:\n  my_turns: 5\n")
    assert show("--config", "main.yaml").args.my_turns == 5


@sweep("yaml, message",
    [
        ("lr: 1\nrolout_batch_size: 4\n",
         "a.yaml:2: unknown setting 'rolout_batch_size'. Did you mean rollout_batch_size?"),
        ("tensor-model-paralel-size: 4\n", "a.yaml:1: unknown setting 'tensor-model-paralel-size'."
         " Did you mean tensor_model_parallel_size?"),
        ("zzz: 4\n",
         "a.yaml:1: unknown setting 'zzz'. Keys of your own go under 'custom': or into --custom-config-path."),
        ("lr: 1\n\nlr: 2\n", "a.yaml:3: 'lr' is already set in line 1"),
        ("plugins:\n  m: 1\n  m: 2\n", "a.yaml:3: 'm' is already set in line 2"),
        ("lr: [1\n", "a.yaml:2: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("- lr\n", "a.yaml:1: expected `name: value` lines"),
        ("lr: 1\nseed: x\n", "--seed 'x' (a.yaml:2): must be a whole number"),
        ("seed: true\n", "--seed True (a.yaml:1): must be a number"),
        ("group_rm: 7\n", "--group-rm 7 (a.yaml:1): must be a valid boolean, unable to interpret input"),
        ("config: b.yaml\n", "a.yaml:1: 'config' can only be given as a flag."),
        ("tensor_model_parallel_size: two\n", "a.yaml:1: tensor_model_parallel_size 'two': invalid int value: 'two'"),
        ("lr: !!python/object/apply:os.system [x]\n", "a.yaml:1: not valid YAML: could not determine a constructor for"
         " the tag 'tag:yaml.org,2002:python/object/apply:os.system'"),
        ("seed: 1\nplugins:\n  m: {t: !!int x}\n", "a.yaml:3: not valid YAML: 'x' is not of type int"),
        ("lr: !!bool maybe\n", "a.yaml:1: not valid YAML: 'maybe' is not of type bool"),
        ("lr: !!timestamp maybe\n", "a.yaml:1: not valid YAML: could not determine a constructor for"
         " the tag 'tag:yaml.org,2002:timestamp'"),
        ("lr: 1\nseed: \x01\n", "a.yaml:2: not valid YAML: special characters are not allowed"),
        ("plugins:\n  math: 1\n",
         "plugins.math 1 (a.yaml:1): must be a mapping of options, e.g. plugins.math.OPTION=VALUE"),
        ("num-rollout: 1\nlr: 1\nnum_rollout: 2\n",
         "a.yaml:3: 'num_rollout' is already set as 'num-rollout' in a.yaml:1; remove one."),
        ("disable_grpo_std_normalization: true\ngrpo_std_normalization: true\n", "a.yaml:2: 'grpo_std_normalization' is"
         " already set as 'disable_grpo_std_normalization' in a.yaml:1; remove one."),
        ("tensor-model-parallel-size: 1\ntensor_model_parallel_size: 1\n", "a.yaml:2: 'tensor_model_parallel_size' is"
         " already set as 'tensor-model-parallel-size' in a.yaml:1; remove one."),
        ("custom:\n  num_rollout: 1\nnum_rollout: 2\n",
         "a.yaml:1: 'num_rollout' is already set as 'num_rollout' in a.yaml:3; remove one."),
        ("kl_loss_type: k9\n", "--kl-loss-type 'k9' (a.yaml:1): must be one of k1, k2, k3, low_var_kl"),
    ],
)  # fmt: skip
def test_file_errors_name_file_and_line(yaml: str, message: str) -> None:
    Path("a.yaml").write_text(yaml)
    with pytest.raises(ConfigError) as caught:
        show("--config", "a.yaml")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--rollout-batchsize 4", "unknown flag --rollout-batchsize. Did you mean --rollout-batch-size?"),
        ("--rollout_batch_size=4", "unknown flag --rollout_batch_size. Did you mean --rollout-batch-size?"),
        ("--tensor-model-parallel 4",
         "unknown flag --tensor-model-parallel. Did you mean --tensor-model-parallel-size?"),
        ("--zzz", "unknown flag --zzz. `slime config show --help-all` lists all; keys of your own go into"
         " --custom-config-path."),
        ("stray", "unexpected argument 'stray'; every setting is a flag, see `slime config show --help-all`."),
        ("--lr", "--lr (flag): expected one argument"),
        ("--num-roll 3", "unknown flag --num-roll. Did you mean --num-rollout?"),
        ("--config none.yaml", "--config 'none.yaml' (flag): no such file; `slime init` lists those it can write"),
        ("--custom-config-path none.yaml", "--custom-config-path 'none.yaml' (flag): no such file"),
        ("--config .", "--config '.' (flag): cannot be read: [Errno 21] Is a directory: '.'"),
        ("--rollout-top-k 0", "--rollout-top-k '0' (flag): must be -1 (all tokens) or at least 1"),
        ("--eval-top-k -2", "--eval-top-k '-2' (flag): must be -1 (all tokens) or at least 1"),
        ("--train-env-vars {", "--train-env-vars '{' (flag): not valid JSON: Expecting property name enclosed in double"
         " quotes: line 1 column 2 (char 1)"),
        ("--lr x --seed 1.5", "--lr 'x' (flag): must be a number\n--seed '1.5' (flag): must be a whole number"),
    ],
)  # fmt: skip
def test_flag_errors(argv: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        show(*argv.split())
    assert str(caught.value) == message


def test_environment_typos_stop_and_foreign_variables_warn() -> None:
    with pytest.raises(ConfigError) as caught:
        show(env={"SLIME_NUM_ROLOUT": "3"})
    assert str(caught.value) == "unknown setting SLIME_NUM_ROLOUT in the environment. Did you mean SLIME_NUM_ROLLOUT?"
    s = show(env={"SLIME_HOME": "/x", "SLIME_PLUGINS": "", "SLIME_TRACE_PLUGINS": "1", "OTHER": "1"})
    assert s.warnings == ["SLIME_HOME in the environment is no setting and has no effect."]


def test_an_empty_variable_of_a_switch_is_not_set() -> None:
    s = show(env={"SLIME_NO_PLUGINS": "", "SLIME_OVERWRITE": " "})
    assert (s.args.no_plugins, s.args.overwrite) == (False, False)
    assert str(s.origins["no_plugins"]) == "default"


def test_yaml_text_loads_back_as_the_same_settings(load: Load) -> None:
    Path("mine.yaml").write_text('my_turns: 4\n"odd key": [1, {a: "no"}]\n')
    Path("main.yaml").write_text("rollout_stop: ['no', '1e-6', \"a: b # c\", \"\\u00e9\\n\", null_]\nsave: out dir\n")
    s = load(
        *[
            "--config",
            "main.yaml",
            "--custom-config-path",
            "mine.yaml",
            "--set",
            "plugins.math.tolerance=1e-6",
            "--lr",
            "3e-7",
        ],
        *["--tensor-model-parallel-size", "2", "--sglang-mem-fraction-static", "0.8", "--router-policy", "cache_aware"],
        *["--eval-prompt-data", "a", "d.jsonl@[0:5]", "--eval-interval", "2", "--disable-grpo-std-normalization"],
        env={"SLIME_SEED": "9"},
    )
    text = s.to_yaml()
    assert "lr: 3e-07  # flag\n" in text
    assert "seed: 9  # SLIME_SEED env\n" in text
    assert "# global_batch_size: 32  # derived: rollout_batch_size * n_samples_per_prompt\n" in text
    Path("saved.yaml").write_text(text)
    Path("main.yaml").unlink()
    Path("mine.yaml").unlink()
    again = load("--config", "saved.yaml", base=False)
    files = {"config": None, "custom_config_path": None}
    assert again.to_dict() | files == s.to_dict() | files
    assert again.args.eval_datasets == s.args.eval_datasets
    assert again.args.my_turns == 4
    assert again.args.rollout_stop == ["no", "1e-6", "a: b # c", "\u00e9\n", "null_"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["\u2014lr", "3"], "unexpected argument '\u2014lr'.* Did you mean --lr"),
        (["\u2013lr=3"], "unexpected argument '\u2013lr=3'.* Did you mean --lr"),
        (["--rollout-stop", "a", "\u2014lr", "3"], "unexpected argument '\u2014lr'.* Did you mean --lr"),
        (["lr=3"], "unexpected argument 'lr=3'.* Did you mean --lr"),
        (["--LR", "3"], "unknown flag --LR. Did you mean --lr"),
        (["--save="], "--save '' .flag.: an empty text names nothing"),
        (["--prompt-data", ""], "--prompt-data '' .flag.: an empty text names nothing"),
        (["--seed", "9" * 20], "--seed '9{20}' .flag.: must be less than"),
    ],
)
def test_what_strangers_type(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        show(*argv)


def test_variables_that_are_no_truth_value_and_no_setting() -> None:
    with pytest.raises(ConfigError, match=r"^SLIME_NO_PREFLIGHT '\{': expected true or false$"):
        show(env={"SLIME_NO_PREFLIGHT": "{"})
    with pytest.raises(ConfigError, match=r"unknown setting SLIME_PLUGINS_ .* Did you mean SLIME_PLUGINS\?"):
        show(env={"SLIME_PLUGINS_": "x"})
