"""GPUs that Ray only believes in: which ones servers of the rollout actor would see, on a cluster of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.backends, pytest.mark.timeout(300)]

_SCRIPT = """
import json, logging
import ray
from slime_core.config import Args
from slime_launcher_ray.gpus import SeenGpu, gpu_here, seen_by_tasks, visible_to_servers
from slime_launcher_ray.placing import reserve
from slime_launcher_ray.placement import EngineNeeds, plan_placement

ray.init(address="local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
args = Args(actor_num_nodes=1, actor_num_gpus_per_node=1, num_gpus_per_node=4, colocate=False,
            debug_train_only=False, debug_rollout_only=False)
placement = plan_placement(args, trainer_processes=1, engines=[EngineNeeds("e0", 2)], gpus=True)
reserved = reserve(placement, "test", 120.0)
seen = seen_by_tasks(placement, reserved)
# The trainer's bundle is whole: its actor is asked.
node, gpus = ray.get(ray.remote(gpu_here).options(**reserved.options(0, 0.0, 1.0)).remote(), timeout=120)
seen[0] = SeenGpu(node, gpus[0])
print(json.dumps({"bundles": sorted(seen), "visible": visible_to_servers(placement, seen, node).split(",")}))
ray.shutdown()
"""


def test_the_gpus_of_the_places() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bundles"] == [0, 1, 2]
    assert len(set(found["visible"])) == 3
    assert set(found["visible"]) <= {"0", "1", "2", "3"}
