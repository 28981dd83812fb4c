"""SGLang's servers behind a router, and which models of a run answer where."""

from __future__ import annotations

from slime_core import Args, resolve
from slime_core.errors import ConfigError, EngineError

__all__ = ["get_model_url", "planned_models"]


def planned_models(args: Args) -> list[str]:
    """Names of the models that `--sglang-config` has served, before anything starts; none without the file.

    Raises:
        ConfigError: The file cannot be read, or is wrong.
        PluginError: There is no such engine.
    """
    if not args.sglang_config:
        return []
    engine = resolve("engines", args.rollout_engine, origin="--rollout-engine").obj
    ask = getattr(engine, "planned_models", None)
    return [] if ask is None else list(ask(args))


def get_model_url(args: Args, model_name: str, endpoint: str = "/generate") -> str:
    """URL of a model of `--sglang-config`, as in THUDM/slime.

    Args:
        args: The run's settings. While the engine runs, `args.sglang_model_routers` maps each model's name to the
            host and port that answer for it; an engine that serves one model may leave it out.
        model_name: `name` of the model; "default" without `--sglang-config`.
        endpoint: Path, beginning with a slash.

    Raises:
        ConfigError: There is no such model; says which there are.
        EngineError: No engine answers over HTTP, as before the run's has started.
    """
    from slime_engine_http.ports import url_host  # which a run without servers does not need

    routers = args.sglang_model_routers or {}
    names = routers or planned_models(args)
    if names and model_name not in names:
        raise ConfigError(f"no model {model_name!r} is served; there are: {', '.join(map(repr, sorted(names)))}")
    if names and not routers:  # a router that is running already would answer for another model
        raise EngineError(f"model {model_name!r} of --sglang-config is served while --rollout-engine sglang runs")
    host, port = routers.get(model_name) or (args.sglang_router_ip, args.sglang_router_port)
    if not host or not port:
        raise EngineError(
            f"model {model_name!r}: no engine answers over HTTP (args.sglang_router_ip and args.sglang_router_port are"
            " not set); it is set while a run has an engine that serves models"
        )
    return f"http://{url_host(str(host))}:{port}{endpoint}"
