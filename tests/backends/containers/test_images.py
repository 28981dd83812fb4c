"""The images of docker/: linted; the CPU one built and run, the GPU one resolved, which no machine here can build.

buildah works in a chroot, as root, without a daemon or a registry; the base image is Debian's packages, which
mmdebstrap unpacks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts import release
from scripts.sync_packages import Folders

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
TOOLS = ("buildah", "mmdebstrap")
DISK = 8 << 30
"""Bytes that base, image and container take, each a copy where the file system has no overlays."""
Buildah = Callable[..., str]
ON_GPUS = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_39")
"""Python and C library of Ubuntu 24.04, the base of the GPU image."""
NO_PROGRAMS = "pip() { printf '%s\\n' \"$@\"; }; python3() { :; }; useradd() { :; }; id() { :; }; install() { :; }\n"
"""Shell functions in the place of a build's programs: pip prints its arguments."""

pytestmark = [pytest.mark.backends, pytest.mark.timeout(3000)]


def run(*command: str | Path, **env: str) -> str:
    done = subprocess.run([str(word) for word in command], env={**os.environ, **env}, text=True, capture_output=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_hadolint_finds_nothing(file: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.is_file():
        pytest.skip("needs hadolint: pip install --group release")
    assert run(hadolint, "--failure-threshold", "style", file) == ""


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """Run buildah on a store that is removed at the end."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"needs {' and '.join(missing)}: apt-get install {' '.join(TOOLS)}")
    if os.geteuid() != 0:
        pytest.skip("needs root: buildah and mmdebstrap change roots")
    store = tmp_path_factory.mktemp("store")
    if (free := shutil.disk_usage(store).free) < DISK:
        pytest.skip(f"needs {DISK >> 30} GiB of disk in {store}; {free >> 30} are free")
    places = ("--root", store / "root", "--runroot", store / "run", "--storage-driver", _driver(store))
    try:
        yield lambda *words, **env: run("buildah", *places, *words, BUILDAH_ISOLATION="chroot", **env)
    finally:
        subprocess.run(["buildah", *map(str, places), "rm", "--all"], capture_output=True)
        subprocess.run(["buildah", *map(str, places), "rmi", "--all", "--force"], capture_output=True)
        shutil.rmtree(store, ignore_errors=True)


def _driver(store: Path) -> str:
    """Return "overlay" if the kernel mounts one in this folder, else "vfs", which copies each layer."""
    parts = {name: store / name for name in ("lower", "upper", "work", "merged")}
    for part in parts.values():
        part.mkdir()
    options = f"lowerdir={parts['lower']},upperdir={parts['upper']},workdir={parts['work']}"
    mounted = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, parts["merged"]], capture_output=True)
    if mounted.returncode == 0:
        subprocess.run(["umount", parts["merged"]], check=True)
    return "overlay" if mounted.returncode == 0 else "vfs"


@pytest.fixture(scope="module")
def base(buildah: Buildah, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image of Debian's minimal system with Python."""
    tar = tmp_path_factory.mktemp("base") / "base.tar"
    suite = re.search(r"^VERSION_CODENAME=(\w+)$", Path("/etc/os-release").read_text(), re.MULTILINE)
    assert suite is not None
    run("mmdebstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", suite[1], tar)
    container = buildah("from", "scratch").strip()
    buildah("add", "--quiet", container, tar, "/")
    buildah("commit", "--quiet", "--rm", container, "debian-python")
    tar.unlink()
    return "localhost/debian-python"


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write what .dockerignore leaves of a checkout: the published wheels in dist/, and the constraints."""
    folder = tmp_path_factory.mktemp("context")
    for name in (".", *Folders(ROOT).distributions()):
        run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder / "dist", ROOT / name)
    for file in ROOT.glob("constraints*.txt"):
        shutil.copy(file, folder)
    return folder


def _pip_arguments(stage: str, context: Path, scratch: Path) -> list[str]:
    """Return the arguments of all calls of pip in a stage of the GPU image, as the shell of a build expands them."""
    text = (ROOT / "docker/gpu.Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
    text = text.partition(f"AS {stage}\n")[2] if stage else text.rpartition("\nFROM ")[2]
    text = text.partition("\nFROM ")[0]
    arguments = "".join(f"{line}\n" for line in re.findall(r"^ARG (\w+=.+)$", text, re.MULTILINE))
    (script,) = re.findall(r"^RUN (.*)$", text, re.MULTILINE)
    script = re.sub(r"/opt/\w+/bin/pip\b", "pip", script).replace("/tmp/", f"{scratch}/")
    for source, target in re.findall(r"--mount=type=bind,source=(\S+),target=(\S+)", script):
        assert (context / source).exists()
        script = script.replace(f"--mount=type=bind,source={source},target={target}", "")
        script = script.replace(target, str(context / source))
    return run("bash", "-euc", NO_PROGRAMS + arguments + script).split("\n")


@pytest.mark.parametrize(
    ("stage", "wanted"), [("engine-sglang", "sglang"), ("engine-vllm", "vllm"), ("", "transformer-engine")]
)
def test_the_versions_of_the_gpu_image_go_together(stage: str, wanted: str, context: Path, tmp_path: Path) -> None:
    words = [word for word in _pip_arguments(stage, context, tmp_path) if word]
    constraints = {words[place + 1] for place, word in enumerate(words) if word == "-c"}
    asked = [word for word in words if word not in constraints and not word.startswith("-") and word != "install"]
    (tmp_path / "asked.in").write_text("\n".join(asked))
    found = release.uv("pip", "compile", "-q", *ON_GPUS, *(f"-c{file}" for file in constraints), tmp_path / "asked.in")
    majors = dict(re.findall(r"^([\w.-]+)==(\d+)", found, re.MULTILINE))
    assert wanted in majors
    cuda = re.search(r"^ARG BASE=nvidia/cuda:(\d+)", (ROOT / "docker/gpu.Dockerfile").read_text(), re.MULTILINE)
    assert cuda is not None
    assert {majors[name] for name in ("cuda-toolkit", "cuda-python") if name in majors} == {cuda[1]}


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Mounts with which pip finds in a build what it finds here: its settings, and the folders and files they name."""
    settings = run(sys.executable, "-m", "pip", "config", "list").splitlines()
    pairs = [re.fullmatch(r"(?:global|user|site|install|:env:)\.([\w-]+)='(.*)'", line) for line in settings]
    values = {pair[1]: pair[2].replace("\\n", " ") for pair in pairs if pair}
    file = tmp_path_factory.mktemp("pip") / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in values.items()))
    words = {word.removeprefix("file://") for value in values.values() for word in value.split()}
    paths = sorted({Path(*Path(word).parts[:3]) for word in words if word.startswith("/") and Path(word).exists()})
    return [f"--volume={file}:/etc/pip.conf:ro", *(f"--volume={path}:{path}:ro" for path in paths)]


@pytest.fixture(scope="module")
def container(buildah: Buildah, base: str, context: Path, volumes: list[str]) -> str:
    """A container of the CPU image."""
    file = ROOT / "docker" / "cpu.Dockerfile"
    buildah("bud", "--quiet", "--layers=false", f"--build-arg=BASE={base}", *volumes, "-t", "cpu", "-f", file, context)
    return buildah("from", "cpu").strip()


def test_the_cpu_image_runs_the_demo_as_a_plain_user(buildah: Buildah, container: str, tmp_path: Path) -> None:
    inside = ("run", container, "--")
    assert buildah(*inside, "id", "-u").strip() == "1000"
    refused = "touch /opt/slime/mine 2>/dev/null || echo refused"
    assert buildah(*inside, "bash", "-c", refused).strip() == "refused"
    assert buildah(*inside, "slime", "--version").startswith("slime ")
    buildah(*inside, "slime", "init", "demo", "demo.yaml")
    buildah(*inside, "slime", "train", "--config", "demo.yaml")
    summary = tmp_path / "summary.json"
    summary.write_text(buildah(*inside, "cat", "outputs/demo/summary.json"))
    assert json.loads(summary.read_text())["eval_after"] >= 0.9
    run(sys.executable, ROOT / ".ci" / "check_demo.py", summary)


def test_the_image_is_one_layer_and_has_no_sources(buildah: Buildah, container: str) -> None:
    found = json.loads(buildah("inspect", "--type", "image", "cpu"))
    assert len(found["OCIv1"]["rootfs"]["diff_ids"]) == 2  # the base's and ours
    assert buildah("run", container, "--", "bash", "-c", "ls /mnt; ls /work").split() in ([], ["demo.yaml", "outputs"])
