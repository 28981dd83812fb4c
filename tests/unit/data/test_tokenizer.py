from __future__ import annotations

import builtins
import copy
import json
import multiprocessing
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from slime_data.images import load_processor
from slime_embedded.engine import loading
from slime_models.vision_language.trained import VisionLanguageModel

from slime_core.config import Args
from slime_core.data.tokenizer import encode_prompt, encode_text, load_tokenizer
from slime_core.errors import ConfigError, DataError
from slime_core.models.config import ModelConfig

PLAIN = Args(apply_chat_template=False, apply_chat_template_kwargs={})
CHAT = Args(apply_chat_template=True, apply_chat_template_kwargs={})


def with_template(source: Path, target: Path, template: str | None, **settings: Any) -> Any:
    shutil.copytree(source, target)
    config = json.loads((target / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    (target / "chat_template.jinja").unlink()
    if template is not None:
        (target / "chat_template.jinja").write_text(template)
    (target / "tokenizer_config.json").write_text(json.dumps({**config, **settings}))
    return load_tokenizer(target)


def test_tools_and_keyword_arguments_reach_the_template(tokenizer_dir: Path, tmp_path: Path) -> None:
    template = (
        "{{ tools[0]['function']['name'] if tools else 'no tools' }}/{{ mood }}/{{ messages[0]['content'] }}"
        "{{ '>' if add_generation_prompt else '.' }}"
    )
    tokenizer = with_template(tokenizer_dir, tmp_path / "t", template)
    args = Args(apply_chat_template=True, apply_chat_template_kwargs={"mood": "calm"})
    tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
    assert tokenizer.decode(encode_prompt(tokenizer, "hi", args, tools)) == "search/calm/hi>"
    args.apply_chat_template_kwargs = {"mood": "calm", "add_generation_prompt": False}
    assert tokenizer.decode(encode_prompt(tokenizer, "hi", args)) == "no tools/calm/hi."


def test_a_missing_template_names_the_directory(tokenizer_dir: Path, tmp_path: Path) -> None:
    tokenizer = with_template(tokenizer_dir, tmp_path / "bare", None)
    with pytest.raises(DataError, match=r"bare has no chat template, which chat messages and"):
        encode_prompt(tokenizer, "hi", CHAT)
    assert encode_prompt(tokenizer, "hi", PLAIN)


def with_added_tokens(source: Path, directory: Path, before: list[str], after: list[str], bos: str | None) -> Any:
    """The tokenizer of `source`, whose post-processor puts special tokens around every text."""
    shutil.copytree(source, directory)
    raw = json.loads((directory / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in raw["added_tokens"]}
    single = [{"SpecialToken": {"id": token, "type_id": 0}} for token in before]
    single += [{"Sequence": {"id": "A", "type_id": 0}}]
    single += [{"SpecialToken": {"id": token, "type_id": 0}} for token in after]
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in {*before, *after}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(raw))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": bos}))
    return load_tokenizer(directory)


@pytest.mark.parametrize(
    ("before", "after", "bos"),
    [
        (["<|system|>"], [], "<|system|>"),
        (["<|system|>"], ["<|end|>"], "<|system|>"),  # add_eos_token
        ([], ["<|end|>"], None),
        (["<|system|>", "<|user|>"], ["<|end|>"], None),  # GLM-4: two leading tokens, no bos_token
        ([], [], "<|system|>"),  # a bos_token that no text begins with
    ],
)
def test_a_text_begins_as_the_model_wants_and_does_not_end(
    tokenizer_dir: Path, tmp_path: Path, before: list[str], after: list[str], bos: str | None
) -> None:
    tokenizer = with_added_tokens(tokenizer_dir, tmp_path / "added", before, after, bos)
    leading, seven = [[tokenizer.convert_tokens_to_ids(t) for t in tokens] for tokens in (before, ["7"])]
    assert encode_text(tokenizer, "7") == leading + seven
    assert encode_text(tokenizer, "".join(before) + "7") == leading + seven
    assert encode_text(tokenizer, "") == leading
    chat = encode_prompt(tokenizer, "7", CHAT)  # a template writes its own
    assert chat == tokenizer.encode("<|user|>7<|end|><|assistant|>", add_special_tokens=False)


@pytest.mark.parametrize("place", ["the main thread", "other threads", "a forked process"])
def test_a_template_that_takes_for_ever_is_ended(
    tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr("slime_core.data.tokenizer._TEMPLATE_S", 0.2)
    tokenizer = load_tokenizer(tokenizer_dir)
    loop = "{% for i in range(99999) %}"
    tokenizer.chat_template = f"{loop * 3}{'{% endfor %}' * 3}x"

    def ended(_: int = 0) -> bool:
        with pytest.raises(DataError, match=r"the chat template took longer than 0\.2 s and was ended"):
            encode_prompt(copy.copy(tokenizer), "hi", CHAT)
        return True

    if place == "other threads":
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(ended, range(2))) == [True, True]
    elif place == "a forked process":
        assert ended()  # its thread is not there after the fork
        process = multiprocessing.get_context("fork").Process(target=ended)
        process.start()
        process.join(60)
        assert process.exitcode == 0
    else:
        assert ended()
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert encode_prompt(tokenizer, "7", CHAT) == [tokenizer.convert_tokens_to_ids("7")]


def metaspace(raw: dict[str, Any]) -> None:
    part = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True}
    raw["pre_tokenizer"] = raw["decoder"] = part


def byte_level(raw: dict[str, Any]) -> None:
    part = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    raw["pre_tokenizer"] = raw["decoder"] = part


def lower_case(raw: dict[str, Any]) -> None:
    raw["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}


@pytest.mark.parametrize("kind", [metaspace, byte_level, lower_case])
@pytest.mark.parametrize("said", ["PreTrainedTokenizerFast", "Qwen2TokenizerFast", None])
@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_a_tokenizer_is_the_one_that_transformers_chooses(
    kind: Any, said: str | None, model: str, tokenizer_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    directory = tmp_path / "kind"
    shutil.copytree(tokenizer_dir, directory)
    for name, change in (
        ("tokenizer.json", kind),
        ("tokenizer_config.json", lambda raw: raw.update(tokenizer_class=said, extra_special_tokens=["<tool>"])),
        ("config.json", lambda raw: raw.update(model_type=model)),
    ):
        raw = json.loads((directory / name).read_text()) if (directory / name).is_file() else {}
        change(raw)
        (directory / name).write_text(json.dumps(raw))
    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert type(ours) is type(theirs)
    assert ours.special_tokens_map == theirs.special_tokens_map
    for text in ("37 + 48 = ?", " Add <|end|>1\n", "<tool>7</tool>"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


# -- code that comes with a model directory is not run, and nobody is asked whether it may be ------------


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
