"""The model of a commit for other programs: what is written is the trainer's, or nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_embedded.models.lora import FOLDER, LoraSettings, write_adapter
from slime_runs import Run
from slime_runs.models import gguf_file
from slime_runs.models.commit import Commit
from slime_runs.models.written import ExportError, write_model

from slime_core.checkpoint.store import CheckpointStore
from slime_core.cli.main import main
from slime_core.data.tokenizer import load_tokenizer
from slime_core.errors import ConfigError
from slime_core.models.hf_io import copy_assets, read_weights, write_weights
from tests.tiny_models import byte_tokenizer, make_model, make_text_model

__all__ = ["byte_tokenizer", "make_model", "make_text_model"]
MakeCommit = Callable[..., Commit]
LORA = {"lora_rank": 4, "lora_alpha": 8.0, "lora_target_modules": ["q_proj", "down_proj"]}


@pytest.fixture
def make_commit(make_text_model: Callable[..., tuple[Path, Any]], tmp_path: Path) -> MakeCommit:
    """Make a run with one commit of a random model, with random adapters or without."""

    def make(
        variant: str, *, lora: bool = False, dtype: torch.dtype = torch.float32, named: str = "", **config: Any
    ) -> Commit:
        model, hf = make_text_model(variant, **config)
        run = tmp_path / "run"
        run.mkdir()
        (run / "config.yaml").write_text(f"# name: value  # origin\n\nhf_checkpoint: {model}  # flag\n")
        state = {"settings": {"hf_checkpoint": named or str(model), **(LORA if lora else {})}, "plugins": []}

        def write(folder: Path) -> None:
            copy_assets(model, folder)
            (folder / "open_groups.jsonl").write_text("prompts that only slime reads\n")
            read = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**read, "dtype": str(dtype).removeprefix("torch.")}))
            write_weights(folder, ((name, tensor.to(dtype)) for name, tensor in read_weights(model)))
            if lora:
                settings = LoraSettings(4, 8.0, ("q_proj", "down_proj"))
                shapes = {name: tuple(tensor.shape) for name, tensor in read_weights(model)}
                tensors = {}
                for name in settings.select(shapes):
                    rows, columns = shapes[name]
                    module = name.removesuffix(".weight")
                    tensors[f"{module}.lora_A"] = torch.randn(4, columns) * 0.1
                    tensors[f"{module}.lora_B"] = torch.randn(rows, 4) * 0.1
                names = [name for name, _ in hf.named_modules()]
                write_adapter(folder / FOLDER, settings, tensors, names, str(model))

        CheckpointStore(run / "checkpoints").commit(0, state, [write])
        return Commit(Run(run))

    return make


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("llama", None),
        ("llama-tied", "float16"),
        ("llama-llama3-rope", None),
        ("llama-linear-rope", None),
        ("qwen2", None),
        ("qwen3", "float16"),
        ("qwen3-untied", None),
    ],
)
def test_gguf_files_hold_the_model(make_commit: MakeCommit, tmp_path: Path, variant: str, dtype: str | None) -> None:
    commit = make_commit(variant)
    proof = write_model(commit, tmp_path / "out", "gguf", dtype=dtype)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.gguf"]
    assert proof.difference < (1e-4 if dtype is None else 1e-2) * max(proof.largest, 1)
    assert proof.difference > 0 or dtype is None, "half precision rounds"
    assert (proof.sequences, proof.tokens) == (4, 4 * 48)


@pytest.mark.parametrize("variant", ["llama", "qwen2"])
def test_a_gguf_file_is_imported(
    make_commit: MakeCommit, tmp_path: Path, variant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = make_commit(variant)
    write_model(commit, tmp_path / "out", "gguf")
    file, back = tmp_path / "out" / "model.gguf", tmp_path / "back"
    assert main(["models", "import", str(file), str(back)]) == 0
    assert "largest difference of logits between slime and transformers" in capsys.readouterr().out
    found, expected = dict(read_weights(back)), dict(commit.weights())
    assert {name: torch.equal(tensor, expected[name]) for name, tensor in found.items()} == dict.fromkeys(found, True)
    assert found.keys() >= expected.keys()
    ours, theirs = load_tokenizer(back), load_tokenizer(commit.path)
    assert ours.encode("a b", add_special_tokens=False) == theirs.encode("a b", add_special_tokens=False)
    assert ours.chat_template == theirs.chat_template
    for given, target, message in (
        (file, back, "is there already"),
        (tmp_path / "none.gguf", tmp_path / "new", "no such file"),
        (tmp_path / "run" / "config.yaml", tmp_path / "new", "not a GGUF file"),
        (_cut(file, tmp_path / "cut.gguf"), tmp_path / "new", "transformers cannot read it"),
    ):
        assert main(["models", "import", str(given), str(target)]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def _cut(file: Path, target: Path) -> Path:
    target.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return target


def test_other_rows_than_the_trainers_are_noticed(
    make_commit: MakeCommit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = make_commit("llama")
    monkeypatch.setattr(gguf_file, "_permuted", lambda name, tensor, config: tensor)
    with pytest.raises(ExportError, match=r"largest difference of logits .*not the trainer's model, so nothing"):
        write_model(commit, tmp_path / "out", "gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_limit_is_the_users(make_commit: MakeCommit, tmp_path: Path) -> None:
    commit = make_commit("qwen3")
    with pytest.raises(ExportError, match="at most 1e-09"):
        write_model(commit, tmp_path / "out", "gguf", dtype="float16", limit=1e-9)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_merged_weights(make_commit: MakeCommit, tmp_path: Path, dtype: str | None) -> None:
    commit = make_commit("qwen3")
    proof = write_model(commit, tmp_path / "out", "merged", dtype=dtype)
    found = dict(read_weights(tmp_path / "out"))
    assert {tensor.dtype for tensor in found.values()} == {torch.float32 if dtype is None else torch.bfloat16}
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names.isdisjoint({"open_groups.jsonl", "state.json", "manifest.json", "trainer"})
    assert proof.difference <= proof.limit
    with pytest.raises(ConfigError, match="is there already"):
        write_model(commit, tmp_path / "out", "merged")


@pytest.mark.parametrize("form", ["peft", "merged", "gguf"])
def test_adapters(make_commit: MakeCommit, tmp_path: Path, form: str) -> None:
    commit = make_commit("llama", lora=True, named=f"hf:org/base@{'a' * 40}")
    if form == "merged":  # the commit's own files are the base's here, without its adapters
        with pytest.raises(ExportError):
            write_model(commit, tmp_path / "out", form)
        write_model(commit, tmp_path / "out", form, dtype="float16")
        return
    proof = write_model(commit, tmp_path / "out", form)
    assert proof.difference < 1e-4 * max(proof.largest, 1)
    if form == "peft":
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert names >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
        assert "config.json" not in names
        config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert (config["base_model_name_or_path"], config["revision"]) == ("org/base", "a" * 40)


@pytest.mark.parametrize(
    ("variant", "form", "dtype", "message"),
    [
        ("qwen3", "peft", None, "the run trained no adapters"),
        ("qwen3", "gguf", "bfloat16", "written in float32 or float16"),
        ("llama-biases", "gguf", None, "a llama model with biases"),
    ],
)
def test_what_cannot_be_written(
    make_commit: MakeCommit, tmp_path: Path, variant: str, form: str, dtype: str | None, message: str
) -> None:
    commit = make_commit(variant)
    with pytest.raises(ConfigError, match=message):
        write_model(commit, tmp_path / "out", form, dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
