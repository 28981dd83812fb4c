"""The code in the pages: Python files are written out and used as the page says, YAML and TOML are read."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from slime_testing_contracts import ScriptedService

from slime_core.plugins.resolve import resolve
from tests.conftest import Slime, TinyRun
from tests.docs.test_pages import PAGES, ROOT, blocks, page

KINDS = {
    "my_rm": "rewards",
    "my_judge": "rewards",
    "my_scores": "rewards",
    "my_rank": "rewards",
    "near_rm": "rewards",
    "my_gen": "generators",
    "my_buffer": "buffers",
    "my_world": "environments",
    "my_corridor": "environments",
    "my_turns": "estimators",
    "my_tis": "corrections",
    "my_loss": "custom_losses",
    "my_post": "slime_train_data",
    "centred_tis": "corrections",
    "my_transport": "weight_transports",
}
"""What the files of the pages are; files named `test_...` are suites, run by pytest."""


def files() -> dict[tuple[str, str], str]:
    """(page, file name) -> text, of the Python blocks that begin with `# name.py`."""
    found = {}
    for path in PAGES:
        for block in blocks(path.read_text(encoding="utf-8"), "python"):
            if match := re.match(r"# (\w+)\.py\n", block):
                found[str(path.relative_to(ROOT)), match[1]] = block
    return found


FILES = files()
plugins = pytest.mark.parametrize(
    ("source", "name"), [k for k in FILES if k[1] in KINDS], ids=lambda v: v.replace("/", "-")
)


@page
def test_blocks_can_be_read(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for block in blocks(text, "python"):
        ast.parse(block)
    for block in blocks(text, "toml"):
        tomllib.loads(block)
    for block in blocks(text, "yaml"):
        yaml.safe_load(block)
    for block in blocks(text, "json"):
        for line in block.splitlines():
            json.loads(line)


def test_the_pages_have_files() -> None:
    names = {name for _, name in FILES}
    assert names >= KINDS.keys()


@plugins
def test_plugin_files_have_an_accepted_signature(source: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text(FILES[source, name])
    resolve(KINDS[name], str(path))


@pytest.mark.slow
@pytest.mark.parametrize(("source", "name"), [k for k in FILES if k[1].startswith("test_")], ids=lambda v: v[-12:])
def test_suites_of_a_page_pass(source: str, name: str, tmp_path: Path, program: Slime) -> None:
    for (other, file), text in FILES.items():
        if other == source:
            (tmp_path / f"{file}.py").write_text(text)
    done = program("pytest", "-q", "-p", "no:cacheprovider", f"{name}.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("source", ["README.md", "docs/how-to/write-a-reward.md", "docs/plugins/index.md"])
def test_first_reward(source: str, tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    path = tmp_path / "my_rm.py"
    path.write_text(FILES[source, "my_rm"])
    done = slime("rollout", *tiny.argv(tmp_path / "run", custom_rm_path=path, num_rollout=1))
    assert "failed" not in done.stderr


def test_reward_of_readme_scores_as_it_says(tmp_path: Path) -> None:
    from slime_core import Sample, SampleStatus

    (tmp_path / "my_rm.py").write_text(FILES["README.md", "my_rm"])
    reward = resolve("rewards", str(tmp_path / "my_rm.py")).obj
    answers = {r"\boxed{94}": 1.0, r"\boxed{90}": 0.5, r"\boxed{10}": 0.0, "94": 0.0, r"\boxed{1} \boxed{94}": 1.0}
    for text, expected in answers.items():
        sample = Sample(response=text, label="94", status=SampleStatus.COMPLETED)
        assert reward(None, sample) == expected, text
        sample.status = SampleStatus.TRUNCATED
        assert reward(None, sample) == 0.0


@pytest.mark.slow
def test_generate_function_and_group_reward(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    for (_, name), text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    argv = tiny.argv(
        tmp_path / "run", num_rollout=1, rollout_max_response_len=40, group_rm=True,
        custom_rm_path=tmp_path / "my_rank.py", custom_generate_function_path=tmp_path / "my_gen.py",
    )  # fmt: skip
    done = slime("rollout", *argv)
    assert "failed" not in done.stderr
    lines = (tmp_path / "run/rollouts/rollout_0000000.jsonl").read_text().splitlines()
    assert any(" So the answer is " in json.loads(line)["response"] for line in lines)


def test_run_file_of_the_quick_start(slime: Slime, tmp_path: Path) -> None:
    block = next(b for b in blocks((ROOT / "docs/quickstart.md").read_text(), "yaml") if "hf_checkpoint" in b)
    (tmp_path / "run.yaml").write_text(block)
    done = slime("config", "show", "--for", "train", "--config", tmp_path / "run.yaml")
    assert "warning" not in done.stderr


def test_judge_over_http(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    path = tmp_path / "my_judge.py"
    path.write_text(FILES["docs/how-to/write-a-reward.md", "my_judge"])
    with ScriptedService(lambda asked: {"score": len(asked.body["response"]) / 10}) as judge:
        argv = tiny.argv(tmp_path / "run", num_rollout=1, custom_rm_path=path, rm_url=f"{judge.url}/score")
        done = slime("rollout", *argv)
    assert "failed" not in done.stderr
    lines = (tmp_path / "run/rollouts/rollout_0000000.jsonl").read_text().splitlines()
    for sample in map(json.loads, lines):
        assert sample["reward"] == pytest.approx(len(sample["response"]) / 10)


def test_loss_and_last_word_train(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    source = "docs/how-to/custom-loss.md"
    for name in ("my_loss", "my_post"):
        (tmp_path / f"{name}.py").write_text(FILES[source, name])
    flags = {
        "loss_type": "custom_loss",
        "custom_loss_function_path": tmp_path / "my_loss.py",
        "rollout_data_postprocess_path": tmp_path / "my_post.py",
    }
    slime("train", *tiny.argv(tmp_path / "run", num_rollout=1, **flags))
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["train/grad_norm"] > 0
    assert line["train/my_entropy"] > 0
