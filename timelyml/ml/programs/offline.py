"""A client without a cluster: functions and programs can be traced and looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from jax.sharding import AbstractMesh

from timelyml.errors import ProgramError
from timelyml.ml.functions import LogicalMesh, abstract_mesh


@dataclass(frozen=True, slots=True)
class OfflineSlice:
    """A slice that stands nowhere."""

    client: OfflineClient
    name: str
    axes: tuple[tuple[str, int], ...]
    platform: str

    @property
    def mesh(self) -> AbstractMesh:
        """The mesh, without devices."""
        names, sizes = zip(*self.axes, strict=True)
        return abstract_mesh(LogicalMesh(names, sizes))


class OfflineClient:
    """Gives out slices as a client does, and runs nothing.

    >>> client = OfflineClient()
    >>> client.slice({"data": 4, "model": 2}).mesh.size
    8
    """

    def __init__(self) -> None:
        self._num_slices = 0

    def slice(
        self,
        shape: Mapping[str, int],
        *,
        name: str | None = None,
        platform: str = "cpu",
    ) -> OfflineSlice:
        """Return a slice with these axes, the slowest first."""
        self._num_slices += 1
        name = name or f"slice{self._num_slices - 1}"
        return OfflineSlice(self, name, tuple(shape.items()), platform)

    def call(self, call: Any) -> NoReturn:
        """Refuse to run a compiled function.

        Raises:
            ProgramError: Always.
        """
        self._refuse(f"function {call.computation.name!r}")

    def call_program(self, call: Any) -> NoReturn:
        """Refuse to run a program.

        Raises:
            ProgramError: Always.
        """
        self._refuse(f"program {call.program.name!r}")

    def _refuse(self, who: str) -> NoReturn:
        raise ProgramError(
            f"{who} cannot run; got a client without a cluster; expected one from "
            f"ml.local or ml.connect; offline, functions can only be traced"
        )
