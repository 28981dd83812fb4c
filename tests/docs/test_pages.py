"""What the pages say exists does: links, flags, commands, and files named in them."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path

import pytest
from slime_engine_sglang.flag_list import shipped_flags
from slime_engine_vllm.flags import parser as vllm_flags
from slime_engine_vllm.launch import server_arguments

from scripts import generate_docs
from slime_core.config import Args
from slime_core.config.foreign import find_owners
from slime_core.config.spec import flag_specs
from slime_core.plugins.manager import current_registry
from slime_core.plugins.resolve import resolve
from tests.as_written.flags import NEWER
from tests.cli.test_json import leaves
from tests.sweeps import sweep

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(file for file in ROOT.glob("docs/**/*.md") if file.parent.name != "reference"),  # those are built
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("compat/**/*.md"),
        *ROOT.glob("skills/**/*.md"),
        ROOT / "slime_core/README.md",
        *(file for file in ROOT.glob("plugins/**/README.md") if "node_modules" not in file.parts),
        *ROOT.glob("benchmarks/README.md"),
    ]
)
NAMES = {name.replace("_", "-") for name in current_registry().names("commands")}
page = sweep("path", PAGES)

SETTINGS_FLAGS = {
    "serve": {"--host", "--port", "--model-path", "--served-model-name", "--api-key", "--allowed-hosts"},
    "config": {"--for", "--json", "--changed"},
    "check": {"--for", "--json", "--strict", "--flags-only"},
    "rehearse": {"--for", "--json", "--strict", "--stand-ins", "--num-gpus", "--processes", "--seconds", "--until"},
    "engines": {"--num-gpus", "--for", "--json"},
    "plan": {"--num-gpus", "--num-cpus", "--gpu-memory-gib", "--trace", "--what", "--json"},
    "rewards": {
        *("--with", "--diff", "--label", "--json", "--check", "--response", "--prompt", "--metadata", "--data"),
        "--rows",
    },
    "submit": {
        *("--address", "--no-wait", "--no-check", "--directory", "--python", "--job-id", "--to", "--dry-run"),
        *("--image", "--volume", "--env-from", "--nodes", "--gpus"),
        *("--partition", "--gres", "--time", "--no-requeue"),  # sbatch's
    },
}
"""Flags that commands read beside a run's settings."""


@cache
def own_flags() -> dict[str, set[str]]:
    """Return the flags of commands that are no settings."""
    found = dict(SETTINGS_FLAGS)
    for name in current_registry().names("commands"):
        command, parser = resolve("commands", name).obj, argparse.ArgumentParser()
        if command.add_parser is not None:
            command.add_parser(parser.add_subparsers())
            flags = (set(own._option_string_actions) for _, own in leaves(parser, ""))
            found[name.replace("_", "-")] = {"--"}.union(*flags)
    return found


def blocks(text: str, *languages: str) -> list[str]:
    """Fenced blocks in these languages."""
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [body for language, body in found if language in languages]


def commands(text: str) -> list[list[str]]:
    """`slime ...` lines of shell blocks, split as a shell does; `[...]` and prompts are left out."""
    lines = "".join(blocks(text, "bash", "", "console", "text")).replace("\\\n", " ").splitlines()
    lines = [re.sub(r"^\s*\$ ", "", line).split("#")[0].strip() for line in lines]
    starts = ("slime ", ".venv/bin/slime ", "python train.py ", "torchrun ", "python -m pdb -m slime_core ")
    found = []
    for line in lines:
        if line.startswith(starts) and "|" not in line and "[" not in line.replace("@[", ""):
            words = shlex.split(line)
            command = next((w for w in words if w in NAMES), "train")
            found.append([command, *words])
    return found


def flags_of_settings() -> set[str]:
    names = {"--help", "--help-all", "--set"}
    for spec in flag_specs().values():
        names |= {spec.flag} | ({spec.off_flag} if spec.off_flag else set())
    return names


@cache
def flags_of_others() -> set[str]:
    """Megatron's, vLLM's, SGLang's and its router's (also as they spell them), and the flags that list them."""
    owners = find_owners(["--no-plugins"], {})[0]
    sglang = shipped_flags()
    flags = [*sglang.server.flags, *sglang.router.flags, *vllm_flags().flags]
    flags += [flag for owner in owners if not owner.prefixes for flag in owner.listed.flags]
    names = {name for flag in flags for name in flag.option_strings}
    names |= {re.sub("--(sglang|router|vllm)-", "--", name) for name in names}
    names |= {f"--{name.replace('_', '-')}" for name in server_arguments(Args(), "cpu", 1, 0, {})}
    return names | {f"--{owner.help_flag}" for owner in owners if owner.help_flag}


@page
def test_links_lead_somewhere(path: Path) -> None:
    links_lead_somewhere(path, path.read_text(encoding="utf-8"))


@pytest.mark.slow  # `make docs` runs it
def test_the_reference_can_be_built_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    generate_docs.main(tmp_path)
    built = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    listed = re.findall(r"^\| `([\w-]+\.md)` \|", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(built)
    for name, text in built.items():
        links_lead_somewhere(ROOT / "docs/reference" / name, text, built)


def links_lead_somewhere(path: Path, text: str, built: Collection[str] = ()) -> None:
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        if linked.parent == ROOT / "docs/reference" and linked.name in built:
            continue
        assert linked.exists(), f"{path}: {target}"
        if anchor and linked.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{path}: {target}; there are {sorted(slugs)}"


OF_TORCHRUN = {"--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint"}


@page
def test_commands_have_the_flags_that_are_typed(path: Path) -> None:
    settings = flags_of_settings() | flags_of_others()
    for command, *words in commands(path.read_text(encoding="utf-8")):
        known = settings | own_flags().get(command, set())
        for word in words:
            flag = word.split("=")[0]
            if flag.startswith("--") and flag not in known and flag not in OF_TORCHRUN:
                # The pages show what a misspelt flag does.
                assert flag == "--rollout-batchsize", f"{path}: {' '.join(words)}"


@page
def test_flags_in_the_text_exist(path: Path) -> None:
    if path.name == "CHANGELOG.md" or path.parent.name == "benchmarks":  # its scripts have flags of their own
        return
    known = flags_of_settings() | {flag for flags in own_flags().values() for flag in flags}
    for flag in re.findall(r"`(--[a-z][a-z0-9-]*)(?=[ `=])", path.read_text(encoding="utf-8")):
        assert flag in known or flag in flags_of_others() or flag in NOT_OURS, f"{path}: {flag}"


NOT_OURS = {
    *("--x", "--no-x", "--disable-x", "--tiny", "--help", "--help-all", "--learning-rate", "--check", "--torch"),
    *("--slime-component", "--slime-args", "--build-arg", "--ref-micro-batch-size"),
    *NEWER,
}
"""Flags of other programs, and placeholders."""


def test_agents_md_names_targets_files_and_scripts_that_exist() -> None:
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*)(?: [a-z -]*)?:", (ROOT / "Makefile").read_text(), re.MULTILINE))
    typed = [word for line in re.findall(r"^make ([a-z -]+)", text, re.MULTILINE) for word in line.split()]
    assert len(typed) >= 5
    assert set(typed) <= targets
    paths = re.findall(r"`([\w.]+(?:/[\w.*-]+)*/?)`", text)
    paths = [path.replace("KIND", "rewards") for path in paths if "/" in path or path.endswith((".toml", ".txt"))]
    assert len(paths) >= 15
    assert [path for path in paths if not list(ROOT.glob(path)) and path != "docs/reference/"] == []
    for module in re.findall(r"`(slime_core\.\w+)`", text):
        done = f"import sys, {module}; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", done], cwd=ROOT).returncode == 0, module


@pytest.mark.parametrize("name", ["slime_core/README.md", "docs/internals/architecture.md"])
def test_files_named_in_the_reading_order_exist(name: str) -> None:
    for file in re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", (ROOT / name).read_text(encoding="utf-8")):
        known = (ROOT / "slime_core" / file).exists() or (ROOT / file).exists() or file == "file.py"
        assert known, f"{name}: {file}"


def test_the_index_names_every_page() -> None:
    text = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = {str(p.relative_to(ROOT / "docs")) for p in PAGES if p.is_relative_to(ROOT / "docs")} - {"index.md"}
    assert {p for p in pages if f"({p})" not in text} == set()


def test_the_page_of_commands_names_every_command() -> None:
    head = (ROOT / "docs/commands.md").read_text(encoding="utf-8").partition("\n## ")[0]
    assert set(re.findall(r"`([\w-]+)`", head)) == NAMES


def test_the_layers_of_the_architecture_page_are_those_that_are_checked() -> None:
    import tomllib

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c for c in contracts if c["type"] == "layers")["layers"]
    checked = [set(re.findall(r"slime_core\.(\w+)", layer)) for layer in layers]
    text = (ROOT / "docs/internals/architecture.md").read_text(encoding="utf-8")
    shown = re.findall(r"From top to bottom: (.*?)\.", text, re.DOTALL)[0].split(";")
    assert [set(re.findall(r"`(\w+)`", layer)) for layer in shown] == checked
