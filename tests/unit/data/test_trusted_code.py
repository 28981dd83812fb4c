"""Code that comes with a model directory is not run, and nobody is asked whether it may be."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slime_data.images import load_processor
from slime_embedded.engine import loading
from slime_models.vision_language.trained import VisionLanguageModel

from slime_core.data.tokenizer import load_tokenizer
from slime_core.errors import ConfigError
from slime_core.models.config import ModelConfig


def _model(directory: Path) -> Any:
    return VisionLanguageModel.from_directory(ModelConfig.__new__(ModelConfig), str(directory))


LOADERS: dict[str, Callable[[Path], Any]] = {
    "tokenizer": load_tokenizer,
    "engine": loading.load_tokenizer,
    "processor": load_processor,
    "model": _model,
}


@pytest.mark.parametrize("loader", LOADERS)
def test_nothing_of_the_directory_runs(loader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody at the terminal would say yes."""
    asked: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda *words: asked.append(str(words)) or "y")
    ran = tmp_path / "ran"
    (tmp_path / "theirs.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Theirs:\n    pass\n", encoding="utf-8")
    kinds = ("AutoConfig", "AutoProcessor", "AutoModelForImageTextToText")
    auto = dict.fromkeys(kinds, "theirs.Theirs")
    config = {"model_type": "theirs", "auto_map": auto | {"AutoTokenizer": ["theirs.Theirs", None]}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        own = {"tokenizer_class": "Theirs", "processor_class": "Theirs", **config}
        (tmp_path / name).write_text(json.dumps(own), encoding="utf-8")
    with pytest.raises((ConfigError, ValueError)):
        LOADERS[loader](tmp_path)
    assert not ran.exists()
    assert not asked
