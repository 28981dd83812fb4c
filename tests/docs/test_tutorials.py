"""The tutorials, landing page, skill and some how-to pages: every command and every block of Python in them is run.

A page has a folder, in which its blocks run in order, as they are written. The inputs that a recipe makes are there,
small, and `SLIME_...` variables make runs short; a flag on the page wins over them. Python trains 2 rollouts, not 20.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

import pytest

from tests.conftest import SLIME, TinyRun
from tests.docs.test_pages import ROOT
from tests.package_index import serving
from tests.ports import free_port
from tests.scripts import load_script
from tests.zygote import Zygote

SITE = load_script("scripts/build_site.py")
HOW_TO = (
    "data-parallel", "debug", "look-at-a-run", "rehearse", "resume", "shadow", "tools", "write-a-generate-function",
)  # fmt: skip
"""Pages whose commands need nothing from elsewhere."""
PAGES = [
    ROOT / "docs/index.md",
    *dict.fromkeys(ROOT / "docs" / link.partition("#")[0] for _, link in SITE.sections()["Tutorials"]),
    *(ROOT / f"docs/how-to/{name}.md" for name in HOW_TO),
    ROOT / "skills/slime/SKILL.md",
]
SMALL = {
    "SLIME_NUM_ROLLOUT": "2", "SLIME_ROLLOUT_BATCH_SIZE": "4", "SLIME_N_SAMPLES_PER_PROMPT": "4",
    "SLIME_SAVE_INTERVAL": "1", "SLIME_PREFLIGHT": "false", "SLIME_NUM_THREADS": "1",
    "SLIME_DYNAMIC_SAMPLING_ON_EXHAUSTED": "keep", "SLIME_OVERWRITE": "true",
}  # fmt: skip
ELSEWHERE = {
    "slime train --config smollm2.yaml": ("tests/integration/test_real_model.py", '"smollm2"'),
    "pip install dist/": ("scripts/release.py", '"install"'),
    "REPO=": ("tests/integration/test_outside.py", "REPO"),
    'pip install "slime-rl': ("tests/integration/test_outside.py", "REPO"),
}
"""Beginning of a command -> the file that runs it, and words that it has."""
STATUS = {"--failed": 1, "/failures/": 1, "why": None}
"""Part of a command -> its exit status where that is not 0: no sample failed; a run may be damaged (None: any)."""
FILES = {
    "load_model": "def load_model(path):\n    return lambda prompts, responses: [float(len(r)) for r in responses]\n"
}
"""A name that a file of a page uses and does not define -> its definition."""


class Walk:
    """A reader who follows a page."""

    def __init__(self, folder: Path, tiny: TinyRun, zygote: Zygote) -> None:
        self.folder, self._tiny, self._zygote = folder, tiny, zygote
        self.env = {**os.environ, **SMALL}
        self._blocks: list[str] = []
        self._python = ""
        self.ran = 0
        for name in ("demo", "grpo", "tools"):
            inputs = folder / "outputs" / name / "inputs"
            shutil.copytree(tiny.root / "model", inputs / "model")
            shutil.copy(tiny.root / "train.jsonl", inputs)
            shutil.copy(tiny.root / "eval.jsonl", inputs / "heldout.jsonl")
        shutil.copy(ROOT / "examples/custom_reward.py", folder / "new_reward.py")
        shutil.copytree(ROOT / "examples", folder / "examples")  # a link would lead ../outputs out of the folder

    def follow(self, text: str) -> None:
        """Run the blocks of a page, which may use run files that an earlier page has made."""
        for made in ("init demo demo.yaml", "init grpo run.yaml"):
            if made not in text and f"slime init tools {made.split()[-1]}" not in text:
                self._slime(made.split())
        if "slime view" in text and "slime train" not in text:
            self._slime(["train", "--config", "demo.yaml"])
        for language, body in re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            if language == "bash":
                for line in body.replace("\\\n", " ").splitlines():
                    self._run(line)
            elif language == "python" and (named := re.match(r"# ([\w/-]+\.py)\n", body)):
                before = "".join(code for name, code in FILES.items() if name in body)
                (self.folder / named[1]).write_text(before + body)
            elif language == "python":
                self._blocks.append(body.replace("num_rollout=20", "num_rollout=2").replace("range(20)", "range(2)"))
            elif language == "json":
                (self.folder / "rows.jsonl").write_text(body)
        self._run_blocks()

    def _run(self, line: str) -> None:
        line = line.replace("/models/judge", str(self._tiny.root / "model"))
        if not (words := self._words(line)) or any(line.startswith(begin) for begin in ELSEWHERE):
            return
        self.ran += 1
        program, *argv = words
        if argv[:1] == ["serve"]:
            self._serve(words, "/health")
        elif argv[:1] == ["view"]:
            self._serve([*words, "--port", str(free_port())], "/")
        elif Path(program).name == "slime":
            self._slime(argv)
        elif program == "torchrun" or words[:3] == ["python", "-m", "pdb"]:
            module = [] if program == "python" else ["-m", "torch.distributed.run"]
            env = {**self.env, "PET_MASTER_PORT": str(free_port())}
            command = [sys.executable, *module, *argv]
            subprocess.run(command, cwd=self.folder, env=env, input="c\nq\n", text=True, check=True, timeout=600)
        elif words[:3] == ["python", "-m", "build"]:
            command = [sys.executable, "-m", "build", "--no-isolation", "--quiet", *words[3:]]
            subprocess.run(command, cwd=self.folder, check=True, timeout=240)
        elif program == "export":
            self.env |= dict(word.split("=", 1) for word in argv)
        else:
            raise AssertionError(f"{line}: who runs it?")

    def _words(self, line: str) -> list[str]:
        """Return the words as a shell makes them of the line."""
        command = ["bash", "-c", f"set -- {line}\nprintf '%s\\0' \"$@\""]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=True)
        return done.stdout.split("\0")[:-1] if line.split("#")[0].strip() else []

    def _slime(self, argv: list[str]) -> None:
        for run in (word for word in argv if re.fullmatch(r"outputs/[ab]-\d", word)):  # seeds of two settings
            shutil.copytree(self.folder / "outputs/demo", self.folder / run)
        for commit in (self.folder / word for word in argv if word.endswith("/rollout_0000039")):
            if not commit.exists():
                shutil.copytree(sorted(commit.parent.glob("rollout_*"))[-1], commit)
        if argv[:2] == ["plugins", "install"] and not self._python:
            self._make_environment()
        if self._python:
            command = [self._python, "-m", "slime_core", *argv]
            done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=600)
        else:
            done = self._zygote.run(argv, self.env, 600, cwd=self.folder)
        line = " ".join(argv)
        status = next((status for part, status in STATUS.items() if part in line), 0)
        said = f"slime {line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert status is None or done.returncode == status, said
        assert "Traceback" not in done.stderr, said
        self._name_the_last_commit()

    def _make_environment(self) -> None:
        """Make an environment with a pip of its own, in which everything that is installed here is there, too."""
        venv.create(self.folder / "venv", with_pip=True)
        self._python = str(self.folder / "venv/bin/python")
        # That of Python 3.11's venv is older than the one that torch needs.
        subprocess.run([self._python, "-m", "pip", "uninstall", "-qy", "setuptools"], check=True, timeout=120)
        (site,) = self.folder.glob("venv/lib/python*/site-packages")
        here = [path for path in sys.path if path.endswith("site-packages")]
        (site / "here.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in here))
        self.env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PYTHONSAFEPATH": "1"}

    def _name_the_last_commit(self) -> None:
        """The pages name the commit of 40 rollouts."""
        commits = self.folder / "outputs/demo/checkpoints"
        if (found := sorted(commits.glob("rollout_*"))) and not (commits / "rollout_0000039").exists():
            shutil.copytree(found[-1], commits / "rollout_0000039")

    def _serve(self, words: list[str], path: str) -> None:
        port = words[words.index("--port") + 1]
        server = subprocess.Popen([SLIME, *words[1:]], cwd=self.folder, env=self.env)
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and server.poll() is None:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                        assert answer.status == 200
                        return
                except urllib.error.HTTPError as error:
                    if error.code == 401:  # without the token of the page
                        return
                    raise
                except OSError:
                    time.sleep(0.5)
            raise AssertionError(f"{' '.join(words)}: does not answer")
        finally:
            server.terminate()
            server.wait(timeout=60)

    def _run_blocks(self) -> None:
        """Run the blocks of Python as one script; each further block of `trainer` begins with a new one."""
        again: list[ast.stmt] = []
        script: list[str] = []
        for block in self._blocks:
            tree = ast.parse(block).body
            names = [ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else "" for node in tree]
            if "trainer" in names:
                again = tree[: names.index("trainer") + 1]
            elif "trainer." in block or "in trainer" in block:
                script += [ast.unparse(node) for node in again]
            script.append(block)
        if not script:
            return
        self.ran += len(self._blocks)
        (self.folder / "page.py").write_text("\n".join(script))
        done = self._zygote.run([], self.env, 600, program=str(self.folder / "page.py"), cwd=self.folder)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_reader_can_follow_the_page(page: Path, tiny: TinyRun, zygote: Zygote, tmp_path: Path) -> None:
    walk = Walk(tmp_path, tiny, zygote)
    with serving(tmp_path / "slime-reward-near/dist") as index:  # "publishes" what the page builds
        walk.env["PIP_INDEX_URL"] = index.url
        walk.follow(page.read_text(encoding="utf-8"))
    assert walk.ran or page.stem == "life-of-a-sample"


def test_what_runs_elsewhere_does() -> None:
    for command, (file, words) in ELSEWHERE.items():
        assert words in (ROOT / file).read_text(encoding="utf-8"), command


def test_a_newcomer_reads_at_most_25000_words() -> None:
    pages = SITE.newcomers_pages()
    assert len(pages) > 20
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 25_000
