"""Proof from outside: wheels in fresh environments, no checkout in sight.

One environment has core, bundle and slime-reward-math, and a reward of a stranger's; another has the core alone, then
slime-reward-math, and then a stranger's buffer, estimator, generator and model family, written as the docs have them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

import slime_core
from tests.conftest import TinyRun
from tests.package_index import metadata_of, serving, write_wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
CORE, BUNDLE, MATH = (ROOT, ROOT / "plugins", ROOT / "plugins/rewards/math")
OF_A_RUN = [ROOT / "plugins" / name for name in ("embedded", "data", "runs", "hooks", "rewards")]
"""Distributions that every run with an embedded trainer takes something from."""
OWN = {"slime-rl-core", "slime-rl", "slime-reward-math"}

EDITED = '''"""Reward `digits_outside`: the share of digits in the response, times a factor."""

from __future__ import annotations

from typing import Any

from slime_core import PluginOptions, Sample, options


class Options(PluginOptions):
    """What a user may set."""

    factor: float = 1.0
    """Reward of a response that is all digits."""


def reward(args: Any, sample: Sample) -> float:
    """A random model learns this within a few steps."""
    digits = sum(character.isdigit() for character in sample.response)
    return options(args, "digits_outside", Options).factor * digits / max(len(sample.response), 1)
'''

EDITED_TEST = """from __future__ import annotations

from slime_testing_contracts import RewardContract


class TestDigitsOutside(RewardContract):
    component = "digits_outside"
    args = {"plugins": {"digits_outside": {"factor": 2.0}}}
    examples = [("1+1=", "12", "2", 2.0), ("1+1=", "a1", "2", 1.0), ("1+1=", "no", "2", 0.0)]
"""


def run(*command: str | Path, cwd: Path, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLIME_", "PYTHON", "PYTEST"))}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env={**kept, **env}, capture_output=True, text=True, timeout=600
    )
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@dataclass
class Outside:
    """A fresh environment in a folder of its own."""

    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "venv" / "bin"

    def slime(self, *arguments: str | Path, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        return run(self.bin / "slime", *arguments, cwd=self.folder, check=check, **env)

    def python(self, *arguments: str | Path, cwd: Path | None = None) -> str:
        return run(self.bin / "python", *arguments, cwd=cwd or self.folder).stdout

    @property
    def site(self) -> Path:
        (found,) = (self.folder / "venv").glob("lib/python*/site-packages")
        return found

    def install(self, *projects: Path) -> None:
        """Build wheels and install them, from no index."""
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
        wheels = self.folder / "wheels" / str(len(list(self.folder.glob("wheels/*"))))
        run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, *projects, cwd=self.folder)
        target = ("--python", str(self.bin / "python"))
        found = sorted(wheels.glob("*.whl"))
        assert len(found) == len(projects)
        run(*pip, *target, "install", "-q", "--no-deps", "--no-index", *found, cwd=self.folder)


def third_party_only(target: Path) -> None:
    """Links to what this interpreter's site-packages hold, slime's own distributions and editable installs left out."""
    target.mkdir()
    for site in (Path(path) for path in sys.path if path.endswith("site-packages")):
        for entry in site.iterdir():
            if (
                not entry.name.startswith(("slime", "_slime", "_editable", "__editable", "pip"))
                and entry.suffix != ".pth"
            ):
                link = target / entry.name
                if not link.exists():
                    link.symlink_to(entry)


def made(folder: Path, *projects: Path) -> Outside:
    """An environment with wheels of ours; torch and the like by path, since installing them takes minutes."""
    found = Outside(folder)
    venv.create(folder / "venv", with_pip=False)
    third_party_only(folder / "third_party")
    (found.site / "third_party.pth").write_text(f"{folder / 'third_party'}\n")
    found.install(*projects)
    return found


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Outside:
    """What `pip install slime-rl` brings."""
    return made(tmp_path_factory.mktemp("outside"), CORE, BUNDLE, MATH)


@pytest.fixture(scope="module")
def core_alone(tmp_path_factory: pytest.TempPathFactory) -> Outside:
    """What `pip install slime-rl-core` brings."""
    return made(tmp_path_factory.mktemp("core"), CORE)


def test_the_quick_starts_command_installs_a_clone(tmp_path: Path) -> None:
    clone = tmp_path / "clone"  # one whole commit: pip's partial clone of a shallow one starts processes without end
    run("git", "archive", "--output", tmp_path / "files.tar", "HEAD", cwd=ROOT)
    shutil.unpack_archive(tmp_path / "files.tar", clone, filter="fully_trusted")
    for words in ("init", "add --all --force", "-c user.name=a -c user.email=a@localhost commit -q -m all"):
        run("git", *words.split(), cwd=clone)
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    named = [
        words.replace("$REPO", f"git+file://{tmp_path}/clone") for words in re.findall(r'"([^"]+\$REPO[^"]*)"', page)
    ]
    assert {words.split()[0] for words in named} == OWN
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--target", tmp_path / "site", *named, cwd=tmp_path)
    assert {dist.name for dist in metadata.distributions(path=[str(tmp_path / "site")])} == OWN


PARTS = {
    "pyproject.toml": """[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "acme-parts"
version = "1.0"
dependencies = ["slime-rl-core"]

[project.entry-points."slime.buffers"]
acme_buffer = "acme_parts:buffer_filter"

[project.entry-points."slime.generators"]
acme_generate = "acme_parts:generate"

[project.entry-points."slime.estimators"]
acme_estimator = "acme_parts:Centred"

[project.entry-points."slime.models"]
qwen3 = "acme_parts:model"
""",
    "acme_parts/__init__.py": """from slime_core import EstimatorBase, GenerateContext, Group, RewardInputs, Sample
from slime_core.models.config import ModelConfig
from slime_core.ops import group_normalize


def buffer_filter(args, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    taken = buffer[:num_samples]
    del buffer[: len(taken)]
    return taken


async def generate(args, sample: Sample, sampling_params: dict, *, context: GenerateContext) -> Sample:
    room = sampling_params["max_new_tokens"] - sample.response_length
    output = await context.engine.generate(sample.tokens, {**sampling_params, "max_new_tokens": room})
    sample.append_response_tokens(
        args, output.token_ids, output.log_probs, meta_info=output.meta_info, text=output.text
    )
    return sample


class Centred(EstimatorBase):
    def shape_rewards(self, args, inputs: RewardInputs) -> list[float]:
        return group_normalize(inputs.rewards, inputs.group_indices, False, inputs.rollout_ids)


def model(hf) -> ModelConfig:
    return ModelConfig.from_hf(hf, qk_norm=True)
""",
}
"""What a run cannot do without, from docs/plugins/{buffers,generators,estimators,models}.md."""


@pytest.fixture(scope="module")
def parts(core_alone: Outside) -> dict[str, str]:
    """The flags that select them, once they are installed beside the core, what a run needs, and slime-reward-math."""
    folder = core_alone.folder / "acme"
    for name, text in PARTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    core_alone.install(folder, *OF_A_RUN, MATH)
    return {
        "buffer_filter_path": "acme_buffer",
        "custom_generate_function_path": "acme_generate",
        "advantage_estimator": "acme_estimator",
    }


@pytest.fixture(scope="module")
def stranger(outside: Outside) -> Path:
    """A plugin made by `slime plugins new`, edited, tested and installed, all of it outside."""
    outside.slime("plugins", "new", "rewards", "digits_outside", "--dir", outside.folder / "work")
    folder = outside.folder / "work" / "slime-reward-digits-outside"
    checked = outside.slime("plugins", "check", folder).stdout
    assert checked.startswith("ok ")
    assert "tests passed" in checked
    (folder / "slime_reward_digits_outside" / "__init__.py").write_text(EDITED)
    (folder / "tests" / "test_contract.py").write_text(EDITED_TEST)
    assert outside.slime("plugins", "check", folder).stdout.startswith("ok ")
    outside.install(folder)
    return folder


def test_no_checkout_is_in_sight(outside: Outside) -> None:
    code = "import slime_core, sys; from slime_core.plugins.discovery import checkout_root; print(slime_core.__file__)"
    code += "; print(checkout_root()); print([p for p in sys.path])"
    file, root, path = outside.python("-c", code).splitlines()
    assert Path(file).is_relative_to(outside.folder / "venv")
    assert root == "None"
    assert str(ROOT) + "'" not in path
    names = {row["distribution"] for row in json.loads(outside.slime("plugins", "list", "--json").stdout)}
    assert names - {"slime-reward-digits-outside"} == OWN


def sources(folder: Path) -> set[str]:
    """Files below a folder of the checkout, by path from its parent."""
    files = (file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {file.relative_to(folder.parent).as_posix() for file in files}


def packaged(environment: Outside, distribution: str) -> set[str]:
    """Files that a wheel brought, metadata and commands apart."""
    record = (
        environment.site / f"{distribution.replace('-', '_')}-{slime_core.__version__}.dist-info" / "RECORD"
    ).read_text()
    names = {line.split(",")[0] for line in record.splitlines()}
    assert any(".dist-info/licenses/LICENSE" in name for name in names), f"{distribution} has no licence"
    return {name for name in names if ".dist-info/" not in name.partition("/")[0] + "/" and not name.startswith("..")}


def test_each_wheel_has_all_of_its_packages_and_nothing_else(outside: Outside) -> None:
    """Data files, markers and SGLang's `.dist-info` of a plugin included; neither tests nor folders of the checkout."""
    packages = [package for depth in ("*", "*/*") for package in ROOT.glob(f"plugins/{depth}/slime_*")]
    of_bundle = {name for package in packages if package.parent != MATH for name in sources(package)}
    pages = {file.relative_to(ROOT / "docs") for file in (ROOT / "docs").rglob("*") if file.is_file()}
    of_bundle |= {f"slime_runs/pages/{page}" for page in pages if page.parts[0] not in ("images", "reference")}
    assert {name for name in packaged(outside, "slime-rl-core") if not name.endswith(".pyc")} == sources(
        ROOT / "slime_core"
    )
    assert {name for name in packaged(outside, "slime-rl") if not name.endswith(".pyc")} == of_bundle
    assert {name for name in packaged(outside, "slime-reward-math") if not name.endswith(".pyc")} == sources(
        MATH / "slime_reward_math"
    )


def test_source_distributions_build_the_same_wheels(outside: Outside, tmp_path: Path) -> None:
    for number, project in enumerate((CORE, BUNDLE, MATH)):
        out = tmp_path / str(number)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, project, cwd=tmp_path)
        (built,), (kept,) = out.glob("*.whl"), outside.folder.glob(f"wheels/0/{next(out.glob('*.whl')).name}")
        assert zipfile.ZipFile(built).namelist() == zipfile.ZipFile(kept).namelist()


def test_the_quick_start_learns(outside: Outside, tmp_path: Path) -> None:
    """`slime init`, `slime train` and nothing else."""
    run(outside.bin / "slime", "init", "demo", "run.yaml", cwd=tmp_path)
    run(outside.bin / "slime", "train", "--config", "run.yaml", "--num-rollout", "16", cwd=tmp_path)
    summary = json.loads((tmp_path / "outputs" / "demo" / "summary.json").read_text())
    assert summary["eval_after"] > summary["eval_before"] + 0.2
    assert summary["versions"]["slime-rl-core"] == summary["versions"]["slime-rl"] == slime_core.__version__
    if (ROOT / "plugins/runs/slime_runs/view/built/main.js").is_file():  # make view-assets
        run(outside.bin / "slime", "report", "outputs/demo", cwd=tmp_path, PATH="")  # without Node
        assert "uplot" in (tmp_path / "report.html").read_text()


def test_the_core_alone_says_what_brings_the_rest(core_alone: Outside, tiny: TinyRun) -> None:
    done = core_alone.slime("train", *tiny.argv(buffer_filter_path="fifo"), check=False)
    assert done.returncode == 2
    assert "buffers/fifo" in done.stderr
    assert done.stderr.endswith("pip install slime-rl\n")


@pytest.mark.parametrize("reward", [None, "math"])
def test_the_core_trains_with_strangers_parts(
    reward: str | None, core_alone: Outside, parts: dict[str, str], tiny: TinyRun, tmp_path: Path
) -> None:
    """Without most of slime's plugins; by a reward in a file, and by slime-reward-math."""
    chosen = {"custom_rm_path": reward} if reward else {}
    argv = tiny.argv(tmp_path / "run", num_rollout=2, no_preflight=False, **parts, **chosen)
    core_alone.slime("train", *argv)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "slime-rl" not in summary["versions"]
    used = {plugin["kind"]: (plugin["name"], plugin["distribution"]) for plugin in summary["plugins"]}
    assert {kind: used[kind] for kind in ("buffers", "estimators", "generators")} == {
        "buffers": ("acme_buffer", "acme-parts"),
        "estimators": ("acme_estimator", "acme-parts"),
        "generators": ("acme_generate", "acme-parts"),
    }
    if reward:
        assert used["rewards"] == ("math", "slime-reward-math")


KIT = """
def test_a_run(run_loop):
    run = run_loop(steps=2, custom_rm_path="my_rm.py:good")
    assert len(run.steps) == len(run.samples) == 2
    assert run.weight_checksums


def test_an_engine(scripted_engine, tiny_model_dir):
    assert (tiny_model_dir / "config.json").is_file()
    assert scripted_engine("one").requests == []
"""
KIT_REWARDS = """
def good(args, sample):
    return float(sample.response.strip() == str(sample.label))

def bad(args, sample):
    return float(len(sample.label))
"""


def test_the_kit_is_in_the_wheel(outside: Outside, tmp_path: Path) -> None:
    """Contracts without code, and the fixtures, from an empty folder."""
    (tmp_path / "my_rm.py").write_text(KIT_REWARDS)
    (tmp_path / "test_kit.py").write_text(KIT)
    pytest_run = (outside.bin / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    bare = (*pytest_run, "--pyargs", "slime_testing_contracts.components", "--slime-component")
    assert " passed" in run(*bare, "rewards:./my_rm.py:good", cwd=tmp_path).stdout
    bad = run(*bare, "rewards:./my_rm.py:bad", cwd=tmp_path, check=False)
    assert bad.returncode == 1
    assert "raise a ValueError that names a label which the reward cannot read" in bad.stdout
    assert "2 passed" in run(*pytest_run, "test_kit.py", cwd=tmp_path).stdout


def test_a_strangers_plugin_is_shown_with_where_it_comes_from(outside: Outside, stranger: Path) -> None:
    shown = outside.slime("plugins", "show", "rewards/digits_outside").stdout
    assert "slime-reward-digits-outside 0.1.0" in shown
    assert str(outside.folder / "venv") in shown
    assert "plugins.digits_outside.factor" in shown
    assert outside.slime("doctor").stdout.endswith("0 errors, 0 warnings\n")


def test_plugins_of_an_index_come_and_go_by_pip(outside: Outside, tmp_path: Path) -> None:
    """A wheel that `slime plugins new` and `build` made, an index on this machine, and pip of the environment."""
    outside.python("-m", "ensurepip")
    outside.slime("plugins", "new", "rewards", "of_index", "--dir", tmp_path)
    folder, wheels, name = tmp_path / "slime-reward-of-index", tmp_path / "wheels", "slime-reward-of-index"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", wheels, folder, cwd=tmp_path)
    (built,) = wheels.glob("*.whl")
    assert {"slime-plugin", "Apache-2.0"} <= set(metadata_of(built).decode().replace("\n", " ").split())
    write_wheel(wheels, "slime-not-one")
    write_wheel(wheels, "slime-reward-newer", entry_points="[slime.rewards]\nn = m:f\n", requires=("slime-rl-core>9",))
    write_wheel(wheels, "part", "1.0")
    write_wheel(wheels, "part", "2.0")
    write_wheel(wheels, "other-part", requires=("part>1",))
    clashing = ("part<2", "other-part")
    write_wheel(wheels, "slime-clash", entry_points="[slime.rewards]\nc = m:f\n", requires=clashing)
    with serving(wheels) as index:
        settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_INDEX_URL": index.url}

        def plugins(*words: str | Path, status: int = 0) -> str:
            done = outside.slime("plugins", *words, check=False, **settings)
            assert done.returncode == status, done.stdout + done.stderr
            return done.stdout + done.stderr

        before = outside.python("-m", "pip", "freeze", "--all")
        assert [name, "0.1.0", "-"] in [line.split()[:3] for line in plugins("search").splitlines()]
        assert "slime-not-one 1.0 is no plugin of slime" in plugins("install", "slime-not-one", status=2)
        newer = "slime-reward-newer 1.0 needs slime-rl-core>9, and 0.1.0 is installed"
        assert newer in plugins("install", "slime-reward-newer", status=2)
        assert "other-part 1.0 depends on part>1" in plugins("install", "slime-clash", status=2)
        assert outside.python("-m", "pip", "freeze", "--all") == before, "nothing is installed"
        said = plugins("install", name)
        assert f"installed {name} 0.1.0: rewards/of_index\nok    rewards/of_index ({name} 0.1.0): version, load" in said
        assert "tests passed" in said
        assert f"{name}==0.1.0\n" in outside.python("-m", "pip", "freeze"), "by name, not by a file that is gone"
        assert "is installed already" in plugins("install", built, status=2)
        assert f"uninstalled {name}\n" in plugins("uninstall", "--yes", name)
        assert f"installed {name} 0.1.0" in plugins("install", built, "--no-check")
        plugins("uninstall", "--yes", name)
        assert outside.python("-m", "pip", "freeze", "--all") == before


def test_a_strangers_engine_trainer_launcher_and_command_are_used(
    outside: Outside, tiny: TinyRun, tmp_path: Path
) -> None:
    """As `slime plugins new` writes them; their contract suites are run with those of all templates."""
    kinds = ("engine", "trainer", "launcher", "command")
    for kind in kinds:
        outside.slime("plugins", "new", kind, "acme_plain", "--dir", tmp_path)
    outside.install(*(tmp_path / f"slime-{kind}-acme-plain" for kind in kinds))
    listed = json.loads(outside.slime("plugins", "list", "--json").stdout)
    found = {row["kind"] for row in listed if row["name"] == "acme_plain"}
    assert found == {f"{kind}s" for kind in kinds}
    checked = outside.slime("plugins", "check", "--no-contract", *(f"{kind}/acme_plain" for kind in sorted(found)))
    assert checked.stdout.count("ok ") == 4
    assert "acme-plain    the last value" in outside.slime("--help").stdout
    flags = {**dict.fromkeys(("rollout_engine", "train_backend", "launcher"), "acme_plain"), "use_kl_loss": True}
    outside.slime("train", *tiny.argv(tmp_path / "run", num_rollout=2, **flags))
    outside.slime("train", *tiny.argv(tmp_path / "run", num_rollout=3, load=tmp_path / "run", **flags))
    shown = outside.slime("acme-plain", tmp_path / "run", "--prefix", "train/").stdout
    assert "train/loss " in shown
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    used = {plugin["kind"]: plugin["distribution"] for plugin in summary["plugins"]}
    assert (used["engines"], used["trainers"]) == ("slime-engine-acme-plain", "slime-trainer-acme-plain")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "train/loss" in line]
    assert len(trained) == 3
    assert all(line["train/train_rollout_logprob_abs_diff"] < 1e-3 for line in trained)
