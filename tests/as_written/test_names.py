"""The names that code for THUDM/slime imports: all of `NAMES` resolve, and every function is called by a test."""

from __future__ import annotations

import base64
import importlib
import inspect
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import slime
import torch

from slime_core import Sample
from slime_core.errors import PluginError, RolloutError
from tests.as_written.names import NAMES
from tests.sweeps import sweep

ROOT = Path(__file__).parents[2]
PACKAGE = Path(slime.__file__).parent
OURS = {"RouterEngine", "router_url", "stream_events", "wrap_ipv6"}
"""Public names that THUDM/slime does not have."""
CALLED_IN = [*ROOT.glob("compat/tests/test_*.py"), *ROOT.glob("tests/as_written/test_*.py")]
CALLED_IN += [ROOT / "tests/integration/test_slime_compat.py", *ROOT.glob("compat/examples/*.py")]


def exported() -> Iterator[str]:
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        if not file.stem.startswith("_") or file.stem == "__init__":
            name = ".".join(("slime", *parts)).removesuffix(".__init__")
            yield from (f"{name}.{public}" for public in getattr(importlib.import_module(name), "__all__", ()))


def resolved(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    scope: dict[str, Any] = {}
    exec(f"from {module} import {attribute} as found", scope)  # as users do: another error than getattr's
    return scope["found"]


def test_every_name_has_its_line_and_every_line_its_name() -> None:
    there = {name for name in exported() if name.rpartition(".")[2] not in OURS}
    told = {name for name, verdict in NAMES.items() if verdict.kind != "refused" and name.startswith("slime.")}
    assert told == there
    assert all(verdict.why for verdict in NAMES.values())


@sweep("name", NAMES)
def test_a_name_is_there_or_says_what_to_use(name: str) -> None:
    if NAMES[name].kind != "refused":
        assert resolved(name) is not None
    else:
        with pytest.raises(ImportError, match=r"slime-compat.*nearest: "):
            resolved(name)


def test_every_function_is_called_by_some_test() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in CALLED_IN)
    functions = {
        n.rpartition(".")[2] for n, v in NAMES.items() if v.kind != "refused" and inspect.isfunction(resolved(n))
    }
    assert [name for name in sorted(functions) if not re.search(rf"\b{name}\(|[\".]{name}\b", text)] == []


# -- small ones ------------------------------------------------------------------------------------------


def test_what_processors_are_called_with() -> None:
    from slime.utils.processing_utils import build_processor_kwargs

    kwargs = build_processor_kwargs({"images": ["a"], "images_kwargs": {"do_resize": False}})
    assert kwargs["images"] == ["a"]
    assert kwargs["return_tensors"] is None
    assert kwargs["images_kwargs"] == {"do_resize": False, "return_tensors": "pt"}
    assert build_processor_kwargs()["videos_kwargs"] == {"return_tensors": "pt"}


@pytest.mark.parametrize("form", [list, np.array, torch.tensor, bytes, base64.b64encode])
def test_arrays_in_an_engines_answer(form: Any) -> None:
    from slime.utils.misc import decode_int32_meta_array

    numbers = [1, -2, 1 << 30]
    raw = np.array(numbers, dtype="<i4").tobytes()
    value = form(raw) if form in (bytes, base64.b64encode) else form(numbers)
    value = value.decode() if form is base64.b64encode else value
    found = decode_int32_meta_array({"x": value}, ("y", "x"))
    assert found is not None
    assert (found.dtype, found.tolist()) == (torch.int32, numbers)
    assert decode_int32_meta_array({"x": None}, "x") is None
    assert decode_int32_meta_array({}, "x") is None


def test_groups_that_are_dropped() -> None:
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput, should_drop_dynamic_filter_output

    def dropped(left: int, **answer: Any) -> bool:
        output = DynamicFilterOutput(**answer)
        return should_drop_dynamic_filter_output(output, remaining_batch_size=left, target_data_size=4)

    assert not dropped(9, keep=True)
    assert dropped(4, keep=False)
    assert [dropped(left, keep=False, keep_when_insufficient=True) for left in (5, 4, 3)] == [True, False, False]


def test_responses_are_whole_on_every_rank() -> None:
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp

    values = torch.arange(3.0, requires_grad=True)
    assert all_gather_with_cp(values, 5, 3) is values
    assert slice_log_prob_with_cp([-1.0, -2.0], 5, 2) == [-1.0, -2.0]
    with pytest.raises(ValueError, match="3 entries for a response of 4 in 5 tokens; every context-parallel rank"):
        all_gather_with_cp(values, 5, 4)


def test_metrics_under_both_names() -> None:
    from slime.observability.metric_utils import compute_pass_rate, compute_rollout_step

    assert compute_rollout_step(Namespace(), 7) == 7
    assert compute_pass_rate([1, 0, 1], 2, group_ids=["a", "b", "a"]) == {"pass@1": 0.5}


def test_graders_of_the_hub() -> None:
    from slime.rollout.rm_hub import compute_score_dapo, get_deepscaler_rule_based_reward, grade_answer_verl

    assert grade_answer_verl(r"\boxed{42.0}", "42")
    assert get_deepscaler_rule_based_reward(r"</think>\boxed{2/4}", "0.5") == 1
    assert compute_score_dapo("Answer: 1e3", "1000")["acc"]


# -- hooks of samples ------------------------------------------------------------------------------------


async def test_sample_hooks_keep_the_shape_and_are_told_what_they_ask_for(tmp_path: Path) -> None:
    from slime.rollout.sample_hooks import apply_rollout_sample_hooks, set_current_rollout_id

    file = tmp_path / "hooks.py"
    file.write_text(
        "async def note(args, sample, rollout_id=None, evaluation=False):\n"
        "    sample.metadata['told'] = [rollout_id, evaluation]\n"
        "def odd(args, sample):\n    return 7\n"
    )
    args = Namespace(rollout_sample_hook_path=[f"{file}:note"], rollout_timeout=9.0)
    done = [Sample(index=i, status=Sample.Status.COMPLETED) for i in range(3)]
    set_current_rollout_id(4)
    shaped = await apply_rollout_sample_hooks(args, [done[:1], [[done[1]], done[2]]], evaluation=True)
    assert shaped == [[done[0]], [[done[1]], done[2]]]
    assert [sample.metadata["told"] for sample in done] == [[4, True]] * 3
    set_current_rollout_id(None)
    assert await apply_rollout_sample_hooks(Namespace(), done[0]) is done[0]
    with pytest.raises(TypeError, match="str; expected a Sample or a list"):
        await apply_rollout_sample_hooks(args, ["x"])
    args.rollout_sample_hook_path = [f"{file}:odd"]
    with pytest.raises(RolloutError, match="returned int"):
        await apply_rollout_sample_hooks(args, done[0])
    args.rollout_sample_hook_path = [f"{file}:nothing"]
    with pytest.raises(PluginError, match="nothing"):
        await apply_rollout_sample_hooks(args, done[0])


# -- traces, as the documentation of THUDM/slime writes them -----------------------------------------------


async def test_traces_of_functions_spans_and_events_are_stored_with_the_sample() -> None:
    from slime.utils.trace_utils import (
        bind_trace,
        build_sglang_meta_trace_attrs,
        trace_event,
        trace_function,
        trace_span,
    )

    @trace_function("generate_and_rm", target="sample")
    async def generate_and_rm(args: Any, sample: Sample, sampling_params: Any, evaluation: bool = False) -> Sample:
        with trace_span(sample, "sglang_generate", attrs={"max_new_tokens": 8}) as span:
            meta = {"finish_reason": {"type": "stop"}, "completion_tokens": 3, "cached_tokens": None, "id": "r1"}
            span.update(build_sglang_meta_trace_attrs(meta)).set("more", 1)
            trace_event(sample, "tool", attrs={"name": "x"})
        return sample

    @trace_function("batch", target="samples", attrs_getter=lambda samples, **_: {"batch_size": len(samples)})
    def batch(samples: list[Sample], **kwargs: Any) -> int:
        return len(samples)

    one, two = Sample(index=3, group_index=1), Sample(index=4, group_index=1)
    assert bind_trace(one).sample_id == 3
    await generate_and_rm(None, one, {})
    assert batch([one, two]) == 2
    trace = Sample.from_dict(one.to_dict()).trace  # type: ignore[attr-defined]
    kinds = [(event["type"], event["name"]) for event in trace["events"]]
    assert kinds == [
        ("span_start", "generate_and_rm"), ("span_start", "sglang_generate"), ("event", "tool"),
        ("span_end", "sglang_generate"), ("span_end", "generate_and_rm"),
        ("span_start", "batch"), ("span_end", "batch"),
    ]  # fmt: skip
    outer, inner, _, ended, *_, begun, _ = trace["events"]
    assert (inner["parent_span_id"], "parent_span_id" in outer) == (outer["span_id"], False)
    assert ended["attrs"] == {"completion_tokens": 3, "sglang_request_id": "r1", "finish_reason": "stop", "more": 1}
    assert begun["attrs"] == {"batch_size": 2}
    assert two.trace["trace_id"] != trace["trace_id"]  # type: ignore[attr-defined]


def test_traces_of_errors_of_attempts_and_of_nothing() -> None:
    from slime.observability.trace_utils import trace_function, trace_next_attempt, trace_span

    sample = Sample(index=0)
    with pytest.raises(KeyError), trace_span(sample, "x"):
        raise KeyError("lost")
    trace_next_attempt(sample)
    events = sample.trace["events"]  # type: ignore[attr-defined]
    assert events[1]["attrs"] == {"error_type": "KeyError", "error_message": "'lost'"}
    assert [event["attempt"] for event in events] == [0, 0, 1]
    with trace_span(None, "of nothing") as span:
        span.set("k", 1)
    with pytest.raises(ValueError, match="has no parameter 'sampel'"):
        trace_function("f", target="sampel")(lambda sample: sample)


def test_a_trace_goes_on_in_another_process() -> None:
    from slime.observability.trace_utils import bind_trace, export_trace, import_trace, trace_event, trace_span

    sample = Sample(index=2, group_index=5)
    with trace_span(sample, "here"):
        payload = export_trace(bind_trace(sample))
    there = import_trace(payload)
    with trace_span(there, "there"):
        trace_event(there, "e")
    first = there.carrier["events"][0]
    here = sample.trace["events"][0]  # type: ignore[attr-defined]
    assert (first["trace_id"], first["sample_id"], first["parent_span_id"]) == (here["trace_id"], 2, here["span_id"])
