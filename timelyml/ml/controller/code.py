"""Computations: known once in the cluster, compiled once for each slice."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping

from timelyml.ml.controller.messages import Register
from timelyml.ml.controller.records import LoadedCode, Outbox, SliceRecord
from timelyml.ml.functions import Computation, MemoryNeeds
from timelyml.ml.hosts import Compiled, Load


class Code:
    """What clients registered, and for which slices it is compiled.

    Args:
        slices: All slices, also those that are lost.
        hosts: All hosts.
        outbox: Takes what follows.
    """

    def __init__(
        self, slices: Mapping[str, SliceRecord], hosts: Iterable[int], outbox: Outbox
    ) -> None:
        self._slices = slices
        self._outbox = outbox
        self._computations: dict[str, Computation] = {}
        self._pickled: dict[str, bytes] = {}
        self._sent: dict[int, set[str]] = {host: set() for host in hosts}

    def get(self, identity: str) -> Computation | None:
        """Return a computation that was registered."""
        return self._computations.get(identity)

    def register(self, message: Register) -> None:
        """Learn a computation, and have it compiled for a slice."""
        if message.identity not in self._computations:
            loaded = pickle.loads(message.pickled)  # noqa: S301 - of an authenticated client
            self._computations[message.identity] = loaded
            self._pickled[message.identity] = message.pickled
        slice_ = self._slices.get(message.slice)
        if slice_ is None or slice_.error is not None:
            return  # calls on it are refused, which is told to those who ask
        if message.identity in slice_.loaded:
            return
        slice_.loaded[message.identity] = LoadedCode(set(slice_.hosts))
        for host in slice_.hosts:
            is_known = message.identity in self._sent[host]
            pickled = None if is_known else self._pickled[message.identity]
            self._sent[host].add(message.identity)
            self._outbox.send(host, Load(message.identity, slice_.name, pickled))

    def compiled(self, host: int, message: Compiled) -> bool:
        """Take a host's word; return whether all hosts of the slice have given theirs."""
        slice_ = self._slices.get(message.slice)
        if slice_ is None:
            return False  # it was given back in the meantime
        loaded = slice_.loaded[message.identity]
        loaded.hosts_left.discard(host)
        loaded.needs = max(loaded.needs, message.needs, key=lambda each: each.new_bytes)
        return not loaded.hosts_left

    def needs(self, identity: str, slice_: SliceRecord) -> MemoryNeeds | None:
        """Return what a computation takes on each device, once it is compiled there."""
        loaded = slice_.loaded.get(identity)
        return None if loaded is None or loaded.hosts_left else loaded.needs
