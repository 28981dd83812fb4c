"""No setting is ignored silently: what nothing reads is in the table of settings without effect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_core.config import load_settings
from slime_core.config.sections.evaluation import EvalDataset
from slime_core.config.spec import flag_specs
from slime_core.config.support import BY_COMPONENT, REFUSED_VALUES, UNSUPPORTED, check_component_support
from slime_core.errors import ConfigError
from slime_core.plugins.kinds import hook_flags
from tests.architecture.trees import LOCKSTEP

ROOT = Path(__file__).resolve().parents[3]
FOR_USERS_FUNCTIONS = {"rm_url"}
"""Settings that only plugins and users' own functions read."""


def _words() -> set[str]:
    config = ROOT / "slime_core" / "config"
    read = [ROOT / "slime_core", *LOCKSTEP, ROOT / "plugins" / "hooks"]
    texts = {f: f.read_text() for folder in read for f in folder.rglob("*.py") if f != config / "support.py"}
    for file in (config / "sections").glob("*.py"):  # the rules read, the declarations do not
        texts[file] = "".join(re.split(r"^(?:def |RULES)", texts[file], maxsplit=1, flags=re.MULTILINE)[1:])
    of_hooks = {row.setting for row in hook_flags().values()}
    of_evaluation = {f"eval_{name}" for name in EvalDataset.model_fields}  # `eval_config` makes the names up
    words = {word for text in texts.values() for word in re.findall(r"[a-z_][a-z_0-9]*", text)}
    return of_hooks | of_evaluation | words


def test_every_setting_is_read_or_said_to_be_without_effect() -> None:
    words = _words()
    unread = {name for name in flag_specs() if name not in words}
    assert unread - set(UNSUPPORTED) - FOR_USERS_FUNCTIONS == set()


def test_settings_without_effect_are_not_read_by_the_loop() -> None:
    text = "\n".join(
        f.read_text()
        for folder in (ROOT / "slime_core", *LOCKSTEP)
        for f in folder.rglob("*.py")
        if "config" not in f.relative_to(ROOT).parts[:2]
    )
    read = set(re.findall(r"\bargs\.([a-z_0-9]+)", text)) & set(UNSUPPORTED)
    assert read == set()


def test_settings_of_some_components_are_not_those_of_none() -> None:
    assert set(BY_COMPONENT) <= set(flag_specs())
    assert not set(BY_COMPONENT) & set(UNSUPPORTED)


def test_settings_that_the_chosen_components_do_not_act_on_are_told_or_refused() -> None:
    settings = load_settings(["--colocate", "--rollout-num-gpus", "4", "--num-rollout", "1"], command="show", env={})
    found = (settings.args, settings.origins)
    assert check_component_support(*found, {"colocate", "rollout_num_gpus"}, "--rollout-engine a") == []
    assert check_component_support(*found, {"colocate"}, "--rollout-engine b") == [
        "without effect with --rollout-engine b: --rollout-num-gpus 4 (flag)"
    ]
    settings = load_settings(["--sglang-config", "x.yaml", "--prefill-num-servers", "1"], command="show", env={})
    found = (settings.args, settings.origins)
    with pytest.raises(ConfigError) as raised:
        check_component_support(*found, {"colocate"}, "--rollout-engine b")
    assert str(raised.value) == (
        "--sglang-config 'x.yaml' (flag), --prefill-num-servers 1 (flag) have no effect with --rollout-engine b; remove"
        " to go on, or choose others."
    )
    assert check_component_support(*found, {"sglang_config", "prefill_num_servers"}, "--rollout-engine a") == []


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in REFUSED_VALUES.items() for v in values])
def test_values_that_only_some_components_act_on(name: str, value: str) -> None:
    flag = "--" + name.replace("_", "-")
    settings = load_settings([flag, value], command="show", env={})
    assert check_component_support(settings.args, settings.origins, {name}, "a") == []
    with pytest.raises(ConfigError, match=f"{flag} '{value}' .flag. has no effect with b; remove to go on"):
        check_component_support(settings.args, settings.origins, set(), "b")
