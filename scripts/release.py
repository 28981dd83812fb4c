"""Build every distribution of the repository twice, and try the wheels: `make release` runs it.

python scripts/release.py [--python 3.12] [--torch VERSION] [--build-only | --built]

`dist/` gets wheels and sdists of the distributions that are published, an SBOM of slime-rl, and SHA256SUMS;
`build/release/` the others, whose code the wheel of slime-rl has. Both builds must have the same bytes. Then, with the
lowest and with the newest versions that they allow: demo and smoke run in an empty environment with the wheels that are
published, and the entry points of every other wheel are loaded in a second one, with all extras. uv links both from its
cache. torch is the version of requirements.txt in all of them: an older one is a download of gigabytes.

A lower bound is true if the lowest versions of a wheel for each Python of the classifiers have it: `uv pip compile`
reads metadata only, so it says so of Pythons and of a torch that are not installed here.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from zipfile import ZipFile

from build import ProjectBuilder
from packaging.markers import default_environment
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version
from pyproject_hooks import quiet_subprocess_runner

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts import versions  # noqa: E402
from scripts.sync_packages import Folders  # noqa: E402

DIST, BUILD = ROOT / "dist", ROOT / "build" / "release"
PAGE = "plugins/runs/slime_runs/view/built"
"""The page of `slime view`, which `make view-assets` builds and git ignores."""
BUNDLE, SMOKE_EXTRAS = "slime-rl", ("megatron", "ray")
SOURCE_ONLY = frozenset({"antlr4-python3-runtime", "langdetect", "verifiers"})
"""Packages of which the index has no wheel."""
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}

LOAD = """
import importlib.metadata, sys
entries = [e for name in sys.argv[1:] for e in importlib.metadata.distribution(name).entry_points]
for entry in entries:
    entry.load()
print(f"loaded {len(entries)} entry points of {len(sys.argv) - 1} distributions")
"""

SMOKE = """
slime init demo demo.yaml
slime train --config demo.yaml
slime check demo.yaml
python {root}/.ci/check_demo.py outputs/demo/summary.json
slime show outputs/demo
slime why --learning outputs/demo
slime report outputs/demo --output demo.html
slime eval --config demo.yaml --hf-checkpoint outputs/demo/checkpoints/rollout_0000039
slime samples show outputs/demo -n 1
slime plugins list --check
slime plugins new rewards near
slime plugins check ./slime-reward-near --no-contract
slime train --config demo.yaml --num-rollout 2 --save outputs/ray --launcher ray
slime train --config demo.yaml --num-rollout 2 --save outputs/megatron --train-backend megatron
python -c "import slime, fully_async_rollout"
slime doctor
"""


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Run a command and return its standard output; exit with all that it printed if it fails."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env={**os.environ, **env}, text=True, capture_output=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


@dataclass(frozen=True)
class Distribution:
    """A wheel with its sdist beside it."""

    folder: str
    wheel: Path

    @cached_property
    def metadata(self) -> Metadata:
        """Core metadata, from the wheel."""
        with ZipFile(self.wheel) as archive:
            (name,) = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
            return Metadata.from_email(archive.read(name))

    @property
    def name(self) -> str:
        """Normalized name."""
        return canonicalize_name(self.metadata.name)

    @property
    def extras(self) -> list[str]:
        """Names of the extras."""
        return list(self.metadata.provides_extra or ())

    def requires(self, extras: Sequence[str], python: str) -> Iterator[Requirement]:
        """Yield the requirements that hold on a Python with these extras, without their markers."""
        here = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
        for found in self.metadata.requires_dist or ():
            if found.marker is None or any(found.marker.evaluate({**here, "extra": extra}) for extra in ("", *extras)):
                plain = Requirement(str(found))
                plain.marker = None
                yield plain


def distributions() -> list[str]:
    """Return the folders with a pyproject.toml that git knows, the published ones first.

    The plugin of the benchmarks is loaded from its folder alone, whose neighbours it imports.
    """
    files = run("git", "ls-files", "*pyproject.toml", ":!benchmarks").split()
    return sorted((str(Path(file).parent) for file in files), key=lambda folder: (folder not in published(), folder))


def published() -> list[str]:
    """Return the folders whose distributions are published."""
    return [".", *Folders(ROOT).distributions()]


def export(tree: str, target: Path) -> None:
    """Write the files of a commit and the built page into a folder."""
    archive = target.with_suffix(".tar")
    run("git", "archive", "--output", archive, tree)
    shutil.unpack_archive(archive, target, filter="fully_trusted")  # git's own: it has links, such as to docs/
    archive.unlink()
    if (ROOT / PAGE).is_dir():
        shutil.copytree(ROOT / PAGE, target / PAGE)


def build(tree: str, out: Path) -> None:
    """Build an sdist of each distribution, and the wheel from the sdist."""
    with tempfile.TemporaryDirectory() as scratch:
        source, unpacked = Path(scratch, "source"), Path(scratch, "unpacked")
        export(tree, source)
        for folder in distributions():
            target = out / ("dist" if folder in published() else "others")
            sdist = ProjectBuilder(source / folder, runner=quiet_subprocess_runner).build("sdist", target)
            shutil.unpack_archive(sdist, unpacked, filter="data")
            project = unpacked / Path(sdist).name.removesuffix(".tar.gz")
            ProjectBuilder(project, runner=quiet_subprocess_runner).build("wheel", target)


def checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in a folder by its name."""
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def build_twice() -> list[Distribution]:
    """Build all distributions into `dist/` and `build/release/`, and return them; exit if a second build differs."""
    os.environ["SOURCE_DATE_EPOCH"] = epoch = run("git", "log", "-1", "--format=%ct").strip()
    shutil.rmtree(BUILD, ignore_errors=True)
    shutil.rmtree(DIST, ignore_errors=True)
    commit = run("git", "rev-parse", "HEAD").strip()
    tree = run("git", "stash", "create").strip() or commit
    if tree != commit:
        print("release: tracked files have changes, which are built too: not to be published", file=sys.stderr)
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, (tree, tree), (BUILD / "first", BUILD / "second")))
    first, second = checksums(BUILD / "first"), checksums(BUILD / "second")
    if differ := sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name)):
        raise SystemExit(f"two builds differ: {', '.join(differ)}")
    shutil.rmtree(BUILD / "second")
    shutil.move(BUILD / "first" / "dist", DIST)
    shutil.move(BUILD / "first" / "others", BUILD / "others")
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    run(sys.executable, "-m", "twine", "check", *(BUILD / "others").iterdir())
    print(f"built {len(first)} files twice, with the same bytes (SOURCE_DATE_EPOCH={epoch}); twine finds nothing")
    return built()


def built() -> list[Distribution]:
    """Return the distributions that were built, by the order of `distributions`."""
    wheels = {parse_wheel_filename(file.name)[0]: file for file in [*DIST.glob("*.whl"), *BUILD.glob("others/*.whl")]}
    found = []
    for folder in distributions():
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        found.append(Distribution(folder, wheels[canonicalize_name(project["name"])]))
    return found


def check_bundle(all_of_them: Sequence[Distribution]) -> None:
    """Exit unless the wheel of slime-rl has, byte for byte, the files of the distributions that are not published."""
    by_folder = {found.folder: found for found in all_of_them}
    bundle = _files(by_folder["plugins"].wheel)
    parts: dict[str, int] = {}
    for folder in Folders(ROOT).bundled:
        parts |= _files(by_folder[f"plugins/{folder}"].wheel)
    if wrong := sorted(name for name in bundle.keys() | parts.keys() if bundle.get(name) != parts.get(name)):
        raise SystemExit(f"{BUNDLE} and the plugins' own wheels differ in {', '.join(wrong[:9])}")


_INFO = re.compile(r"[^/]+\.dist-info/")


def _files(wheel: Path) -> dict[str, int]:
    with ZipFile(wheel) as archive:
        return {item.filename: item.CRC for item in archive.infolist() if not _INFO.match(item.filename)}


class Plan:
    """Wheels of this repository, and requirements of others, for one environment."""

    def __init__(self, wanted: Mapping[str, Sequence[str]], own: Mapping[str, Distribution], python: str) -> None:
        self.wheels: list[Path] = []
        self.others: dict[str, Requirement] = {}
        """Requirements by their text."""
        seen: set[tuple[str, str]] = set()
        waiting = [(name, extra) for name, extras in wanted.items() for extra in ("", *extras)]
        while waiting:
            name, extra = waiting.pop()
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            if own[name].wheel not in self.wheels:
                self.wheels.append(own[name].wheel)
            for requirement in own[name].requires([extra], python):
                if (key := canonicalize_name(requirement.name)) in own:
                    waiting += [(key, further) for further in ("", *requirement.extras)]
                else:
                    self.others[str(requirement)] = requirement


def uv(*args: str | Path) -> str:
    """Run uv, which finds wheels where pip does and downloads no Python."""
    links = {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if "PIP_FIND_LINKS" in os.environ else {}
    program = shutil.which("uv", path=Path(sys.executable).parent)
    if program is None:
        raise SystemExit("release.py needs uv, twine and cyclonedx-bom: pip install --group release")
    return run(program, "--no-progress", *args, UV_PYTHON_DOWNLOADS="never", **links)


def lowest_bound(requirement: Requirement) -> Version | None:
    """Return the version that a requirement begins with; None if it has no lower bound."""
    bounds = [s.version.removesuffix(".*") for s in requirement.specifier if s.operator in (">=", "==", "~=")]
    return max(map(Version, bounds), default=None)


def check_bounds(plan: Plan, held: Plan, python: str) -> list[str]:
    """Return what is wrong with the lower bounds that a plan has and `held` does not have."""
    words = [f"--only-binary={canonicalize_name(requirement.name)}" for requirement in plan.others.values()]
    words = [word for word in words if word.partition("=")[2] not in SOURCE_ONLY]
    with tempfile.NamedTemporaryFile("w", suffix=".in") as file:
        file.write("\n".join(plan.others))
        file.flush()
        pins = uv(
            *("pip", "compile", "--quiet", "--no-annotate", "--no-header", "--resolution", "lowest-direct"),
            *("--python-version", python, "--python-platform", "x86_64-manylinux_2_28", *words, file.name),
        )
    picked = {canonicalize_name(name): Version(version) for name, version in re.findall(r"^(.+)==(.+)$", pins, re.M)}
    wrong = []
    for text, requirement in plan.others.items():
        bound, lowest = lowest_bound(requirement), picked[canonicalize_name(requirement.name)]
        if text not in held.others and bound != lowest:
            wrong.append(f"{text}: on Python {python} the lowest version that can be installed is {lowest}")
    return wrong


def check_all_bounds(own: Mapping[str, Distribution]) -> None:
    """Exit if a lower bound of the published distributions, or of an extra, is not the lowest version that resolves."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    pairs: list[tuple[Plan, Plan, str]] = []
    for python in pythons:
        plain = Plan({"slime-compat": ()}, own, python)
        pairs.append((plain, Plan({}, own, python), python))
        pairs += [(Plan({BUNDLE: (extra,)}, own, python), plain, python) for extra in own[BUNDLE].extras]
    with ThreadPoolExecutor(8) as pool:  # each waits for the index
        wrong = [line for found in pool.map(lambda pair: check_bounds(*pair), pairs) for line in found]
    if wrong:
        raise SystemExit("lower bounds to raise:\n" + "\n".join(dict.fromkeys(wrong)))
    print(f"lower bounds: the lowest versions that can be installed on Python {', '.join(pythons)}")


@dataclass(frozen=True)
class Installer:
    """Makes environments of one Python with the lowest or the newest versions."""

    own: Mapping[str, Distribution]
    python: str
    torch: str
    versions: str
    """A key of `RESOLUTIONS`."""

    def __str__(self) -> str:
        return f"Python {self.python}, {self.versions} versions"

    def install(self, folder: Path, wanted: Mapping[str, Sequence[str]]) -> Path:
        """Make an environment with these distributions and extras; return its folder of commands."""
        plan = Plan(wanted, self.own, self.python)
        texts = [f"torch=={self.torch}" if r.name == "torch" else text for text, r in plan.others.items()]
        to = ("--quiet", "--python", folder)
        uv("venv", "--quiet", "--python", self.python, folder)
        if texts:
            uv("pip", "install", *to, "--resolution", RESOLUTIONS[self.versions], *texts)
        uv("pip", "install", *to, "--no-deps", *plan.wheels)
        uv("pip", "check", *to)
        return folder / "bin"

    def load(self) -> None:
        """Install every distribution but slime-rl, which has the same code as others, and load all entry points."""
        extras = {name: found.extras for name, found in self.own.items() if name not in (BUNDLE, "slime-compat")}
        with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
            binaries = self.install(Path(scratch, "env"), extras)
            print(f"{self}: {run(binaries / 'python', '-c', LOAD, *extras, cwd=Path(scratch)).strip()}", flush=True)

    def smoke(self, sbom: Path | None) -> None:
        """Run demo and smoke in an empty directory, write the SBOM of slime-rl, and record the versions."""
        with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
            folder = Path(scratch)
            binaries = self.install(folder / "env", {BUNDLE: SMOKE_EXTRAS, "slime-compat": ()})
            (folder / "empty").mkdir()
            lines = SMOKE.format(root=ROOT).strip().splitlines()
            for line in lines:
                path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
                run("bash", "-c", line, cwd=folder / "empty", PATH=path)
                print(f"{self}: {line}", flush=True)
            versions.record(f"wheels, {self.versions} versions", len(lines), {"slime": binaries / "python"})
            if sbom:
                binaries = self.install(folder / "plain", {BUNDLE: ()})
                of = ("--pyproject", ROOT / "plugins/pyproject.toml", "--mc-type", "library", "--output-reproducible")
                run(Path(sys.executable).with_name("cyclonedx-py"), "environment", *of, "-o", sbom, binaries / "python")


def main(argv: Sequence[str] | None = None) -> None:
    """Build, check and try."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    requirements = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    torch = re.findall(r"^torch==(\S+)$", requirements, re.MULTILINE)[0]
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=here, help="Python of the environments; default: %(default)s")
    parser.add_argument("--torch", default=torch, help="torch of the environments; default: %(default)s")
    parser.add_argument("--build-only", action="store_true", help="write dist/ and try nothing")
    parser.add_argument("--built", action="store_true", help="try what an earlier command has built")
    args = parser.parse_args(argv)
    own = {found.name: found for found in (built() if args.built else build_twice())}
    check_bundle(list(own.values()))
    if not args.build_only:
        check_all_bounds(own)
        sbom = DIST / f"{BUNDLE}-{own[BUNDLE].metadata.version}.cdx.json"
        for name in RESOLUTIONS:
            installer = Installer(own, args.python, args.torch, name)
            installer.load()
            installer.smoke(sbom if name == "newest" else None)
    (DIST / "SHA256SUMS").unlink(missing_ok=True)
    lines = [f"{digest}  {name}\n" for name, digest in checksums(DIST).items()]
    (DIST / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    print(f"wrote {DIST}: {len(lines)} files and SHA256SUMS")


if __name__ == "__main__":
    main()
