"""`slime plugins new`: write a distribution of a kind and name that installs and passes its contract tests unchanged.

The files come from `templates/`: `<kind>.py.tmpl` is the package and, after the line `_TESTS`, its tests. All kinds
share the files of `_SHARED`. Only `@@word@@` is replaced in a template. The templates are data and are never imported.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path

import slime_core
from slime_core.errors import ConfigError, PluginConflictError
from slime_core.plugins.kind import Kind
from slime_core.plugins.kinds import HOOK_GROUP, hook_flags, kind_of
from slime_core.plugins.registry import NAME_PATTERN, Registry

_TESTS = "# --- tests/test_contract.py\n"
_SHARED = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "LICENSE": "LICENSE",
    ".gitignore": "gitignore",
    ".github/workflows/ci.yml": "ci.yml",
    ".github/workflows/publish.yml": "publish.yml",
}
"""File of every distribution -> its template; `scripts/sync_packages.py` writes the licence's."""
_HOOKS = ("hooks", "hook", "plugins", "plugin", HOOK_GROUP)

_TOO_LARGE = {
    "megatron_models": "start from plugins/models/slime_models/qwen3/megatron.py; see docs/plugins/models.md",
    "megatron_model_providers": "a function in a file will do; start from examples/hooks/megatron_hooks.py",
    "functions": "its signature is that of the flag it is for; a function in a file needs no distribution",
}
"""Kinds without a template, and what to do instead."""

_TARGETS = {
    "engines": "@@Class@@",
    "trainers": "@@Class@@",
    "estimators": "@@Class@@",
    "data_sources": "@@Class@@",
    "environments": "@@Class@@",
    "losses": "@@Class@@",
    "generators": "generate",
    "buffers": "buffer_filter",
    "filters": "dynamic_filter",
    "models": "model",
    "rollouts": "generate_rollout",
    "recipes": "prepare",
    "reward_post_processes": "post_process_rewards",
    "sample_converters": "convert_samples",
    "advantages": "compute_advantages",
    "corrections": "@@Class@@",
    "loss_reducers": "reducer",
    "custom_losses": "custom_loss",
    "rewards": "reward",
    "tool_parsers": "@@Class@@",
    "tools": "@@name@@",
    "launchers": "@@Class@@",
    "commands": "command",
    "weight_transports": "@@Class@@",
}
"""Kind -> object of the package that the entry point names. A hook module has none: it is the package itself."""

_NOTES = {
    "hooks": "There is nothing to select: every installed hook plugin is called in every run.\n"
    "`--no-plugins` leaves all of them out.",
    "commands": "There is nothing to select: `slime --help` lists the command once the package is installed.",
    "models": "There is nothing to select: checkpoints whose `config.json` names this `model_type` use it.",
    "environments": "The generator `multi_turn` plays it. Rows of `prompt_data` are chat messages, which it continues:"
    """

    {"input": [{"role": "user", "content": "Play."}]}

Leave `apply_chat_template` out of the run's file: it would turn the rows into text.""",
}
"""Kind -> how the component is selected, for kinds that a setting alone does not select."""


@dataclass(frozen=True)
class Plan:
    """The distribution to write."""

    kind: str
    """Kind in the plural, or the hook group."""
    name: str
    folder: Path
    files: dict[str, str]
    """Path below the folder -> text."""
    distribution: str
    package: str


def template_kinds() -> list[str]:
    """Return the names of kinds that `slime plugins new` accepts."""
    return [*_TARGETS, "hooks"]


def plan(kind: str, name: str, directory: Path, registry: Registry) -> Plan:
    """Fill in the templates.

    Args:
        kind: A kind, singular or plural, or "hooks".
        name: The component's name.
        directory: Directory for the distribution's folder.
        registry: Installed components.

    Raises:
        ConfigError: The name is not allowed, the kind has no template, or the folder exists already.
        PluginConflictError: An installed distribution has that name or offers that component.
        PluginNotFoundError: There is no such kind.
    """
    row = None if kind in _HOOKS or kind in hook_flags() else kind_of(kind)
    key = HOOK_GROUP if row is None else row.name
    _check_name(name)
    if key in _TOO_LARGE:
        raise ConfigError(f"slime plugins new {kind}: there is no template; {_TOO_LARGE[key]}")
    singular = "hook" if row is None else row.singular
    distribution = f"slime-{singular}-{name}".replace("_", "-")
    package = f"slime_{singular}_{name}"
    _check_clash(HOOK_GROUP if row is None else row.registered, name, distribution, registry)
    folder = directory / distribution
    if folder.exists():
        raise ConfigError(f"{folder} exists already; choose another name, another --dir, or remove it")
    stem = "hooks" if row is None else key
    target = f":{_TARGETS[key]}" if row is not None else ""
    words = {
        "name": name,
        "typed": name.replace("_", "-"),
        "distribution": distribution,
        "package": package,
        "singular": singular.replace("_", " "),
        "group": HOOK_GROUP if row is None else row.group,
        "spec": f"{stem}/{name}",
        "use": _use(row, name),
        "note": _NOTES.get(stem, f"That setting selects `{name}`, on the command line or in a run's file."),
        "version": slime_core.__version__,
        "api": str(1 if row is None else row.api),
        "target": f"{package}{target}",
        "requires": "slime-rl" if key == "tool_parsers" else "slime-rl-core",  # whose base classes they derive from
        "Class": "".join(part.capitalize() for part in name.split("_") if part),
    }
    module, tests = _filled(f"{stem}.py.tmpl", words).split(_TESTS)
    texts = {
        **{path: _filled(f"{template}.tmpl", words) for path, template in _SHARED.items()},
        f"{package}/__init__.py": module.rstrip() + "\n",
        "tests/test_contract.py": tests,
        f"{package}/py.typed": "",
    }
    return Plan(key, name, folder, texts, distribution, package)


def write(made: Plan) -> None:
    """Create the folder and its files. Raises ConfigError when that cannot be done."""
    try:
        for path, text in made.files.items():
            file = made.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {made.folder}: {error}") from error


def _check_name(name: str) -> None:
    if not NAME_PATTERN.fullmatch(name) or keyword.iskeyword(name) or "__" in name or name.endswith("_"):
        suggestion = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        good = NAME_PATTERN.fullmatch(suggestion) and not keyword.iskeyword(suggestion)
        hint = f"; {suggestion} would do" if good and suggestion != name else ""
        raise ConfigError(
            f"plugin name {name!r} is not allowed: lower-case letters, digits and single '_', a letter first, no"
            f" keyword of Python{hint}"
        )


def _check_clash(key: str, name: str, distribution: str, registry: Registry) -> None:
    offers = [ref for ref in [*registry, *registry.left_out] if (ref.kind, ref.name) == (key, name)]
    if offers:
        raise PluginConflictError(f"{offers[0].label} has that name; choose another")
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return
    raise PluginConflictError(f"{distribution} {version} is installed; choose another name")


def _use(row: Kind | None, name: str) -> str:
    """The command line that uses the plugin once it is installed."""
    if row is None:
        return "slime train --config run.yaml"
    if row.name == "commands":
        return f"slime {name.replace('_', '-')}"
    if row.name == "environments":
        return f"slime train --config run.yaml --custom-generate-function-path multi_turn --environment-path {name}"
    flags = [flag for flag in row.flags if flag.startswith("--")]
    if not flags:
        return "slime train --config run.yaml --hf-checkpoint MODEL"
    return f"slime train --config run.yaml {flags[0]} {name}"


def _filled(template: str, words: dict[str, str]) -> str:
    text = (resources.files(__package__) / "templates" / template).read_text(encoding="utf-8")
    # A target is itself a template; its words come after.
    for _ in range(2):
        for word, value in words.items():
            text = text.replace(f"@@{word}@@", value)
    assert "@@" not in text, template
    return text
