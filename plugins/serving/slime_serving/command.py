"""`slime serve` (serve): serve a checkpoint over HTTP (SGLang's, OpenAI's and Anthropic's APIs).

The checkpoint is an HF-layout model directory. The command loads torch and the web framework only when it runs. It
prints one line when the server is ready; SIGTERM and ctrl-C end it cleanly.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from slime_core.protocols import Command

if TYPE_CHECKING:
    from slime_embedded.engine.engine import EmbeddedEngine

    from slime_serving.http.guard import Access


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a checkpoint over HTTP",
        description="Serve an HF-layout model directory: SGLang's API (/generate), OpenAI's and Anthropic's (/v1/...).",
    )
    parser.add_argument("--hf-checkpoint", "--model-path", required=True, metavar="DIR", help="directory, or org/name")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=30000, help="port, 0 for a free one (default %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="asked of every request but GET (default: $SLIME_API_KEY)")
    parser.add_argument("--allowed-hosts", metavar="NAMES", help="in Host and Origin, besides this machine's; *: any")
    parser.add_argument("--tool-call-parser", default="auto", metavar="NAME", help="reads the model's tool calls")
    parser.add_argument("--served-model-name", help="name in /v1/models (default: the directory)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N (default %(default)s)")
    parser.add_argument("--num-threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--seed", type=int, default=0, help="of requests that bring no sampling_seed")
    parser.add_argument("--engine-max-running-requests", type=int, default=256, metavar="N")
    parser.add_argument("--engine-max-tokens", type=int, metavar="N", help="KV cache capacity in tokens")
    parser.add_argument("--engine-max-context-len", type=int, metavar="N", help="default: max_position_embeddings")
    parser.add_argument("--engine-prefix-cache", action=argparse.BooleanOptionalAction, default=True)


def run(namespace: argparse.Namespace) -> int:
    """Serve until a signal. Raises ConfigError, EngineError."""
    import asyncio

    from slime_embedded.engine.engine import EmbeddedEngine
    from slime_hub.fetch import local_model

    from slime_core.config.schema import Args

    named = namespace.hf_checkpoint
    namespace.hf_checkpoint = local_model(named, f"--hf-checkpoint {named!r} (flag)")
    if namespace.hf_checkpoint != named:
        namespace.served_model_name = namespace.served_model_name or named
    args = Args.model_construct(**vars(namespace), rollout_seed=namespace.seed)
    _access(namespace)
    return asyncio.run(_serve(namespace, EmbeddedEngine(args, step_in_thread=True)))


def _access(namespace: argparse.Namespace) -> Access:
    """Return the access rules. Raises ConfigError for an address reachable from other machines without a key."""
    from slime_core.errors import ConfigError
    from slime_serving.http.guard import KEY_VARIABLE, Access, is_local

    key = namespace.api_key or os.environ.get(KEY_VARIABLE) or None
    if key is None and not is_local(namespace.host):
        raise ConfigError(
            f"--host {namespace.host} is reached from other machines, and any client could change the weights; give"
            f" --api-key KEY (or {KEY_VARIABLE}), or leave --host out"
        )
    hosts = {name.strip().lower() for name in (namespace.allowed_hosts or "").split(",") if name.strip()}
    # With a key, any host name is safe: a web page that rebinds its name to this machine does not have the key.
    return Access(key, frozenset(hosts | ({"*"} if not is_local(namespace.host) else set())))


async def _serve(namespace: argparse.Namespace, engine: EmbeddedEngine) -> int:
    import asyncio
    import gc
    import signal

    from slime_serving.http.application import bind
    from slime_serving.native import serve_socket

    sock = bind(namespace.host, namespace.port)
    try:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        starting = asyncio.create_task(engine.start())
        ended = asyncio.create_task(stopped.wait())
        await asyncio.wait({starting, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not stopped.is_set():
            await starting
            gc.freeze()  # the collector would look at every object of the libraries while all clients wait
            host, port, stop = await serve_socket(engine, sock, namespace.served_model_name, _access(namespace))
            print(f"slime: serving {namespace.hf_checkpoint} on http://{host}:{port}", flush=True)
            await ended
            await stop()
        else:
            await asyncio.gather(starting, return_exceptions=True)
        await engine.stop()
    finally:
        sock.close()
    return 0


command = Command(run, add_parser)
