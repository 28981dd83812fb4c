"""Launchers, and the YAML for Kubernetes and SkyPilot: every field exists in the API."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from slime_submit.command import run
from slime_testing_contracts import CommandContract, LauncherContract

from slime_core.errors import ConfigError

RUN = ["--hf-checkpoint=m", "--prompt-data=d.jsonl", "--num-rollout=1", "--rollout-batch-size=1"]
RUN += ["--rollout-max-response-len=4", "--custom-rm-path=rm.py:reward", "--drain-timeout=100"]
OWN = ["--dry-run", "--no-check", "--directory=/data/work", "--image=me/slime:1"]


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """(options of submit) -> the YAML documents."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rm.py").write_text("def reward(args, sample):\n    return 1.0  # 'END_OF_FILE'\n")

    def submit(*words: str) -> list[Any]:
        assert run([*OWN, *words, "train", *RUN, "--run-dir=my Run"]) == 0
        return list(yaml.safe_load_all(capsys.readouterr().out))

    return submit


def check(value: Any, kind: str, where: str) -> None:
    """Every field of a value is one of the OpenAPI model and of its type, and none that it needs is absent."""
    from kubernetes import client

    if match := re.fullmatch(r"(list|dict)[\[(](?:str, ?)?(.+)[\])]", kind):
        assert isinstance(value, {"list": list, "dict": dict}[match[1]]), where
        for key, inner in value.items() if match[1] == "dict" else enumerate(value):
            check(inner, match[2], f"{where}.{key}")
        return
    if kind in ("str", "int", "bool"):
        assert type(value).__name__ == kind, f"{where}: {value!r} is no {kind}"
        return
    model = getattr(client, kind, None)
    if model is None:  # a quantity, a time
        return
    fields = {json_name: name for name, json_name in model.attribute_map.items()}
    for key, inner in value.items():
        assert key in fields, f"{where}.{key} is no field of {kind}"
        check(inner, model.openapi_types[fields[key]], f"{where}.{key}")
    model(**{fields[key]: inner for key, inner in value.items()})  # raises ValueError if one that it needs is absent


def test_a_job(printed: Any) -> None:
    pytest.importorskip("kubernetes")
    secret, job = printed("--to=k8s", "--volume=claim:/data", "--gpus=8", "--env-from=tokens")
    check(secret, "V1Secret", "secret")
    check(job, "V1Job", "job")
    with pytest.raises(AssertionError, match=r"job\.spec\.retries is no field of V1JobSpec"):
        check({**job, "spec": {**job["spec"], "retries": 1}}, "V1Job", "job")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", job["metadata"]["name"])
    assert job["metadata"]["name"].startswith("my-run-")
    pod = job["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 100, "longer than a drain"
    assert pod["securityContext"]["fsGroup"] == 1000, "the user of the images writes the volume"
    [container] = pod["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "tokens"}}]
    assert container["command"] == ["python", "-m", "slime_submit.job", "/tmp/slime-job"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert [rule["action"] for rule in job["spec"]["podFailurePolicy"]["rules"]] == ["FailJob", "Ignore"]

    files = {item["path"]: secret["stringData"][item["key"]] for item in pod["volumes"][0]["secret"]["items"]}
    order = json.loads(files["job.json"])
    assert (order["directory"], order["run_dir"]) == ("/data/work", "/data/work/my Run")
    settings = yaml.safe_load(files["run.yaml"])
    assert settings["hf_checkpoint"] == "/data/work/m"
    reward = settings["custom_rm_path"].removeprefix("/tmp/slime-job/").removesuffix(":reward")
    assert "return 1.0" in files[reward]


def test_a_ray_job(printed: Any) -> None:
    pytest.importorskip("kubernetes")
    secret, job = printed("--to=k8s", "--volume=claim:/data", "--gpus=8", "--nodes=4")
    check(secret, "V1Secret", "secret")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    # Fields of KubeRay's RayJobSpec, RayClusterSpec, HeadGroupSpec and WorkerGroupSpec, which no package of Python has.
    assert {*spec} <= {"entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "rayClusterSpec"}
    assert {*cluster} == {"headGroupSpec", "workerGroupSpecs"}
    [workers] = cluster["workerGroupSpecs"]
    assert {*workers} - {*cluster["headGroupSpec"]} == {"groupName", "replicas", "minReplicas", "maxReplicas"}
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (3, 3, 3)
    for group in (cluster["headGroupSpec"], workers):
        check(group["template"], "V1PodTemplateSpec", "template")
        assert group["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert spec["entrypoint"] == "python -m slime_submit.job /tmp/slime-job"


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_task_of_skypilot(nodes: int, printed: Any, tmp_path: Path) -> None:
    volume = "s3://bucket:/data" if nodes == 1 else "disk:/data"
    [task] = printed("--to=skypilot", f"--volume={volume}", "--gpus=H100:8", f"--nodes={nodes}", "--env-from=HF_TOKEN")
    mounted = {"file_mounts"} if nodes == 1 else {"volumes"}
    assert {*task} == {"name", "num_nodes", "resources", "secrets", "setup", "run"} | mounted
    assert task["secrets"] == {"HF_TOKEN": None}
    assert task["resources"] == {"accelerators": "H100:8", "image_id": "docker:me/slime:1"}
    bucket = {"/data": {"source": "s3://bucket", "mode": "MOUNT_CACHED"}}  # MOUNT cannot append
    assert task.get("file_mounts", bucket) == bucket
    assert task.get("volumes", {"/data": "disk"}) == {"/data": "disk"}
    assert task["num_nodes"] == nodes
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[part], text=True, check=True, timeout=60)
    here = tmp_path / "there"
    subprocess.run(["bash", "-e"], input=task["setup"].replace("/tmp/slime-job", str(here)), text=True, check=True)
    [reward] = here.rglob("rm.py")
    assert reward.read_text() == (tmp_path / "rm.py").read_text()
    assert json.loads((here / "job.json").read_text())["run_dir"] == "/data/work/my Run"
    assert ("ray.scripts.scripts start" in task["run"]) is (nodes > 1)
    try:
        from sky.utils.schemas import get_task_schema
    except ImportError:
        return
    import jsonschema

    jsonschema.validate(task, get_task_schema())


def test_nodes_cannot_share_a_bucket(printed: Any) -> None:
    with pytest.raises(ConfigError, match=r"--volume s3://bucket:/data: 2 nodes cannot share a bucket; name a volume"):
        printed("--to=skypilot", "--volume=s3://bucket:/data", "--nodes=2")


class TestRay(LauncherContract):
    component = "ray"


class TestSubmit(CommandContract):
    component = "submit"
