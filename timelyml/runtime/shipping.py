"""Shipping of user code: the one place that pickles it, and that unpickles it.

A run is pickled once, before anything starts, in every mode; each worker then
unpickles its own copy, so captured objects behave alike everywhere. Code of
`__main__` and of modules that a worker could not import travels by value.
Unpickling runs code: only what the process that started a worker sent to it, over
an authenticated link, may reach `unship`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import pickle
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from timelyml.errors import ShippingError, summary_of
from timelyml.exchange import Codec
from timelyml.graph import Graph, OperatorSpec
from timelyml.runtime.config import ShippedRun
from timelyml.runtime.culprit import Culprit, find_culprit
from timelyml.runtime.messages import MESSAGE_TYPES
from timelyml.runtime.service import ServiceSpec, message_types
from timelyml.runtime.signals import is_interrupt

_NAME = [field.name for field in dataclasses.fields(OperatorSpec)].index("name")
_ANONYMOUS_FILE = "<dynamic-code>"  # what cloudpickle calls the file of all code


def ship(run: ShippedRun) -> bytes:
    """Pickle a graph and its configuration, for `unship` in each worker.

    Raises:
        ShippingError: Something captured cannot be pickled; names the operator or
            channel, and the attribute where it was found.
    """
    try:
        return dumps(run)
    except Exception as error:
        raise _explain(run, error) from error


def unship(shipped: bytes) -> ShippedRun:
    """Rebuild what `ship` pickled; runs code that the bytes name.

    Raises:
        ShippingError: A module or name that it needs does not exist here, or a class
            of what was captured raised; names the operator, where that can be told.
    """
    try:
        run = pickle.loads(shipped)  # noqa: S301 - sent by the process that started us
    except BaseException as error:
        if is_interrupt(error):
            raise
        what = summary_of(error)
        msg = (
            f"{_not_rebuilt(shipped)} cannot be rebuilt in this worker; got {what}; "
            "expected what was captured to come back from pickling, and every module "
            "that it uses to be importable here; install it for the workers or define "
            "it in the script"
        )
        raise ShippingError(msg, reason=what) from error
    if not isinstance(run, ShippedRun):
        msg = (
            f"the shipped bytes are no dataflow; got {type(run).__name__}; expected "
            "what ship() returned"
        )
        raise ShippingError(msg, reason=type(run).__name__)
    return run


def _not_rebuilt(shipped: bytes) -> str:
    """Say whose part of a run cannot be unpickled, by doing it once more in Python."""
    unpickler: Any = pickle._Unpickler(io.BytesIO(shipped))  # noqa: SLF001  shows how far it came
    with contextlib.suppress(BaseException):
        unpickler.load()
    # Within a specification, the object and the list of its values are at the end of
    # one level, and the values so far are the next.
    for outer, values in itertools.pairwise([*unpickler.metastack, unpickler.stack]):
        is_within = len(outer) > 1 and isinstance(outer[-2], OperatorSpec)
        if is_within and len(values) > _NAME:
            return f"operator {values[_NAME]!r}"
    return "the shipped dataflow"


def dumps(
    value: object,
    buffer_callback: Callable[[pickle.PickleBuffer], bool] | None = None,
    *,
    refer: Callable[[Any], Any] | None = None,
    reduce: Callable[[Any], Any] | None = None,
) -> bytes:
    """Pickle any object, by value where a worker could not import its code.

    Args:
        value: The object.
        buffer_callback: Is offered large buffers, as by `pickle.dumps`.
        refer: From an object to what stands for it, as `Pickler.persistent_id`.
        reduce: Asked before others how an object is made again, as
            `Pickler.reducer_override`.
    """
    with io.BytesIO() as file:
        pickler = _Pickler(file, buffer_callback, reduce)
        if refer is not None:
            pickler.persistent_id = refer
        try:
            pickler.dump(value)
        finally:
            pickler.unregister()
        return file.getvalue()


def worker_codec(services: Sequence[ServiceSpec] = ()) -> Codec:
    """Return a codec for the messages between a driver and its own workers."""
    kinds = [*MESSAGE_TYPES, *message_types(services)]
    return Codec(kinds, allow_pickle=True, dumps=dumps)


def loads(data: bytes, *, resolve: Callable[[Any], Any] | None = None) -> Any:
    """Unpickle what `dumps` made; runs code that the bytes name.

    Args:
        data: The bytes.
        resolve: From what `refer` returned to the object that it stands for.
    """
    unpickler = pickle.Unpickler(io.BytesIO(data))  # noqa: S301 - of our own workers
    if resolve is not None:
        unpickler.persistent_load = resolve  # type: ignore[method-assign]  # as documented
    return unpickler.load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    """Registers modules that workers cannot import, for as long as it pickles."""

    def __init__(
        self,
        file: io.BytesIO,
        buffer_callback: Callable[[pickle.PickleBuffer], bool] | None,
        reduce: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(file, buffer_callback=buffer_callback)
        self._reduce = reduce
        self._registered: list[types.ModuleType] = []

    def reducer_override(self, obj: Any) -> Any:
        if self._reduce is not None:
            found = self._reduce(obj)
            if found is not NotImplemented:
                return found
        if isinstance(obj, types.CodeType):
            return self._reduce_code(obj)
        if isinstance(obj, (types.FunctionType, type)):
            self._register_module_of(obj)
        return super().reducer_override(obj)

    def _reduce_code(self, code: types.CodeType) -> Any:
        """Keep the file name, or tracebacks would not show the user's lines."""
        make, parts = self.dispatch_table[types.CodeType](code)
        known = (
            code.co_filename if part == _ANONYMOUS_FILE else part for part in parts
        )
        return make, tuple(known)

    def _register_module_of(self, obj: Any) -> None:
        name = getattr(obj, "__module__", None)
        module = sys.modules.get(name) if isinstance(name, str) else None
        if module is None or name == "__main__" or module in self._registered:
            return
        if not _is_importable(module):
            _by_value.add(module)
            self._registered.append(module)

    def unregister(self) -> None:
        for module in self._registered:
            _by_value.remove(module)
        self._registered.clear()


class _ByValue:
    """Modules in cloudpickle's registry, which all threads that pickle share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: Counter[str] = Counter()

    def add(self, module: types.ModuleType) -> None:
        """Register a module, unless the user has."""
        name = module.__name__
        with self._lock:
            if (
                self._uses[name]
                or name not in cloudpickle.list_registry_pickle_by_value()
            ):
                self._uses[name] += 1
                cloudpickle.register_pickle_by_value(module)

    def remove(self, module: types.ModuleType) -> None:
        """Take it out again after the last use."""
        name = module.__name__
        with self._lock:
            if not self._uses[name]:
                return  # the user's own
            self._uses[name] -= 1
            if not self._uses[name]:
                cloudpickle.unregister_pickle_by_value(module)


_by_value = _ByValue()  # one, as cloudpickle has one registry


def _is_importable(module: types.ModuleType) -> bool:
    """Whether a fresh interpreter with our `sys.path` would find the module."""
    if getattr(module, "__spec__", None) is None:
        return module.__name__ in sys.builtin_module_names
    root = module.__name__.partition(".")[0]
    if root in sys.stdlib_module_names:
        return True
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is not None and find_spec(root, None) is not None:
            return True
    return False


def _explain(run: ShippedRun, error: Exception) -> ShippingError:
    for who, part in _parts(run.graph):
        if (culprit := find_culprit(part, _reason_not_picklable)) is not None:
            return _refusal(who, culprit)
    if (culprit := find_culprit(run.config, _reason_not_picklable)) is not None:
        return _refusal("the run's configuration", culprit)
    return _refusal(
        f"dataflow {run.graph.name!r}", Culprit("", type(run), f"{error!r}")
    )


def _parts(graph: Graph) -> list[tuple[str, object]]:
    parts: list[tuple[str, object]] = []
    for spec in graph.operators:
        parts += [(f"operator {spec.name!r}", part) for part in (spec.logic, spec)]
    for channel in graph.channels:
        source = graph.operators[channel.source.operator].name
        target = graph.operators[channel.target.operator].name
        parts.append((f"the channel from {source!r} to {target!r}", channel.pact))
    return parts


def _refusal(who: str, culprit: Culprit) -> ShippingError:
    where = f" at {culprit.path}" if culprit.path else ""
    msg = (
        f"{who} cannot be shipped to workers; got a {culprit.type_name}{where} "
        f"({culprit.reason}); expected functions and values that pickle; create it "
        "inside the function, or in state, on the worker"
    )
    return ShippingError(msg, who=who, path=culprit.path, type_name=culprit.type_name)


def _reason_not_picklable(value: object) -> str | None:
    try:
        dumps(value)
    except Exception as error:  # noqa: BLE001 - whatever a user's __reduce__ raises
        return f"{type(error).__name__}: {error}"
    return None
