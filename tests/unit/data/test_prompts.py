from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from slime_data.flat_source import FlatSource
from slime_data.saved import read_samples

from slime_core import BufferBase
from slime_core.config import Args
from slime_core.config.eval_config import EvalDataset
from slime_core.data.dumps import write_samples
from slime_core.data.prompts import DatasetSource, eval_samples
from slime_core.errors import CheckpointError, ConfigError, DataError, RolloutError
from slime_core.sample import Group, Sample, SampleStatus


def pop_first(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def make_args(prompt_data: str, **changes: Any) -> Args:
    defaults = {
        "prompt_data": prompt_data,
        "input_key": "input",
        "label_key": "label",
        "n_samples_per_prompt": 2,
    }
    return Args(**{**defaults, **changes})


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write(tmp_path / "train.jsonl", [{"input": f"{i}+1=?", "label": str(i + 1)} for i in range(10)])


@pytest.fixture
def make(tokenizer: Any) -> Any:
    def build(prompt_data: str, **changes: Any) -> DatasetSource:
        return DatasetSource(make_args(prompt_data, **changes), tokenizer, pop_first)

    return build


def labels(groups: list[Group]) -> list[Any]:
    return [group[0].label for group in groups]


def test_rows_become_numbered_groups(make: Any, data: str, tokenizer: Any) -> None:
    source = make(data)
    groups = [*source.get_samples(3), *source.get_samples(2)]
    assert len(source) == 10
    assert labels(groups) == ["1", "2", "3", "4", "5"]
    assert [[s.group_index for s in g] for g in groups] == [[i, i] for i in range(5)]
    assert [s.index for g in groups for s in g] == list(range(10))
    first, second = groups[1]
    assert (first.prompt, first.status) == ("1+1=?", SampleStatus.PENDING)
    assert tokenizer.decode(first.tokens) == "1+1=?"
    assert first.response_length == 0
    assert first.metadata == {"source_name": "train", "source_index": 1}
    first.tokens.append(5)
    first.metadata["mine"] = True
    assert tokenizer.decode(second.tokens) == "1+1=?"
    assert "mine" not in second.metadata


def test_metadata_label_tools_and_functions_of_a_row(make: Any, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "calc"}}]
    path = write(
        tmp_path / "rows.jsonl",
        [
            {"q": "a", "meta": {"rm_type": "f1", "custom_rm_path": "my.py:rm", "source_name": "wiki"}, "t": tools},
            {"q": "b", "meta": '{"level": 3, "generate_function_path": "gen"}', "t": json.dumps(tools)},
            {"q": "c", "meta": None},
        ],
    )
    source = make(path, input_key="q", label_key=None, metadata_key="meta", tool_key="t")
    a, b, c = (group[0] for group in source.get_samples(3))
    assert (a.custom_rm_path, a.generate_function_path) == ("my.py:rm", None)
    assert (a.metadata["source_name"], a.metadata["rm_type"]) == ("wiki", "f1")
    assert (b.metadata["level"], b.generate_function_path) == (3, "gen")
    assert a.metadata["tools"] == b.metadata["tools"] == tools
    assert a.label is None
    assert c.metadata == {"source_name": "rows", "source_index": 2}


def test_chat_prompts(make: Any, tmp_path: Path, tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(tmp_path / "chat.jsonl", [{"input": messages}, {"input": "u"}])
    rendered = "<|system|>s<|end|><|user|>u<|end|><|assistant|>"
    chat, text = (g[0] for g in make(path, label_key=None, apply_chat_template=True).get_samples(2))
    assert chat.prompt == rendered
    assert tokenizer.decode(chat.tokens) == rendered
    assert text.prompt == "<|user|>u<|end|><|assistant|>"
    chat, text = (g[0] for g in make(path, label_key=None).get_samples(2))
    assert chat.prompt == messages
    assert tokenizer.decode(chat.tokens) == rendered
    assert (text.prompt, tokenizer.decode(text.tokens)) == ("u", "u")


def test_keys_that_parquet_made_up_are_not_there(make: Any, tmp_path: Path) -> None:
    """Arrow gives an object the keys of all rows; `datasets` writes them, as null, into JSONL as well."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def tool(name: str, kind: dict[str, Any]) -> dict[str, Any]:
        function = {"name": name, "parameters": {"type": "object", "properties": {name: kind}}}
        return {"type": "function", "function": function}

    def call(arguments: dict[str, Any]) -> dict[str, Any]:
        said = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }
        return {"input": [{"role": "user", "content": "q"}, said], "label": "x"}

    rows = [
        {**call({"city": "x"}), "tools": [tool("city", {"type": "string"})], "metadata": {"a": {"b": 1}}},
        {**call({"number": 1}), "tools": [tool("number", {"type": "integer", "minimum": 0})], "metadata": {"c": [1]}},
    ]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "data.parquet")
    expected = make(write(tmp_path / "data.jsonl", rows)).get_samples(2)
    assert make(str(tmp_path / "data.parquet")).get_samples(2) == expected
    exported = [{**row, "tools": made["tools"]} for row, made in zip(rows, table.to_pylist())]
    assert '"number": null' in json.dumps(exported[0])
    (tmp_path / "exported").mkdir()
    assert make(write(tmp_path / "exported" / "data.jsonl", exported)).get_samples(2) == expected


@pytest.mark.parametrize("number", [2**63, 2**64 + 1, -(2**63) - 1, 10**400])
def test_integers_of_any_length_are_exact(make: Any, tmp_path: Path, number: int) -> None:
    rows = [
        {"input": "x", "label": number, "metadata": json.dumps({"n": [number]})},
        {"input": "x", "label": {"n": [number, 1.5]}},
    ]
    samples = [group[0] for group in make(write(tmp_path / "data.jsonl", rows)).get_samples(2)]
    assert [sample.label for sample in samples] == [number, {"n": [number, 1.5]}]
    assert samples[0].metadata["n"] == [number]
    write_samples(tmp_path / "kept.jsonl", samples)
    assert [sample.label for sample in read_samples(tmp_path / "kept.jsonl")] == [s.label for s in samples]


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ({"prompt": "x", "label": "1"}, {}, r"no column 'input' \(--input-key\); the row has: prompt, label"),
        ({"input": "x"}, {}, r"no column 'label' \(--label-key\)"),
        ({"input": 5, "label": "1"}, {}, "is a int; a prompt is text or a list"),
        ({"input": [], "label": "1"}, {}, "is empty; a prompt is text or a list"),
        ({"input": [{"content": "x"}], "label": "1"}, {}, "message 0: not an object with a text 'role'"),
        ({"input": "x", "label": "1", "metadata": [1]}, {}, "--metadata-key"),
        ({"input": "x", "label": "1", "metadata": "[1]"}, {}, "--metadata-key"),
        ({"input": "x", "label": "1", "tools": {"a": 1}}, {}, "--tool-key"),
        ({"input": "", "label": "1"}, {}, "the prompt has no tokens"),
    ],
)
def test_bad_rows_name_file_and_line(make: Any, tmp_path: Path, row: dict, changes: dict, message: str) -> None:
    good = {"input": "x", "label": "1"}
    with pytest.raises(DataError, match=rf"data\.jsonl:3: .*{message}"):
        make(write(tmp_path / "data.jsonl", [good, good, row]), **changes)  # the last row is read at start-up
    source = make(write(tmp_path / "data.jsonl", [good, good, row, good]), **changes)
    source.get_samples(2)
    with pytest.raises(DataError, match=rf"data\.jsonl:3: .*{message}"):
        source.get_samples(1)


def test_long_prompts_are_skipped_and_counted(make: Any, tmp_path: Path) -> None:
    rows = [{"input": "x" * n, "label": str(n)} for n in (1, 9, 2, 8, 3, 4)]
    source = make(write(tmp_path / "data.jsonl", rows), rollout_max_prompt_len=3)
    groups = source.get_samples(5)
    assert labels(groups) == ["1", "2", "3", "1", "2"]
    assert [g[0].group_index for g in groups] == [0, 1, 2, 3, 4]
    assert source.num_skipped == 4
    assert len(source) == 6


def test_only_long_prompts_is_an_error_and_no_endless_loop(make: Any, data: str) -> None:
    with pytest.raises(DataError, match="none of the 10 prompts has at most --rollout-max-prompt-len 2 tokens"):
        make(data, rollout_max_prompt_len=2).get_samples(1)


def test_long_files_are_not_read_through_at_start(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    row = '{"input": "x", "label": "1"}\n'
    path.write_text(row + "{malformed}\n" * 1000 + row)
    assert len(make(str(path), rollout_max_prompt_len=3)) == 1002


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drawn_before", [0, 4, 10, 13, 26])
def test_resume_goes_on_with_the_very_next_samples(make: Any, data: str, shuffle: bool, drawn_before: int) -> None:
    changes = {"rollout_shuffle": shuffle, "rollout_max_prompt_len": 5}
    whole = make(data, **changes)
    groups = whole.get_samples(drawn_before)
    if groups:
        whole.add_samples(groups[-1:])
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = make(data, **changes)
    resumed.load_state_dict(state)
    assert resumed.get_samples(17) == whole.get_samples(17)
    assert resumed.state_dict() == whole.state_dict()


def test_changed_data_is_refused_and_the_change_is_named(make: Any, tmp_path: Path) -> None:
    rows = [{"input": f"{i}", "label": "1"} for i in range(10)]
    path = write(tmp_path / "data.jsonl", rows)
    state = make(path, rollout_shuffle=True).state_dict()

    def refused(message: str, spec: str = path, **changes: Any) -> None:
        with pytest.raises(CheckpointError, match=message):
            make(spec, **{"rollout_shuffle": True, **changes}).load_state_dict(state)

    refused("rows was 10, is 5", spec=path + "@[:5]")
    refused("--rollout-seed was 42, is 7", rollout_seed=7)
    refused("--rollout-shuffle was True, is False", rollout_shuffle=False)
    write(tmp_path / "data.jsonl", [{**row, "label": "2"} for row in rows])
    refused("content hash of the file's head and tail was")
    write(tmp_path / "data.jsonl", [*rows, rows[0]])
    refused("rows was 10, is 11; file size in bytes was")
    moved = write(tmp_path / "moved.jsonl", rows)
    make(moved, rollout_shuffle=True).load_state_dict(state)
    with pytest.raises(CheckpointError, match="version 0"):
        make(moved).load_state_dict({**state, "version": 0})


def eval_config(path: str, **changes: Any) -> EvalDataset:
    defaults = {
        "name": "addition",
        "path": path,
        "label_key": "label",
        "apply_chat_template": True,
        "n_samples_per_eval_prompt": 3,
    }
    return EvalDataset(**{**defaults, **changes})


def test_evaluation_groups(data: str, tokenizer: Any) -> None:
    config = eval_config(data + "@[:4]", rm_type="f1", metadata_overrides={"level": 9}, custom_rm_path="rm")
    groups = eval_samples(make_args(""), config, tokenizer)
    assert labels(groups) == ["1", "2", "3", "4"]
    assert [s.index for g in groups for s in g] == list(range(12))
    assert [g[2].group_index for g in groups] == [0, 1, 2, 3]
    sample = groups[3][1]
    assert sample.metadata == {"source_name": "addition", "source_index": 3, "level": 9, "rm_type": "f1"}
    assert sample.custom_rm_path == "rm"
    assert tokenizer.decode(sample.tokens) == "<|user|>3+1=?<|end|><|assistant|>"
    sample.metadata["level"] = 1
    assert groups[3][0].metadata["level"] == 9


# -- what the buffer decides about fresh prompts ---------------------------------------------------------


class Choosy(BufferBase):
    """Wants the rows in `args`; remembers what it was told."""

    def __init__(self, rows: set[int]) -> None:
        super().__init__(None)
        self.rows, self.told = rows, []

    def wants(self, prompt: Sample) -> bool:
        return prompt.row in self.rows

    def observe(self, groups: list[Group], trained: bool) -> None:
        self.told.append(([g[0].row for g in groups], trained))


def test_prompts_that_the_buffer_does_not_want_are_passed_over(data: str, tokenizer: Any) -> None:
    source = DatasetSource(make_args(data), tokenizer, Choosy({2, 5}))
    groups = source.get_samples(5)
    assert [g[0].row for g in groups] == [2, 5, 2, 5, 2]
    assert [g[0].group_index for g in groups] == [0, 1, 2, 3, 4]
    assert source.state_dict()["epoch"] == 2


def test_a_buffer_that_wants_nothing_does_not_stop_the_run(data: str, tokenizer: Any) -> None:
    source = DatasetSource(make_args(data), tokenizer, Choosy(set()))
    assert [g[0].row for g in source.get_samples(2)] == [0, 1], "each after an epoch of refusals"
    assert source.state_dict()["epoch"] == 2


# -- read ahead, and streamed -----------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"rollout_shuffle": True}, {"rollout_max_prompt_len": 5}])
@pytest.mark.parametrize("how", [{"num_data_workers": 3}, {"streaming_data": True}, {"both": True}])
def test_threads_and_streams_draw_the_same(
    make: Any, tokenizer: Any, tmp_path: Path, changes: dict[str, Any], how: dict[str, Any]
) -> None:
    """Over two epochs, with a resume in between: the same prompts, and a state that either kind of run takes."""
    path = write(tmp_path / "d.jsonl", [{"input": f"{10 ** (i % 4)}+1=?", "label": str(i)} for i in range(7)])
    how = {"num_data_workers": 2, "streaming_data": True} if "both" in how else how
    if changes.get("rollout_shuffle") and "streaming_data" in how:
        how = {**how, "streaming_data": False}  # what the settings' rules make of the two
    plain, other = (make(path, rollout_batch_size=3, **changes, **more) for more in ({}, how))
    for draw in range(6):
        assert labels(other.get_samples(3)) == labels(plain.get_samples(3))
        if draw == 2:
            resumed = make(path, rollout_batch_size=3, **changes, **how)
            resumed.load_state_dict(json.loads(json.dumps(plain.state_dict())))
            other.close()
            other = resumed
    assert other.cursor["epoch"] == plain.cursor["epoch"] >= 1
    assert other.cursor == plain.cursor
    other.close()


def test_a_stream_is_read_as_far_as_it_is_drawn(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"input": "1+1=?", "label": "2"}\n' * 100 + "no row\n")
    source = make(str(path), streaming_data=True)
    assert labels(source.get_samples(100)) == ["2"] * 100
    assert source.cursor["num_rows"] == 101, "there is one more, whatever it is"
    with pytest.raises(DataError, match=r"d\.jsonl:101: not JSON"):
        source.get_samples(1)
    with pytest.raises(DataError, match="--streaming-data reads whole files"):
        make(f"{path}@[1:5]", streaming_data=True)


# -- sources that know no groups --------------------------------------------------------------------------


class Kept:
    """As the seeds write it; `super().__init__` of a base with nothing in it."""

    def __init__(self) -> None:
        self.buffer: list[Sample] = []

    def get_samples(self, num_samples: int) -> list[Sample]:
        return [Sample(prompt=p) for p in self.dataset.sample(num_samples)]  # type: ignore[attr-defined]

    def add_samples(self, samples: list[Sample]) -> None:
        self.buffer.extend(samples)

    def buffer_filter(self, args: Any, buffer: list[Sample], num_samples: int) -> list[Sample]:
        return sorted(buffer, key=lambda s: s.reward, reverse=True)[:num_samples]  # type: ignore[arg-type, return-value]


def flat(cls: type, prompt_data: str | None, tokenizer: Any, **changes: Any) -> FlatSource:
    settings = make_args(prompt_data or "", use_tis=True, use_rollout_logprobs=False, plugins={}, **changes)
    settings.prompt_data = prompt_data
    source = FlatSource(settings, cls)
    source.tokenizer = tokenizer
    return source


@pytest.fixture
def with_tokenizer(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    monkeypatch.setattr("slime_core.data.prompts.load_tokenizer", lambda _: tokenizer)


def scored_group(group: Group, reward: float) -> Group:
    for sample in group:
        sample.status, sample.reward = SampleStatus.COMPLETED, reward
    return group


@pytest.mark.usefixtures("with_tokenizer")
def test_a_flat_source_with_a_buffer(data: str, tokenizer: Any) -> None:
    source = flat(Kept, data, tokenizer, hf_checkpoint="m")
    first = source.get_samples(3)
    assert labels(first) == ["1", "2", "3"]
    assert [[s.index for s in g] for g in first] == [[0, 1], [2, 3], [4, 5]]
    assert [r.group_index for r in source.take_passed_rows()] == []  # kept from the first call on
    for number, group in enumerate(first):
        scored_group(group, float(number))
    source.observe(first, trained=True)
    source.add_samples([[Sample(prompt="cut", group_index=9, index=90 + i) for i in range(2)]])
    resumed = flat(Kept, data, tokenizer, hf_checkpoint="m")
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    for each in (source, resumed):
        groups = each.get_samples(3)
        assert groups[0][0].prompt == "cut", "what was given back comes first"
        assert [g[0].group_index for g in groups[1:]] == [2, 3], "the best group again, and a new prompt"
        assert groups[1][0].metadata["reused"]
        assert [len(g) for g in groups] == [2, 2, 2]
        each.observe([scored_group(groups[1], 2.0)], trained=True)
        assert len(each._user.buffer) == 4, "a group is used again once"


@pytest.mark.usefixtures("with_tokenizer")
def test_what_a_flat_source_may_answer(data: str, tokenizer: Any) -> None:
    class Prompts:
        def get_samples(self, num_samples: int) -> list[Any]:
            drawn = self.dataset.sample(num_samples + 1)  # type: ignore[attr-defined]
            return drawn[1:]

        def add_samples(self, samples: list[Sample]) -> None:
            raise AssertionError("nothing was trained on")

    source = flat(Prompts, data, tokenizer, hf_checkpoint="m")
    source.take_passed_rows()
    assert labels(source.get_samples(2)) == ["2", "3"]
    reasons = [(r.row, r.reason) for r in source.take_passed_rows()]
    assert reasons == [(1, None), (2, None), (0, "left out by the data source")]

    class Own:
        def __init__(self, dataset: Any, args: Any) -> None:
            self.dataset = dataset

        def get_samples(self, num_samples: int) -> list[Any]:
            return self.dataset.sample(num_samples) if num_samples < 3 else [Sample(prompt="a")]

        def add_samples(self, samples: list[Sample]) -> None: ...

    with pytest.raises(ConfigError, match="name their file with --prompt-data"):
        flat(Own, None, tokenizer).get_samples(1)
    with pytest.raises(
        RolloutError, match=r"get_samples\(4\) must return 4 samples or prompts; it returned a list of 1"
    ):
        flat(Own, None, tokenizer).get_samples(4)


def test_without_a_data_set_samples_are_empty(make: Any) -> None:
    source = make(None, rollout_global_dataset=False)
    (group,) = source.get_samples(1)
    assert (group[0].prompt, group[0].tokens, group[1].index, len(source)) == ("", [], 1, 0)
    other = make(None, rollout_global_dataset=False)
    other.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert other.get_samples(1)[0][0].group_index == 1


def test_evaluation_prompts_that_are_too_long(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "data.jsonl", [{"input": "x" * n, "label": n} for n in (1, 50, 2)])
    groups = eval_samples(make_args(""), eval_config(path, max_prompt_len=10), tokenizer)
    assert [(g[0].label, g[0].group_index) for g in groups] == [(1, 0), (2, 1)]
    with pytest.raises(DataError, match="every prompt is over --eval-max-prompt-len"):
        eval_samples(make_args(""), eval_config(path, max_prompt_len=1), tokenizer)
