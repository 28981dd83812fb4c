"""Nothing that slime prints or keeps shows a key, a token or a password that it was given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slime_runs.files import json_lines

from slime_core import secrets
from slime_core.cli.main import main
from slime_core.config import load_settings

KEY = 'sk-"0123456789\\'
PASSWORD = "s3cr3tpass"
URL = f"http://me:{PASSWORD}@judge:8000/v1"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", set())


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    main(list(argv))
    captured = capsys.readouterr()
    text = captured.out + captured.err
    for secret in (KEY, PASSWORD, json.dumps(KEY)[1:-1], repr(KEY)[1:-1]):
        assert secret not in text, text
    return text


WAYS = [
    [f"--wandb-key={KEY}"],
    ["--wandb-key", KEY],
    ["--set", f"plugins.remote.url={URL}"],
    ["--set", f"plugins.mine.auth_token={KEY}"],
    ["--set", f"plugins.mine={json.dumps({'headers': {'api_key': KEY}, 'servers': [URL]})}"],
    ["--plugins", json.dumps({"mine": {"password": KEY}})],
    ["--custom-loss-function-path", URL],
    ["--rollout-external-engine-addrs", URL],
    ["--sglang-api-key", KEY, "--rollout-engine", "sglang"],
    ["--router-api-key", KEY, "--rollout-engine", "sglang"],
    ["--load", URL],
]


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
@pytest.mark.parametrize("command", [["config", "show"], ["train"]], ids=" ".join)
def test_as_flags(command: list[str], way: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Also beside a mistake, which is cited with its values."""
    told(capsys, *command, *way)
    told(capsys, *command, *way, "--lr", "much", "--plugins", "[]")


@pytest.mark.parametrize("line", [f"wandb_key: '{KEY}'", f"api_key: '{KEY}'", f"plugins: {{remote: {{url: '{URL}'}}}}",
                                  f"custom: {{hf_token: '{KEY}'}}", f"lr: '{URL}'"])  # fmt: skip
def test_in_a_file(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(line, encoding="utf-8")
    told(capsys, "config", "show", "--config", str(tmp_path / "run.yaml"))
    told(capsys, "train", "--config", str(tmp_path / "run.yaml"))


def test_in_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_WANDB_KEY", KEY)
    monkeypatch.setenv("MY_API_KEY", "0123456789abcdef")
    assert secrets.MARK in told(capsys, "config", "show")
    secrets.learn("url", "redis://:pa@ss:word@host/0,http://a:other@host")
    assert secrets.hidden("pa@ss:word other") == f"{secrets.MARK} {secrets.MARK}"
    assert secrets.hidden("it says 0123456789abcdef") == f"it says {secrets.MARK}"


def test_kept_settings_do_not_have_them_and_say_so(tmp_path: Path) -> None:
    settings = load_settings(["--set", f"plugins.remote.url={URL}", "--set", f"mine.api_key={KEY}"][:2], command="show")
    assert secrets.MARK in str(settings.to_dict()["plugins"])
    assert PASSWORD not in str(settings.to_dict())
    (tmp_path / "config.yaml").write_text(settings.to_yaml(), encoding="utf-8")
    again = ["--config", str(tmp_path / "config.yaml")]
    with pytest.raises(secrets.ConfigError, match=r"plugins .*config.yaml.*does not keep secrets; give it again"):
        load_settings(again, command="show")
    given = load_settings([*again, "--set", f"plugins.remote.url={URL}"], command="show")
    assert given.args.plugins["remote"]["url"] == URL
    assert PASSWORD in settings.to_yaml(whole=True), "what is handed to another machine's job"


def test_a_server_that_cannot_start(capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "serve", "--hf-checkpoint", f"/nowhere/{PASSWORD}", "--api-key", PASSWORD)


def test_a_bug(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Python prints its traceback."""
    (tmp_path / "sitecustomize.py").write_text(
        "import slime_core.config.load as load\n"
        f"def fail(*_, **__): raise ZeroDivisionError('at {URL}')\n"
        "load.load_settings = fail\nimport slime_core.config\nslime_core.config.load_settings = fail\n"
    )
    command = [sys.executable, "-m", "slime_core", "config", "show", "--set", f"plugins.remote.url={URL}"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert "ZeroDivisionError: at http://me:" + secrets.MARK in done.stderr
    assert PASSWORD not in done.stderr


FORMS = [
    "ghp_" + "a1" * 18, "github_pat_" + "a1" * 20, "glpat-" + "a1" * 10, "hf_" + "aB1" * 12, "sk-proj-" + "aB1" * 12,
    "xoxb-1234567890-abc", "AKIA" + "A1B2" * 4, "AIza" + "aB1" * 12, "npm_" + "aB1" * 12,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijkl",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_known_forms_are_secret_whatever_their_name(form: str) -> None:
    secrets.learn_environment({"EDITOR": f"vi {form}", "DATA": "sk-learn is a library"})
    assert form not in secrets.hidden(f"key: {form}.")
    assert secrets.hidden("sk-learn is a library; hf_hub") == "sk-learn is a library; hf_hub"


@pytest.mark.parametrize("name", ["GITHUB_PAT", "AZURE_PAT", "GITHUB_TOKEN", "MY_TOKEN", "DB_PWD", "pat", "gh-pat"])
def test_names_of_tokens_in_the_environment(name: str) -> None:
    secrets.learn_environment({name: "plain-looking-9", "PWD": "/home/someone", "SLIME_EOS_TOKEN": "endoftext"})
    assert secrets.hidden("plain-looking-9") == secrets.MARK
    assert secrets.hidden("/home/someone endoftext spat") == "/home/someone endoftext spat"


def test_samples_that_are_kept_have_none(tmp_path: Path) -> None:
    """A word or a number that is also a secret stays: it may be the name or the value of another field."""
    secrets.learn_environment({"GITHUB_PAT": "abc-123-def-456", "MY_TOKEN": "response", "DB_PWD": "12345678"})
    row = {"index": 0, "response": "12345678", "tokens": [12345678], "metadata": {"key": "abc-123-def-456"}}
    (kept,) = map(json.loads, json_lines([row]).splitlines())
    assert kept == {**row, "metadata": {"key": secrets.MARK}}
