"""Facts of a run that only its records have -> the model card of a repository, and the same facts as JSON.

Everything passes through `secrets.hidden`, after `learn` has looked at every value of the run's records.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime_runs.inspect.ledger_verify import verify
from slime_runs.models.commit import Commit
from slime_runs.run import Run
from slime_runs.scores import data_sets

from slime_core.checkpoint.store import read_state
from slime_core.config.flags import SettingsParser
from slime_core.config.foreign import Lists
from slime_core.config.spec import flag_specs
from slime_core.errors import CheckpointError
from slime_core.rollout.state import STATE_FILE
from slime_core.secrets import hidden, learn
from slime_hub.names import HubName, data_name, model_name

FACTS = "slime_run.json"
"""File that marks a repository as one that `slime push` made."""
_PLACES = ("save", "run_dir", "load", "config", "custom_config_path", "overwrite")
_SEEDS = ("seed", "rollout_seed")
_MOST_STEPS = 60
"""Rows of the table of scores, evenly chosen among more."""


def facts_of(run: Run, commit: Commit, proof: str, form: str) -> dict[str, Any]:
    """Return the facts of a run up to a commit, without secrets."""
    state = read_state(commit.path)
    settings = {name: value for name, (value, origin) in run.settings().items() if _is_given(origin)}
    settings = {name: value for name, value in settings.items() if name not in _PLACES}
    if custom := commit.settings.get("custom"):
        settings["custom"] = custom
    _learn_all(run.settings(), state)
    facts = {
        "format": form,
        "rollouts": commit.rollout_id + 1,
        "model": str(commit.settings.get("hf_checkpoint")),
        "data": _data(commit, run),
        "rewards": [_component(one) for one in state["plugins"] if one.get("kind") == "rewards"],
        "plugins": [_component(one) for one in state["plugins"] if one.get("kind") != "rewards"],
        "settings": settings,
        "seeds": {name: commit.settings.get(name) for name in _SEEDS},
        "versions": (run.summary() or {}).get("versions", {}),
        "evaluations": _scores(run, commit),
        "ledger": _ledger(run, commit),
        "command": _command(run, settings),
        "proof": proof,
    }
    found: dict[str, Any] = json.loads(hidden(json.dumps(facts, ensure_ascii=False)))
    return found


def card(repo: str, facts: Mapping[str, Any]) -> str:
    """Return the text of README.md."""
    return hidden("\n".join(_lines(repo, facts)) + "\n")


def _lines(repo: str, facts: Mapping[str, Any]) -> Iterator[str]:
    yield from _head(facts)
    yield f"\n# {repo.rpartition('/')[2]}\n"
    yield f"Trained by reinforcement learning with slime for {facts['rollouts']} rollouts, from {facts['model']}."
    yield f"`{FACTS}` has the facts of this page as JSON.\n"
    yield f"Files: {facts['format']}; {facts['proof']}.\n"
    yield "## Command\n"
    yield f"```bash\n{facts['command']}\n```\n"
    yield from _table("Data", ("use", "name", "rows", "SHA-256"), [_row(one) for one in facts["data"]])
    source = [
        (r["name"], r["distribution"] or "", r["version"] or "", f"`{r['sha256'] or ''}`") for r in facts["rewards"]
    ]
    yield from _table("Reward", ("name", "distribution", "version", "SHA-256 of the source"), source)
    yield from _scores_table(facts["evaluations"])
    yield from _table("Settings that differ from the defaults", ("setting", "value"), _pairs(facts["settings"]))
    yield from _table("Seeds", ("seed", "value"), _pairs(facts["seeds"]))
    yield from _table("Versions", ("package", "version"), _pairs(facts["versions"]))
    yield from _table("Ledger of prompt groups", ("fact", "value"), _pairs(facts["ledger"]))


def _head(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the card's metadata for the hub."""
    yield "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- slime\n- reinforcement-learning"
    if (base := model_name(str(facts["model"]))) is not None and str(facts["model"]).startswith("hf:"):
        yield f"base_model: {base.repo}"
    names = [data_name(str(one["name"])) for one in facts["data"]]
    if repos := sorted({name.repo for name in names if isinstance(name, HubName)}):
        yield "datasets:\n" + "\n".join(f"- {repo}" for repo in repos)
    yield "---"


def _table(title: str, head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Iterator[str]:
    if rows:
        yield f"## {title}\n"
        yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}"
        yield from (f"| {' | '.join(_cell(value) for value in row)} |" for row in rows)
        yield ""


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(text.replace("|", "\\|").split())


def _pairs(values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [(name, value) for name, value in values.items() if value is not None]


def _row(one: Mapping[str, Any]) -> tuple[Any, ...]:
    return one["use"], one["name"], one["rows"], f"`{one['sha256']}`" if one["sha256"] else ""


def _scores_table(scores: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield the curve of evaluation: a row per step that was evaluated."""
    steps = sorted({int(step) for of in scores.values() for step in of})
    apart = max(1, -(-len(steps) // _MOST_STEPS))
    chosen = [step for at, step in enumerate(steps) if at % apart == 0 or at == len(steps) - 1]
    rows = [(step, *(_number(of.get(str(step))) for of in scores.values())) for step in chosen]
    yield from _table("Evaluation", ("rollouts", *scores), rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


# -- facts ------------------------------------------------------------------------------------------------------


def _is_given(origin: str) -> bool:
    return origin not in ("default", "origin") and not origin.startswith(("derived", "auto"))


def _learn_all(settings: Mapping[str, tuple[Any, str]], state: Mapping[str, Any]) -> None:
    for name, (value, _) in settings.items():
        learn(name, value)
    for name, value in state["settings"].items():
        learn(name, value)


def _data(commit: Commit, run: Run) -> list[dict[str, Any]]:
    """Return the training data as the run has read it, and the evaluation data as it is now."""
    source = json.loads((commit.path / STATE_FILE).read_text(encoding="utf-8"))
    read = _fingerprint(source)
    name = commit.settings.get("prompt_data")
    found = [{"use": "training", "name": name, "rows": read.get("num_rows"), "sha256": _hash(read)}] if name else []
    words = commit.settings.get("eval_prompt_data") or []
    pairs = zip(words[::2], words[1::2]) if len(words) > 1 else [("evaluation", word) for word in words]
    for label, path in pairs:
        found.append({"use": f"evaluation: {label}", "name": path, "rows": None, "sha256": _hash({"path": path})})
    return found


def _fingerprint(value: Any) -> Mapping[str, Any]:
    """Return the fingerprint of the data anywhere in the data source's state."""
    if isinstance(value, Mapping):
        if {"sha256", "num_rows", "size"} <= value.keys():
            return value
        return next((found for one in value.values() if (found := _fingerprint(one))), {})
    return {}


def _hash(read: Mapping[str, Any]) -> str | None:
    """Return the hash of the whole file if it has the size that was read, else the recorded hash of its two ends."""
    path = Path(str(read.get("path", "")).partition("@[")[0])
    if path.is_file() and path.stat().st_size == read.get("size", path.stat().st_size):
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return f"{read['sha256']} (first and last 64 KiB)" if "sha256" in read else None


def _component(plugin: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plugin.get(name) for name in ("kind", "name", "distribution", "version", "sha256")}


def _scores(run: Run, commit: Commit) -> dict[str, dict[str, float]]:
    """Return data set -> step -> score, for the steps up to the commit."""
    found: dict[str, dict[str, float]] = {}
    for line in run.metrics():
        for name in data_sets(line):
            value = line[f"eval/{name}"]
            if value is not None and line["step"] <= commit.rollout_id + 1:
                found.setdefault(name, {})[str(line["step"])] = value
    return found


def _ledger(run: Run, commit: Commit) -> dict[str, Any]:
    try:
        report = verify(run.history(commit.rollout_id))
    except CheckpointError as error:
        return {"not readable": str(error)}
    return {**report.facts, "holds": not report.problems}


def _command(run: Run, settings: Mapping[str, Any]) -> str:
    """Return a command with the run's settings; files that the run had read are spelled out as flags."""
    name = str((run.summary() or {}).get("command") or "train")
    specs = flag_specs()
    known = {n: v for n, v in settings.items() if n in specs and (v is not False or specs[n].off_flag)}
    custom = settings.get("custom") or {}
    own = [word for key, value in custom.items() for word in ("--set", f"custom.{key}={json.dumps(value)}")]
    others = {n: v for n, v in settings.items() if n not in specs and n != "custom" and v is not None}
    ours = SettingsParser(()).words_of(known, Lists((), {}))
    words = ["slime", name, *ours, *_theirs(others), *own, "--save", "outputs/run"]
    return " ".join(shlex.quote(word) for word in words)


def _theirs(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of other programs' flags, whose parsers may not be installed where a run is pushed."""
    for name, value in values.items():
        if value is not False:
            texts = value if isinstance(value, list | tuple) else [] if value is True else [value]
            yield from ("--" + name.replace("_", "-"), *(t if isinstance(t, str) else json.dumps(t) for t in texts))
