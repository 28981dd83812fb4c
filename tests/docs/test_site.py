"""Parts of the documentation site; the whole is built and looked at in `tests/browser/test_site.py`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from slime_runs.documentation import PAGES

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
    # Not all that the page leads to is written: generated pages are not there before `make docs`.
    stage, start, example = script.Stage(tmp_path), ROOT / "docs/how-to/write-a-reward.md", "examples/custom_reward.py"
    assert stage.place(start) == Path("how-to/write-a-reward.md")
    page = stage._page(start)
    assert "(../source/examples/custom_reward.py.md)" in page
    assert "(../source/plugins/rewards/README.md#signatures)" in page
    assert stage.place(ROOT / example) == Path("source/examples/custom_reward.py.md")
    assert (ROOT / example).read_text() in stage._page(ROOT / example)
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
    """Deploy as the workflow does, from a repository that has only what the script needs."""
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


def test_the_skill_names_pages_that_the_package_has() -> None:
    named = re.findall(r"`([\w-]+/[\w-]+\.md)`", (ROOT / "skills/slime/SKILL.md").read_text(encoding="utf-8"))
    assert len(named) >= 3
    assert [name for name in named if not (PAGES / name).is_file()] == []
