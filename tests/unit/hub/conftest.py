"""A hub on localhost with a model and a data set, and this process's libraries pointed at it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import hub_server
from tests.conftest import Slime, TinyRun
from tests.conftest import _command as command
from tests.hub_server import Hub
from tests.zygote import Zygote

MODEL, DATA = "org/tiny", "org/sums"


@pytest.fixture
def hub(tiny: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with `org/tiny` and `org/sums` (configurations `main` and `hard`, splits `train` and `test`)."""
    import datasets.config
    import huggingface_hub.constants as constants

    home = tmp_path / "hf"
    with hub_server.serving() as served:
        served.add(MODEL, tiny.root / "model")
        served.add(DATA, sums(tiny), "dataset")
        for name, value in served.environment(home).items():
            monkeypatch.setenv(name, value)
        for place, name in (("hub", "HF_HUB_CACHE"), ("assets", "HF_ASSETS_CACHE")):
            monkeypatch.setattr(constants, name, str(home / place))
        for module in (constants, datasets.config):
            monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = f"{served.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", served.url)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
        yield served


def sums(tiny: TinyRun) -> dict[str, bytes]:
    """Return the files of a data set of two configurations."""
    card = "---\nconfigs:\n" + "".join(
        f"- config_name: {config}\n  data_files:\n"
        + "".join(f"  - split: {split}\n    path: {config}/{split}.jsonl\n" for split in ("train", "test"))
        for config in ("main", "hard")
    )
    files = {"README.md": (card + "---\nSums.\n").encode()}
    for split, name in (("train", "train"), ("test", "eval")):
        rows = (tiny.root / f"{name}.jsonl").read_bytes()
        files[f"main/{split}.jsonl"] = rows
        files[f"hard/{split}.jsonl"] = b"".join(rows.splitlines(keepends=True)[:5])
    return files


def first_row(tiny: TinyRun) -> dict[str, object]:
    """Return the first row of the training data."""
    with (tiny.root / "train.jsonl").open(encoding="utf-8") as file:
        row: dict[str, object] = json.loads(file.readline())
    return row


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Compute as the other tests do."""
    torch.set_num_threads(1)


@pytest.fixture
def slime_hub(zygote: Zygote, hub: Hub) -> Slime:
    """Run the command with the hub of `hub`."""
    return command(zygote, "tests.hub_server:in_child")
