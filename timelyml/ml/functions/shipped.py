"""Functions that travel as code, because they call Python while they run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from timelyml.errors import ShippingError
from timelyml.ml import jax_pickles
from timelyml.ml.functions.options import Arguments
from timelyml.runtime.shipping import dumps, loads


@dataclass(frozen=True, eq=False)  # JAX keeps what it traced by weak reference
class ShippedFunction:
    """A function of flat arrays, made of the user's own.

    Attributes:
        split: Holds the arguments that are fixed, and none of the others.
        skeleton: `(args, kwargs)` of the traced arguments, numbers for arrays.
        classes: Dataclasses of arguments and results that JAX was told of, with the fields that
            hold arrays; a class that travels by value is a new one in each process.
    """

    fun: Callable[..., Any]
    split: Arguments
    skeleton: Any
    classes: tuple[tuple[type, tuple[str, ...]], ...]

    def __call__(self, *arrays: Any) -> Any:
        """Call the function."""
        leaves, tree = jax.tree.flatten(self.skeleton)
        args, kwargs = jax.tree.unflatten(tree, [arrays[each] for each in leaves])
        merged, merged_kwargs = self.split.merge(args, kwargs)
        return self.fun(*merged, **merged_kwargs)


def ship_function(
    name: str, fun: Callable[..., Any], split: Arguments, in_tree: Any, out_tree: Any
) -> bytes:
    """Pickle a function by value where workers could not import it.

    Raises:
        ShippingError: It captures something that cannot be pickled.
    """
    skeleton = jax.tree.unflatten(in_tree, range(in_tree.num_leaves))
    classes = {**dataclasses_in(in_tree), **dataclasses_in(out_tree)}
    shipped = ShippedFunction(fun, split.fixed, skeleton, tuple(classes.items()))
    try:
        return dumps(shipped, reduce=jax_pickles.reduce)
    except Exception as error:
        raise ShippingError(
            f"function {name!r} cannot be shipped to workers; got "
            f"{type(error).__name__}: {error}; expected code and values that pickle, as "
            f"it calls Python on the host; create what it captures inside of the "
            f"callback",
            who=name,
        ) from error


def unship_function(pickled: bytes) -> ShippedFunction:
    """Rebuild what `ship_function` pickled; runs code that the bytes name.

    Raises:
        ShippingError: A module or name that it needs does not exist here.
    """
    try:
        shipped: ShippedFunction = loads(pickled)
    except Exception as error:
        raise ShippingError(
            f"a compiled function cannot be rebuilt in this worker; got "
            f"{type(error).__name__}: {error}; expected every module that it uses to be "
            f"importable here; install it for the workers or define it in the script",
            reason=repr(error),
        ) from error
    for cls, data_fields in shipped.classes:
        register(cls, data_fields)
    return shipped


def dataclasses_in(tree: Any) -> dict[type, tuple[str, ...]]:
    """Return the dataclasses among the nodes of a tree, with fields that hold arrays."""
    found: dict[type, tuple[str, ...]] = {}
    node: tuple[type, Any] | None = tree.node_data()
    if node is not None and dataclasses.is_dataclass(node[0]):
        value = jax.tree.unflatten(tree, range(tree.num_leaves))
        paths, _ = jax.tree.flatten_with_path(value, is_leaf=lambda x: x is not value)
        keys = [getattr(path[0], "name", None) for path, _ in paths]
        cls: type = node[0]
        names = {each.name for each in dataclasses.fields(cls)}
        if names.issuperset(keys):
            found[cls] = tuple(str(key) for key in keys)
    for child in tree.children():
        found.update(dataclasses_in(child))
    return found


def register(cls: type, data_fields: tuple[str, ...]) -> None:
    """Tell JAX of a dataclass, unless it knows it."""
    names = [each.name for each in dataclasses.fields(cls) if each.init]
    meta_fields = [name for name in names if name not in data_fields]
    # It is known already if its module was imported, or if it came before.
    with contextlib.suppress(ValueError):
        jax.tree_util.register_dataclass(cls, data_fields, meta_fields)
