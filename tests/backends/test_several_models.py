"""Two models in one run: the actor follows the trainer, the other keeps its weights and scores what the actor says."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_commands.init.tiny_model import write_random_model

from tests.backends.whole_runs import Run, hold, release, running, samples
from tests.conftest import SLIME, TinyRun
from tests.run_files import metrics

pytestmark = [pytest.mark.backends, pytest.mark.timeout(1200)]

EXAMPLE = Path(__file__).parents[2] / "examples/engines/judge"
ROLLOUTS = 2
LOG = '''
import json
from pathlib import Path
from urllib.request import Request, urlopen

import hold
from slime_engine_sglang import get_model_url


def log(rollout_id, args, samples, extra, seconds):
    """Where each model answers, and with which weights, at the end of a rollout."""
    hold.log(rollout_id, args, samples, extra, seconds)
    found = {}
    for name, address in args.sglang_model_routers.items():
        body = json.dumps({"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}).encode()
        request = Request(get_model_url(args, name), body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            version = json.load(answer)["meta_info"]["weight_version"]
        found[name] = {"address": list(address), "weight_version": version}
    found["main"] = [args.sglang_router_ip, args.sglang_router_port]
    Path(f"seen-{rollout_id}.json").write_text(json.dumps(found))
    return False
'''


@dataclass(frozen=True)
class Place:
    """Where a run is typed: `models/actor` and a second model beside it."""

    tiny: TinyRun
    directory: Path
    python: Path

    def second(self, name: str) -> None:
        """Weights of its own, and the actor's tokenizer."""
        write_random_model(self.directory / "models" / name, seed=1)

    def start(self, **changes: Any) -> AbstractContextManager[Run]:
        argv = self.tiny.argv(
            self.directory / "run", hf_checkpoint="models/actor", num_rollout=ROLLOUTS, eval_interval=None,
            eval_prompt_data=None, no_preflight=None, rollout_engine="sglang", device="cpu", engine_python=self.python,
            save_debug_rollout_data="samples/{rollout_id}.jsonl", **changes,
        )  # fmt: skip
        return running([SLIME, "train", *argv], self.directory, self.directory / "log")

    def samples(self, rollout: int) -> list[dict[str, Any]]:
        return samples(self.directory / "samples/{rollout_id}.jsonl", rollout)

    def logs(self) -> dict[str, str]:
        root = self.directory / "run/engines"
        return {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.log")}


@pytest.fixture
def place(tiny: TinyRun, sglang_python: Path, tmp_path: Path) -> Place:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/actor").symlink_to(tiny.root / "model")
    return Place(tiny, tmp_path, sglang_python)


@cache
def loaded(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def log_probs(model: Path, sample: dict[str, Any]) -> torch.Tensor:
    """[response_length], of the response's tokens, as transformers computes them."""
    tokens, length = torch.tensor(sample["tokens"]), sample["response_length"]
    with torch.no_grad():
        logits = loaded(model)(tokens[None]).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[-length:, 0]


def test_a_frozen_judge_scores_while_the_actor_learns(place: Place) -> None:
    place.second("judge")
    hold(place.directory, 1)
    (place.directory / "log.py").write_text(LOG)
    rows = [json.loads(line) for line in (place.tiny.root / "train.jsonl").read_text().splitlines()][:16]
    for row in rows[::2]:  # in the loop; the others in a worker process, as the run's reward
        row["metadata"] = {"custom_rm_path": str(EXAMPLE / "reward.py")}
    (place.directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with place.start(
        sglang_config=EXAMPLE / "models.yaml", custom_rm_path=f"{EXAMPLE / 'reward.py'}:blocking",
        prompt_data="rows.jsonl", rollout_shuffle=None, custom_rollout_log_function_path="log.py",
    ) as run:  # fmt: skip
        run.until("rollout ")
        assert len(run.servers()) == 2
        release(place.directory)
        run.finish()
        assert run.left() == []

    judge, actor = place.directory / "models/judge", place.directory / "models/actor"
    for rollout in range(ROLLOUTS):
        found = place.samples(rollout)
        assert len(found) == 16
        assert {"custom_rm_path" in sample["metadata"] for sample in found} == {True, False}
        for sample in found:
            assert sample["status"] != "failed", sample
            assert sample["reward"] == pytest.approx(log_probs(judge, sample).mean().item(), abs=1e-4)
        gaps = [
            (log_probs(actor, sample) - torch.tensor(sample["rollout_log_probs"])).abs().max().item()
            for sample in found
        ]
        if rollout == 0:
            assert max(gaps) < 1e-4
        else:
            assert max(gaps) > 1e-2, "the actor is no longer what it was"  # a short answer may be as likely as before
    for line in metrics(place.directory / "run"):
        assert line["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert line["rollout/failed_ratio"] == 0

    seen = [json.loads((place.directory / f"seen-{i}.json").read_text()) for i in range(ROLLOUTS)]
    for rollout, of_one in enumerate(seen):
        assert set(of_one) == {"actor", "judge", "main"}
        assert of_one["main"] == of_one["actor"]["address"] != of_one["judge"]["address"]
        assert of_one["actor"]["weight_version"] == str(rollout + 1)
        assert of_one["judge"] == seen[0]["judge"]
        assert of_one["judge"]["weight_version"] not in {str(i + 1) for i in range(ROLLOUTS)}
    logs = place.logs()
    assert set(logs) == {"actor/0.log", "actor/router.log", "judge/0.log", "judge/router.log"}
    assert "update_weights" in logs["actor/0.log"]
    assert "update_weights" not in logs["judge/0.log"]


def test_a_teacher_is_found_by_its_name_also_without_routers(place: Place) -> None:
    place.second("teacher")
    (place.directory / "models.yaml").write_text((EXAMPLE / "models.yaml").read_text().replace("judge", "teacher"))
    with place.start(
        sglang_config="models.yaml", no_engine_router=True, use_opd=True, opd_type="sglang", custom_rm_path=None,
        rm_type="on_policy_distillation", custom_rollout_log_function_path=hold(place.directory, 1),
    ) as run:  # fmt: skip
        run.until("rollout ")
        assert len(run.servers()) == 2
        release(place.directory)
        run.finish()
        assert run.left() == []
    for rollout in range(ROLLOUTS):
        for sample in place.samples(rollout):
            expected = log_probs(place.directory / "models/teacher", sample)
            torch.testing.assert_close(torch.tensor(sample["teacher_log_probs"]).double(), expected, atol=1e-4, rtol=0)
    for line in metrics(place.directory / "run"):
        apart = line["rollout/rollout_log_probs"] - line["rollout/teacher_log_probs"]
        assert line["rollout/opd_reverse_kl"] == pytest.approx(apart, abs=1e-5)
        assert apart != 0
    assert set(place.logs()) == {"actor/0.log", "teacher/0.log"}
