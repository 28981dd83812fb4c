"""A run's model -> a repository of the hub: weights or adapters, tokenizer, chat template, and a card of its facts.

A repository that `slime push` made has `slime_run.json`. Another one with files in it is only written to on request.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from slime_runs.models.commit import Commit
from slime_runs.models.written import write_model
from slime_runs.run import Run

from slime_core.errors import ConfigError
from slime_core.secrets import hidden
from slime_hub.card import FACTS, card, facts_of
from slime_hub.client import client, is_offline, page, token, translated
from slime_hub.names import HubName, model_name

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json", "*.gguf", "*.bin", "*.bin.index.json")
"""Files of a model that would be read beside, or instead of, the new ones."""
_EMPTY = {".gitattributes", "README.md"}
"""Files of a repository that the hub's page makes."""


@dataclass(frozen=True)
class Pushed:
    """The commit that was made on the hub."""

    url: str
    commit: str
    proof: str
    files: list[str]


def push(
    run: Run,
    repo: str,
    *,
    step: int | None = None,
    adapter: str | None = None,
    form: str = "merged",
    private: bool = False,
    overwrite: bool = False,
) -> Pushed:
    """Upload the model of a commit.

    Args:
        run: The run.
        repo: `org/name`; created if it does not exist.
        step: Rollout of the commit; by default the newest.
        adapter: Name of `--lora-adapters`; by default the shared adapter.
        form: A format of `write_model`.
        private: Create the repository as a private one.
        overwrite: Also write to a repository that `slime push` has not made; weights in it are replaced.

    Raises:
        ConfigError: The name, the token or the repository cannot be used.
        SlimeError: The model cannot be written, or is not the trainer's.
    """
    name = check(repo)
    there = _there(name, overwrite=overwrite)
    commit = Commit(run, step, adapter)
    with tempfile.TemporaryDirectory(prefix="slime-push-") as place:
        folder = Path(place, "model")
        proof = str(write_model(commit, folder, form))
        facts = facts_of(run, commit, proof, form)
        (folder / "README.md").write_text(card(repo, facts), encoding="utf-8")
        (folder / FACTS).write_text(hidden(json.dumps(facts, indent=2, ensure_ascii=False)) + "\n", encoding="utf-8")
        made = _upload(name, folder, there, private=private, title=f"slime: rollout {commit.rollout_id + 1}")
        files = sorted(path.name for path in folder.iterdir())
    return Pushed(page(name, "model"), made, proof, files)


def _cited(name: HubName) -> str:
    return f"slime push {name.repo}"


def check(repo: str) -> HubName:
    """Return the name, without a request. Raises ConfigError for a malformed one, and without token or network."""
    name = model_name(repo)
    if name is None or name.revision:
        raise ConfigError(f"slime push {repo}: expected a repository, org/name")
    if is_offline():
        raise ConfigError(f"{_cited(name)}: HF_HUB_OFFLINE forbids requests to the hub; unset it")
    if not token():
        raise ConfigError(f"{_cited(name)}: no token; set HF_TOKEN to one that may write there")
    return name


def _there(name: HubName, *, overwrite: bool) -> dict[str, Any] | None:
    """Return commit and files of the repository, None if it does not exist. Raises ConfigError if it is another's."""
    from huggingface_hub.errors import RepositoryNotFoundError

    with translated(name, "model", _cited(name)):
        try:
            info = client().model_info(name.repo, timeout=20.0)
        except RepositoryNotFoundError:
            return None
    files = [one.rfilename for one in info.siblings or ()]
    if not overwrite and FACTS not in files and not {*files} <= _EMPTY:
        raise ConfigError(
            f"{_cited(name)}: {page(name, 'model')} exists and slime push has not made it (no {FACTS}); name another"
            " repository, or type --overwrite to write to this one"
        )
    return {"sha": info.sha, "files": files}


def _upload(name: HubName, folder: Path, there: dict[str, Any] | None, *, private: bool, title: str) -> str:
    """Make one commit of all files, and return its hash."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    adds = [CommitOperationAdd(path.relative_to(folder).as_posix(), str(path)) for path in paths]
    stale = _stale((there or {}).get("files", ()), {add.path_in_repo for add in adds})
    with translated(name, "model", _cited(name)):
        api = client()
        if there is None:
            api.create_repo(name.repo, repo_type="model", private=private or None, exist_ok=False)
        made = api.create_commit(
            name.repo,
            [*adds, *(CommitOperationDelete(path) for path in stale)],
            commit_message=title,
            parent_commit=None if there is None else there["sha"],
        )
    return str(made.oid)


def _stale(files: Collection[str], new: Collection[str]) -> list[str]:
    """Return the files with other weights, which would be read beside the new ones."""
    return [path for path in files if path not in new and any(fnmatch(path, pattern) for pattern in _WEIGHTS)]
