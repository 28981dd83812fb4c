"""`slime plugins check`: check that each plugin keeps the contract of its kind. One line per plugin or complaint.

The checks, in order: API version, load, signature, requirements, options, contract suite. The suites run with pytest in
a separate process. A plugin's own `tests/test_contract.py` is run if its folder has one, since it knows the plugin's
settings and examples; otherwise the bare suite of its kind is run. The tier of each plugin sums up (`tiers.py`).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import slime_core
from slime_commands.plugins.contracts import Outcome, run_contracts
from slime_commands.plugins.naming import kind_word, split
from slime_commands.plugins.tiers import lacking, tier
from slime_core.distributions import CORE, normalized
from slime_core.errors import PluginError, PluginNotFoundError
from slime_core.plugins.kinds import HOOK_GROUP
from slime_core.plugins.registry import ComponentRef, Registry
from slime_core.text import json_text


@dataclass(frozen=True)
class Line:
    """A line of the report."""

    ok: bool
    plugin: str
    """Name of the plugin, such as `rewards/near (slime-reward-near 0.1.0)`."""
    message: str
    tier: str = ""
    """Name from `tiers.py`; empty for a path, and if the contract suites are left out."""
    lacks: tuple[str, ...] = ()
    """Parts that the tier `complete` needs besides."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `slime plugins check` to its parser."""
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="WHAT",
        help="KIND/NAME, KIND:SPEC, a distribution, or a folder; without: every plugin that is not slime's own",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-contract", action="store_true", help="leave out the contract suites")


def run(namespace: argparse.Namespace) -> int:
    """Print the report; return exit status 1 if a check fails."""
    specs = _specs(namespace.targets)
    lines = [_checked(kind, spec, ref) for kind, spec, ref in specs]
    if not namespace.no_contract:
        loaded = [spec for spec, line in zip(specs, lines) if line.ok]
        outcomes = run_contracts(loaded)
        lines = _merged(specs, lines, outcomes)
    if namespace.json:
        print(json_text([asdict(line) for line in lines], indent=2))
    else:
        for line in lines:
            print(f"{'ok  ' if line.ok else 'FAIL'}  {line.plugin}: {line.message}")
        if not lines:
            print("nothing to check: only slime's own are here; name one, e.g. slime plugins check rewards/math")
    return int(not all(line.ok for line in lines))


Spec = tuple[str, str, ComponentRef | None]
"""Kind, spec, and the registered component or None."""


def _specs(targets: list[str]) -> list[Spec]:
    """Return the components that the command line names. Raises PluginNotFoundError for an unknown target."""
    from slime_core.distributions import own_distributions
    from slime_core.plugins.discovery import add_plugin_directories
    from slime_core.plugins.manager import current_registry

    add_plugin_directories([target for target in targets if Path(target).is_dir()])
    registry = current_registry()
    if not targets:
        own = own_distributions()
        return [_spec(ref) for ref in registry if normalized(ref.distribution) not in own]
    found: list[Spec] = []
    for target in targets:
        found += _meant(target, registry)
    return list(dict.fromkeys(found))


def _meant(target: str, registry: Registry) -> list[Spec]:
    directory = Path(target)
    if directory.is_dir():
        inside = [ref for ref in registry if ref.folder and ref.folder.is_relative_to(directory.resolve())]
        if not inside:
            broken = [p for p in registry.problems if Path(p.where).is_relative_to(directory.resolve())]
            reason = "".join(f" ({p.where}: {p.message})" for p in broken)
            raise PluginNotFoundError(
                f"{target}: no plugin in this folder{reason}; expected a pyproject.toml with"
                ' [project.entry-points."slime.rewards"] or another group of slime\'s'
            )
        return [_spec(ref) for ref in inside]
    offered = [ref for ref in registry if ref.distribution and normalized(ref.distribution) == normalized(target)]
    if offered:
        return [_spec(ref) for ref in offered]
    if not (set("/:") & set(target) or any(ref.name == target for ref in registry)):
        raise PluginNotFoundError(
            f"slime plugins check {target!r}: no folder and no distribution with plugins; write KIND/NAME or KIND:SPEC,"
            " e.g. rewards:my_rm.py"
        )
    kind, spec = split(target, "slime plugins check")
    known = [ref for ref in registry if (ref.kind, ref.name) == (kind, spec)]
    return [_spec(ref) for ref in known] or [(kind, spec, None)]


def _spec(ref: ComponentRef) -> Spec:
    return ref.kind, f"{ref.distribution}:{ref.name}" if ref.distribution else ref.name, ref


def _shown(kind: str, spec: str, ref: ComponentRef | None) -> str:
    return f"{kind_word(ref)}/{ref.name} ({ref.origin})" if ref else f"{kind}:{spec}"


def _checked(kind: str, spec: str, ref: ComponentRef | None) -> Line:
    """Check API version, load, signature, requirements and options."""
    from slime_core.plugins.manager import load_hook_module
    from slime_core.plugins.options import options_model
    from slime_core.plugins.resolve import resolve

    shown = _shown(kind, spec, ref)
    try:
        if kind == HOOK_GROUP:
            assert ref is not None, "hook plugins have no path"
            obj = load_hook_module(ref).obj
        else:
            obj = resolve(kind, spec).obj
    except PluginError as error:
        return Line(False, shown, str(error))
    if ref is not None and (missing := missing_requirements(ref)):
        needs = ", ".join(f"{name} ({found or 'not installed'})" for name, found in missing)
        return Line(False, shown, f"its distribution needs {needs}")
    model = options_model(obj)
    undocumented = [name for name, field in model.model_fields.items() if not field.description] if model else []
    if undocumented:
        return Line(False, shown, f"options without documentation: {', '.join(undocumented)}")
    lacks = tuple(lacking(ref, obj)) if ref is not None else ()
    return Line(True, shown, "version, load, signature" + (", options" if model else ""), lacks=lacks)


def _merged(specs: list[Spec], lines: list[Line], outcomes: dict[Spec, Outcome]) -> list[Line]:
    """Return the lines with the results of the contract suites."""
    merged = []
    for spec, line in zip(specs, lines):
        outcome = outcomes.get(spec)
        if outcome is None:
            merged.append(replace(line, tier=tier(line.ok, 0, [])))
            continue
        passes = not outcome.failures
        message = f"{line.message}; contract: {outcome.note}" if passes else f"contract: {'; '.join(outcome.failures)}"
        summed_up = tier(passes, outcome.passed, list(line.lacks)) if spec[2] is not None else ""
        if summed_up and passes:
            message += f"; tier: {summed_up}"
            message += f", since it lacks {'; '.join(line.lacks)}" if summed_up == "tested" else ""
        merged.append(replace(line, ok=passes, message=message, tier=summed_up))
    return merged


def missing_requirements(ref: ComponentRef) -> list[tuple[str, str]]:
    """Return the unmet requirements of the plugin's distribution: (requirement, found).

    `found` is the installed version that does not match, or empty.
    """
    from importlib import metadata

    from packaging.requirements import InvalidRequirement, Requirement

    missing = []
    for text in ref.requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            # The core may run from a checkout that is not installed.
            core = normalized(requirement.name) == CORE
            found = slime_core.__version__ if core else metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            found = ""
        if not found or not requirement.specifier.contains(found, prereleases=True):
            missing.append((f"{requirement.name}{requirement.specifier}", found))
    return missing
