"""Settings -> `Placement`: which bundle of the cluster each trainer rank, engine and the rollout manager gets.

A bundle is the unit that a cluster allocates: a GPU with a CPU, or a CPU without GPUs. Bundles are numbered over the
cluster, node after node, so bundle b of a GPU cluster is GPU `b % num_gpus_per_node` of node
`b // num_gpus_per_node`::

    disaggregated   | t0 t1 t2 t3 | e0 e0 e1 e1 |        --colocate   | t0+e0 t1+e0 t2+e1 t3+e1 |

Pure computation: nothing is started, and no GPU is searched for. `slime plan` calls it, and the Ray launcher, which
requests `bundles` from Ray and places actors accordingly. The engines' places come from the engine's own plan if it has
one (`launch_plan` of its class), else from the table in `protocols/launcher.py`. A critic needs no place of its own,
since actor and critic of a rank share a process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from slime_core.config import Settings
from slime_core.errors import ConfigError
from slime_core.protocols import Args, EngineTraits, traits_of
from slime_core.protocols.launcher import gpu_layout
from slime_core.text import table

TRAINER_SHARE = 0.4
"""The trainer's share of a bundle that it shares with an engine; both shares fit into one, as in THUDM/slime."""
ENGINE_SHARE = 0.2
MANAGER_CPUS = 0.2
"""CPUs of the rollout manager, which mostly waits; it runs in the first engine's bundle."""
SMALLEST_SHARE = 0.001
"""Ray counts resources in ten-thousandths."""


@dataclass(frozen=True)
class EngineNeeds:
    """The requirements of one engine that the run starts."""

    name: str
    size: int
    """Number of GPUs; on CPU the number of processes."""
    gpus: tuple[int, ...] = ()
    """GPU numbers in the cluster from the engine's own plan; empty: the next free GPUs."""


@dataclass(frozen=True)
class Bundle:
    """A unit of the cluster: a GPU with a CPU, or a CPU."""

    index: int
    node: int
    """Node of the cluster, counted from 0; on CPU derived from the settings."""
    gpus: int
    cpus: float

    @property
    def resources(self) -> dict[str, float]:
        """The resources under Ray's names."""
        return {"CPU": self.cpus, **({"GPU": float(self.gpus)} if self.gpus else {})}


@dataclass(frozen=True)
class TrainerPlace:
    """The place of one trainer process (actor and critic)."""

    rank: int
    bundle: int
    node: int
    local_rank: int
    """Rank among the trainer's processes on its node."""
    gpus: float
    """Share of the bundle's GPU; 0 on CPU."""
    cpus: float


@dataclass(frozen=True)
class EnginePlace:
    """The place of one engine; its process runs in the first of its bundles."""

    name: str
    bundles: tuple[int, ...]
    nodes: tuple[int, ...]
    gpus: float
    """Share of the first bundle's GPU; 0 on CPU."""
    cpus: float


@dataclass(frozen=True)
class ManagerPlace:
    """The place of the rollout stage."""

    bundle: int
    cpus: float


@dataclass(frozen=True)
class Placement:
    """The places of all processes of a run."""

    device: Literal["cuda", "cpu"]
    bundles: tuple[Bundle, ...]
    trainers: tuple[TrainerPlace, ...]
    engines: tuple[EnginePlace, ...]
    """Engines that the run starts; empty with external engines, or if the run generates nothing."""
    manager: ManagerPlace
    first_engine: int
    """First bundle for inference."""
    warnings: tuple[str, ...] = ()

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in use, over all nodes."""
        return sum(bundle.gpus for bundle in self.bundles)

    @property
    def num_nodes(self) -> int:
        """Number of nodes in use."""
        return max(bundle.node for bundle in self.bundles) + 1

    @property
    def shared(self) -> tuple[int, ...]:
        """Bundles that a trainer rank and an engine share."""
        engines = {bundle for engine in self.engines for bundle in engine.bundles}
        return tuple(t.bundle for t in self.trainers if t.bundle in engines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def describe(self) -> str:
        """Return a table of bundles and their processes for the terminal."""
        return "\n".join(_describe(self))


def plan_placement(
    args: Args,
    *,
    trainer_processes: int,
    engines: Sequence[EngineNeeds],
    gpus: bool,
    num_gpus: int | None = None,
    num_cpus: float | None = None,
) -> Placement:
    """Place a run.

    Args:
        args: The run's settings.
        trainer_processes: Number of trainer processes over all nodes; ignored with `--debug-rollout-only`.
        engines: Engines that this run starts, in order (`engines_of`); ignored with `--debug-train-only`.
        gpus: Whether bundles are GPUs.
        num_gpus: GPUs in the cluster; None: not checked.
        num_cpus: CPUs in the cluster; None: not checked. With fewer CPUs than bundles, a bundle is a fraction of a CPU.

    Raises:
        ConfigError: The run does not fit; the message shows the arithmetic.
    """
    trainer = 0 if args.debug_rollout_only else trainer_processes
    engines = () if args.debug_train_only else tuple(engines)
    _check_trainer(args, trainer, gpus)
    layout = gpu_layout(args, trainer=trainer, rollout=sum(engine.size for engine in engines))
    spans = _spans(engines, layout.first_engine)
    total = max([layout.total, 1, *(max(span) + 1 for span in spans)])
    if gpus and not trainer and not engines:
        gpus = False  # the rollout stage alone, with engines elsewhere
    per_node = _per_node(args, trainer, total, gpus)
    if gpus:
        _check_gpus(args, trainer, spans, total, num_gpus)
        for engine, span in zip(engines, spans):
            _check_engine_node(engine, span, per_node)
    cpus, warnings = _cpus(total, num_cpus)
    last = total if gpus else max(args.actor_num_nodes if trainer else 1, 1) - 1
    bundles = tuple(Bundle(i, min(i // per_node, last), int(gpus), cpus) for i in range(total))
    held = {bundle for span in spans for bundle in span}
    trainers = tuple(
        TrainerPlace(
            rank=rank,
            bundle=rank,
            node=bundles[rank].node,
            local_rank=rank % per_node,
            gpus=(TRAINER_SHARE if rank in held else 1.0) if gpus else 0.0,
            cpus=_rounded(cpus * (TRAINER_SHARE if rank in held else 1 - MANAGER_CPUS)),
        )
        for rank in range(trainer)
    )
    placed = tuple(
        EnginePlace(
            name=engine.name,
            bundles=span,
            nodes=tuple(dict.fromkeys(bundles[b].node for b in span)),
            gpus=(ENGINE_SHARE if span[0] < trainer else 1.0) if gpus else 0.0,
            cpus=_rounded(cpus * (ENGINE_SHARE if span[0] < trainer else 1 - MANAGER_CPUS)),
        )
        for engine, span in zip(engines, spans)
    )
    home = placed[0].bundles[0] if placed else 0
    manager = ManagerPlace(home, _rounded(cpus * MANAGER_CPUS))
    if gpus and trainer and args.actor_num_nodes > 1 and args.actor_num_gpus_per_node != args.num_gpus_per_node:
        warnings.append(
            f"--actor-num-nodes {args.actor_num_nodes} x --actor-num-gpus-per-node {args.actor_num_gpus_per_node} is"
            f" packed on nodes of --num-gpus-per-node {args.num_gpus_per_node}: {bundles[trainer - 1].node + 1} nodes"
        )
    return Placement(
        "cuda" if gpus else "cpu", bundles, trainers, placed, manager, layout.first_engine, tuple(warnings)
    )


def engines_of(engine: Any, settings: Settings, num_gpus: int) -> tuple[list[EngineNeeds], list[str]]:
    """Return the engines that a run starts, and warnings: from the plan of the engine's class, or one process.

    Args:
        engine: The class that `--rollout-engine` names; None if the run needs no engine.
        settings: The run's settings, with the number of trainer processes set (`settle_trainer`).
        num_gpus: GPUs in the cluster; 0 on CPU.

    Raises:
        ConfigError: The engine's plan cannot work.
    """
    if engine is None or (traits_of(engine, EngineTraits).runs_elsewhere and not hasattr(engine, "launch_plan")):
        return [], []
    planner = getattr(engine, "launch_plan", None)
    if planner is None:
        return [EngineNeeds("engine", 1)], []
    plan = planner(settings, num_gpus)
    per_node = settings.args.num_gpus_per_node
    found: dict[str, EngineNeeds] = {}
    for server in plan.servers:
        numbers = tuple(server.node * per_node + gpu for gpu in server.gpus)
        size = len(numbers) or server.arguments.get("tp_size", 1) * server.arguments.get("pp_size", 1)
        before = found.get(server.engine, EngineNeeds(server.engine, 0))
        found[server.engine] = replace(before, size=before.size + size, gpus=tuple(sorted(before.gpus + numbers)))
    return list(found.values()), list(plan.warnings)


def engines_of_flags(args: Args, trainer_processes: int, num_gpus: int | None = None) -> list[EngineNeeds]:
    """Divide `--rollout-num-gpus` into engines of `--rollout-num-gpus-per-engine`, for an engine without a plan.

    Without `--rollout-num-gpus`, use the trainer's GPUs with `--colocate`, else the GPUs of `num_gpus` that training
    does not use.

    Raises:
        ConfigError: The number of GPUs is no multiple of the engine's size.
    """
    size, total = args.rollout_num_gpus_per_engine, args.rollout_num_gpus
    trainer = 0 if args.debug_rollout_only else trainer_processes
    if args.rollout_external_engine_addrs:
        return []
    if total is None:
        left = size if num_gpus is None else max(0, num_gpus - trainer)
        total = trainer if args.colocate and trainer else left
    if total % size:
        below = total // size * size
        works = f"{below} or {below + size} works" if below else f"{size} works"
        raise ConfigError(
            f"{total} GPUs for inference (--rollout-num-gpus) is no multiple of --rollout-num-gpus-per-engine {size};"
            f" {works}"
        )
    return [EngineNeeds(f"engine/{i}", size) for i in range(total // size)]


def settle_trainer(settings: Settings, processes: int) -> None:
    """Set `--actor-num-gpus-per-node` to the GPUs that training uses, unless the user has set it.

    The default is 8, and a trainer may run in one process; without this the engine's plan would leave seven GPUs free.

    Raises:
        ConfigError: The processes cannot be spread over the nodes.
    """
    each, rest = divmod(processes, settings.args.actor_num_nodes)
    if rest:
        raise ConfigError(f"{settings.cite('actor_num_nodes')}: {processes} trainer processes do not divide evenly")
    if not settings.is_given("actor_num_gpus_per_node"):
        settings.derive("actor_num_gpus_per_node", each, "the trainer's processes")


# -- checks ------------------------------------------------------------------------------------------------


def _check_trainer(args: Args, trainer: int, gpus: bool) -> None:
    nodes = args.actor_num_nodes
    if trainer % nodes:
        below = trainer // nodes * nodes
        raise ConfigError(
            f"{trainer} trainer processes over --actor-num-nodes {nodes} is no whole number per node;"
            f" {below} or {below + nodes} works"
        )
    if gpus and trainer // nodes > args.num_gpus_per_node:
        raise ConfigError(
            f"{trainer} trainer processes over --actor-num-nodes {nodes} is {trainer // nodes} per node, and a node has"
            f" --num-gpus-per-node {args.num_gpus_per_node}; set that to what a node has, or take more nodes"
        )


def _check_gpus(args: Args, trainer: int, spans: list[tuple[int, ...]], total: int, num_gpus: int | None) -> None:
    if num_gpus is None or total <= num_gpus:
        return
    count = sum(map(len, spans))
    if args.colocate:
        sum_of = f"the larger of {trainer} for training and {count} for inference"
    else:
        sum_of = f"{trainer} for training + {count} for inference"
    fits = [] if args.colocate or max(trainer, count) > num_gpus else ["--colocate shares them"]
    fits += [f"at most {num_gpus - trainer} fit after training's"] if not args.colocate and trainer < num_gpus else []
    raise ConfigError(
        f"the run needs {total} GPUs ({sum_of}), and the cluster has {num_gpus}: {'; '.join(fits) or 'ask for fewer'}"
        " (--actor-num-nodes, --actor-num-gpus-per-node, --rollout-num-gpus)"
    )


def _check_engine_node(engine: EngineNeeds, span: tuple[int, ...], per_node: int) -> None:
    begin, end = span[0], span[-1] + 1
    crosses = begin // per_node != (end - 1) // per_node
    if crosses and (begin % per_node or end % per_node):
        raise ConfigError(
            f"engine {engine.name!r} of {engine.size} GPUs (--rollout-num-gpus-per-engine) would have GPUs {begin} to"
            f" {end - 1} and lie across nodes of --num-gpus-per-node {per_node}; an engine lies on one node, or fills"
            " several: choose a size that divides the node, or a multiple of it"
        )


# -- arithmetic --------------------------------------------------------------------------------------------


def _spans(engines: Sequence[EngineNeeds], first: int) -> list[tuple[int, ...]]:
    """Return the bundles of each engine."""
    spans, start = [], first
    for engine in engines:
        span = engine.gpus or tuple(range(start, start + engine.size))
        spans.append(span)
        start = span[-1] + 1
    return spans


def _per_node(args: Args, trainer: int, total: int, gpus: bool) -> int:
    """Return the number of bundles per node; on CPU it follows from the trainer's processes only."""
    if gpus:
        return int(args.num_gpus_per_node)
    return trainer // args.actor_num_nodes if trainer and args.actor_num_nodes > 1 else total


def _cpus(total: int, num_cpus: float | None) -> tuple[float, list[str]]:
    """Return the CPUs of a bundle, and warnings."""
    if num_cpus is None or total <= num_cpus:
        return 1.0, []
    each = int(num_cpus / total / SMALLEST_SHARE) * SMALLEST_SHARE
    if each <= 0:
        raise ConfigError(f"the run needs {total} places, and the cluster has {num_cpus:g} CPUs")
    return _rounded(each), [f"{total} processes share {num_cpus:g} CPUs: each counts as {each:.3g} of one"]


def _rounded(cpus: float) -> float:
    return max(round(cpus, 4), SMALLEST_SHARE / 10)


# -- table -------------------------------------------------------------------------------------------------


def _describe(placement: Placement) -> Iterator[str]:
    unit = "GPU" if placement.device == "cuda" else "CPU"
    count = placement.num_gpus or len(placement.bundles)
    nodes = f" on {placement.num_nodes} nodes" if placement.num_nodes > 1 else ""
    yield f"{count} {unit} place{'s' * (count != 1)}{nodes}"
    rows = [("node", unit, "trainer rank", "engine", "also")]
    for bundle in placement.bundles:
        ranks = ", ".join(str(t.rank) for t in placement.trainers if t.bundle == bundle.index)
        engines = ", ".join(e.name for e in placement.engines if bundle.index in e.bundles)
        also = "rollout manager" if placement.manager.bundle == bundle.index else ""
        number = sum(b.node == bundle.node for b in placement.bundles[: bundle.index])
        rows.append((str(bundle.node), str(number), ranks or "-", engines or "-", also))
    yield from (f"  {line}" for line in table(rows))
    for warning in placement.warnings:
        yield f"warning: {warning}"
