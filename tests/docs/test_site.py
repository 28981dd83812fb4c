"""The documentation site: its parts quickly, and the whole, built without a network, where zensical is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from scripts import generate_docs
from tests.docs.test_pages import ROOT
from tests.scripts import load_script

ORDER = ["Tutorials", "How to", "Concepts", "Engines and trainers", "Plugins", "Reference", "Internals"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("scripts/build_site.py")


def test_the_index_is_the_navigation(script: ModuleType, tmp_path: Path) -> None:
    assert list(script.sections()) == ORDER
    tutorials = dict(script.sections()["Tutorials"])
    assert tutorials["A real model"] == "quickstart.md#a-real-model"
    stage = script.Stage(tmp_path)
    nav = script.navigation(stage)
    assert nav.startswith('[{"Home" = "index.md"}, {"Tutorials" = [{"Quick start" = "quickstart.md"}')
    assert '{"Twelve files to read" = "source/slime_core/README.md"}' in nav
    assert '{"Python API" = "reference/api.md"}' in nav


def test_links_out_of_docs_lead_to_pages(script: ModuleType, tmp_path: Path) -> None:
    stage = script.Stage(tmp_path)
    stage.write([ROOT / "docs/how-to/write-a-reward.md"])
    page = (tmp_path / "how-to/write-a-reward.md").read_text()
    assert "(../source/examples/custom_reward.py.md)" in page
    assert "(../source/plugins/rewards/README.md#signatures)" in page
    shown = (tmp_path / "source/examples/custom_reward.py.md").read_text()
    assert (ROOT / "examples/custom_reward.py").read_text() in shown
    assert "```python\n# my_rm.py\n" in page  # blocks are as they were


def test_what_leads_nowhere_is_found(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="x">x</h1><a href="a/">a</a><a href="a/#y">y</a><a href="a/#no">no</a><a href="#x">x</a>'
        '<a href="gone/">gone</a><a href="https://example.org/">out</a><img src="https://example.org/pixel.png">'
    )
    (tmp_path / "a/index.html").write_text('<h2 id="y">y</h2><a href="..">up</a><script src="../no.js"></script>')
    assert script.broken_links(tmp_path) == [
        "index.html: a/#no", "index.html: gone/", "index.html: https://example.org/pixel.png",
        "a/index.html: ../no.js",
    ]  # fmt: skip


def test_versions_are_kept_side_by_side(script: ModuleType, tmp_path: Path) -> None:
    site, pages = tmp_path / "site", tmp_path / "pages"
    site.mkdir()
    for number, version in enumerate(["dev", "0.1", "dev", "0.2", "dev"]):
        (site / "index.html").write_text(f"build {number}")
        script.add_version(site, version, pages)
    assert {v["version"]: v["aliases"] for v in json.loads((pages / "versions.json").read_text())} == {
        "dev": [], "0.2": ["latest"], "0.1": [],
    }  # fmt: skip
    assert "url=0.2/" in (pages / "index.html").read_text()
    assert "url=../0.2/" in (pages / "latest/index.html").read_text()
    built = {version: (pages / version / "index.html").read_text() for version in ("dev", "0.1", "0.2")}
    assert built == {"dev": "build 4", "0.1": "build 1", "0.2": "build 3"}


def test_it_is_deployed_to_a_branch(tmp_path: Path) -> None:
    """As the workflow does it, in a repository that has only what the script needs."""
    origin, work = tmp_path / "origin.git", tmp_path / "work"

    def git(*words: str | Path) -> str:
        named = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(work)]
        return subprocess.run([*named, *words], check=True, capture_output=True, text=True).stdout

    subprocess.run(["git", "init", "-q", "--bare", origin], check=True)
    for file in (".github/deploy_site", "scripts/build_site.py"):
        (work / file).parent.mkdir(parents=True)
        shutil.copy(ROOT / file, work / file)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    git("remote", "add", "origin", origin)
    (work / "build/site").mkdir(parents=True)
    (work / "build/site/index.html").write_text("the page")
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    for ref in ("refs/heads/main", "refs/tags/v0.1.0", "refs/tags/v0.1.0"):
        done = subprocess.run([".github/deploy_site", ref], cwd=work, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    files = git("-C", origin, "ls-tree", "-r", "--name-only", "gh-pages").split()
    assert files == [
        ".nojekyll", "0.1/index.html", "dev/index.html", "index.html", "latest/index.html", "versions.json",
    ]  # fmt: skip
    assert git("-C", origin, "log", "--format=%s", "gh-pages").split("\n")[:2] == [
        "Deploy the site of 0.1", "Deploy the site of dev",
    ]  # fmt: skip
    assert git("worktree", "list").count("\n") == 1


def test_the_workflow_runs_what_there_is() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/site.yml").read_text(encoding="utf-8"))
    ran = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert ran == ["make site", '.github/deploy_site "$GITHUB_REF"']
    assert os.access(ROOT / ".github/deploy_site", os.X_OK)
    assert re.search(r"^site: ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_references_of_the_skill_are_those_of_the_code() -> None:
    folder = generate_docs.SKILL_REFERENCES
    assert {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()} == generate_docs.skill_pages(), (
        "run `make docs`"
    )


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("zensical"), reason="zensical is not installed: make site")
def test_the_site_is_built_and_every_link_leads_somewhere(script: ModuleType) -> None:
    site = script.build()
    assert script.broken_links(site) == []
    home = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="images/view/run.png"' in home
    assert "slime train --config demo.yaml" in re.sub(r"<[^>]+>", "", home)
    api = re.sub(r"<[^>]+>", "", (site / "reference/api/index.html").read_text(encoding="utf-8"))
    assert "Prompt group of the sample; unique over the run" in api
    for page in ("flags", "commands", "hooks", "plugins"):
        assert (site / f"reference/{page}/index.html").is_file()
    assert (site / "search.json").is_file()
