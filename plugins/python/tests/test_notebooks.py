"""The notebooks of examples/, executed in a kernel; they are stored without outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[3] / "examples" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
LARGEST = 10_000


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)  # type: ignore[no-untyped-call]


def test_notebooks_are_small_and_without_outputs() -> None:
    assert len(NAMES) == 6
    for name in NAMES:
        assert (FOLDER / f"{name}.ipynb").stat().st_size < LARGEST
        for cell in read(name).cells:
            assert not cell.get("outputs")
            assert cell.get("execution_count") is None


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = read(name)
    for cell in book.cells:  # ten minutes of training elsewhere are one rollout here
        cell.source = cell.source.replace(
            'from_yaml("smollm2.yaml")',
            'from_yaml("smollm2.yaml", num_rollout=1, rollout_batch_size=2, n_samples_per_prompt=4)',
        )
    monkeypatch.setenv("SLIME_PREFLIGHT", "false")
    without = nbformat.v4.new_code_cell("import sys\n\nsys.modules['pytest'] = None  # which a user need not have")
    book.cells.insert(0, without)  # type: ignore[no-untyped-call]
    client = NotebookClient(book, timeout=1200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = [data for cell in book.cells for output in cell.get("outputs", ()) for data in output.get("data", {})]
    assert "text/html" in shown
