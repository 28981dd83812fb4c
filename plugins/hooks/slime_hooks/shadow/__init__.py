"""Shadow components: rewards and filters that see copies of every rollout, while the run's own components decide.

Copies are made when a rollout is done. A thread with its own processes scores them, so training does not wait and is
not affected. The results are in `RUN/samples/shadow_*.jsonl.zst`, which `slime_runs.Run.shadow` reads.
"""

from __future__ import annotations

import copy
import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core import Args, Sample, hookimpl
from slime_core.plugins.resolve import absolute_spec, resolve
from slime_core.sample import Group

if TYPE_CHECKING:
    from slime_hooks.shadow.judging import Judge

__all__ = ["Shadows"]

logger = logging.getLogger(__name__)

_BEHIND = 8
"""Maximum number of rollouts that wait to be judged; further ones are skipped."""
_DEADLINE = 60.0
"""Seconds that the end of a run waits for the results."""


class Shadows:
    """The hooks of one process."""

    def __init__(self) -> None:
        self._all_groups: list[Group] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._judge: Judge | None = None
        self._pending: set[Future[None]] = set()
        self._left_out = 0

    @hookimpl
    def slime_configure(self, args: Args) -> None:
        """Raise PluginError if a shadow component cannot be found or called."""
        for setting, kind in (("shadow_rm_path", "rewards"), ("shadow_filter_path", "filters")):
            specs = [absolute_spec(spec) for spec in getattr(args, setting)]
            setattr(args, setting, specs)
            for spec in specs:
                resolve(kind, spec, origin=f"--{setting.replace('_', '-')}")

    @hookimpl
    def slime_process_all_samples(self, args: Args, all_groups: list[Group]) -> None:
        """Keep all groups: only this hook sees dropped groups."""
        self._all_groups = all_groups if args.shadow_rm_path or args.shadow_filter_path else None

    @hookimpl
    def slime_log_rollout(self, rollout_id: int, args: Args, samples: list[Sample]) -> None:
        """Copy the groups of a finished rollout and queue them for judging."""
        groups, self._all_groups = self._all_groups, None
        if groups is None or not args.run_dir:
            return
        self._pending = {future for future in self._pending if not future.done()}
        if len(self._pending) >= _BEHIND:
            self._left_out += 1
            return
        from slime_hooks.shadow.judging import Judge, Seen

        trained = {id(sample) for sample in samples}
        seen = [Seen(copy.deepcopy(group), any(id(s) in trained for s in group)) for group in groups]
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="slime-shadow")
            self._judge = Judge(args)
        assert self._judge is not None
        self._pending.add(self._thread.submit(self._judge.rollout, Path(args.run_dir), rollout_id, seen))

    @hookimpl
    def slime_run_end(self, error: BaseException | None) -> None:
        """Judge the waiting rollouts, up to a deadline."""
        if self._thread is None or self._judge is None:
            return
        late = wait(self._pending, timeout=_DEADLINE if error is None else 0.0).not_done
        left_out = self._left_out + len(late)
        if left_out:
            logger.warning("shadow components were too slow for %d rollouts, which they have not judged", left_out)
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._judge.close()
        self._thread = self._judge = None
