"""Help texts: `slime train --help` (common settings by topic) and `--help-sglang` (a program's own flags).

`flags.SettingsParser` shows the first for `--help`. `load_settings` prints the second. `--help-all` shows the whole
schema. A command that is not in `FIRST` shows the same settings as `train`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.config.flag_parser import as_json, off_names, takes_list
from slime_core.config.foreign import ForeignFlags
from slime_core.config.spec import FlagSpec, flag_specs

_DATA = "config hf_checkpoint prompt_data input_key label_key apply_chat_template"
_SAMPLING = "rollout_temperature rollout_max_response_len custom_generate_function_path rollout_engine"
_TRAINING = "global_batch_size max_tokens_per_gpu lr lr_decay_style train_backend lora_rank"
_REWARD = "rm_type custom_rm_path"

FIRST: Mapping[str, Mapping[str, str]] = {
    "train": {
        "Model and data": f"{_DATA} system_prompt",
        "Rollout": f"num_rollout num_epoch rollout_batch_size n_samples_per_prompt {_SAMPLING}",
        "Reward": _REWARD,
        "Algorithm": "advantage_estimator use_kl_loss kl_loss_coef eps_clip",
        "Training": f"num_steps_per_rollout {_TRAINING}",
        "Machines": "device actor_num_gpus_per_node rollout_num_gpus colocate async_training",
        "Evaluation": "eval_prompt_data eval_interval",
        "Output": "save save_interval load overwrite seed",
    },
    "sft": {
        "Model and data": f"{_DATA} loss_mask_type",
        "Training": f"num_epoch rollout_batch_size {_TRAINING}",
        "Machines": "device actor_num_gpus_per_node",
        "Output": "save save_interval load overwrite seed",
    },
    "rollout": {
        "Model and data": f"{_DATA} system_prompt",
        "Rollout": f"num_rollout rollout_batch_size n_samples_per_prompt {_SAMPLING}",
        "Reward": _REWARD,
        "Output": "run_dir save_debug_rollout_data overwrite seed",
    },
    "eval": {
        "Model and data": "config hf_checkpoint eval_prompt_data eval_config eval_input_key eval_label_key"
        " apply_chat_template system_prompt",
        "Sampling": "n_samples_per_eval_prompt eval_temperature eval_top_p eval_max_response_len"
        " custom_generate_function_path rollout_engine",
        "Reward": f"{_REWARD} eval_answer_path",
        "Output": "run_dir resume overwrite",
    },
}
"""Command -> topic -> settings, in the order in which they are shown."""

_COLUMN = 34
"""Column at which the help texts begin."""


def short_help(prog: str) -> str:
    """Return the first page of a command's help.

    Args:
        prog: The command as typed, `slime train`.
    """
    width = min(max(shutil.get_terminal_size().columns, 80), 120)
    topics = FIRST.get(prog.split()[-1], FIRST["train"])
    lines = [
        f"usage: {prog} [--config FILE] [flags]",
        "",
        "Settings come from defaults, then --config files, then SLIME_<NAME> variables, then flags; later ones win.",
        f"`{prog} --help-all` lists every setting, `slime config show` each value and where it is from.",
    ]
    for title, names in topics.items():
        lines += ["", f"{title}:"]
        for name in names.split():
            lines += _entry(flag_specs()[name], width)
    return "\n".join(lines)


def _entry(spec: FlagSpec, width: int) -> list[str]:
    head = f"  {spec.flag}" if spec.kind == "bool" else f"  {spec.flag} {_value(spec)}"
    text = textwrap.wrap(spec.help_with_default, width - _COLUMN, break_on_hyphens=False)
    if len(head) < _COLUMN - 1:
        head, text = f"{head:<{_COLUMN}}{text[0]}", text[1:]
    return [head, *(" " * _COLUMN + line for line in text)]


def _value(spec: FlagSpec) -> str:
    """Return the value placeholder; choices too long for a line are shown by --help-all only."""
    return spec.metavar if len(spec.metavar) < 24 else "NAME"


def flags_text(owners: Sequence[ForeignFlags], settings: Mapping[str, Any]) -> str:
    """Return the help of every flag of these owners; `settings` are slime's own given settings. Raises ConfigError."""
    width = min(shutil.get_terminal_size().columns, 120)
    blocks = []
    for owner in owners:
        parser = owner.parser(settings)
        users = ", ".join(owner.used_by) or "none in this version"
        blocks.append(f"{owner.owner} ({parser.prog}; taken by: {users})\n")
        blocks += [_foreign_entry(flag, width) for flag in parser.flags if flag.dest not in flag_specs()]
        blocks.append("")
    return "\n".join(blocks).rstrip()


def _foreign_entry(flag: argparse.Action, width: int) -> str:
    off = off_names(flag)
    names = [name for name in flag.option_strings if name not in off]
    head = f"  {', '.join([*names, *off[:1]])} {value_shape(flag)}".rstrip()
    text = " ".join((flag.help or "").replace("%%", "%").split())
    if flag.default not in (None, False, [], {}) and "default" not in text.lower():
        text += f" (default: {flag.default if isinstance(flag.default, str) else json.dumps(flag.default)})"
    body = textwrap.fill(text.strip(), width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
    return f"{head}\n{body}" if text.strip() else head


def value_shape(flag: argparse.Action) -> str:
    """Return the value placeholder of another program's flag: `N`, `{a,b}`, `TEXT ...`."""
    if flag.nargs == 0:
        return ""
    kinds: Mapping[Any, str] = {int: "N", float: "X", as_json: "JSON"}
    value = "{" + ",".join(map(str, flag.choices)) + "}" if flag.choices else kinds.get(flag.type, "TEXT")
    value = str(flag.metavar or value)
    if takes_list(flag):
        value = " ".join([value] * flag.nargs) if isinstance(flag.nargs, int) else f"{value} ..."
    return f"[{value}]" if flag.nargs in ("?", "*") else value
