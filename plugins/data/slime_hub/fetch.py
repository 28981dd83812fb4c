"""Replace names of the hub in a command's settings by local paths, before anything reads them.

`load_settings` calls `fetch` twice by the entry point `slime.fetchers`: for the models' small files, which the rules of
the settings read, and for weights and rows once the rules have found nothing. Files come from the cache; what is
missing there is downloaded. The commit that was used replaces the revision in the run's records, and a resumed run uses
it again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.checkpoint.store import find, read_state
from slime_core.config import Settings
from slime_core.config.settings import Origin
from slime_core.config.spec import flag_specs
from slime_core.errors import CheckpointError, ConfigError
from slime_core.files import CHECKPOINTS, CONFIG
from slime_hub.names import HubName, data_name, is_explicit, model_name

if TYPE_CHECKING:
    from slime_hub.client import Kind

_MODELS = ("hf_checkpoint", "ref_load", "opd_teacher_load", "critic_load")
"""Settings that name a model to read."""
_WEIGHTS, _PATTERNS = "*.safetensors", ("*.json", "*.jinja", "*.model", "*.txt")
_IGNORED = ("*/*.safetensors", "consolidated*")
"""The same weights in other layouts."""
_FORM = "hf:org/name[@revision][:config][[split]][[a:b]], for example hf:openai/gsm8k:main[train][:1000]"


def fetch(settings: Settings, *, checked: bool) -> None:
    """Bring in the models and data sets that the settings name on the hub, and write the paths into the settings.

    `slime config show` and others that only print take what the cache has, and leave other names as they are.

    Args:
        settings: Settings of a command.
        checked: True once the settings fit together; without, only configurations and tokenizers are fetched.

    Raises:
        ConfigError: A name is malformed, or its files cannot be had; the message names the setting.
    """
    if not settings.files:
        return
    fetching = _Fetching(settings, checked)
    for name in _MODELS:
        fetching.model(name)
    if checked:
        fetching.training_data()
    fetching.evaluation_data()


class _Fetching:
    """The names of one command, and the commits that a run to resume has recorded."""

    def __init__(self, settings: Settings, checked: bool) -> None:
        self._settings, self._checked = settings, checked
        self._only_cached = settings.command == "show"

    @cached_property
    def _recorded(self) -> Recorded:
        return Recorded.of(self._settings)

    def model(self, setting: str) -> None:
        """Fetch the model that a setting names."""
        settings = self._settings
        value = str(settings.names.get(setting) or _as_typed(settings, setting) or "")
        name = model_name(value)
        if is_explicit(value) and name is None:
            raise ConfigError(f"{self._cite(setting, value)}: a model of the hub is hf:org/name[@revision]")
        if name is None or (not is_explicit(value) and os.path.exists(getattr(settings.args, setting))):
            return
        name = self._recorded.model(setting, name)
        try:
            how = {"only_cached": self._only_cached, "weights": self._checked}
            found = _snapshot(name, self._cite(setting, value), **how)
        except ConfigError as error:
            if self._is_deferred:
                return
            recipe = settings.args.prepare_path
            if recipe is None or is_explicit(value):
                raise
            made = f"; to have --prepare-path {recipe} make a model there, name it ./{value}"
            raise ConfigError(f"{error}{made}") from error
        if found is not None and setting not in settings.names:
            self._replace(setting, str(found), [str(name.at(found.name))])

    @property
    def _is_deferred(self) -> bool:
        """True if the rules need no configuration of the model, so that their errors come before the hub's."""
        args = self._settings.args
        return not self._checked and (args.rollout_max_response_len or args.rollout_max_context_len) is not None

    def training_data(self) -> None:
        """Fetch the data set that `--prompt-data` names."""
        value = self._settings.args.prompt_data
        if value and is_explicit(value):
            path, name = self._rows(value, self._cite("prompt_data", value), "train")
            self._replace("prompt_data", path, [name])

    def evaluation_data(self) -> None:
        """Fetch the data sets of `--eval-prompt-data` and `--eval-config`; before the rules, only name a single one."""
        settings = self._settings
        words = list(settings.args.eval_prompt_data or ())
        if len(words) == 1 and is_explicit(words[0]):
            words = settings.args.eval_prompt_data = [_name(words[0], "").repo.rpartition("/")[2], *words]
        if not self._checked:
            return
        pins: dict[str, tuple[str, str]] = {}
        for dataset in (dataset for dataset in settings.args.eval_datasets if is_explicit(dataset.path)):
            cited = f"evaluation data set {dataset.name!r}: {dataset.path}"
            typed, (dataset.path, name) = dataset.path, self._rows(dataset.path, cited, "test")
            pins[typed] = dataset.path, name
            if typed not in words:
                origin = settings.origins["eval_config"]
                settings.origins["eval_config"] = Origin(origin.kind, f"{origin.where or origin.kind}, {name}")
        if not pins.keys().isdisjoint(words):
            paths, names = ([pins[w][at] if w in pins else w for w in words] for at in (0, 1))
            self._replace("eval_prompt_data", paths, names)

    # -- parts --------------------------------------------------------------------------------------------

    def _rows(self, text: str, cited: str, split: str) -> tuple[str, str]:
        """Return the path of a data set's rows, and the name with commit; the text twice if only the cache may do."""
        from slime_hub.rows import parquet_file

        name = _name(text, cited)
        name = self._recorded.data(replace(name, split=name.split or split))
        commit = _commit(name, "dataset", cited, only_cached=self._only_cached)
        path = parquet_file(name.at(commit), cited, only_cached=self._only_cached) if commit else None
        if path is None or commit is None:
            return text, text
        return f"{path}@[{name.rows}]" if name.rows else str(path), str(name.at(commit))

    def _replace(self, setting: str, value: Any, names: list[str]) -> None:
        """Set the local path; files and the run's other processes get the names with their commits."""
        settings, spec = self._settings, flag_specs()[setting]
        typed = getattr(settings.args, setting)
        setattr(settings.args, setting, value)
        settings.names[setting] = names if spec.is_list else names[0]
        if spec.is_list and settings.origins[setting].kind in ("flag", "argument"):
            pins = dict(zip(typed, names))  # the flag once more would add to the list
            settings.argv = tuple(pins.get(word, word) if is_explicit(word) else word for word in settings.argv)
        else:
            settings.argv = (*settings.argv, spec.flag, *names)

    def _cite(self, setting: str, value: Any) -> str:
        return f"{flag_specs()[setting].show(value)} ({self._settings.origins[setting]})"


def local_model(text: str, cited: str) -> str:
    """Return the local directory of a model on the hub, for commands without settings; other text as it is.

    Raises:
        ConfigError: The model cannot be had; the message begins with `cited`.
    """
    name = model_name(text)
    if name is None or (not is_explicit(text) and os.path.exists(text)):
        return text
    return str(_snapshot(name, cited, only_cached=False, weights=True))


def _snapshot(name: HubName, cited: str, *, only_cached: bool, weights: bool) -> Path | None:
    """Return the local directory of a model's commit; None if only the cache may be used and lacks it."""
    from slime_hub.client import client, is_offline, not_cached, translated

    commit = _commit(name, "model", cited, only_cached=only_cached)
    if commit is None:
        return None
    patterns = (*_PATTERNS, _WEIGHTS) if weights else _PATTERNS
    wanted: dict[str, Any] = {"revision": commit, "allow_patterns": patterns, "ignore_patterns": _IGNORED}
    for local in (True,) if only_cached or is_offline() else (True, False):
        try:
            with translated(name, "model", cited):
                found = Path(client().snapshot_download(name.repo, local_files_only=local, **wanted))
        except ConfigError:
            if not local:
                raise
            continue
        if _is_whole(found) if weights else (found / "config.json").is_file():
            return found
    if only_cached:
        return None
    if is_offline():
        raise not_cached(name, "model", cited)
    raise ConfigError(f"{cited}: {name.repo} has no config.json with safetensors; name a model in that layout")


def _commit(name: HubName, kind: Kind, cited: str, *, only_cached: bool) -> str | None:
    from slime_hub import client

    if not only_cached:
        return client.commit_of(name, kind, cited)
    return str(name.revision) if name.is_commit else client.cached_commit(name, kind)


def _name(text: str, cited: str) -> HubName:
    """Return the parsed name of a data set. Raises ConfigError."""
    name = data_name(text)
    if name is None:
        raise ConfigError(f"{cited}: expected {_FORM}")
    return name


def _as_typed(settings: Settings, setting: str) -> str | None:
    """Return the value before it was made relative to the directory of the file that has it."""
    value, origin = getattr(settings.args, setting), settings.origins[setting]
    if value is None or is_explicit(value) or origin.kind != "file":
        return None if value is None else str(value)
    return os.path.relpath(value, os.path.dirname(origin.where.rpartition(":")[0]) or ".")


def _is_whole(folder: Path) -> bool:
    """Return True if the directory has a configuration and every file of weights that its index lists."""
    index = folder / "model.safetensors.index.json"
    names = ["config.json", "model.safetensors"]
    if index.is_file():
        names = ["config.json", *set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())]
    return all((folder / name).is_file() for name in names)


@dataclass(frozen=True)
class Recorded:
    """The commits that a run has used."""

    models: Mapping[str, HubName]
    """Setting -> name."""
    rows: Mapping[HubName, str]
    """Name of a data set without revision -> commit."""

    @classmethod
    def of(cls, settings: Settings) -> Recorded:
        """Read the records of the run that `--load` resumes; nothing is recorded without one."""
        text = _records(settings)
        names = [data_name(word) for word in re.findall(r"hf:[^\s\"',]+", text)]
        rows = {replace(name, revision=None): str(name.revision) for name in names if name and name.is_commit}
        found = {setting: model_name(word) for setting, word in re.findall(r'(\w+)"?: "?(hf:[^\s"]+)', text)}
        return cls({setting: name for setting, name in found.items() if name and name.is_commit}, rows)

    def model(self, setting: str, name: HubName) -> HubName:
        """Return the name with the commit that the setting had, unless another commit or repository was typed."""
        then = self.models.get(setting)
        return name if then is None or name.is_commit or then.repo != name.repo else then

    def data(self, name: HubName) -> HubName:
        """Return the name with the commit that these rows had, unless another commit was typed."""
        commit = self.rows.get(replace(name, revision=None))
        return name if commit is None or name.is_commit else name.at(commit)


def _records(settings: Settings) -> str:
    """Return a text with the settings of the run that `--load` resumes; empty without one."""
    args = settings.args
    if not args.load:
        return ""
    load = Path(args.load)
    above = (path.parent for path in (load, load.parent) if path.name == CHECKPOINTS)
    for folder in (load, *above, args.run_dir, args.save):
        config = Path(folder or os.devnull, CONFIG)
        if config.is_file():
            return config.read_text(encoding="utf-8", errors="replace")
    try:
        commit = find(str(load), args.ckpt_step)
    except CheckpointError:
        return ""  # the resume reports it
    return "" if commit is None else json.dumps(read_state(commit)["settings"])
