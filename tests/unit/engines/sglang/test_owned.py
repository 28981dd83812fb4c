from __future__ import annotations

import re

import pytest
from slime_engine_sglang.flag_list import ROUTER, SERVER, shipped_flags
from slime_engine_sglang.owned import ROUTER_OWNED, SERVER_OWNED, refuse_owned

from slime_core.config import load_settings
from slime_core.errors import ConfigError


@pytest.fixture(autouse=True)
def _shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_engine_sglang.flag_list.find_python", lambda _: None)


def load(*argv: str) -> list[str]:
    return load_settings([*argv, "--rollout-engine", "sglang"], command="show", env={}).warnings


def _value(attribute: str) -> list[str]:
    owner = SERVER if attribute.startswith(SERVER) else ROUTER
    flag = shipped_flags().field(owner, attribute.removeprefix(owner))
    assert flag is not None
    if flag.nargs == 0:
        return []
    return [[*flag.choices][-1] if flag.choices else "7"]


@pytest.mark.parametrize("prefix", [SERVER, ROUTER])
def test_each_is_refused_saying_what_to_set(prefix: str) -> None:
    for field, text in (SERVER_OWNED if prefix == SERVER else ROUTER_OWNED).items():
        flag = shipped_flags().field(prefix, field)
        if flag is None or field in ("config", "tp_size", "skip_server_warmup"):
            continue
        with pytest.raises(ConfigError, match=re.escape(f"(flag) is slime's to set: {text}.")) as caught:
            load(flag.option_strings[-1], *_value(prefix + field))
        assert str(caught.value).startswith("--" + flag.dest.replace("_", "-"))
    (warning,) = load("--sglang-skip-server-warmup")
    assert "without need" in warning


@pytest.mark.parametrize(
    ("argv", "gpus", "origin"),
    [
        ("--sglang-tp-size 2", 2, "derived: sglang_tp_size"),
        ("--sglang-tensor-parallel-size 2 --sglang-pp-size 2", 4, "derived: sglang_tp_size * sglang_pp_size"),
        ("--sglang-tp-size 2 --rollout-num-gpus-per-engine 2", 2, "flag"),
        ("--sglang-tp-size 2 --rollout-num-gpus-per-engine 4 --sglang-pp-size 2", 4, "flag"),
    ],
)
def test_the_size_of_an_engine_may_be_said_in_sglangs_way(argv: str, gpus: int, origin: str) -> None:
    settings = load_settings([*argv.split(), "--rollout-engine", "sglang"], command="show", env={})
    assert settings.args.rollout_num_gpus_per_engine == gpus
    assert str(settings.origins["rollout_num_gpus_per_engine"]) == origin
    assert not [w for w in settings.warnings if "tp-size" in w]


def test_with_another_engine_they_have_no_effect() -> None:
    argv = "--sglang-tp-size 2 --sglang-port 1 --router-host h --rollout-engine embedded --train-backend embedded"
    settings = load_settings(argv.split(), command="show", env={})
    assert settings.args.rollout_num_gpus_per_engine == 1
    (warning,) = [w for w in settings.warnings if "sglang" in w]
    assert warning.startswith("without effect with --train-backend embedded and --rollout-engine embedded: ")
    assert "--sglang-tp-size 2 (flag), --sglang-port 1 (flag)" in warning


def test_overrides_of_a_group() -> None:
    refuse_owned({"trust_remote_code": True, "skip_server_warmup": True, "chunked_prefill_size": 4}, "m.yaml:3")
    with pytest.raises(ConfigError) as caught:
        refuse_owned({"nnodes": 2, "skip_server_warmup": False}, "m.yaml:3")
    assert "m.yaml:3: skip_server_warmup False is slime's to set: " in str(caught.value)
    assert "m.yaml:3: nnodes 2 is slime's to set: slime places engines" in str(caught.value)
