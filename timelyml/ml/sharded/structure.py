"""The structure of a pytree, as a value that travels to workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


class Structure:
    """A PyTreeDef that pickles, as a tree of numbers of its leaves.

    >>> import pickle
    >>> structure = Structure.of({"a": 1, "b": (2, 3)})
    >>> pickle.loads(pickle.dumps(structure)) == structure
    True
    """

    __slots__ = ("treedef",)

    def __init__(self, treedef: Any) -> None:
        self.treedef = treedef

    @classmethod
    def of(cls, tree: Any) -> Structure:
        """Give the structure of a tree."""
        return cls(jax.tree.structure(tree))

    @property
    def num_leaves(self) -> int:
        """How many leaves there are."""
        return int(self.treedef.num_leaves)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Give a tree of these leaves."""
        return jax.tree.unflatten(self.treedef, leaves)

    def flatten_up_to(self, tree: Any) -> list[Any]:
        """Give what stands in a tree where this structure has leaves."""
        return list(self.treedef.flatten_up_to(tree))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self.treedef == other.treedef

    def __hash__(self) -> int:
        return hash(self.treedef)

    def __repr__(self) -> str:
        return f"Structure({self.treedef})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Structure.of, (self.unflatten(range(self.num_leaves)),)
