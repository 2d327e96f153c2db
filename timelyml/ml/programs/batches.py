"""Batches of rows, as `ml.route` and what branches or loops by row are given them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from timelyml.errors import TraceError
from timelyml.ml.functions import ArrayType, type_of
from timelyml.ml.functions.blame import calling_line
from timelyml.ml.functions.ragged import Layout, Ragged, is_ragged


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows on one slice, as arrays or as ragged handles.

    Attributes:
        who: Who was given them, and where, for errors.
        tree: Their structure.
        leaves: Without what makes them ragged.
        layout: If they are ragged.
        slice: Where they are; None on the client.
        num_rows: How many, padding of ragged ones included.
    """

    who: str
    tree: Any
    leaves: tuple[Any, ...]
    layout: Layout | None
    slice: Any
    num_rows: int

    @classmethod
    def of(cls, name: str, values: Any) -> Batch:
        """Check that these are rows of one batch.

        Raises:
            TraceError: They are not.
        """
        who = f"{name} at {calling_line()}"
        found, tree = jax.tree.flatten(values, is_leaf=is_ragged)
        leaves = tuple(each.rows if is_ragged(each) else each for each in found)
        layouts = {each.layout.number if is_ragged(each) else 0 for each in found}
        lengths = {_num_rows(who, name, each) for each in leaves}
        if len(lengths) != 1 or len(layouts) != 1:
            got = sorted(lengths) if lengths else "no arrays"
            got = f"rows of {len(layouts)} routings" if len(layouts) > 1 else got
            raise TraceError(
                f"{who} is given rows that do not belong together; got {got}; expected "
                f"arrays of as many rows, or ragged handles of one routing; cut or pad "
                f"them before",
                function=name,
            )
        slices = (getattr(each, "slice", None) for each in leaves)
        on = next((each for each in slices if each is not None), None)
        layout = found[0].layout if is_ragged(found[0]) else None
        return cls(who, tree, leaves, layout, on, lengths.pop())

    def numbers(
        self, name: str, what: str, given: Any, *, are_flags: bool = False
    ) -> Any:
        """Return an integer for each row, without what makes them ragged.

        Args:
            name: Of the function that asks.
            what: What they tell.
            given: They.
            are_flags: Booleans will do, and any numbers that can be compared with zero.

        Raises:
            TraceError: They are none for these rows.
        """
        layout = given.layout if is_ragged(given) else None
        found = given.rows if is_ragged(given) else given
        of = _array_type(self.who, name, found)
        routings = [None if x is None else x.number for x in (layout, self.layout)]
        is_fit = of.key_impl is None and (are_flags or "int" in of.dtype)
        if not is_fit or len(of.shape) != 1:
            one = "boolean or number" if are_flags else "integer"
            raise TraceError(
                f"{self.who} cannot tell where rows go; got {what} {of}; expected one "
                f"{one} for each row; make them so in a compiled function",
                function=name,
            )
        if of.shape[0] != self.num_rows or routings[0] != routings[1]:
            raise TraceError(
                f"{self.who} cannot tell where rows go; got {of.shape[0]} {what} for "
                f"{self.num_rows} rows; expected as many, of the same routing if they "
                f"are ragged",
                function=name,
            )
        return found

    def back(self, leaves: Sequence[Any], layout: Layout | None) -> Any:
        """Return a tree like the one that was given, of other rows."""
        whole = leaves if layout is None else [Ragged(each, layout) for each in leaves]
        return jax.tree.unflatten(self.tree, whole)


def _num_rows(who: str, name: str, leaf: Any) -> int:
    of = _array_type(who, name, leaf)
    if not of.shape or of.key_impl is not None:
        raise TraceError(
            f"{who} is given what has no rows; got {of}; expected arrays of one dimension "
            f"or more, and no typed keys; send numbers, and make keys of them there",
            function=name,
        )
    return of.shape[0]


def _array_type(who: str, name: str, leaf: Any) -> ArrayType:
    try:
        return type_of(leaf)
    except TypeError as error:
        raise TraceError(
            f"{who} is given what is no array; got a {type(leaf).__name__}: "
            f"{leaf!r:.200}; expected arrays and trees of them",
            function=name,
        ) from error
