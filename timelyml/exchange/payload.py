"""Payloads: the two containers of records, and what the core does with them.

A payload is a list of Python objects, or columns: a pytree of numpy arrays that
share their leading axis (a bare array, a dict, a tuple, a dataclass...). The core
moves, cuts and joins whole payloads. Routing rows to shards is in `routing.py`,
turning payloads into bytes in `codec.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from timelyml.errors import PayloadError

Payload: TypeAlias = Any
"""A list of records, or a pytree of arrays of one leading length."""

Array: TypeAlias = npt.NDArray[Any]

EXACT_LIMIT = 2**53  # beyond it a float64 skips integers
_NAMESPACE = "timelyml"
_NUMBERS = {int, float}
_UNSEALABLE = {int, float, str, bytes, bool, type(None)}
_FEW = 8  # records, for which a loop in Python is faster than a set of types
_SHORT = 64  # characters of a string: long ones are not joined to look at them


def as_payload(value: Any) -> Payload:
    """Return `value` as a checked payload; what is array-like becomes numpy.

    A list is taken as it is. Columns that already are numpy arrays come back as the
    same object; leaves that offer `__array__`, such as jax arrays, are converted.

    Raises:
        PayloadError: `value` is neither, or its columns do not fit together.
    """
    if isinstance(value, list):
        return value
    leaves, rebuild = _flatten(value)
    arrays = [_as_array(leaf) for leaf in leaves]
    _check_lengths(arrays)
    if all(new is old for new, old in zip(arrays, leaves, strict=True)):
        return value
    return rebuild(arrays)


def num_records(payload: Payload) -> int:
    """Return how many records the payload holds."""
    if isinstance(payload, (list, np.ndarray)):
        return len(payload)
    if type(payload) is dict:  # asked for often: 0.2 us instead of 5
        for column in payload.values():
            if type(column) is np.ndarray:
                return len(column)
            break
    return len(_flatten(payload)[0][0])


def take(payload: Payload, indices: npt.NDArray[np.integer[Any]]) -> Payload:
    """Return a new payload of the rows at `indices`, in their order."""
    if isinstance(payload, list):
        return [payload[index] for index in indices.tolist()]
    return map_columns(lambda column: column.take(indices, axis=0), payload)


def slice_rows(payload: Payload, start: int, stop: int) -> Payload:
    """Return rows `start` to `stop`; columns are views of the same memory."""
    if isinstance(payload, (list, np.ndarray)):
        return payload[start:stop]
    return map_columns(lambda column: column[start:stop], payload)


def concat(payloads: Sequence[Payload]) -> Payload:
    """Join payloads of one structure, in order; a single one is not copied.

    Payloads without records are left out, since an empty list may stand between
    columns; if all are empty, one of them comes back, columns rather than a list.

    Raises:
        PayloadError: Lists are mixed with columns, or structures, row shapes or
            kinds of values differ.
    """
    full = [payload for payload in payloads if num_records(payload)]
    if len(full) == 1:
        return full[0]
    if not full:
        columns = [payload for payload in payloads if not isinstance(payload, list)]
        return columns[0] if columns else []
    lists = sum(isinstance(payload, list) for payload in full)
    if lists == len(full):
        return [record for records in full for record in records]
    if lists:
        raise PayloadError(
            f"payloads cannot be joined; got {lists} lists of records among "
            f"{len(full)}; expected one container; send lists or columns, not both",
            lists=lists,
        )
    return _concat_columns(full)


def records_of(payload: Payload) -> Iterable[Any]:
    """Return the records: a list as it is, rows of an array, or a dict, tuple... per row.

    >>> import numpy as np
    >>> [(int(r["x"]), int(r["y"])) for r in records_of({"x": np.arange(2), "y": np.arange(2)})]
    [(0, 0), (1, 1)]
    """
    if isinstance(payload, (list, np.ndarray)):
        return payload
    leaves, rebuild = _flatten(payload)
    return map(rebuild, map(list, zip(*leaves, strict=True)))


def leaves_of(payload: Payload) -> list[Array]:
    """Return the arrays of columns, in the order of the pytree."""
    return _flatten(payload)[0]


def map_columns(function: Callable[[Array], Any], payload: Payload) -> Payload:
    """Apply `function` to every column and keep the structure."""
    if isinstance(payload, np.ndarray):
        return function(payload)
    leaves, rebuild = _flatten(payload)
    return rebuild([function(leaf) for leaf in leaves])


def seal(payload: Payload) -> Payload:
    """Make every array read-only in place, with the arrays it is a view of.

    A sent block is shared with the transport and with every branch of a fan-out.
    In a list, arrays that are records, or direct items of a tuple, list or dict
    record, are sealed; the list itself belongs to the runtime from now on.
    """
    if isinstance(payload, list):
        if len(payload) <= _FEW or not _holds_no_arrays(payload):
            for record in payload:
                if type(record) not in _UNSEALABLE:
                    _seal_record(record)
        return payload
    for leaf in _flatten(payload)[0]:
        _seal_array(leaf)
    return payload


def _holds_no_arrays(records: list[Any]) -> bool:
    """Tell without a loop in Python, which would cost 0.1 us per record and more."""
    sample = records[0]
    with contextlib.suppress(Exception):
        if type(sample) in _NUMBERS:
            # An array among numbers makes their sum one: 5 ns per record, not 20.
            if type(sum(records)) in _NUMBERS:
                return True
        elif type(sample) is str and len(sample) <= _SHORT:
            # Nothing but strings can be joined: 9 ns per record, not 30.
            "".join(records)
            return True
    types = set(map(type, records))
    if types <= _UNSEALABLE:
        return True
    return types == {tuple} and _UNSEALABLE.issuperset(
        map(type, chain.from_iterable(records))
    )


def _seal_record(record: Any) -> None:
    if isinstance(record, np.ndarray):
        _seal_array(record)
    elif isinstance(record, (tuple, list)):
        for item in record:
            if type(item) not in _UNSEALABLE and isinstance(item, np.ndarray):
                _seal_array(item)
    elif isinstance(record, dict):
        for item in record.values():
            if isinstance(item, np.ndarray):
                _seal_array(item)


def _seal_array(array: Any) -> None:
    while isinstance(array, np.ndarray):
        array.flags.writeable = False
        array = array.base


def _flatten(payload: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """Return the leaves, at least one, and a function from leaves to the pytree."""
    if isinstance(payload, np.ndarray):
        return [payload], _only
    names = _names_of(payload)
    if names:  # as optree does it, in a fifth of its 5 us
        order = list(payload)
        leaves = [payload[name] for name in names]
        return leaves, partial(_named, names, None if order == names else order)
    import optree  # noqa: PLC0415  takes a worker 15 ms; most payloads need none

    leaves, treespec = optree.tree_flatten(payload, namespace=_NAMESPACE)
    unknown = {
        type(leaf)
        for leaf in leaves
        if type(leaf) is not np.ndarray and dataclasses.is_dataclass(leaf)
    }
    if unknown:
        for cls in unknown:
            if cls is type:
                raise _not_a_payload(payload)
            _register_dataclass(cls)
        return _flatten(payload)
    if not leaves:
        raise _not_a_payload(payload)
    return leaves, treespec.unflatten


def _names_of(payload: Any) -> list[str]:
    """Return the names of a dictionary of arrays, sorted; none of what else it is."""
    if type(payload) is not dict:
        return []
    for name, column in payload.items():
        if type(name) is not str or type(column) is not np.ndarray:
            return []
    return sorted(payload)


def _named(names: list[str], order: list[str] | None, leaves: Any) -> dict[str, Any]:
    columns = dict(zip(names, leaves, strict=True))
    return columns if order is None else {name: columns[name] for name in order}


def _only(leaves: Any) -> Any:
    (leaf,) = leaves
    return leaf


def _not_a_payload(payload: Any) -> PayloadError:
    return PayloadError(
        f"a payload has no columns; got {type(payload).__name__}; expected a list of "
        f"records or a pytree of arrays; wrap records in a list",
        got=type(payload).__name__,
    )


def _register_dataclass(cls: type[Any]) -> None:
    """Teach optree, in our namespace only, that a dataclass is a node."""
    import optree  # noqa: PLC0415  see `_flatten`

    names = tuple(field.name for field in dataclasses.fields(cls) if field.init)

    def flatten(value: Any) -> tuple[list[Any], None, tuple[str, ...]]:
        return [getattr(value, name) for name in names], None, names

    def unflatten(_: Any, children: Any) -> Any:
        return cls(**dict(zip(names, children, strict=True)))

    with contextlib.suppress(ValueError):  # another thread was first
        optree.register_pytree_node(cls, flatten, unflatten, namespace=_NAMESPACE)


def _as_array(leaf: Any) -> Array:
    array: Array = leaf if type(leaf) is np.ndarray else _converted(leaf)
    _check_array(array)
    return array


def _converted(leaf: Any) -> Array:
    # Not asked of each array: to load `numpy.ma` takes a worker 20 ms.
    if isinstance(leaf, np.ma.MaskedArray) or not hasattr(leaf, "__array__"):
        raise PayloadError(
            f"a payload holds something that is no array; got {type(leaf).__name__}; "
            f"expected a list of records or a pytree of arrays; wrap records in a list",
            got=type(leaf).__name__,
        )
    return np.asarray(leaf)


def _check_array(array: Array) -> None:
    if array.ndim == 0:
        raise PayloadError(
            f"a column has no rows; got a 0-d array of {array.dtype}; expected a "
            f"leading axis of records; add it with array[None]",
            dtype=str(array.dtype),
        )
    if array.dtype.hasobject:
        raise PayloadError(
            f"a column holds Python objects; got dtype {array.dtype}; expected numbers, "
            f"fixed-width strings or times; send a list of records instead",
            dtype=str(array.dtype),
        )


def _check_lengths(arrays: Sequence[Array]) -> None:
    lengths = [len(array) for array in arrays]
    if lengths.count(lengths[0]) != len(lengths):
        raise PayloadError(
            f"columns of one payload differ in length; got {lengths}; expected equal "
            f"leading axes; cut or pad them",
            lengths=lengths,
        )


def _concat_columns(payloads: Sequence[Payload]) -> Payload:
    flattened = [_flatten(payload) for payload in payloads]
    names = _names_of(payloads[0])
    if not names or any(_names_of(payload) != names for payload in payloads):
        _check_structures(payloads)
    columns = zip(*(leaves for leaves, _ in flattened), strict=True)
    return flattened[0][1]([_concat_arrays(column) for column in columns])


def _check_structures(payloads: Sequence[Payload]) -> None:
    import optree  # noqa: PLC0415  see `_flatten`

    structures = {optree.tree_structure(p, namespace=_NAMESPACE) for p in payloads}
    if len(structures) > 1:
        found = sorted(str(structure) for structure in structures)
        raise PayloadError(
            f"payloads cannot be joined; got structures {found}; expected equal ones; "
            f"send the same columns every time",
            structures=found,
        )


def _concat_arrays(arrays: Sequence[Array]) -> Array:
    kinds = {"number" if a.dtype.kind in "biufc" else a.dtype.kind for a in arrays}
    shapes = {array.shape[1:] for array in arrays}
    if len(kinds) > 1 or len(shapes) > 1:
        found = sorted({f"{a.dtype}{list(a.shape[1:])}" for a in arrays})
        raise PayloadError(
            f"columns cannot be joined; got rows of {found}; expected one kind and "
            f"shape; send the same columns every time",
            rows=found,
        )
    joined = np.concatenate(arrays)
    if joined.dtype.kind == "f" and all(a.dtype.kind in "biu" for a in arrays):
        return np.concatenate(arrays, dtype=_common_integer(arrays), casting="unsafe")
    if joined.dtype.kind in "fc":
        _check_exact(arrays, joined.dtype)
    return joined


def _common_integer(arrays: Sequence[Array]) -> np.dtype[Any]:
    """Return what holds the signed and unsigned integers, which numpy makes floats."""
    least = min(int(array.min()) for array in arrays)
    most = max(int(array.max()) for array in arrays)
    for dtype in (np.dtype(np.int64), np.dtype(np.uint64)):
        bounds = np.iinfo(dtype)
        if bounds.min <= least and most <= bounds.max:
            return dtype
    found = sorted({str(array.dtype) for array in arrays})
    raise PayloadError(
        f"columns cannot be joined; got {least} and {most} among {found}; expected "
        f"integers that int64 or uint64 holds; convert one of them",
        values=(least, most),
    )


def _check_exact(arrays: Sequence[Array], dtype: np.dtype[Any]) -> None:
    """Refuse integers among numbers of other kinds that a float cannot hold."""
    for array in arrays:
        if array.dtype.kind not in "iu" or array.dtype.itemsize < 8:
            continue
        for value in (int(array.max()), int(array.min())):
            if abs(value) > EXACT_LIMIT:
                raise PayloadError(
                    f"columns cannot be joined; got {value} of {array.dtype} among "
                    f"{dtype}, which cannot hold it; expected one kind of numbers; "
                    f"convert one of them",
                    value=value,
                )
