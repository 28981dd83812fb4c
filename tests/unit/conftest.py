from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from slime_commands.init.tiny_model import write_tokenizer

from slime_core.data.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start's tokenizer: byte-level, with a chat template."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Any:
    return load_tokenizer(tokenizer_dir)
