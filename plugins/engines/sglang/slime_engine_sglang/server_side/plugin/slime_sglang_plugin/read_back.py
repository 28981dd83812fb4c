"""Which bytes of a model come from which trained tensor: the model's own loader is run, and nothing is written.

    names and shapes -> model.load_weights on tensors without memory ("meta") -> each write into the model is recorded
                        instead of executed -> checksums of the places that would have been written

So fused, sharded and tied parameters need no table of names: the loader itself says what goes where. `weight_action`
answers slime's requests with it. Not only parameters but every tensor that a module holds is protected from writes, and
every attribute that the loader replaces is put back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

FACTS = ""
"""Key of what is said about the model as a whole; no weight has this name."""
_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_THREADS = 4
_SAME_VALUES = {
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.lift_fresh.default,
}
_FILLS = {
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
}


class Refused(Exception):
    """This model's weights cannot be read back; the text says why."""


@dataclass(frozen=True)
class Place:
    """Where one write would have gone, and from where in the trained tensor."""

    parameter: str
    target: torch.Tensor
    name: str | None
    """Of the trained tensor; None for values that come from elsewhere."""
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    value: torch.Tensor | None = None
    """What would have been written, where that is no trained tensor."""


def read_back(model: torch.nn.Module, wanted: Sequence[Sequence[Any]]) -> dict[str, str]:
    """JSON by HF name of `wanted` ([name, shape, dtype], ...): [[size, stride, offset, checksum], ...].

    Sizes, strides and offsets count elements of the contiguous trained tensor; a name that nothing is loaded from is
    left out. Under FACTS: `{"refused": why}`, or `parameters` (name -> elements), `written` (name -> elements that the
    names fill) and `stale` (parameters which differ from what the loader computes for them without trained tensors).
    It never raises: where one of several processes raised, the others would wait for it.
    """
    try:
        with torch.no_grad():
            return _read_back(model, wanted)
    except Refused as error:
        return {FACTS: json.dumps({"refused": str(error)})}
    except Exception as error:
        return {FACTS: json.dumps({"refused": f"its load_weights failed: {type(error).__name__}: {error}"})}


def _read_back(model: torch.nn.Module, wanted: Sequence[Sequence[Any]]) -> dict[str, str]:
    parameters = dict(model.named_parameters())
    _check_layout(model, parameters)
    places = _dry_load(model, wanted) if wanted else []
    written: dict[str, int] = {}
    for place in places:
        written[place.parameter] = written.get(place.parameter, 0) + place.target.numel()
    stale = {p.parameter for p in places if p.value is not None and not _holds(p.target, p.value)}
    facts = {
        "parameters": {name: parameter.numel() for name, parameter in parameters.items()},
        "written": written,
        "stale": sorted(stale),
    }
    trained = [place for place in places if place.name is not None]
    trained += _shared(model, parameters, wanted, {place.name for place in trained})
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        checksums = list(threads.map(lambda place: checksum(place.target), trained))
    pieces: dict[str, list[Any]] = {}
    for place, found in zip(trained, checksums):
        pieces.setdefault(str(place.name), []).append([place.size, place.stride, place.offset, found])
    return {FACTS: json.dumps(facts)} | {name: json.dumps(found) for name, found in pieces.items()}


def checksum(tensor: torch.Tensor) -> str:
    """As slime's `weights.checksum.tensor_checksum`, which these are compared with."""
    tensor = tensor.detach().to("cpu").contiguous()
    digest = hashlib.blake2b(f"{tuple(tensor.shape)}".encode(), digest_size=16)
    # One element counts as contiguous with any stride, and only stride 1 can be viewed as bytes.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    digest.update(flat.view(torch.uint8).numpy().data)
    return f"{str(tensor.dtype).removeprefix('torch.')}:{digest.hexdigest()}"


def _check_layout(model: torch.nn.Module, parameters: dict[str, torch.nn.Parameter]) -> None:
    """Raise Refused for weights that are not held as they were trained."""
    for name, parameter in parameters.items():
        if parameter.dtype not in _PLAIN:
            raise Refused(
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}: quantized weights (fp8, int8, ...)"
                " are not the trained ones, and are not covered"
            )
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if getattr(module, "use_intel_amx_backend", False):
            raise Refused(f"{name} holds its weights packed for AMX, which is not covered")
        for flag in ("w13_swiglu_interleaved", "use_flashinfer_trtllm_moe"):
            if getattr(method, flag, False) is True:
                raise Refused(f"{name} holds its weights reordered ({flag}), which is not covered")


def _holds(target: torch.Tensor, value: torch.Tensor) -> bool:
    return torch.equal(target, value.to(target.device, target.dtype).expand(target.shape))


def _shared(
    model: torch.nn.Module,
    parameters: dict[str, torch.nn.Parameter],
    wanted: Sequence[Sequence[Any]],
    loaded: set[str | None],
) -> list[Place]:
    """Places of the names that nothing was loaded from because another module has the same parameter: a tied output
    layer, which is loaded under the name of the embedding.
    """
    first = {id(parameter): name for name, parameter in parameters.items()}
    origins = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    places: list[Place] = []
    for name, shape, dtype in wanted:
        origin = origins.get(name, name)
        if name in loaded or origin == name:
            continue
        with contextlib.suppress(KeyError):  # the loader knows it under yet another name
            found = _dry_load(model, [[origin, shape, dtype]])
            places += [replace(p, name=name) for p in found if p.name is not None and p.parameter == origin]
    return places


def _dry_load(model: Any, wanted: Sequence[Sequence[Any]]) -> list[Place]:
    recorder = _Recorder(model)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape, dtype in wanted:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            recorder.sources[_storage(tensor)] = (name, tensor)
            yield name, tensor

    restore = _remember(model)
    try:
        with recorder:
            model.load_weights(tensors())
    finally:
        restore()
    return list(recorder.places.values())


def _remember(model: torch.nn.Module) -> Callable[[], None]:
    """A function that puts every attribute of every module back, and the memory of every parameter."""
    spaces = [
        (space, dict(space))
        for module in model.modules()
        for space in (module._parameters, module._buffers, module.__dict__)
    ]
    memory = [(parameter, parameter.data) for parameter in model.parameters()]

    def restore() -> None:
        for space, before in spaces:
            if space.keys() != before.keys() or any(space[key] is not value for key, value in before.items()):
                space.clear()
                space.update(before)
        for parameter, data in memory:
            same = parameter.shape == data.shape and parameter.stride() == data.stride()
            if not same or parameter.data_ptr() != data.data_ptr():
                parameter.data = data

    return restore


class _Recorder(TorchDispatchMode):
    """While active, writes into the model are recorded and not executed."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.sources: dict[int, tuple[str, torch.Tensor]] = {}
        """Storage -> name of the trained tensor it stands for, and what keeps it alive."""
        self.places: dict[tuple[Any, ...], Place] = {}
        """The last write to each place."""
        self._scalar: tuple[str, int] | None = None
        """A trained element that the loader has just asked the value of."""
        self._owned: dict[int, list[tuple[int, int, str]]] = {}
        """Storage -> [first byte, end, name] of the tensors in it."""
        for name, tensor in _tensors(model):
            begin = tensor.storage_offset() * tensor.element_size()
            extent = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride())) + 1
            end = begin + extent * tensor.element_size()
            self._owned.setdefault(_storage(tensor), []).append((begin, end, name))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for target in _written(func, args, kwargs):
            if _storage(target) in self.sources:
                raise Refused(f"its load_weights changes the tensors it is given ({func})")
            if _storage(target) in self._owned:
                return self._write(func, target, args)
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if source is not None and _storage(source) in self.sources:
            if func in _SAME_VALUES:
                return self._again(source, kwargs.get("dtype"))
            if func is torch.ops.aten._local_scalar_dense.default:
                self._scalar = (self.sources[_storage(source)][0], source.storage_offset())
                return 0.0
        return func(*args, **kwargs)

    def _again(self, source: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """A copy of a trained tensor's view, at the same offsets of another tensor without memory."""
        name, whole = self.sources[_storage(source)]
        base = torch.empty(whole.numel(), dtype=dtype or source.dtype, device="meta")
        self.sources[_storage(base)] = (name, base)
        return base.as_strided(source.shape, source.stride(), source.storage_offset())

    def _write(self, func: Any, target: torch.Tensor, args: Any) -> torch.Tensor:
        parameter = self._name_of(target)
        scalar, self._scalar = self._scalar, None
        if func in _FILLS:
            if scalar is not None and target.numel() == 1:
                ones = (1,) * target.dim()
                self._record(Place(parameter, target, scalar[0], tuple(target.shape), ones, scalar[1]))
            else:
                self._record(Place(parameter, target, None))
            return target
        if func is not torch.ops.aten.copy_.default:
            raise Refused(f"its load_weights computes in place on {parameter} ({func})")
        source = args[1]
        if _storage(source) in self.sources:
            view = source.expand(target.shape)
            name = self.sources[_storage(source)][0]
            size, stride = tuple(view.shape), tuple(view.stride())
            self._record(Place(parameter, target, name, size, stride, view.storage_offset()))
        elif source.device.type == "meta":
            raise Refused(f"its load_weights computes what it writes to {parameter} from the trained tensors")
        else:
            self._record(Place(parameter, target, None, value=source))
        return target

    def _record(self, place: Place) -> None:
        target = place.target
        if target.numel() == 0:  # a rank may hold nothing but padding
            return
        self.places[_storage(target), target.storage_offset(), target.shape, target.stride()] = place

    def _name_of(self, target: torch.Tensor) -> str:
        at = target.storage_offset() * target.element_size()
        inside = self._owned[_storage(target)]
        return next((name for begin, end, name in inside if begin <= at < end), inside[0][2])


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that a module of the model holds."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{key}" if name else key, value


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The arguments that an operator writes to."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor
