"""Unique, readable names for the parts of one graph."""

from __future__ import annotations

from timelyml.errors import DuplicateNameError, GraphError


class NameTable:
    """The names of one sort of part: operators, scopes or loops.

    A part without a name of its own is named after its kind: `map`, then `map-2`.
    """

    def __init__(self, dataflow: str, sort: str) -> None:
        self._dataflow = dataflow
        self._sort = sort
        self._kinds: dict[str, str] = {}
        self._next: dict[str, int] = {}

    def choose(self, name: str | None, kind: str) -> str:
        """Return a usable name; None, or the bare kind, finds a free one.

        The bare kind is no explicit name, so that an operator function may have it
        as the default of its `name=`. The name is free until `add`.

        Raises:
            DuplicateNameError: An explicit name is taken.
            GraphError: It is empty or cannot be printed in one line.
        """
        if name is None or name == kind:
            name = self._free(kind)
        check_name(name, f"{self._sort} of dataflow {self._dataflow!r}")
        if name in self._kinds:
            raise DuplicateNameError(
                f"dataflow {self._dataflow!r} has two {self._sort}s of one name; got "
                f"{name!r} for a {self._kinds[name]} before; expected a unique name; "
                f"choose another name, or leave it out",
                name=name,
                kind=self._kinds[name],
            )
        return name

    def add(self, name: str, kind: str) -> None:
        """Take a name that `choose` returned."""
        self._kinds[name] = kind

    def _free(self, kind: str) -> str:
        number = self._next.get(kind, 1)
        while (name := kind if number == 1 else f"{kind}-{number}") in self._kinds:
            number += 1
        # kept, or naming n operators of one kind would take n * n steps
        self._next[kind] = number
        return name


def check_name(name: str, who: str) -> None:
    """Refuse a name that is empty or cannot be printed in one line."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise GraphError(
            f"{who} has an unusable name; got {name!r}; expected printable text of one "
            f"line; choose another name",
            name=repr(name),
        )
