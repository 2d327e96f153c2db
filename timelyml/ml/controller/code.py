"""Computations: known once in the cluster, compiled once for each slice."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

from timelyml.ml.controller.messages import Register
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.records import LoadedCode, SliceRecord
from timelyml.ml.functions import Computation, MemoryNeeds
from timelyml.ml.hosts import Compiled, ForgetFunctions, Load

MAX_UNUSED = 256
"""Computations that hosts keep though no slice has them: a client that comes again may."""


class Code:
    """What clients registered, and for which slices it is compiled.

    Args:
        slices: All slices, also those that are lost.
        outbox: Takes what follows.
    """

    def __init__(self, slices: Mapping[str, SliceRecord], outbox: Outbox) -> None:
        self._slices = slices
        self._outbox = outbox
        self._computations: dict[str, Computation] = {}
        self._pickled: dict[str, bytes] = {}
        self._sent: dict[int, set[str]] = {}
        self._remapped: dict[str, str] = {}  # what hosts called slices until then
        self._targets: dict[
            str, SliceRecord
        ] = {}  # of slices that move, by their names

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
        self._load(message.identity, slice_)
        if slice_.name in self._targets:
            self._load(message.identity, self._targets[slice_.name])

    def aim(self, slice_: SliceRecord, target: SliceRecord) -> None:
        """Have all that is compiled for a slice compiled for where it will stand."""
        self._targets[slice_.name] = target
        for identity in slice_.loaded:
            self._load(identity, target)

    def remapped(self, slice_: SliceRecord) -> None:
        """Take note that a slice is about to be where its target is."""
        self._remapped[slice_.name] = self._targets.pop(slice_.name).name

    def unaim(self, slice_: SliceRecord) -> None:
        """Compile for nowhere else any more."""
        self._targets.pop(slice_.name, None)

    def forget(self, slice_name: str) -> None:
        """Take note that a slice is gone."""
        self._remapped.pop(slice_name, None)

    def forget_unused(self) -> None:
        """Forget computations that no slice has, but for those registered last."""
        slices = *self._slices.values(), *self._targets.values()
        used = {identity for slice_ in slices for identity in slice_.loaded}
        unused = [each for each in self._computations if each not in used]
        gone = set(unused[:-MAX_UNUSED])
        for identity in gone:
            del self._computations[identity], self._pickled[identity]
        for host, sent in self._sent.items():
            if forgotten := sent & gone:
                sent.difference_update(forgotten)
                self._outbox.order(host, ForgetFunctions(tuple(sorted(forgotten))))

    def is_ready(self, target: SliceRecord) -> bool:
        """Whether all that was to be compiled for a target is."""
        return not any(loaded.hosts_left for loaded in target.loaded.values())

    def compiled(self, host: int, message: Compiled) -> str:
        """Take a host's word; return the slice if all of its hosts have given theirs."""
        slice_ = self._named(message.slice)
        if slice_ is None or message.identity not in slice_.loaded:
            return ""  # it was given back, or moved, in the meantime
        loaded = slice_.loaded[message.identity]
        loaded.hosts_left.discard(host)
        loaded.needs = max(loaded.needs, message.needs, key=lambda each: each.new_bytes)
        return "" if loaded.hosts_left else slice_.name

    def needs(self, identity: str, slice_: SliceRecord) -> MemoryNeeds | None:
        """Return what a computation takes on each device, once it is compiled there."""
        loaded = slice_.loaded.get(identity)
        return None if loaded is None or loaded.hosts_left else loaded.needs

    def _load(self, identity: str, slice_: SliceRecord) -> None:
        slice_.loaded[identity] = LoadedCode(set(slice_.hosts))
        for host in slice_.hosts:
            sent = self._sent.setdefault(host, set())
            pickled = None if identity in sent else self._pickled[identity]
            sent.add(identity)
            self._outbox.order(host, Load(identity, slice_.name, pickled))

    def _named(self, name: str) -> SliceRecord | None:
        """Return the slice, or target of one, that hosts know by a name."""
        if (slice_ := self._slices.get(name)) is not None:
            return slice_
        remapped = (self._slices[x] for x, of in self._remapped.items() if of == name)
        targets = (each for each in self._targets.values() if each.name == name)
        return next(remapped, None) or next(targets, None)
