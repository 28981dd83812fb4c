"""Names of settings as Python's callers know them, and errors in their words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from slime_core.errors import ConfigError, SlimeError
from slime_core.plugins.kinds import hook_flags

COMPONENTS: Mapping[str, str] = {
    "generate": "custom_generate_function_path",
    "environment": "environment_path",
    "dynamic_filter": "dynamic_sampling_filter_path",
    "buffer_filter": "buffer_filter_path",
    "estimator": "advantage_estimator",
    "rollout": "rollout_function_path",
    **{row.word: row.setting for row in hook_flags().values()},
}
"""Argument of a function or object -> the setting that names it."""
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "model": ("hf_checkpoint",),
    "data": ("prompt_data",),
    "reward": ("custom_rm_path", "rm_type"),
    "eval_data": ("eval_prompt_data",),
    "tools": ("tools_path",),
    "loss": ("loss_type", "custom_loss_function_path"),
    **{name: (setting,) for name, setting in COMPONENTS.items()},
}
"""Argument -> the settings in whose place it stands."""
_TYPED = {
    "--prompt-data is required": "data=[...]",
    "give --rm-type": "reward=FUNCTION",
    "--load ": "resume=True",
    "--overwrite": "overwrite=True",
}
_Error = TypeVar("_Error", bound=BaseException)


def refuse_two_names(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that is given by two of its names."""
    for argument, settings in ARGUMENTS.items():
        for setting in settings:
            if given.get(argument) is not None and given.get(setting) is not None:
                raise ConfigError(f"arguments {argument} and {setting} are the same setting; remove one")


def without(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those in whose place an argument of `changes` stands."""
    replaced = {setting for argument in changes for setting in ARGUMENTS.get(argument, ())}
    return {name: value for name, value in given.items() if name not in replaced}


def in_python(error: _Error) -> _Error:
    """Rewrite an error of slime in the words of Python: `argument reward`, and what to type instead of flags."""
    if not isinstance(error, SlimeError) or len(error.args) != 1:
        return error
    text = str(error)
    for argument, settings in ARGUMENTS.items():
        for setting in settings:
            text = text.replace(f"(argument {setting})", f"(argument {argument})")
    typed = [word for flag, word in _TYPED.items() if flag in text]
    if typed and "In Python: " not in text:
        text = f"{text.rstrip('.')}. In Python: {' or '.join(typed)}"
    error.args = (text,)
    return error
