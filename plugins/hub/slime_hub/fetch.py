"""Replace names of the hub in a command's settings by local paths, before anything reads them.

`load_settings` calls `fetch` by the entry point `slime.fetchers`. Files come from the cache; what is missing there is
downloaded. The commit that was used replaces the revision in the run's records, and a resumed run uses it again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.checkpoint.store import find, read_state
from slime_core.config import Settings
from slime_core.config.origins import Origin
from slime_core.config.run_files import CONFIG
from slime_core.config.spec import flag_specs
from slime_core.errors import CheckpointError, ConfigError
from slime_hub.names import HubName, data_name, is_explicit, model_name, recorded

if TYPE_CHECKING:
    from slime_hub.client import Kind

_MODELS = ("hf_checkpoint", "ref_load", "opd_teacher_load", "critic_load")
"""Settings that name a model to read."""
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
_IGNORED = ("*/*.safetensors", "consolidated*")
"""The same weights in other layouts."""
_FORM = "hf:org/name[@revision][:config][[split]][[a:b]], for example hf:openai/gsm8k:main[train][:1000]"


def fetch(settings: Settings) -> None:
    """Bring in every model and data set that the settings name on the hub, and write the paths into the settings.

    `slime config show` and others that only print take what the cache has, and leave other names as they are.

    Raises:
        ConfigError: A name is malformed, or its files cannot be had; the message names the setting.
    """
    if not settings.files:
        return
    fetching = _Fetching(settings)
    for name in _MODELS:
        if name not in settings.names:
            fetching.model(name)
    fetching.training_data()
    fetching.evaluation_data()


class _Fetching:
    """The names of one command, and the commits that a run to resume has recorded."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._only_cached = settings.command == "show"
        self._recorded: dict[tuple[bool, str], str] | None = None

    def model(self, setting: str) -> None:
        """Fetch the model that a setting names."""
        settings = self._settings
        value = _as_typed(settings, setting)
        name = model_name(value) if value else None
        if name is None or (not is_explicit(str(value)) and _exists(settings, setting)):
            if value and is_explicit(value):
                raise ConfigError(f"{self._cite(setting, value)}: a model of the hub is hf:org/name[@revision]")
            return
        name = self._pinned(name, is_data=False)
        try:
            found = _snapshot(name, self._cite(setting, value), only_cached=self._only_cached)
        except ConfigError as error:
            recipe = settings.args.prepare_path
            if recipe is None or is_explicit(str(value)):
                raise
            made = f"; to have --prepare-path {recipe} make a model there, name it ./{value}"
            raise ConfigError(f"{error}{made}") from error
        if found is not None:
            self._replace(setting, str(found), str(name.at(found.name)))

    def training_data(self) -> None:
        """Fetch the data set that `--prompt-data` names."""
        value = self._settings.args.prompt_data
        if value and is_explicit(value):
            path, name = self._rows(value, self._cite("prompt_data", value), "train")
            self._replace("prompt_data", path, name)

    def evaluation_data(self) -> None:
        """Fetch the data sets of `--eval-prompt-data`, and those of `--eval-config` once it has been read."""
        settings = self._settings
        words = list(settings.args.eval_prompt_data or ())
        if any(map(is_explicit, words)):
            if len(words) == 1:
                words = [_name(words[0], self._cite("eval_prompt_data", words)).repo.rpartition("/")[2], *words]
            paths, names = list(words), list(words)
            for at in (at for at in range(1, len(words), 2) if is_explicit(words[at])):
                paths[at], names[at] = self._rows(words[at], f"--eval-prompt-data {words[at]}", "test")
            self._replace("eval_prompt_data", paths, names)
        for dataset in settings.args.eval_datasets:
            if is_explicit(dataset.path):
                cited = f"evaluation data set {dataset.name!r}: path {dataset.path}"
                dataset.path, name = self._rows(dataset.path, cited, "test")
                origin = settings.origins["eval_config"]
                settings.origins["eval_config"] = Origin(origin.kind, f"{origin.where or origin.kind}, {name}")

    # -- parts --------------------------------------------------------------------------------------------

    def _rows(self, text: str, cited: str, split: str) -> tuple[str, str]:
        """Return the path of a data set's rows, and the name with commit; the text twice if only the cache may do."""
        from slime_hub.rows import parquet_file

        name = self._pinned(_name(text, cited), is_data=True)
        commit = _commit(name, "dataset", cited, only_cached=self._only_cached)
        if commit is None:
            return text, text
        path, name = parquet_file(name.at(commit), cited, split)
        return f"{path}@[{name.rows}]" if name.rows else str(path), str(name)

    def _pinned(self, name: HubName, *, is_data: bool) -> HubName:
        """Return the name with the commit that the run to resume has used, unless another commit was typed."""
        if self._recorded is None:
            self._recorded = recorded("\n".join(_records(self._settings)))
        commit = self._recorded.get((is_data, name.repo))
        return name if commit is None or name.is_commit else name.at(commit)

    def _replace(self, setting: str, value: Any, name: Any) -> None:
        """Set the local path; files and the run's other processes get the name with its commit."""
        settings = self._settings
        setattr(settings.args, setting, value)
        settings.names[setting] = name
        words = name if isinstance(name, list) else [name]
        settings.argv = (*settings.argv, flag_specs()[setting].flag, *words)

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
    return str(_snapshot(name, cited, only_cached=False))


def _snapshot(name: HubName, cited: str, *, only_cached: bool) -> Path | None:
    """Return the local directory of a model's commit; None if only the cache may be used and lacks it."""
    from slime_hub.client import client, is_offline, not_cached, translated

    commit = _commit(name, "model", cited, only_cached=only_cached)
    if commit is None:
        return None
    wanted: dict[str, Any] = {"revision": commit, "allow_patterns": _PATTERNS, "ignore_patterns": _IGNORED}
    for local in (True,) if only_cached or is_offline() else (True, False):
        try:
            with translated(name, "model", cited):
                found = Path(client().snapshot_download(name.repo, local_files_only=local, **wanted))
        except ConfigError:
            if not local:
                raise
            continue
        if _is_whole(found):
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


def _exists(settings: Settings, setting: str) -> bool:
    return os.path.exists(getattr(settings.args, setting))


def _is_whole(folder: Path) -> bool:
    """Return True if the directory has a configuration and every file of weights that its index lists."""
    index = folder / "model.safetensors.index.json"
    names = ["config.json", "model.safetensors"]
    if index.is_file():
        names = ["config.json", *set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())]
    return all((folder / name).is_file() for name in names)


def _records(settings: Settings) -> Iterator[str]:
    """Yield texts that name the commits of the run that `--load` resumes."""
    args = settings.args
    if not args.load:
        return
    load = Path(args.load)
    for folder in (load, args.run_dir, args.save, load.parent.parent):
        config = Path(folder or os.devnull, CONFIG)
        if config.is_file():
            yield config.read_text(encoding="utf-8", errors="replace")
            return
    try:
        commit = find(str(load), args.ckpt_step)
        if commit is not None:
            yield json.dumps(read_state(commit)["settings"])
    except CheckpointError:
        return  # the resume reports it
