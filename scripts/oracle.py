#!/usr/bin/env python
"""Compare the results of a refactoring: run the code of a commit (base) and of this checkout (head) side by side.

    python scripts/oracle.py BASE                      # the quick cases; `make oracle BASE=...`
    python scripts/oracle.py BASE --case demo --case ppo; --case all

Each side has an environment of its own, with the packages of its `requirements.txt` and links to the third-party
packages of this environment, so neither side imports code of the other. A case returns facts, each a name and a text;
the report lists the differing facts, with the first difference. Facts are compared within one job and never with
recorded facts, since other processors round differently.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "outputs" / "oracle"
"""Sources and environments of bases, and the files of the last comparison; ignored by git."""
SEEDS = 200
MODES = ("sync", "one-step", "full")
DEADLINE_S = 900.0
"""Deadline of one command; a command that hangs counts as a difference."""
MOST = 12
"""Largest number of differences printed for a case."""

Facts = dict[str, str]
FAILED = "failed"
"""The only fact of a case that failed: exit status and end of the output."""


@dataclass(frozen=True)
class Side:
    """A side of the comparison: root of its code, Python that has it installed, and working directory."""

    name: str
    root: Path
    python: Path
    work: Path

    def plain(self, text: str) -> str:
        """Replace the paths of this side in a text."""
        for path, word in ((self.work, "<work>"), (self.python.parents[1], "<environment>"), (self.root, "<checkout>")):
            text = text.replace(str(path), word)
        return text


@dataclass(frozen=True)
class Case:
    """A task that both sides run, and the facts to compare."""

    name: str
    facts: Callable[[Side], tuple[Facts, float]]
    """Facts and seconds of processor time."""
    quick: bool = True
    alone: bool = False
    """Whether the sides run one after the other, because the backend's processes would interfere."""


# -- cases ---------------------------------------------------------------------------------------------


def _training(name: str, flags: str, template: str = "demo", **how: bool) -> Case:
    save = f"outputs/{name}"
    argv = ["train", "--config", f"{template}.yaml", "--save", save, *flags.split()]

    def facts(side: Side) -> tuple[Facts, float]:
        started = 0.0
        if not (side.work / f"{template}.yaml").exists():
            started = slime(side, "init", template, f"{template}.yaml").cpu
        done = slime(side, *argv)
        if done.status != 0:
            return {FAILED: f"exit {done.status}\n{done.said[-1500:]}"}, done.cpu
        return of_run(side.work / save), started + done.cpu

    return Case(name, facts, **how)


def of_run(directory: Path) -> Facts:
    """Return weights, metrics without times, and the ledger's events of a finished run."""
    facts: Facts = {}
    commit = max((directory / "checkpoints").glob("rollout_*"))
    for path in sorted(commit.rglob("*.safetensors")):
        facts[f"weights {path.relative_to(commit)}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        for name in sorted(values.keys() - {"step"}):
            if not name.startswith("perf/") and not name.endswith("/seconds"):
                at = f"step {values['step']}: {values[name]!r}"
                facts[f"metrics {name}"] = "\n".join(filter(None, [facts.get(f"metrics {name}"), at]))
    facts["ledger"] = "\n".join(ledger_events(directory))
    return facts


def ledger_events(directory: Path) -> list[str]:
    """Return every event in the segments below a directory, without the segments' headers."""
    segments = sorted(directory.rglob("ledger/*.jsonl"))
    return [event for path in segments for event in path.read_text(encoding="utf-8").splitlines()[1:]]


def _simulation(side: Side) -> tuple[Facts, float]:
    done = command(side, str(ROOT / "scripts" / "oracle.py"), "--seeds", str(SEEDS), "--root", str(side.root))
    if done.status != 0:
        return {FAILED: f"exit {done.status}\n{done.said[-1500:]}"}, done.cpu
    return json.loads((side.work / "seeds.json").read_text(encoding="utf-8")), done.cpu


def simulated(simulation: Any, seed: int, mode: str) -> str:
    """Simulate a seed with the virtual clock; return its ledger events, life by life, and digests of its batches.

    Tasks run in the order in which they became ready, as in a real loop; a random order would depend on their number.
    """
    events: list[str] = []
    loop = importlib.import_module(f"{simulation.__name__}.loop").SimulatedLoop

    class Recorded(simulation.World):  # type: ignore[misc, name-defined]
        def run(self) -> str:
            try:
                ending = super().run()
            except BaseException as error:
                ending = type(error).__name__
                raise
            finally:
                events.extend([*ledger_events(self.root), f"life ends: {ending}"])
            return ending

    def in_order(self: Any, handles: list[Any]) -> list[Any]:
        self._ready.clear()
        return handles

    with patch.object(loop, "_permuted", in_order):
        report = simulation.simulate(seed, mode=mode, world=Recorded)
    return "\n".join([*events, *(f"batch {rollout}: {digest}" for rollout, digest in report.batches.items())])


def find_simulation(root: Path) -> Any:
    """Import the package `simulation` of a checkout; older checkouts have it below `slime_core.testing`."""
    old = (root / "slime_core" / "testing" / "simulation" / "__init__.py").is_file()
    sys.path.insert(0, str(root))
    return importlib.import_module("slime_core.testing.simulation" if old else "tests.simulation")


# One bad command line for each kind of mistake; mistakes found before code is loaded cost the least time.
REFUSALS = """
train
trian --config demo.yaml
train --config missing.yaml
train --config list.yaml
train --config demo.yaml --kl-coef abc
train --config demo.yaml --lr -1
train --config demo.yaml --num-rollout 1.5
train --config demo.yaml --rollout-batch-size 0
train --config demo.yaml --num-rollouts 3
train --config demo.yaml --advantage-estimator grop
train --config demo.yaml --rm-type exakt
train --config demo.yaml --custom-rm-path nowhere.py:reward
train --config demo.yaml --custom-rm-path bad.py:reward
train --config demo.yaml --custom-rm-path bare.py:other
train --config demo.yaml --custom-rm-path bare.py:reward
train --config demo.yaml --custom-rm-path no_such_module.reward
train --config demo.yaml --custom-generate-function-path multi_trun
train --config demo.yaml --dynamic-sampling-filter-path nonzero
train --config demo.yaml --buffer-filter-path fifi
train --config demo.yaml --data-source-path datasets
train --config demo.yaml --rollout-function-path generated
train --config demo.yaml --loss-type polciy_loss
train --config demo.yaml --prepare-path additions
train --config demo.yaml --rollout-engine vllm
train --config demo.yaml --train-backend fsdp
train --config demo.yaml --launcher slurm
train --config demo.yaml --kl-coef 0.1 --kl-loss-coef 0.2
train --config demo.yaml --bf16 --dtype float32
train --config demo.yaml --num-steps-per-rollout 3
train --config demo.yaml --global-batch-size 100
train --config demo.yaml --over-sampling-batch-size 8
train --config demo.yaml --true-on-policy-mode --partial-rollout
train --config demo.yaml --async --colocate
train --config demo.yaml --async-mode fulll --async
train --config demo.yaml --sglang-mem-fraction-static 0.8
train --config demo.yaml --advantage-estimator ppo --critic-lr nope
train --config demo.yaml --plugin-dir nowhere
train --config plain.yaml --prompt-data missing.jsonl
train --config plain.yaml --hf-checkpoint missing
train --config plain.yaml --prompt-data empty.jsonl
train --config demo.yaml --tool-call-parser plain --tools-path nothing
train --config demo.yaml --use-opd
train --config demo.yaml --lora-alpha 8
train --config demo.yaml --group-timeout -3
sft --config demo.yaml
plugins show rewards:nothing
plugins new rewarded name
config show --config demo.yaml --kl-coef abc
check --config demo.yaml --rm-type exakt
init demos demo2.yaml
plan --model no-such-model
convert --to megatron
why nowhere
"""


FILES = {
    "bad.py": "def reward(:\n",
    "bare.py": "reward = 1\n",
    "list.yaml": "- 1\n",
    "empty.jsonl": "",
    "plain.yaml": "hf_checkpoint: no_model\nprompt_data: empty.jsonl\ninput_key: input\nrm_type: exact\n"
    "num_rollout: 1\nrollout_batch_size: 2\nrollout_max_response_len: 8\n",
}


def _refusals(side: Side) -> tuple[Facts, float]:
    side = replace(side, work=side.work / "refusals")
    shutil.rmtree(side.work, ignore_errors=True)
    side.work.mkdir()
    for name, content in FILES.items():
        (side.work / name).write_text(content)
    facts, cpu = {}, slime(side, "init", "demo", "demo.yaml").cpu
    for line in REFUSALS.strip().splitlines():
        done = slime(side, *shlex.split(line))
        cpu += done.cpu
        facts[f"`slime {line}` exits"] = str(done.status)
        if done.status:
            facts |= {f"`slime {line}` cites {name}": "yes" for name in sorted(cited(side.plain(done.said)))}
    return facts, cpu


def cited(message: str) -> set[str]:
    """Return the names in a message: flags, quoted text, paths and numbers; the other words are not compared."""
    text = "\n".join(line for line in message.splitlines() if not line.startswith("slime: starting for"))
    quoted = {name for pattern in _QUOTED for name in re.findall(pattern, text)}
    return quoted | {name.rstrip(".,:;)") for pattern in _BARE for name in re.findall(pattern, text)}


_QUOTED = (r"(?<!\w)'([^'\n]+)'(?!\w)", r'"([^"\n]+)"', r"`([^`\n]+)`")
_BARE = (
    r"--[a-z][a-z0-9-]+",
    r"(?<![\w<])[\w.<>~-]*/[^\s'\"`,;()]+",
    r"[\w.-]+\.\w+:\d+",
    r"(?<![\w.-])-?\d+(?:\.\d+)?(?:e-?\d+)?(?!\w|[.-]\w)",
)

CASES = (
    _training("demo", "--num-rollout 3 --eval-interval 3 --save-interval 3"),
    _training("ppo", "--num-rollout 3 --eval-interval 9 --advantage-estimator ppo --critic-lr 1e-4"),
    _training("dynamic", "--num-rollout 3 --eval-interval 9 --dynamic-sampling-filter-path nonzero_std"),
    _training(
        "partial",
        "--num-rollout 4 --eval-interval 9 --partial-rollout --over-sampling-batch-size 48"
        " --dynamic-sampling-filter-path nonzero_std",
    ),
    _training("ranks", "--num-rollout 3 --eval-interval 9 --actor-num-gpus-per-node 2"),
    _training("one-step", "--num-rollout 4 --eval-interval 9 --async --use-tis"),
    _training("tools", "--num-rollout 3 --eval-interval 9", template="tools"),
    _training("adapters", "--num-rollout 3 --eval-interval 9 --lora-rank 8 --lr 1e-3", quick=False),
    _training(
        "megatron",
        "--num-rollout 3 --eval-interval 9 --train-backend megatron --tensor-model-parallel-size 2",
        quick=False,
    ),
    _training("ray", "--num-rollout 3 --eval-interval 9 --launcher ray", quick=False, alone=True),
    Case("simulation", _simulation),
    Case("refusals", _refusals),
)


# -- running -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """The result of a command."""

    status: int
    said: str
    cpu: float
    """Seconds of processor time of the command and its child processes."""


def slime(side: Side, *argv: str) -> Done:
    """Run `slime ARGV` of one side, in its directory."""
    return command(side, "-m", "slime_core", *argv)


def command(side: Side, *argv: str) -> Done:
    """Run Python of one side, in its directory; kill it and its child processes at the deadline."""
    log = side.work / "last.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(side.python), *argv], cwd=side.work, env=environment(side), stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        late = threading.Timer(DEADLINE_S, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        _, status, usage = os.wait4(process.pid, 0)
        late.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    said = log.read_text(encoding="utf-8", errors="replace")
    return Done(process.returncode, said, usage.ru_utime + usage.ru_stime)


def environment(side: Side) -> dict[str, str]:
    """Return an environment without variables that redirect Python or slime, and with single-threaded arithmetic."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SLIME_", "VIRTUAL_ENV", "MAKE"))}
    path = f"{side.python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "1"}


# -- comparing -----------------------------------------------------------------------------------------


def different(base: Facts, head: Facts) -> list[str]:
    """Return the names of the differing facts."""
    return [name for name in {**base, **head} if base.get(name) != head.get(name)]


def differences(base: Facts, head: Facts) -> list[str]:
    """Return a line for each differing fact, with its first differing line."""
    lines = []
    for name in different(base, head):
        if name in base and name in head:
            lines.append(f"{name}: {_first(base[name].splitlines(), head[name].splitlines())}")
        else:
            lines.append(f"{name}: {'base' if name in base else 'head'} only")
    return lines


def _first(base: Sequence[str], head: Sequence[str]) -> str:
    number = next((i for i, (b, h) in enumerate(zip(base, head)) if b != h), min(len(base), len(head)))
    shown = [side[number] if number < len(side) else "(ended)" for side in (base, head)]
    where = "" if max(len(base), len(head)) == 1 else f"line {number + 1}: "
    return f"{where}{shown[0]} | {shown[1]}"


def compare(case: Case, sides: Sequence[Side]) -> list[str]:
    """Run a case on both sides, print the result, and return the differences.

    If there are differences, both sides run again. A fact that changes between two runs of one side is printed, but not
    counted.
    """
    with ThreadPoolExecutor(1 if case.alone else 2) as pool:
        (base, base_cpu), (head, head_cpu) = pool.map(case.facts, sides)
        unsteady: set[str] = set()
        if differences(base, head):
            (again, _), (head_again, _) = pool.map(case.facts, sides)
            unsteady = {*different(base, again), *different(head, head_again)}
    failed = [f"{side.name} failed: {facts[FAILED]}" for side, facts in zip(sides, (base, head)) if FAILED in facts]
    found = failed or differences(
        *({name: text for name, text in facts.items() if name not in unsteady} for facts in (base, head))
    )
    verdict = f"{len(found)} DIFFER" if found else "same"
    print(
        f"{case.name:12} {verdict:10} {len(base):5} facts; processor time {base_cpu:.1f} s base, {head_cpu:.1f} s head:"
        f" {head_cpu / base_cpu:.2f}",
        flush=True,
    )
    for line in found[:MOST]:
        print(f"    {line}")
    if len(found) > MOST:
        print(f"    and {len(found) - MOST} more")
    if unsteady:
        print(f"    not the same in two runs of one side, so not compared: {', '.join(sorted(unsteady))}")
    return found


# -- two installations ---------------------------------------------------------------------------------


def base_side(revision: str) -> Side:
    """Extract and install the code of a commit, without its history."""
    commit = _git("rev-parse", "--verify", f"{revision}^{{commit}}").decode().strip()
    root = KEPT / commit[:12]
    if not root.is_dir():
        partial = KEPT / f"{commit[:12]}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as archive:
            archive.extractall(partial, filter="data")
        partial.rename(root)
    return Side("base", root, install(root), KEPT / "work" / "base")


def head_side() -> Side:
    """Install this checkout, including uncommitted changes."""
    return Side("head", ROOT, install(ROOT), KEPT / "work" / "head")


def _git(*argv: str) -> bytes:
    return subprocess.run(["git", *argv], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def install(root: Path) -> Path:
    """Create an environment with a checkout's distributions and our third-party packages; return its Python.

    It is reused until a `pyproject.toml` of the checkout, or the list of third-party packages, changes.
    """
    packages = Path(sysconfig.get_path("purelib"))
    others = third_party(packages)
    plugins = [*root.glob("plugins/*/pyproject.toml"), *root.glob("plugins/*/*/pyproject.toml")]
    projects = [root / "pyproject.toml", *sorted(plugins), root / "requirements.txt"]
    content = [str(root), *others, *(path.read_text(encoding="utf-8") for path in projects)]
    key = hashlib.sha256("\n".join(content).encode()).hexdigest()[:12]
    place, python = KEPT / f"environment-{key}", KEPT / f"environment-{key}" / "bin" / "python"
    if (place / "complete").exists():
        return python
    print(f"installing {root}", flush=True)
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    target = next(place.glob("lib/python*/site-packages"))
    for name in others:
        (target / name).symlink_to(packages / name)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    editable = [line.split(" ", 1)[1] for line in projects[-1].read_text().splitlines() if line.startswith("-e ")]
    subprocess.run([*pip, *(part for path in editable for part in ("-e", path))], cwd=root, check=True)
    (place / "complete").touch()
    return python


def third_party(packages: Path) -> list[str]:
    """List the entries of `site-packages` that do not belong to the checkout installed here."""
    found = importlib.util.find_spec("slime_core")
    checkout = Path(found.origin).parents[1].as_uri() if found and found.origin else ROOT.as_uri()
    ours = {"__pycache__"}
    for dist in importlib.metadata.distributions(path=[str(packages)]):
        origin = json.loads(dist.read_text("direct_url.json") or "{}").get("url", "")
        if f"{origin}/".startswith(f"{checkout}/"):
            ours |= {file.parts[0] for file in dist.files or ()}
    return sorted(entry.name for entry in packages.iterdir() if entry.name not in ours)


FOUND = """
import importlib.metadata as metadata, importlib.util as util, slime_core
print(slime_core.__file__)
for dist in metadata.distributions():
    for entry in dist.entry_points:
        if entry.group.startswith("slime."):
            spec = util.find_spec(entry.value.partition(":")[0].partition(".")[0])
            print(spec.origin if spec else f"{dist.name}: {entry.value} is nowhere")
"""


def check_side(side: Side) -> None:
    """Check that a side imports no code of the other side. Raises SystemExit."""
    found = command(side, "-c", FOUND)
    paths = found.said.split("\n")[:-1]
    core = side.root / "slime_core" / "__init__.py"
    strays = [p for p in paths if p.startswith(str(ROOT)) and not _in(p, side)] or [p for p in paths if " is " in p]
    if found.status != 0 or paths[0] != str(core) or strays:
        raise SystemExit(f"{side.name}: expected {core} and plugins below {side.root}, found {strays or found.said}")


def _in(path: str, side: Side) -> bool:
    return path.startswith(f"{side.root}/") and (side.name == "base" or not path.startswith(f"{KEPT}/"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return 1 if anything differs."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", default="HEAD", help="a commit")
    parser.add_argument(
        "--case", action="append", choices=[*names, "all"], metavar="NAME", help=f"all, {', '.join(names)}"
    )
    parser.add_argument("--seeds", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.seeds is not None:
        simulation = find_simulation(args.root)
        runs = {f"{mode} seed {seed}": (seed, mode) for mode in MODES for seed in range(args.seeds)}
        Path("seeds.json").write_text(json.dumps({k: simulated(simulation, *run) for k, run in runs.items()}))
        return 0
    chosen = [c for c in CASES if ("all" in args.case or c.name in args.case if args.case else c.quick)]
    shutil.rmtree(KEPT / "work", ignore_errors=True)
    KEPT.mkdir(parents=True, exist_ok=True)
    sides = [base_side(args.base), head_side()]
    for side in sides:
        side.work.mkdir(parents=True)
        check_side(side)
    differ = [case.name for case in chosen if compare(case, sides)]
    print(f"differ: {', '.join(differ)}; both sides' files are in {KEPT / 'work'}" if differ else "nothing differs")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
