"""Computations: known once in the cluster, compiled once for each slice."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

from timelyml.errors import ProgramError
from timelyml.ml.controller.buffers import no_such_slice
from timelyml.ml.controller.code_messages import (
    AskCompiled,
    IsCompiled,
    NotCompiled,
    Register,
)
from timelyml.ml.controller.messages import Refused
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.records import LoadedCode, SliceRecord
from timelyml.ml.functions import Computation, MemoryNeeds
from timelyml.ml.hosts import Compiled, ForgetFunctions, Load
from timelyml.runtime.failure import pack_error

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
        self._asked: list[tuple[int, AskCompiled]] = []

    def get(self, identity: str) -> Computation | None:
        """Return a computation that was registered."""
        return self._computations.get(identity)

    def handle(self, client: int, message: Register | AskCompiled) -> None:
        """Learn a computation, and have it compiled for a slice; or note who waits for it.

        A client is told once it is compiled, or why it never will be.
        """
        if isinstance(message, AskCompiled):
            self._asked.append((client, message))
            return
        if message.identity not in self._computations:
            loaded = pickle.loads(message.pickled)  # noqa: S301 - of an authenticated client
            self._computations[message.identity] = loaded
            self._pickled[message.identity] = message.pickled
        slice_ = self._slices.get(message.slice)
        if slice_ is None or slice_.error is not None:
            return  # calls on it are refused, which is told to those who ask
        if message.identity in slice_.loaded:
            return
        self._load(message.identity, slice_, message.line)
        if slice_.name in self._targets:
            self._load(message.identity, self._targets[slice_.name], message.line)

    def leave(self, client: int) -> None:
        """Forget what a client asked."""
        self._asked = [each for each in self._asked if each[0] != client]

    def step(self) -> None:
        """Answer what can be."""
        if self._asked:
            self._asked = [each for each in self._asked if not self._answer(*each)]

    def aim(self, slice_: SliceRecord, target: SliceRecord) -> None:
        """Have all that is compiled for a slice compiled for where it will stand."""
        self._targets[slice_.name] = target
        for identity, loaded in slice_.loaded.items():
            self._load(identity, target, loaded.line)

    def remapped(self, slice_: SliceRecord) -> None:
        """Take note that a slice is about to be where its target is."""
        self._remapped[slice_.name] = self._targets.pop(slice_.name).name

    def arrived(self, slice_: SliceRecord) -> None:
        """Tell what cannot run where a slice stands from now on."""
        for identity in slice_.loaded:
            self._tell(identity, slice_)

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
        loaded.error = loaded.error or message.error
        if loaded.hosts_left:
            return ""
        if self._slices.get(slice_.name) is slice_:  # not where it is to go
            self._tell(message.identity, slice_)
        return slice_.name

    def needs(self, identity: str, slice_: SliceRecord) -> MemoryNeeds | None:
        """Return what a computation takes on each device, once it is compiled there."""
        loaded = slice_.loaded.get(identity)
        return None if loaded is None or loaded.hosts_left else loaded.needs

    def error(self, identity: str, slice_: SliceRecord) -> bytes | None:
        """Return why a computation cannot run, once all hosts have tried."""
        loaded = slice_.loaded.get(identity)
        return None if loaded is None or loaded.hosts_left else loaded.error

    def _answer(self, client: int, message: AskCompiled) -> bool:
        """Answer a client, unless it is too early to."""
        slice_, identity = self._slices.get(message.slice), message.identity
        needs = None
        if slice_ is None or slice_.client != client:
            error: bytes | None = pack_error(no_such_slice(message.slice))
        elif slice_.error is None and identity not in slice_.loaded:
            error = pack_error(not_registered(identity, slice_.name))
        else:
            error = slice_.error or self.error(identity, slice_)
            needs = self.needs(identity, slice_)
        if error is not None:
            self._outbox.tell(client, Refused(message.request, error))
        elif needs is not None:
            self._outbox.tell(client, IsCompiled(message.request, needs))
        return error is not None or needs is not None

    def _tell(self, identity: str, slice_: SliceRecord) -> None:
        """Have later calls of a computation raise at once if it cannot run."""
        if error := self.error(identity, slice_):
            news = NotCompiled(identity, slice_.name, error)
            self._outbox.tell(slice_.client, news)

    def _load(self, identity: str, slice_: SliceRecord, line: str) -> None:
        slice_.loaded[identity] = LoadedCode(set(slice_.hosts), line)
        for host in slice_.hosts:
            sent = self._sent.setdefault(host, set())
            pickled = None if identity in sent else self._pickled[identity]
            sent.add(identity)
            self._outbox.order(host, Load(identity, slice_.name, pickled, line))

    def _named(self, name: str) -> SliceRecord | None:
        """Return the slice, or target of one, that hosts know by a name."""
        if (slice_ := self._slices.get(name)) is not None:
            return slice_
        remapped = (self._slices[x] for x, of in self._remapped.items() if of == name)
        targets = (each for each in self._targets.values() if each.name == name)
        return next(remapped, None) or next(targets, None)


def not_registered(identity: str, slice_name: str) -> ProgramError:
    """Return the error of who uses a computation on a slice that it is not known on."""
    return ProgramError(
        f"computation {identity[:12]} is not registered for slice {slice_name!r}; got a "
        f"call of it; expected it to be; register it",
        slice=slice_name,
    )
