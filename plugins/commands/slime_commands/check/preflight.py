"""Everything about a run that can be found wrong before a model is loaded or a process started, in a few seconds.

The hook `slime_preflight` of this plugin answers with the findings: `slime check` prints them, `slime train` goes on
when there is no error. By the time it is called, settings are valid and every component has been resolved here;
meanwhile `slime_testing_probes` calls each once in another interpreter.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import timeit
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from slime_runs.save_hf import check_target
from slime_testing_probes.fresh_process import FreshProcess

from slime_commands.check.overlap import overlap
from slime_core.checkpoint.run_dir import check_run_dir, run_dir_of
from slime_core.config.sections.rollout import context_of
from slime_core.data.dataset import has_row, open_rows
from slime_core.data.dumps import check_saved
from slime_core.data.rows import Columns, PromptReader
from slime_core.data.tokenizer import load_tokenizer, render_messages
from slime_core.errors import ConfigError, SlimeError
from slime_core.launch.prepare import Prepared
from slime_core.launch.prepare import preflight as checks_of_plugins
from slime_core.launch.resume import first_rollout, goes_on, named_commit
from slime_core.models.config import vocab_size_of
from slime_core.models.hf_io import weight_files
from slime_core.protocols.command import Finding, Level
from slime_core.sample import Sample

ROWS_READ = 64
"""Rows of each data set that are read, spread evenly."""
_MANY = 8
"""Rows from which on a value that all have is reported."""
_POINTER = b"version https://git-lfs"
_HEADROOM = 1.1
_MOST_EXPORTS = 10_000
_SLOW_PRODUCTS = 3.0
"""Times as long as in float32: with instructions for bfloat16 it is about half, without any 20 to 100."""


def preflight(run: Prepared) -> list[Finding]:
    """All findings, in the order of the checks; nothing is written and no model is loaded."""
    with closing(FreshProcess(run)) as fresh:
        rows, findings = _data(run)
        fresh.begin(rows)
        findings += [*_batch(run), *_length(run), *_precision(run), *_paths(run), *_disk(run)]
        return [*fresh.findings(), *findings]


def all_findings(run: Prepared) -> list[Finding]:
    """Return the findings of what is checked before a run, of its start, and of every plugin's `slime_check`."""
    findings = [*checks_of_plugins(run), *starting(run)]
    return findings + [finding for told in run.hooks.slime_check(settings=run.settings) for finding in told]


def starting(run: Prepared) -> Iterator[Finding]:
    """Yield the findings of a training run at its start: a directory in use, or nothing to resume from or to read."""
    args = run.args
    if run.settings.command not in ("train", "sft"):
        return
    try:
        commit = None if args.debug_rollout_only else named_commit(args)
        resume = not args.debug_rollout_only and goes_on(run.settings, commit)
        check_run_dir(args, resume=resume)
        for rollout_id in range(min(args.num_rollout or 1, _MOST_EXPORTS)) if args.save_hf else ():
            check_target(Path(args.save_hf.format(rollout_id=rollout_id)))
        if not args.debug_rollout_only and args.load_debug_rollout_data:
            check_saved(args, first_rollout(args, commit))
    except SlimeError as error:
        yield Finding("start", Level.ERROR, str(error))


# -- data, tokenizer ---------------------------------------------------------------------------------------


_Scored = tuple[str, str | None, Sample]
"""A row that was read: its place, the reward that scores it, its sample."""


def _data(run: Prepared) -> tuple[list[_Scored], list[Finding]]:
    """Usable rows, and what is to be said of data sets, tokenizer and chat template."""
    args = run.args
    if not (Path(args.hf_checkpoint) / "config.json").is_file():
        made_by = f"{run.settings.cite('prepare_path')} makes model and data"
        return [], [Finding("data", Level.NOTE, f"{made_by}; they are checked once they exist")]
    try:
        tokenizer = load_tokenizer(args.hf_checkpoint)
    except SlimeError as error:
        return [], [Finding("tokenizer", Level.ERROR, str(error))]
    findings, scored = [*_tokenizer(run, tokenizer)], []
    sets: list[tuple[str, Columns, str, Any]] = []
    if args.prompt_data:
        sets.append((args.prompt_data, Columns.of_run(args), "--prompt-data", args))
    sets += [(d.path, Columns.of_eval(d, args), f"evaluation data set {d.name!r}", d) for d in args.eval_datasets or []]
    for path, columns, origin, of in sets:
        try:
            limits = _limits(run, training=path == args.prompt_data)
            read, said = _rows(path, columns, origin, tokenizer, limits)
        except SlimeError as error:
            text = str(error)
            said = [Finding("data", Level.ERROR, text if text.startswith(origin) else f"{origin}: {text}")]
        else:
            default = of.custom_rm_path or of.rm_type or args.custom_rm_path or args.rm_type
            label = f"label from --label-key {columns.label!r}" if columns.label else "no --label-key"
            places = [f"{path}, row {number} ({label})" for number, _ in read]
            scored += [(place, _reward_of(sample) or default, sample) for place, (_, sample) in zip(places, read)]
        findings += said
    return scored, [*findings, *overlap(args)]


def _reward_of(sample: Sample) -> str | None:
    """The reward that the row names for itself."""
    return sample.custom_rm_path or sample.metadata.get("custom_rm_path") or sample.metadata.get("rm_type")


@dataclass(frozen=True)
class _Limits:
    """Limits that rows are checked against."""

    vocab_size: int
    positions: int | None
    """Tokens of a sequence, by the model's config.json; None where it does not say."""
    response: int
    """Tokens that an answer may take."""
    rollout: int | None
    """Rows drawn for a rollout; None for an evaluation, and where the rows are not counted."""
    stream: bool


def _limits(run: Prepared, *, training: bool) -> _Limits:
    args = run.args
    positions = context_of(args.hf_checkpoint)
    response = args.rollout_max_response_len if training else args.eval_max_response_len
    context = args.rollout_max_context_len if training else args.eval_max_context_len
    if context is not None and positions is not None and context <= positions:
        response = 0  # the context bounds prompt and answer together
    supervised = not args.compute_advantages_and_returns
    return _Limits(
        vocab_size_of(args.hf_checkpoint),
        positions,
        0 if supervised else response or 0,
        args.rollout_batch_size if training and not args.streaming_data else None,
        bool(training and args.streaming_data),
    )


def _rows(
    spec: str, columns: Columns, origin: str, tokenizer: Any, limits: _Limits
) -> tuple[list[tuple[int, Sample]], list[Finding]]:
    """Rows spread over the data set, with their numbers. Raises DataError for one that cannot be used."""
    rows = open_rows(spec, origin, stream=limits.stream)
    try:
        reader = PromptReader(rows, tokenizer, columns, spec)
        total = sum(has_row(rows, i) for i in range(ROWS_READ)) if limits.stream else len(rows)
        step = max(1, total // ROWS_READ)
        read = [(i, reader.read(i)) for i in sorted({*range(0, total, step), total - 1})]
        foreign = [(i, s) for i, s in read if s is not None and any(t >= limits.vocab_size for t in s.tokens)]
        where = rows.where(foreign[0][0]) if foreign else ""
    finally:
        rows.close()
    usable = [(number + 1, sample) for number, sample in read if sample is not None]
    shown = f"{origin} {spec}: {'streamed' if limits.stream else f'{total} rows'}, {len(read)} read"
    shown += f"; {reader.layout}" if reader.layout else ""
    if foreign:
        return [], [
            Finding("data", Level.ERROR, f"{where}: token ids beyond the model's vocabulary of {limits.vocab_size}")
        ]
    if not usable:
        return [], [Finding("data", Level.ERROR, f"{shown}; every prompt is over {columns.max_prompt_len} tokens")]
    findings = [Finding("data", Level.OK, shown)]
    if len(usable) < len(read):
        message = f"{origin}: {len(read) - len(usable)} of {len(read)} prompts read are too long and left out"
        findings.append(Finding("data", Level.NOTE, message))
    unlabelled = sum(sample.label is None for _, sample in usable) if columns.label else 0
    if unlabelled:
        message = f"{origin}: {columns.label!r} (--label-key) is null in {unlabelled} of {len(usable)} rows read"
        findings.append(Finding("data", Level.WARNING, message))
    findings += _sizes(max(len(sample.tokens) for _, sample in usable), total, origin, limits)
    findings += _alike([sample for _, sample in usable], origin)
    return usable, findings


def _alike(samples: list[Sample], origin: str) -> Iterator[Finding]:
    """Report rows that teach nothing: all alike, or with the answer at the end of the prompt."""
    if len(samples) < _MANY:
        return
    prompts = [str(sample.prompt) for sample in samples]
    labels = [str(sample.label).strip() for sample in samples if sample.label is not None]
    for words, values in (("prompt", prompts), ("label", labels)):
        if len(values) == len(samples) and len(set(values)) == 1:
            text = f"{origin}: all {len(samples)} rows read have the {words} {values[0][:60]!r}; name another column"
            yield Finding("data", Level.WARNING, text)
    if len(labels) < len(samples) or not all(label and label in prompt for prompt, label in zip(prompts, labels)):
        return
    ends = {prompt.rpartition(label)[2] for prompt, label in zip(prompts, labels)}
    if len(ends) == 1:  # of the chat template, if anything
        text = f"{origin}: each of the {len(samples)} prompts read ends with its label, so the answer is known"
        yield Finding("data", Level.WARNING, text)


def _sizes(longest: int, total: int, origin: str, limits: _Limits) -> Iterator[Finding]:
    """Whether prompts and answers fit into the model, and a rollout into the data."""
    if limits.positions is not None and longest >= limits.positions:
        text = f"{origin}: a prompt has {longest} tokens, and the model takes {limits.positions} with the answer;"
        yield Finding("data", Level.ERROR, f"{text} --rollout-max-prompt-len N leaves longer ones out")
    elif limits.positions is not None and longest + limits.response > limits.positions:
        text = f"{origin}: {longest} tokens of a prompt and {limits.response} of an answer are more than the"
        yield Finding("data", Level.WARNING, f"{text} {limits.positions} positions of the model")
    if limits.rollout is not None and limits.rollout > total:
        text = f"--rollout-batch-size {limits.rollout} is more than the {total} rows of {origin}"
        yield Finding("data", Level.WARNING, f"{text}: every rollout draws rows several times")


def _tokenizer(run: Prepared, tokenizer: Any) -> Iterator[Finding]:
    """Special tokens, round trip, and a template that only ever appends."""
    if tokenizer.eos_token_id is None:
        yield Finding("tokenizer", Level.WARNING, "no eos_token: answers end at their length limit or a stop string")
    text = "The answer: 3 + 4 = 7."
    back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
    if back != text:
        yield Finding("tokenizer", Level.NOTE, f"text does not survive encoding: {text!r} comes back as {back!r}")
    if "" in (run.args.rollout_stop or ()):
        yield Finding(
            "tokenizer", Level.ERROR, f"{run.settings.cite('rollout_stop')}: every answer has the empty string"
        )
    if beyond := [i for i in run.args.rollout_stop_token_ids or () if not 0 <= i < len(tokenizer)]:
        text = f"the tokenizer has {len(tokenizer)} tokens, and no {', '.join(map(str, beyond))}"
        yield Finding("tokenizer", Level.ERROR, f"{run.settings.cite('rollout_stop_token_ids')}: {text}")
    if not run.args.apply_chat_template:
        return
    question, answer = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
    try:
        asked = render_messages(tokenizer, [question], None, {"add_generation_prompt": True})
        full = render_messages(tokenizer, [question, answer])
    except SlimeError as error:
        yield Finding("chat template", Level.ERROR, str(error))
        return
    if not full.startswith(asked):
        yield Finding(
            "chat template",
            Level.WARNING,
            "a conversation with its answer does not begin with the prompt that asked for it; several turns will not"
            " be the tokens that were sampled",
        )
        return
    before, _, after = full.removeprefix(asked).partition(str(answer["content"]))
    if before.strip() and asked == render_messages(tokenizer, [question]):
        text = f"a prompt ends without {before!r}, which comes before an answer: the template ignores"
        yield Finding(
            "chat template", Level.WARNING, f"{text} add_generation_prompt, so the model writes on as the user"
        )
    yield from _ends(run, tokenizer, after)


def _ends(run: Prepared, tokenizer: Any, after: str) -> Iterator[Finding]:
    """Compare the token that ends an answer in the template with the tokens that end generation."""
    args, directory = run.args, Path(run.args.hf_checkpoint)
    end = next((token for token in tokenizer.get_added_vocab() if token and after.strip().startswith(token)), None)
    ends = {tokenizer.eos_token_id, *(args.rollout_stop_token_ids or ())}
    for name in ("config.json", "generation_config.json"):
        if (directory / name).is_file():
            said = json.loads((directory / name).read_text(encoding="utf-8")).get("eos_token_id")
            ends |= {*said} if isinstance(said, list) else {said}
    if (
        end is None
        or tokenizer.convert_tokens_to_ids(end) in ends
        or any(end in stop for stop in args.rollout_stop or ())
    ):
        return
    number = tokenizer.convert_tokens_to_ids(end)
    text = f"an answer ends with {end!r} (id {number}), which does not end generation: answers run to their limit"
    yield Finding("chat template", Level.WARNING, f"{text}; type --rollout-stop-token-ids {number}")


# -- arithmetic, paths, space --------------------------------------------------------------------------------


def _batch(run: Prepared) -> Iterator[Finding]:
    a = run.args
    if a.rollout_batch_size is None or a.num_steps_per_rollout is None:
        return
    samples = a.rollout_batch_size * a.n_samples_per_prompt
    length = f"{a.num_epoch} epochs" if a.num_rollout is None else f"{a.num_rollout} rollouts"
    yield Finding(
        "batch",
        Level.OK,
        f"{a.rollout_batch_size} prompts x {a.n_samples_per_prompt} = {samples} samples a rollout, in"
        f" {a.num_steps_per_rollout} optimizer steps of {a.global_batch_size}; {length}",
    )


def _length(run: Prepared) -> Iterator[Finding]:
    """There is something to do."""
    args = run.args
    if run.settings.command not in ("train", "sft") or args.num_rollout is None or args.debug_rollout_only:
        return
    if args.num_rollout == 0:
        yield Finding("length", Level.WARNING, f"{run.settings.cite('num_rollout')}: nothing is trained or committed")
        return
    try:
        done = first_rollout(args, named_commit(args))
    except SlimeError:
        return  # `starting` says so
    if done >= args.num_rollout:
        text = f"{run.settings.cite('num_rollout')}: {done} are done, so nothing is left; a larger one goes on"
        yield Finding("length", Level.WARNING, text)


def _precision(run: Prepared) -> Iterator[Finding]:
    """A CPU without instructions for bfloat16 multiplies in it many times slower than in float32."""
    import torch

    args = run.args
    if args.dtype != "bfloat16" or args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available()):
        return

    def seconds(dtype: torch.dtype) -> float:
        matrix = torch.ones(128, 128, dtype=dtype)
        return min(timeit.repeat(lambda: torch.mm(matrix, matrix), number=1, repeat=8))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # others would have to be woken first
    times = seconds(torch.bfloat16) / seconds(torch.float32)
    torch.set_num_threads(threads)
    if times > _SLOW_PRODUCTS:
        slow = f"{run.settings.cite('dtype')}: a product takes this CPU {times:.0f} times as long as in float32"
        yield Finding("dtype", Level.WARNING, f"{slow}; without it the run is faster, and its numbers are better")


def _paths(run: Prepared) -> Iterator[Finding]:
    """Every place the run writes to can be written to."""
    args = run.args
    places = {"run_dir": str(run_dir_of(args))} | {
        name: os.path.dirname(getattr(args, name) or "")
        for name in ("save_debug_rollout_data", "save_debug_train_data", "save_hf")
    }
    for name, place in {"save": args.save or "", **places}.items():
        ground = _existing(Path(place)) if place else None
        if ground is not None and not (ground.is_dir() and os.access(ground, os.W_OK | os.X_OK)):
            reason = "cannot be written to" if ground.is_dir() else "is no directory"
            yield Finding("paths", Level.ERROR, f"{run.settings.cite(name)}: {ground} {reason}")


def _disk(run: Prepared) -> Iterator[Finding]:
    """Room for the checkpoints: float32 weights and two moments each."""
    args = run.args
    if run.settings.command not in ("train", "sft") or args.debug_rollout_only:
        return
    if not (Path(args.hf_checkpoint) / "config.json").is_file():
        return
    try:
        elements = sum(num_elements(path) for path in weight_files(args.hf_checkpoint))
    except SlimeError as error:
        yield Finding("disk", Level.ERROR, str(error))
        return
    each = 4 * elements * (1 if args.no_save_optim else 3)
    most = max(1, (args.num_rollout or 1) // (args.save_interval or 1))
    kept = min(most, args.keep_checkpoints + len(args.eval_datasets)) if args.keep_checkpoints else most
    place = args.save or str(run_dir_of(args))
    free = shutil.disk_usage(_existing(Path(place))).free
    shown = (
        f"{'--save' if args.save else '--run-dir'} {place}: {_size(free)} free, a checkpoint takes about {_size(each)}"
    )
    # One more than is kept is on disk while it is written.
    if free < _HEADROOM * each:
        yield Finding("disk", Level.ERROR, f"{shown}; not one fits")
    elif free < _HEADROOM * each * (kept + 1):
        yield Finding("disk", Level.WARNING, f"{shown}, {kept} are kept; --keep-checkpoints N keeps fewer")
    else:
        yield Finding("disk", Level.OK, shown)


def num_elements(path: Path) -> int:
    """Return the elements of a file of weights. Raises ConfigError for one that is cut."""
    with path.open("rb") as weights:
        if weights.read(len(_POINTER)) == _POINTER:
            raise ConfigError(f"{path} is a pointer of Git LFS, not the weights; type git lfs pull in its directory")
    try:
        with safe_open(path, framework="pt") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is cut or damaged ({error}); download it again") from error


def _existing(path: Path) -> Path:
    """The path, or its nearest ancestor that exists."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.exists())


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
