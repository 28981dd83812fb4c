"""Evaluation data: `--eval-prompt-data name path` pairs or an `--eval-config` file -> `args.eval_datasets`.

Each value comes from the data set's own entry, else the file's `defaults`, else `--eval-*`, else the rollout's
setting. Example file::

    eval:                       # optional; the mapping may be the root itself
      defaults: {max_response_len: 4096, top_p: 0.7}
      datasets:
        - {name: aime, path: data/aime.jsonl, rm_type: math, n_samples_per_eval_prompt: 16}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from pydantic import ValidationError

from slime_core.config.schema import Args
from slime_core.config.sections.base import Exclusive, Rule
from slime_core.config.sections.evaluation import EvalDataset
from slime_core.config.settings import Settings
from slime_core.config.spec import flag_specs
from slime_core.config.yaml_file import Item, read_document
from slime_core.errors import ConfigError, did_you_mean

_OF_THE_RUN = ("plugins", "environment_path", "tools_path")
"""Keys that override the run's settings where they are used; None means the run's setting."""
_SAME_KIND: Mapping[str, str] = {"path": "prompt_data", "answer_path": "eval_answer_path"}
"""Key -> the setting with the same meaning; other keys have a setting's name, or hold no path."""
_WITHOUT_EFFECT = (
    "app_service",
    "eval_task_timeout",
    "min_eval_samples",
    "eval_early_stop_remaining",
    "eval_early_stop_idle_timeout",
    "message_processor",
    "reward_model",
    "remote_environment",
)
"""Keys in THUDM/slime's files that have no effect, in THUDM/slime or here."""


def _resolve_eval_datasets(args: Args, place: str = "flag") -> tuple[list[EvalDataset], list[str]]:
    """Return the evaluation data sets of these settings, and warnings. Raises ConfigError.

    Args:
        args: Settings after all layers.
        place: Origin of `eval_config` or `eval_prompt_data`, for messages.
    """
    warnings: list[str] = []
    if args.eval_config:
        cited = args.eval_config
        defaults, entries = _from_file(cited, place, warnings)
    else:
        cited, defaults = f"--eval-prompt-data ({place})", {}
        entries = [(cited, entry) for entry in _from_pairs(args.eval_prompt_data or [], place)]
    datasets = [_make(args, entry, defaults, where) for where, entry in entries]
    names = [dataset.name for dataset in datasets]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(f"{cited}: evaluation data set {repeated[0]!r} is named twice; names must differ.")
    return datasets, warnings


def _from_pairs(words: list[str], place: str) -> list[dict[str, object]]:
    if len(words) == 1:  # a path alone gets the name of its file
        words = [PurePath(words[0].partition("@[")[0]).stem, words[0]]
    if len(words) % 2:
        given = " ".join(repr(w) for w in words)
        raise ConfigError(
            f"--eval-prompt-data {given} ({place}): expected pairs of a name and a path,"
            " e.g. --eval-prompt-data aime data/aime.jsonl"
        )
    return [{"name": name, "path": path} for name, path in zip(words[::2], words[1::2])]


def _from_file(
    path: str, place: str, warnings: list[str]
) -> tuple[dict[str, object], list[tuple[str, dict[str, object]]]]:
    """Return the `defaults` of a file, and (file:line, values) of each data set. Adds to `warnings`."""
    document = read_document(path, f"--eval-config {path!r} ({place})")
    root: tuple[str, ...] = ("eval",) if "eval" in document.items() else ()
    sections = document.items(*root)
    for key, item in sections.items():
        if key not in ("defaults", "datasets"):
            raise ConfigError(f"{item.where}: unknown key {key!r}; expected 'defaults' and 'datasets'.")
    listed = sections["datasets"].value if "datasets" in sections else None
    if not isinstance(listed, dict | list):
        raise ConfigError(f"{path}: 'datasets' must be a list of mappings with 'name' and 'path'.")
    items = document.items(*root, "defaults") if "defaults" in sections else {}
    defaults, found = _values(items, warnings, banned=("name", "path")), []
    for each in listed if isinstance(listed, dict) else range(len(listed)):
        keys = (*root, "datasets", each)
        entry = _values(document.items(*keys, expected="a mapping with 'name' and 'path'."), warnings)
        found.append((document.where(*keys), {"name": str(each), **entry} if isinstance(listed, dict) else entry))
    return defaults, found


def _values(items: Mapping[str, Item], warnings: list[str], *, banned: tuple[str, ...] = ()) -> dict[str, object]:
    values = {}
    for key, item in items.items():
        name = key.replace("-", "_")
        if name in _WITHOUT_EFFECT:
            warnings.append(f"{item.where}: {key!r} has no effect.")
            continue
        if name in banned or name not in EvalDataset.model_fields:
            allowed = [k for k in EvalDataset.model_fields if k not in banned]
            hint = did_you_mean(name, allowed) or f" Known: {', '.join(allowed)}."
            raise ConfigError(f"{item.where}: unknown evaluation setting {key!r}.{hint}")
        values[name] = _located(name, item.value, item.directory)
    return values


def _located(name: str, value: object, directory: str) -> object:
    setting = flag_specs().get(_SAME_KIND.get(name, name))
    return setting.located(value, directory) if setting is not None else value


def located_deep(content: object, directory: str) -> object:
    """Return the content of an evaluation file of `directory`, with paths relative to the working directory."""
    if isinstance(content, dict):
        return {key: _located(str(key), located_deep(value, directory), directory) for key, value in content.items()}
    return [located_deep(value, directory) for value in content] if isinstance(content, list) else content


def _make(args: Args, entry: Mapping[str, object], defaults: Mapping[str, object], where: str) -> EvalDataset:
    rewards = ("rm_type", "custom_rm_path")  # a layer that names one of them replaces both
    chosen = next((layer for layer in (entry, defaults) if layer.keys() & {*rewards}), None)
    merged = {**_from_args(args), **defaults, **entry}
    if chosen is not None:
        merged |= {name: chosen.get(name) for name in rewards}
    for key in ("name", "path"):
        if not merged.get(key):
            raise ConfigError(f"{where}: an evaluation data set needs {key!r}.")
    try:
        return EvalDataset.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        reason = first["msg"].replace("Input should be", "must be")
        if not first["loc"]:  # an error about several settings
            raise ConfigError(f"{where}: {reason.removeprefix('Value error, ')}") from None
        raise ConfigError(f"{where}: {first['loc'][0]} {first['input']!r}: {reason}") from None


def _from_args(args: Args) -> dict[str, object]:
    """Return each key's value from `--eval-NAME`, else `--rollout-NAME`, else `--NAME`; unset keys are left out."""
    values = {}
    for name in EvalDataset.model_fields.keys() - {*_OF_THE_RUN}:
        settings = [s for s in (f"eval_{name}", f"rollout_{name}", name) if s in flag_specs()]
        given = [getattr(args, s) for s in settings if getattr(args, s) is not None]
        if given:
            values[name] = given[0]
    return values


def _inherited(s: Settings) -> None:
    """Evaluation has training's reward key and rollout function if it is given none of its own."""
    a = s.args
    if a.eval_reward_key is None and a.reward_key is not None:
        s.derive("eval_reward_key", a.reward_key, "reward_key")
    if a.eval_function_path is None and s.is_given("rollout_function_path"):
        s.derive("eval_function_path", a.rollout_function_path, "rollout_function_path")


def _resumed(s: Settings) -> None:
    """Only an evaluation continues with `--resume`."""
    if s.args.resume is not None and s.command not in ("eval", "show"):
        raise ConfigError(f"{s.cite('resume')} is for slime eval; slime {s.command} continues with --load RUN.")


def _datasets(s: Settings) -> None:
    """Fill in `args.eval_datasets`; an evaluation needs data."""
    a = s.args
    if s.is_absent("eval_config"):
        return
    source = "eval_config" if a.eval_config else "eval_prompt_data"
    a.eval_datasets, warnings = _resolve_eval_datasets(a, str(s.origins[source]))
    s.warnings += warnings
    if a.eval_datasets or a.eval_function_path:
        return
    if a.eval_interval is not None:
        s.warnings.append(
            f"{s.cite('eval_interval')}: no data: give --eval-prompt-data NAME PATH or --eval-config FILE."
        )
        s.derive("eval_interval", None, "no evaluation data")
    if s.command == "eval":
        raise ConfigError("nothing to evaluate: give --eval-prompt-data NAME PATH or --eval-config FILE.")


def _answers_are_bounded(s: Settings) -> None:
    """Without a limit an untrained model may never stop."""
    for d in s.args.eval_datasets if s.command == "eval" and not s.args.eval_function_path else ():
        if d.max_response_len is None and d.max_context_len is None:
            raise ConfigError(f"evaluation of {d.name!r} needs --eval-max-response-len N or --eval-max-context-len N.")


RULES: tuple[Rule, ...] = (
    _inherited,
    _resumed,
    Exclusive("eval_config", "eval_prompt_data"),
    _datasets,
    _answers_are_bounded,
)
