from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from slime_runs.inspect.token_checks import FAILED, NOTE, OK, check_tokens

from slime_core.cli.main import main
from tests.chat_tokenizers import chat_tokenizer, save


def findings(family: str, stop: tuple[str, ...] = (), **changes: Any) -> dict[str, tuple[str, str]]:
    tokenizer = copy.deepcopy(chat_tokenizer(family))
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    found = check_tokens(tokenizer, frozenset(tokenizer.convert_tokens_to_ids(list(stop))))
    return {f.name: (f.status, f.text) for f in found}


@pytest.mark.parametrize(
    ("family", "notes"),
    [
        ("qwen2.5", {"system_prompt", "delta_tools"}),
        ("qwen3", {"append_only", "append_only_tools", "append_only_reasoning", "delta_user", "delta_tools"}),
        ("llama3", set()),
        ("glm4", {"delta_tools"}),
        ("deepseek", {"append_only_reasoning"}),
    ],
)
def test_families(family: str, notes: set[str]) -> None:
    found = findings(family, stop=("<|user|>", "<|observation|>") if family == "glm4" else ())
    assert {name for name, (status, _) in found.items() if status == NOTE} == notes
    assert {name for name, (status, _) in found.items() if status == FAILED} == set()
    assert len(found) == 11


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "check", "status", "text"),
    [
        (TEMPLATE + PROMPT, "append_only", OK, "6 messages"),
        ("{% if add_generation_prompt %}<|im_start|>{% endif %}" + TEMPLATE, "generation_prompt", FAILED,
         "character 12"),
        (TEMPLATE + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}", "generation_prompt",
         NOTE, "supervised fine-tuning on such turns is refused"),
        ("{{ messages | length }}" + TEMPLATE + PROMPT, "append_only", NOTE, "rewrites history"),
        (TEMPLATE.replace("m.content", "''") + PROMPT, "delta_user", FAILED, "0 times"),
        (TEMPLATE.replace("<|im_end|>", "" ) + PROMPT, "end_of_turn", FAILED, "a turn ends with '\\n'"),
        ("{% for m in messages %}{% if m.role != 'tool' %}" + TEMPLATE[23:-12] + "{% endif %}{% endfor %}" + PROMPT,
         "delta_tools", NOTE, "leaves out what tools answer"),
        ("{% for m in messages %}{% if m.role != 'system' %}" + TEMPLATE[23:-12] + "{% endif %}{% endfor %}" + PROMPT,
         "system_prompt", NOTE, "leaves out system messages"),
    ],
)  # fmt: skip
def test_templates_of_every_fault(template: str, check: str, status: str, text: str) -> None:
    found = findings("qwen2.5", chat_template=template)
    assert found[check][0] == status, found[check]
    assert text in found[check][1]


def test_a_tokenizer_without_template_or_end() -> None:
    found = findings("qwen2.5", chat_template=None, eos_token=None)
    assert set(found) == {"round_trip", "special_tokens", "chat_template"}
    assert found["special_tokens"] == (FAILED, "there is no eos_token; name it in tokenizer_config.json")


# -- the command -----------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save("qwen3", tmp_path / "model")
    assert main(["tokens", "check", str(model)]) == 0
    out = capsys.readouterr().out
    assert "note    append_only_reasoning  the template rewrites history" in out
    assert f"{model}: the template rewrites history (append_only, append_only_tools, append_only_reasoning)" in out
    assert out.endswith(f"{model}: 0 of 11 checks failed\n")


def test_the_command_as_json_with_another_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, template = save("glm4", tmp_path / "model"), tmp_path / "mine.jinja"
    assert main(["tokens", "check", str(model), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == ["end_of_turn"]
    stops = chat_tokenizer("glm4").convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    assert main(["tokens", "check", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == []
    template.write_text("{% for m in messages %}{{ m.content + m.content }}{% endfor %}")
    assert main(["tokens", "check", str(model), "--chat-template", str(template), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["chat_template"] == str(template)
    assert "delta_user" in answer["failed"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "no such directory"),
        (["{model}", "--chat-template", "nowhere.jinja"], "--chat-template nowhere.jinja: cannot be read"),
        (["{model}", "--apply-chat-template-kwargs", "[1]"], "expected a JSON object"),
    ],
)
def test_what_cannot_be_checked(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(save("qwen3", tmp_path / "model"))
    assert main(["tokens", "check", *(word.replace("{model}", model) for word in argv)]) == 2
    assert message in capsys.readouterr().err


def test_a_tokenizer_that_loses_text() -> None:
    from tokenizers import normalizers

    tokenizer = copy.deepcopy(chat_tokenizer("qwen2.5"))
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    (found,) = (finding for finding in check_tokens(tokenizer) if finding.name == "round_trip")
    assert (found.status, "differ at character 0: 'The quick" in found.text) == (FAILED, True)
