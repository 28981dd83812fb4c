"""Check that an object can be called as its kind is called; done when a command starts, before any process.

The check binds the kind's arguments to the object's signature; it never calls the object. A second parameter named
`samples` makes a reward a batch reward, whatever its annotation is.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

from slime_core import protocols
from slime_core.errors import ConfigError, PluginLoadError, PluginSignatureError, SlimeError, name_of
from slime_core.plugins.kind import Call, Kind
from slime_core.protocols import Args
from slime_core.workers.call import raised_at

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_signature(kind: Kind, obj: object, subject: str) -> None:
    """Raise PluginSignatureError with the expected and the found signature if `obj` does not fit `kind`."""
    if kind.instance:
        if not isinstance(obj, getattr(protocols, kind.instance)):
            raise PluginSignatureError(f"{subject}: expected a slime_core.{kind.instance}; found {_describe(obj)}")
        return
    if not (kind.calls or kind.construct):
        for each in obj if kind.lists and isinstance(obj, (list, tuple)) else [obj]:
            if not callable(each):
                raise PluginSignatureError(f"{subject}: expected a function, found {type(each).__name__} {each!r:.80}")
        return
    if kind.construct and (inspect.isclass(obj) or (kind.objects and _has_methods(obj, kind))):
        _check_class(kind, obj, subject)
    elif not callable(obj) or inspect.isclass(obj) or not kind.calls:
        raise PluginSignatureError(f"{subject}: expected {' or '.join(_expected(kind))}; found {_describe(obj)}")
    else:
        check_call(kind.calls, obj, subject, extra=_class_forms(kind))


def fits(kind: Kind, obj: object) -> bool:
    """Return whether `check_signature` would pass."""
    try:
        check_signature(kind, obj, "")
    except PluginSignatureError:
        return False
    return True


def check_call(
    calls: Iterable[Call], function: Callable[..., object], subject: str, *, extra: Iterable[str] = ()
) -> None:
    """Raise PluginSignatureError unless one of `calls` that applies can be made on `function`."""
    signature = signature_of(function)
    if signature is None:
        return
    names = positional_names(signature)
    applicable = [call for call in calls if call.marker is None or call.marker in names]
    asynchronous, bound = is_async(function), [call for call in applicable if _binds(function, signature, call)]
    if not all(call.plain if asynchronous else call.awaited for call in bound):
        return
    expected = " or ".join([*(call.shown for call in applicable), *extra])
    found = f"{'async ' if asynchronous else ''}{name_of(function)}{signature}"
    hint = f". Make it {'a plain `def`' if asynchronous else '`async def`'}" if bound else ""
    raise PluginSignatureError(f"{subject}: expected {expected}; found {found}{hint}")


def signature_of(function: Callable[..., object]) -> inspect.Signature | None:
    """Return the signature, or None for a built-in without a readable signature."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def positional_names(signature: inspect.Signature) -> list[str]:
    """Return the names of the parameters that can be passed by position."""
    return [p.name for p in signature.parameters.values() if p.kind in _POSITIONAL]


def declared(function: Callable[..., object], names: Iterable[str]) -> frozenset[str]:
    """Return the `names` that the function declares as parameters; `**kwargs` declares none."""
    signature = signature_of(function)
    parameters = signature.parameters if signature else {}
    return frozenset(
        name
        for name in names
        if name in parameters
        and parameters[name].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    )


def is_async(function: Callable[..., object]) -> bool:
    """Return True for `async def`, an object whose `__call__` is async, or an annotation of an awaitable result."""
    for candidate in (function, inspect.unwrap(function), getattr(function, "__call__", None)):  # noqa: B004
        if candidate is not None and inspect.iscoroutinefunction(candidate):
            return True
    signature = signature_of(function)
    annotation = str(signature.return_annotation) if signature else ""
    return any(word in annotation for word in ("Awaitable", "Coroutine", "Future", "Task["))


def takes_list(function: Callable[..., object]) -> bool:
    """Return True for a function of a list of samples, which has a parameter named `samples`."""
    signature = signature_of(function)
    return signature is not None and "samples" in positional_names(signature)


_SETTINGS = ("arguments", "settings", "config", "cfg", "namespace", "opts", "")
"""Parameter names for the run's settings, without underscores; any name that ends in "args" counts, too."""
_NOTHING = object()


def construct(cls: type, args: Args | None, *, name: str = "", **offered: object) -> Any:
    """Construct a class; its constructor's parameter names choose the values that are passed.

    A parameter called `args` (or `config`, `settings`, ...) gets the run's settings; a name in `offered` gets that
    object. Any other name is looked up in `plugins.NAME`, then among the settings, which include the keys of
    --custom-config-path.

    Args:
        cls: The class.
        args: The run's settings; None for kinds that are built without settings.
        name: The component's key in `plugins`; the stem of a file.
        offered: Further objects, by parameter name.

    Raises:
        ConfigError: A parameter without default was not given.
        PluginLoadError: The constructor raised; the message has its file and line.
        SlimeError: The constructor raised it on purpose.
    """
    positional, keywords = constructor_values(cls, args, name=name, **offered)
    try:
        return cls(*positional, **keywords)
    except SlimeError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise PluginLoadError(f"building {cls.__name__} failed at {raised_at(error)}: {reason}") from error


def constructor_values(
    cls: type, args: Args | None, *, name: str = "", **offered: object
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments with which `construct` would call the class, without calling it.

    Raises ConfigError as `construct` does.
    """
    signature = signature_of(cls)
    if signature is None:
        return (args,), {}
    options = args.plugins.get(name, {}) if args else {}
    values: OrderedDict[str, object] = OrderedDict()
    for parameter in signature.parameters.values():
        value = _constructor_value(parameter, args, options, offered)
        if value is not _NOTHING:
            values[parameter.name] = (value,) if parameter.kind == parameter.VAR_POSITIONAL else value
        elif parameter.default is parameter.empty and parameter.kind not in _VARIABLE:
            raise ConfigError(
                f"{cls.__name__}{signature} needs {parameter.name!r}; type --set plugins.{name or 'NAME'}."
                f"{parameter.name}=VALUE, or write {parameter.name}: VALUE into the file of --custom-config-path"
            )
    bound = inspect.BoundArguments(signature, values)
    return bound.args, bound.kwargs


def asks_by_name(cls: type) -> bool:
    """Return True if the constructor has required parameters besides the run's settings."""
    signature = signature_of(cls)
    parameters = signature.parameters.values() if signature else ()
    return any(p.kind not in _VARIABLE and not _is_settings(p) and p.default is p.empty for p in parameters)


def _constructor_value(
    parameter: inspect.Parameter, args: Args | None, options: Mapping[str, object], offered: Mapping[str, object]
) -> object:
    if parameter.name in offered:
        return offered[parameter.name]
    if _is_settings(parameter):
        return args
    if parameter.kind in _VARIABLE:
        return _NOTHING
    found = options.get(parameter.name, getattr(args, parameter.name, None))
    return _NOTHING if found is None else found


def _is_settings(parameter: inspect.Parameter) -> bool:
    plain = parameter.name.strip("_")
    return parameter.kind != inspect.Parameter.VAR_KEYWORD and (plain.endswith("args") or plain in _SETTINGS)


def _check_class(kind: Kind, obj: Any, subject: str) -> None:
    is_class = inspect.isclass(obj)
    where = obj.__name__ if is_class else type(obj).__name__
    missing = [name for name in kind.methods if not callable(getattr(obj, name, None))]
    if missing:
        is_called = is_class and kind.objects and any("__call__" in vars(base) for base in obj.__mro__)
        if is_called and len(missing) == len(kind.methods):
            check_call(kind.calls, unbound(obj, "__call__"), f"{subject}: {where}.__call__", extra=_class_forms(kind))
            return
        raise PluginSignatureError(
            f"{subject}: expected {' or '.join(_expected(kind))}; found class {where} without {', '.join(missing)}"
        )
    for name, call in kind.methods.items():
        method = unbound(obj, name) if is_class else getattr(obj, name)
        check_call((call,), method, f"{subject}: {where}.{name}")
    assert kind.construct is not None, "only kinds that take classes get here"
    signature = signature_of(obj) if is_class and not kind.by_name else None
    if signature and not (_can_bind(signature, len(kind.construct.positional)) or _can_bind(signature, 0)):
        raise PluginSignatureError(
            f"{subject}: expected to construct {where}{kind.construct.shown}; found {where}{signature}"
        )


def unbound(cls: type, name: str) -> Callable[..., object]:
    """Return a method of a class with the signature that it has when bound to an instance; not to be called."""
    static = inspect.getattr_static(cls, name)
    return MethodType(static, cls) if inspect.isfunction(static) else getattr(cls, name)


def _has_methods(obj: object, kind: Kind) -> bool:
    return not inspect.isfunction(obj) and all(callable(getattr(obj, name, None)) for name in kind.methods)


def _class_forms(kind: Kind) -> list[str]:
    forms = " and ".join(call.of_method(name) for name, call in kind.methods.items())
    return [f"a class with {forms}"] if forms else []


def _expected(kind: Kind) -> list[str]:
    return [f"a function {call.shown}" for call in kind.calls] + _class_forms(kind)


def _binds(function: Callable[..., object], signature: inspect.Signature, call: Call) -> bool:
    keywords = {*declared(function, call.keywords), *call.named}
    return _can_bind(signature, len(call.positional), keywords) or (call.bare and _can_bind(signature, 0, keywords))


def _can_bind(signature: inspect.Signature, count: int, keywords: Iterable[str] = ()) -> bool:
    try:
        signature.bind(*[None] * count, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def _describe(obj: object) -> str:
    if inspect.ismodule(obj):
        return f"module {obj.__name__}; name the function in it: {obj.__name__}:<function>"
    if inspect.isclass(obj):
        return f"class {obj.__name__}"
    return f"{type(obj).__name__} {obj!r:.80}"
