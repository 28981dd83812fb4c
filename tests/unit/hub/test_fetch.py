"""Names of the hub in settings: which files come, from where, and one line for everything that can go wrong."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from slime_hub.fetch import local_model

from slime_core.config import Settings, load_settings
from slime_core.data.dataset import open_rows
from slime_core.errors import ConfigError
from tests.conftest import Slime, TinyRun
from tests.hub_server import TOKEN, Hub
from tests.unit.hub.conftest import DATA, MODEL, first_row

FLAGS = ["--rollout-batch-size", "4", "--rm-type", "exact", "--num-rollout", "1"]


def load(*argv: str, command: str = "train", **arguments: Any) -> Settings:
    given = [] if {"--prompt-data", "--config"} & {*argv} else ["--prompt-data", "rows.jsonl"]
    return load_settings([*FLAGS, *given, *argv], command=command, arguments=arguments)


def test_a_model_comes_at_its_commit_and_from_the_cache_the_next_time(
    hub: Hub, tmp_path: Path, tiny: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commit = hub.repos["model", MODEL].branches["main"]
    settings = load("--hf-checkpoint", MODEL, "--kl-coef", "0.1")
    found = Path(settings.args.hf_checkpoint)
    assert found.name == commit
    assert str(tmp_path / "hf") in str(found)
    assert settings.args.rollout_max_response_len is not None  # from the model's context
    assert settings.args.ref_load == str(found)
    for path in (tiny.root / "model").iterdir():
        assert (found / path.name).read_bytes() == path.read_bytes()
    pinned = f"hf:{MODEL}@{commit}"
    assert f'hf_checkpoint: "{pinned}"  # flag' in settings.to_yaml()
    assert settings.to_dict()["hf_checkpoint"] == pinned
    hub.requests.clear()
    again = load(*settings.argv[len(FLAGS) :])  # as a rank does
    assert again.args.hf_checkpoint == str(found)
    assert hub.requests == []
    assert load("--hf-checkpoint", MODEL).args.hf_checkpoint == str(found)
    assert hub.requests == [f"GET /api/models/{MODEL}/revision/main"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert load("--hf-checkpoint", MODEL).args.hf_checkpoint == str(found)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    newer = hub.add(MODEL, {**hub.repos["model", MODEL].files, "NOTES.txt": b"new"})
    assert load("--hf-checkpoint", MODEL).args.hf_checkpoint.endswith(newer)
    assert load("--hf-checkpoint", f"{MODEL}@{commit}").args.hf_checkpoint == str(found)


def test_a_cache_that_can_only_be_read(hub: Hub, tmp_path: Path) -> None:
    commit = hub.repos["model", MODEL].branches["main"]
    found = local_model(f"{MODEL}@{commit}", "")
    (tmp_path / "hf" / "hub" / f"models--{MODEL.replace('/', '--')}" / "refs" / "main").mkdir(parents=True)
    assert local_model(MODEL, "") == found


def test_a_directory_of_that_name_is_no_name_of_the_hub(
    hub: Hub, tmp_path: Path, tiny: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny.root / "model", MODEL)
    assert load("--hf-checkpoint", MODEL).args.hf_checkpoint == MODEL
    assert hub.requests == []
    assert "snapshots" in load("--hf-checkpoint", f"hf:{MODEL}").args.hf_checkpoint


def test_commands_without_settings(hub: Hub, tiny: TinyRun) -> None:
    found = local_model(MODEL, "--hf-checkpoint")
    assert Path(found).name == hub.repos["model", MODEL].branches["main"]
    assert local_model(str(tiny.root / "model"), "") == str(tiny.root / "model")
    with pytest.raises(ConfigError, match="--hf-checkpoint: no such path here, and no model org/none"):
        local_model("org/none", "--hf-checkpoint")


def test_names_in_a_file_of_another_directory(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    content = {"hf_checkpoint": MODEL, "prompt_data": f"hf:{DATA}:main[train][:20]", "eval_config": "eval.yaml"}
    Path("runs/run.yaml").write_text(yaml.safe_dump(content))
    Path("runs/eval.yaml").write_text(yaml.safe_dump({"datasets": [{"name": "held", "path": f"hf:{DATA}:main[test]"}]}))
    settings = load("--config", "runs/run.yaml")
    commit = hub.repos["dataset", DATA].branches["main"]
    assert "snapshots" in settings.args.hf_checkpoint
    assert settings.args.prompt_data.endswith(f"{commit}/sums-main-train.parquet@[:20]")
    (held,) = settings.args.eval_datasets
    assert held.path.endswith("/sums-main-test.parquet")
    model = hub.repos["model", MODEL].branches["main"]
    assert f'hf_checkpoint: "hf:{MODEL}@{model}"' in settings.to_yaml()
    assert f'prompt_data: "hf:{DATA}@{commit}:main[train][:20]"' in settings.to_yaml()
    assert f"eval.yaml  # runs/run.yaml:1, hf:{DATA}@{commit}:main[test]" in settings.to_yaml()


def test_rows_of_a_data_set(hub: Hub, tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = ["--hf-checkpoint", str(tiny.root / "model")]
    held_out = ["--eval-prompt-data", f"hf:{DATA}:hard", "--eval-interval", "1"]
    settings = load(*model, "--prompt-data", f"hf:{DATA}:main[train][10:]", *held_out)
    rows = open_rows(settings.args.prompt_data)
    assert len(rows) == 190
    assert open_rows(settings.args.prompt_data.partition("@")[0])[0] == first_row(tiny)
    (held,) = settings.args.eval_datasets
    assert (held.name, len(open_rows(held.path))) == ("sums", 5)
    hub.requests.clear()
    again = load_settings(settings.argv)  # as a rank does
    assert (again.args.prompt_data, again.args.eval_datasets) == (
        settings.args.prompt_data,
        settings.args.eval_datasets,
    )
    assert hub.requests == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert load(*model, "--prompt-data", f"hf:{DATA}:main[train][10:]").args.prompt_data == settings.args.prompt_data


FAULTS: dict[str, tuple[list[str], str]] = {
    "missing": (
        ["--hf-checkpoint", "org/none"],
        r"--hf-checkpoint 'org/none' \(flag\): no such path here, and no model",
    ),
    "private": (["--hf-checkpoint", "org/private"], r"no such path here.*for a private one set HF_TOKEN"),
    "gated": (["--hf-checkpoint", "org/gated"], r"org/gated is gated: accept its conditions there, and set HF_TOKEN"),
    "revision": (["--hf-checkpoint", f"{MODEL}@v9"], r"org/tiny has no revision 'v9'; http.*/tree/main lists"),
    "weights": (["--hf-checkpoint", "org/pickled"], r"has no config.json with safetensors"),
    "form": (["--hf-checkpoint", f"hf:{MODEL}:main"], r"a model of the hub is hf:org/name\[@revision\]"),
    "data": (["--prompt-data", "hf:org/none[train]"], r"--prompt-data 'hf:org/none\[train\]' \(flag\): no such path"),
    "rows": (["--prompt-data", f"hf:{DATA}[train][1]"], r"expected hf:org/name\[@revision\]"),
    "config": (["--prompt-data", f"hf:{DATA}[train]"], r"(?s)'main'.*name configuration and split: hf:org/sums:config"),
    "split": (["--prompt-data", f"hf:{DATA}:main[trian]"], r"trian.*train.*name configuration and split"),
    "evaluation": (["--eval-prompt-data", "a", "hf:org/none"], r"evaluation data set 'a': hf:org/none: no such"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_one_line_for_a_name_that_cannot_be_had(hub: Hub, tiny: TinyRun, case: str) -> None:
    files = hub.repos["model", MODEL].files
    hub.add("org/private", files, private=True)
    hub.add("org/gated", files, gated=True)
    hub.add("org/pickled", {"config.json": files["config.json"], "pytorch_model.bin": b"x"})
    argv, message = FAULTS[case]
    model = [] if "--hf-checkpoint" in argv else ["--hf-checkpoint", str(tiny.root / "model")]
    with pytest.raises(ConfigError, match=message) as caught:
        load(*model, *argv)
    assert "\n" not in str(caught.value)


def test_settings_that_contradict_each_other_come_first(hub: Hub) -> None:
    more = ["--n-samples-per-prompt", "3", "--global-batch-size", "5"]
    data = ["--prompt-data", f"hf:{DATA}:main[train]"]
    with pytest.raises(ConfigError, match="--global-batch-size 5"):
        load("--hf-checkpoint", MODEL, *data, *more)
    assert not [request for request in hub.requests if "safetensors" in request or "datasets" in request]
    with pytest.raises(ConfigError, match="--global-batch-size 5"):
        load("--hf-checkpoint", "org/none", *data, *more, "--rollout-max-response-len", "8")


def test_the_token_is_the_environments(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = hub.repos["model", MODEL].files
    hub.add("org/gated", files, gated=True)
    stored = tmp_path / "hf" / "token"
    stored.parent.mkdir(exist_ok=True)
    stored.write_text(TOKEN)
    with pytest.raises(ConfigError, match="is gated"):
        load("--hf-checkpoint", "org/gated")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    settings = load("--hf-checkpoint", "org/gated")
    assert "snapshots" in settings.args.hf_checkpoint
    assert TOKEN not in settings.to_yaml(whole=True)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "b" * 34)
    with pytest.raises(ConfigError, match="does not accept the token in HF_TOKEN"):
        load("--hf-checkpoint", MODEL)


def test_faults_of_the_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    weights = "/large/*"
    hub.fail(weights, times=2)  # breaks off twice, and goes on from there
    found = load("--hf-checkpoint", MODEL).args.hf_checkpoint
    assert (Path(found) / "model.safetensors").read_bytes() == hub.repos["model", MODEL].files["model.safetensors"]
    hub.add("org/other", {**hub.repos["model", MODEL].files, "model.safetensors": b"other" * 99})
    hub.fail(weights)
    with pytest.raises(ConfigError, match=r"the connection to http.*failed \(.*what was downloaded is kept"):
        load("--hf-checkpoint", "org/other")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"not in the cache .*HF_HUB_OFFLINE forbids .* hf download org/other"):
        load("--hf-checkpoint", "org/other")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    hub.faults.clear()
    assert "snapshots" in load("--hf-checkpoint", "org/other").args.hf_checkpoint
    hub.fail("/api/models/*", 429, Retry_After="70")
    with pytest.raises(ConfigError, match=r"limits the rate of requests; type the same command in 70 s; with HF_TOKEN"):
        load("--hf-checkpoint", "org/third")
    with caplog.at_level(logging.WARNING):
        assert load("--hf-checkpoint", MODEL).args.hf_checkpoint == found
    assert "using commit" in caplog.text
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"the connection to http://127.0.0.1:9 failed"):
        load("--hf-checkpoint", "org/third")


def test_commands_that_print_ask_no_server(hub: Hub) -> None:
    settings = load("--hf-checkpoint", MODEL, "--prompt-data", f"hf:{DATA}:main[train]", command="show")
    assert (settings.args.hf_checkpoint, settings.args.prompt_data) == (MODEL, f"hf:{DATA}:main[train]")
    assert hub.requests == []


@pytest.mark.slow
def test_a_run_and_its_continuation_have_the_same_commits(
    hub: Hub, slime_hub: Slime, tiny: TinyRun, tmp_path: Path
) -> None:
    run, held_out = tmp_path / "run", ["main", f"hf:{DATA}:main", "hard", f"hf:{DATA}@easier:hard[test][:2]"]
    easier = hub.repos["dataset", DATA].commit(dict(hub.repos["dataset", DATA].files), "easier")
    main = {key: hub.repos[key].branches["main"] for key in (("model", MODEL), ("dataset", DATA))}
    named = {"hf_checkpoint": MODEL, "prompt_data": f"hf:{DATA}:main[train]", "eval_prompt_data": held_out, "load": run}
    slime_hub("train", *tiny.argv(run, **named, num_rollout=1))
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["hf_checkpoint"] == f"hf:{MODEL}@{main['model', MODEL]}"
    pinned = [f"hf:{DATA}@{main['dataset', DATA]}:main[test]", f"hf:{DATA}@{easier}:hard[test][:2]"]
    assert config["eval_prompt_data"][1::2] == pinned
    for (kind, name), _ in main.items():
        hub.add(name, {**hub.repos[kind, name].files, "NOTES.txt": b"new"}, kind)
    hub.repos["dataset", DATA].commit({"README.md": b"gone"}, "easier")
    done = slime_hub("train", *tiny.argv(run, **named, num_rollout=2))
    assert "resumed from" in done.stdout
    assert "changed settings" not in done.stdout
    again = yaml.safe_load((run / "config.yaml").read_text())
    settings = ("hf_checkpoint", "prompt_data", "eval_prompt_data")
    assert [again[name] for name in settings] == [config[name] for name in settings]
