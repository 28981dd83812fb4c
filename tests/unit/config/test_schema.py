"""THUDM/slime's flags are all there, with their types and defaults."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from slime_core.config import Args
from slime_core.config.flags import SettingsParser
from slime_core.config.layers import collect, validate
from slime_core.config.spec import flag_specs, switched_off
from slime_core.config.support import REFUSED_VALUES, UNSUPPORTED
from tests.sweeps import sweep

ROWS = [
    line.split("\t")
    for line in (Path(__file__).parent / "thudm_flags.tsv").read_text().splitlines()
    if not line.startswith("#")
]
PARSER = SettingsParser(())
OUR_DEFAULTS = {
    "distributed_backend": "auto",
    "micro_batch_size": None,  # packed: see the rule
    "train_backend": "auto",
    "update_weight_transport": "auto",
    "rollout_function_path": None,
    "use_tensorboard": None,
    "data_source_path": None,
    "loss_mask_type": "auto",
    "input_key": None,
    "kl_loss_type": "low_var_kl",
}


def _argv(flag: str, value: str) -> list[str]:
    if not value:
        return [flag]
    spec = flag_specs()[flag[2:].replace("-", "_")]
    return [flag, *(value.split() if spec.is_list else [value])]


@sweep("flag, value, attribute, default", ROWS)
def test_thudm_flag_is_accepted_with_its_default(
    flag: str, value: str, attribute: str, default: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("")
    args, origins = validate(collect(PARSER.read_own(_argv(flag, value)), {}, (), {}))
    spec = flag_specs()[attribute]
    assert str(origins[attribute]) == "flag"
    if not value:
        expected: object = not (flag.startswith(("--disable-", "--no-")) and not attribute.startswith("no_"))
    elif spec.kind == "mapping":
        expected = json.loads(value)
    else:
        convert = {"int": int, "float": float, "str": str}[spec.kind]
        expected = [convert(v) for v in value.split()] if spec.is_list else convert(value)
    assert getattr(args, attribute) == expected
    assert spec.default == OUR_DEFAULTS.get(attribute, json.loads(default) if _is_json(default) else default)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_the_list_is_thudms_223_flags_and_the_megatron_ones_in_use() -> None:
    assert len(ROWS) == len({r[0] for r in ROWS}) >= 223


def test_every_setting_has_help_and_its_own_flag() -> None:
    specs = flag_specs().values()
    assert [s.name for s in specs if not s.help.endswith(".")] == []
    spellings = [f for s in specs for f in (s.flag, s.off_flag) if f]
    assert sorted({f for f in spellings if spellings.count(f) > 1}) == []


def test_tables_name_settings() -> None:
    known = set(flag_specs())
    assert set(UNSUPPORTED) <= known
    assert set(REFUSED_VALUES) <= known
    assert set(switched_off().values()) <= known
    for name, values in REFUSED_VALUES.items():
        choices = flag_specs()[name].choices
        assert not choices or set(values) < set(choices)


def test_args_are_flat_open_and_survive_pickling() -> None:
    args = Args(rollout_batch_size=4)
    args.my_own = {"a": 1}
    again = pickle.loads(pickle.dumps(args))
    assert again.rollout_batch_size == 4
    assert again.my_own == {"a": 1}
    assert not hasattr(args, "not_there")
    assert Args().apply_chat_template_kwargs is not Args().apply_chat_template_kwargs
