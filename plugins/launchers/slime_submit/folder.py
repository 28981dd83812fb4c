"""Write the folder of a job: run.yaml, job.json, and the files that the settings name (`carried`).

The job does not run in its folder but in the directory in which the user typed the command. All nodes must see this
directory, which also resolves relative paths. Called by `command`; on the cluster `job` reads the folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from slime_launcher_ray.carried import find, stage

from slime_core.config.eval_config import located_deep
from slime_core.config.spec import flag_specs
from slime_submit.job import HERE, ORDER, RUN

if TYPE_CHECKING:
    from slime_core.config import Settings


def make_job(settings: Settings, folder: Path, directory: str, *, there: str = HERE, restarts: bool = False) -> None:
    """Write the files that the job reads into a new folder.

    Args:
        settings: Settings of the command to run.
        folder: An existing, empty folder.
        directory: Working directory of the command on the cluster.
        there: Path of the folder on the cluster; by default the job finds it out.
        restarts: The scheduler may start the job again, which then resumes its own run.

    Raises:
        ConfigError: Files that the settings name are too large.
    """
    args, found = settings.args, find(settings.args)
    if found:
        carried, root = stage(found, folder)
        arrived = Path(there, root.name)
        args = carried.localized(args, arrived)
        for file in root.rglob("*.y*ml"):  # an --eval-config may name plugins of its own, and data
            try:
                content = yaml.safe_load(file.read_text(encoding="utf-8"))
            except (yaml.YAMLError, UnicodeDecodeError):  # of another program, in a package
                continue
            evaluates = args.eval_config == str(arrived / file.relative_to(root))
            named_from = os.path.dirname(str(settings.args.eval_config))
            changed = carried.localized(located_deep(content, named_from) if evaluates else content, arrived)
            changed = located_deep(changed, directory) if evaluates else changed
            if changed != content:
                file.write_text(yaml.safe_dump(changed, sort_keys=False), encoding="utf-8")
    text = dataclasses.replace(settings, args=args).to_yaml(changed=True, directory=directory, whole=True)
    (folder / RUN).write_text(text, encoding="utf-8")
    order: dict[str, Any] = {"command": settings.command, "directory": directory}
    if restarts:
        run_dir, save = run_places(settings, directory)
        order |= {"run_dir": str(run_dir), "save": str(save), "id": folder.name, "load": settings.args.load or ""}
        order |= {"drain_timeout": settings.args.drain_timeout}
    (folder / ORDER).write_text(json.dumps(order), encoding="utf-8")


def run_places(settings: Settings, directory: str) -> tuple[Path, Path]:
    """Return the run directory and the directory of checkpoints on the cluster."""
    args = settings.args
    assert args.run_dir, "every command that writes has a run directory"
    run_dir, save = (os.path.normpath(os.path.join(directory, p)) for p in (args.run_dir, args.save or args.run_dir))
    return Path(run_dir), Path(save)


def job_folder(settings: Settings, directory: str) -> Path:
    """Return the path of a new job's folder, beside the run directory."""
    run_dir, _ = run_places(settings, directory)
    return Path(f"{run_dir}.jobs", f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that are settings: they are in run.yaml, which they would override."""
    settings = {f"SLIME_{name.upper()}" for name in flag_specs()}
    return {name: value for name, value in environment.items() if name not in settings}
