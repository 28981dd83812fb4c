"""The suite of engines fails on engines that break it: each below is the embedded engine with one thing made wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from slime_testing_contracts import EngineContract

from tests.conftest import Slime

BAD_ENGINES = {
    "OtherTemperature": (
        "test_log_probs_are_those_of_transformers[0.6]",
        """
    async def generate(self, ids, params, **names):
        return await super().generate(ids, {**params, "temperature": 1.0}, **names)
""",
    ),
    "StopsLate": (
        "test_a_stop_token_ends_the_answer",
        """
    async def generate(self, ids, params, **names):
        return await super().generate(ids, {**params, "stop_token_ids": None}, **names)
""",
    ),
    "TrimsNothing": (
        "test_a_stop_string_ends_the_answer[trimmed]",
        """
    async def generate(self, ids, params, **names):
        return await super().generate(ids, {**params, "no_stop_trim": True}, **names)
""",
    ),
    "FiltersNothing": (
        "test_filters_keep_to_the_likely_tokens[top_k-3]",
        """
    async def generate(self, ids, params, **names):
        return await super().generate(ids, {**params, "top_k": -1}, **names)
""",
    ),
    "TakesAnything": (
        "test_bad_requests_are_refused",
        """
    async def generate(self, ids, params, **names):
        return await super().generate(ids, {k: v for k, v in params.items() if k != "temprature"}, **names)
""",
    ),
    "StreamsPieces": (
        "test_a_stream_tells_everything_so_far",
        """
    async def stream(self, ids, params, **names):
        async for piece in super().stream(ids, params, **names):
            yield type(piece)(piece.token_ids[-1:], piece.log_probs[-1:], piece.text, piece.meta_info)
""",
    ),
    "NeverAborts": (
        "test_abort_ends_with_what_there_is[all]",
        """
    async def abort(self, rid=None):
        pass
""",
    ),
    "NeverPauses": (
        "test_pause_holds_and_resume_goes_on[in_place]",
        """
    async def pause(self, mode="in_place"):
        pass
""",
    ),
    "KeepsItsCache": (
        "test_a_flushed_cache_is_empty",
        """
    async def flush_cache(self):
        pass
""",
    ),
    "OldWeights": (
        "test_new_weights_answer_from_then_on",
        """
    async def update_weights_from_tensor(self, weights, version):
        await self.set_weight_version(version)
""",
    ),
    "NewVersionsOnly": (
        "test_weights_change_under_a_running_request",
        """
    async def generate(self, ids, params, **names):
        output = await super().generate(ids, params, **names)
        output.meta_info["token_weight_versions"] = [self.weight_version] * len(output.token_ids)
        return output
""",
    ),
    "TakesWhatFits": (
        "test_weights_that_do_not_fit_are_refused[name]",
        """
    async def update_weights_from_tensor(self, weights, version):
        fits = ((name, tensor) for name, tensor in weights if not name.startswith("no."))
        await super().update_weights_from_tensor(fits, version)
""",
    ),
    "ServesAfterItsEnd": (
        "test_start_and_stop",
        """
    async def stop(self):
        pass
""",
    ),
}


@pytest.fixture(scope="module")
def failures(program: Slime, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """`Class::test` of what failed when the tests in question were run on the bad engines in one fresh pytest."""
    folder = tmp_path_factory.mktemp("bad")
    lines = ["import torch", "torch.set_num_threads(1)", "from slime_testing_contracts import EngineContract"]
    engines = ["from slime_embedded.engine.engine import EmbeddedEngine"]
    for name, (_, body) in BAD_ENGINES.items():
        engines += [f"class {name}(EmbeddedEngine):{body}"]
        lines += [f"class Test{name}(EngineContract):", f"    component = {f'{folder}/bad.py:{name}'!r}"]
    (folder / "bad.py").write_text("\n".join(engines))
    (folder / "test_bad.py").write_text("\n".join(lines))
    words = ["-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    words += [f"test_bad.py::Test{name}::{test}" for name, (test, _) in BAD_ENGINES.items()]
    result = program("pytest", *words, cwd=folder)
    found = [line.split("::", 1)[1] for line in result.stdout.splitlines() if line.startswith("FAILED ")]
    assert found, result.stdout + result.stderr
    return {entry.split(" - ")[0] for entry in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_ENGINES)
def test_a_bad_engine_fails(name: str, failures: set[str]) -> None:
    assert f"Test{name}::{BAD_ENGINES[name][0]}" in failures


def test_what_is_declared_to_be_lacking_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from slime_embedded.engine.engine import EmbeddedEngine\n"
        "class Mine(EmbeddedEngine):\n    lacks = frozenset({'seeds'})\n"
    )
    suite = type("TestMine", (EngineContract,), {"component": f"{tmp_path}/mine.py:Mine", "lacks": {"http"}})()
    assert suite.lacking == {"seeds", "http"}
    for name in ("seeds", "http"):
        with pytest.raises(pytest.skip.Exception, match=f"declared to lack {name}"):
            suite.need(name)
    suite.need("text")
    wrong = type("TestMine", (EngineContract,), {"component": "embedded", "lacks": frozenset({"sedes"})})()
    with pytest.raises(AssertionError, match=r"`lacks` names sedes; allowed: text, stop_strings"):
        wrong.check_options()
