"""Stations where they run: one firing forward, one back, with what is kept between.

What a station keeps is stored by time in the shard's state, and goes when the way back
has used it. Going back replays the records of the way out: nothing is routed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from timelyml.exchange.payload import leaves_of
from timelyml.ml.firing import Blocks, Firing
from timelyml.ml.sharded.functions import Needs, Prepared, PreparedJax
from timelyml.ml.sharded.groups import PreparedGroups
from timelyml.ml.sharded.moves import Arrays, Transfer, send_rows
from timelyml.ml.sharded.parts import Parts

Key: TypeAlias = tuple[int, int]
Like: TypeAlias = tuple[tuple[int, ...], Any]
"""Shape and dtype of a column, with a sample of its rows."""

NO_OUTPUT = -1


def empty_like(likes: Iterable[Like]) -> Arrays:
    """Give zeros of these shapes that take no memory."""
    return tuple(np.broadcast_to(np.zeros((), dtype), shape) for shape, dtype in likes)


@dataclass(frozen=True, slots=True)
class Inlet:
    """Where columns come in, and their cotangents go out.

    Attributes:
        port: Input port.
        keys: Of all arrays that come, None for those that are not needed.
        likes: Their types, for times at which nothing comes.
        transfer: How they moved; None: not at all.
        is_stream: They are columns of a stream of the user.
        receipts: Columns that tell rows their places.
        back: Those of `keys` whose cotangents go back.
        back_output: Where to.
    """

    port: int
    keys: tuple[Key | None, ...]
    likes: tuple[Like, ...]
    transfer: Transfer | None = None
    is_stream: bool = False
    receipts: tuple[Key, ...] = ()
    back: tuple[Key, ...] = ()
    back_output: int = NO_OUTPUT

    def take(self, blocks: Blocks, values: dict[Key, Any]) -> Any:
        """Put what came among the values; give the record of its way."""
        record = None
        if self.transfer is not None:
            receipts = tuple(values[key] for key in self.receipts)
            likes = empty_like(self.likes)
            arrays, record = self.transfer.receive(blocks, likes, receipts)
        elif not blocks:
            arrays = tuple(
                each[:0] if each.ndim else each for each in empty_like(self.likes)
            )
        elif self.is_stream:
            arrays = tuple(leaves_of(blocks.rows))
        else:
            ((arrays,),) = blocks.payloads
        pairs = zip(self.keys, arrays, strict=True)
        values.update((key, array) for key, array in pairs if key is not None)
        return record

    def give_back(
        self, firing: Firing, cotangents: Mapping[Key, Any], kept: Kept, place: int
    ) -> None:
        """Send the cotangents of what came in."""
        found = tuple(
            np.asarray(cotangents[key])
            if key in cotangents
            else np.zeros(np.shape(kept.values[key]), kept.values[key].dtype)
            for key in self.back
        )
        if self.transfer is None:
            firing.send(self.back_output, [found])
        else:
            record = kept.received[place]
            self.transfer.send_back(firing, self.back_output, found, record)


@dataclass(frozen=True, slots=True)
class Outlet:
    """Where columns leave for other shards."""

    output: int
    transfer: Transfer
    payload: tuple[Key, ...]
    guides: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class CotangentInlet:
    """Where cotangents come back: of columns that left by an outlet, or stayed."""

    port: int
    keys: tuple[Key, ...]
    outlet: int | None = None
    transfer: Transfer | None = None

    def take(self, blocks: Blocks, kept: Kept) -> Arrays | None:
        """Give the cotangents that came, None if none did."""
        if self.transfer is None or self.outlet is None:
            arrays: Arrays
            ((arrays,),) = blocks.payloads or ([()],)
            return arrays or None
        likes = empty_like(kept.likes[key] for key in self.keys)
        return self.transfer.receive_back(blocks, likes, kept.sent[self.outlet])


@dataclass(slots=True)
class Kept:
    """What a station keeps of one time, from forward to back."""

    values: dict[Key, Any]
    received: list[Any]
    sent: list[Any]
    likes: dict[Key, Like]
    residual: Any


@dataclass(frozen=True, slots=True)
class Held:
    """Parameters of a station whose gradients are wanted."""

    shared: tuple[int, ...]
    """Every shard holds all of them: gradients go to all, to be added up."""
    parts: tuple[int, ...]
    """Each shard holds a part, whose gradient stays."""
    output: int = NO_OUTPUT
    copied: tuple[int, ...] = ()
    """Those parts of which other shards hold copies: gradients go to these too."""
    copies: Parts | None = None
    copies_output: int = NO_OUTPUT


@dataclass(frozen=True, slots=True)
class Site:
    """A station on the worker; an operator holds one or several.

    Attributes:
        name: Of the station.
        prepared: What it computes.
        needs: What of it is wanted.
        arguments: Keys of columns and indices of parameters.
        outputs: Keys of its outputs.
        inlets: Those of columns that stayed first.
        outlets: Moves that depart.
        stays: Keys of columns that others on the same shard read.
        stays_output: Where these go.
        shown: By output: a column for the user.
        losses: Keys of the parts of the loss.
        loss_output: Where their sum goes.
        cotangent_inlets: Where cotangents come from, in the order in which they are added.
        held: Parameters with gradients.
        assigned: By index of a parameter: the output that it becomes.
        is_live: Whether there is a way back.
        may_turn: Whether it may go back as it fires, since nothing comes back to it.
    """

    name: str
    prepared: Prepared
    needs: Needs
    arguments: tuple[Key | int, ...]
    outputs: tuple[Key, ...]
    inlets: tuple[Inlet, ...]
    outlets: tuple[Outlet, ...]
    stays: tuple[Key, ...]
    stays_output: int
    shown: tuple[tuple[int, Key], ...]
    losses: tuple[Key, ...]
    loss_output: int
    cotangent_inlets: tuple[CotangentInlet, ...]
    held: Held
    assigned: tuple[tuple[int, Key], ...]
    is_live: bool
    may_turn: bool

    @property
    def turns(self) -> bool:
        """Whether it goes back at once, since nothing else has a part in it."""
        return (
            self.may_turn
            and isinstance(self.prepared, PreparedJax)
            and self.prepared.can_turn
        )

    def forward(self, firing: Firing) -> None:
        """Compute on what came in; send what is read elsewhere."""
        values: dict[Key, Any] = {}
        received = [
            inlet.take(firing.inputs[inlet.port], values) for inlet in self.inlets
        ]
        leaves = self._leaves(firing, values)
        gradients: list[Any] = []
        residual = None
        if self.turns and isinstance(self.prepared, PreparedJax):
            outputs, gradients = self.prepared.turn(leaves)
        else:
            outputs, residual = self.prepared.forward(leaves)
        self._report(firing)
        values.update(zip(self.outputs, outputs, strict=True))
        sent = self._send(firing, values)
        if not self.is_live:
            return
        kept = self._kept(values, received, sent, residual)
        if self.turns:
            self._finish(firing, kept, gradients, {})
        else:
            _by_time(firing, self.name)[firing.time] = kept

    def backward(self, firing: Firing) -> None:
        """Compute gradients from the cotangents that came back."""
        kept = _by_time(firing, self.name).pop(firing.time, None)
        if kept is None:  # this shard had nothing at that time
            self._finish_empty(firing)
            return
        cotangents: dict[Key, Any] = {}
        for comeback in self.cotangent_inlets:
            found = comeback.take(firing.inputs[comeback.port], kept)
            for key, part in zip(comeback.keys, found or (), strict=bool(found)):
                cotangents[key] = cotangents[key] + part if key in cotangents else part
        for key in self.losses:
            shape, dtype = kept.likes[key]
            one = np.ones(shape, dtype)
            cotangents[key] = cotangents[key] + one if key in cotangents else one
        arriving = [
            self._cotangent(key, cotangents, kept) if ok else None
            for key, ok in zip(self.outputs, self.needs.live, strict=True)
        ]
        gradients: list[Any] = []
        if any(self.needs.wanted):
            leaves = self._leaves(firing, kept.values)
            gradients = self.prepared.backward(leaves, kept.residual, arriving)
            self._report(firing)
        own = set(self.outputs)
        passed = {key: each for key, each in cotangents.items() if key not in own}
        self._finish(firing, kept, gradients, passed)

    def _report(self, firing: Firing) -> None:
        prepared = self.prepared
        if isinstance(prepared, PreparedGroups | PreparedJax) and prepared.num_sizes:
            firing.shard.report_peak("compiled_sizes", prepared.num_sizes)

    def _leaves(self, firing: Firing, values: Mapping[Key, Any]) -> list[Any]:
        params = firing.state.get("params", {})
        return [
            params[each] if isinstance(each, int) else values[each]
            for each in self.arguments
        ]

    def _send(self, firing: Firing, values: Mapping[Key, Any]) -> list[Any]:
        if self.stays_output != NO_OUTPUT:
            stays = tuple(values[key] for key in self.stays)
            firing.send(self.stays_output, [stays])
        for output, key in self.shown:
            firing.send(output, np.atleast_1d(values[key]))
        if self.loss_output != NO_OUTPUT:
            sums = [np.sum(values[key]) for key in self.losses]
            firing.send(self.loss_output, np.stack([np.asarray(sums)]))
        if self.assigned:
            firing.state["assigned"] = {
                index: np.array(values[key]) for index, key in self.assigned
            }
        return [
            outlet.transfer.send(
                firing,
                outlet.output,
                tuple(np.asarray(values[key]) for key in outlet.payload),
                tuple(np.asarray(values[key]) for key in outlet.guides),
            )
            for outlet in self.outlets
        ]

    def _kept(
        self,
        values: dict[Key, Any],
        received: list[Any],
        sent: list[Any],
        residual: Any,
    ) -> Kept:
        """Keep arguments, what cotangents go back for, and the shapes of the rest."""
        needed = {key for key in self.arguments if not isinstance(key, int)}
        needed |= {key for inlet in self.inlets for key in inlet.back}
        shaped = {key for comeback in self.cotangent_inlets for key in comeback.keys}
        shaped |= {*self.losses, *self.outputs}
        return Kept(
            {key: values[key] for key in needed},
            received,
            sent,
            {key: (np.shape(values[key]), values[key].dtype) for key in shaped},
            residual,
        )

    @staticmethod
    def _cotangent(key: Key, cotangents: Mapping[Key, Any], kept: Kept) -> Any:
        if key in cotangents:
            return cotangents[key]
        return np.zeros(*kept.likes[key])

    def _finish(
        self,
        firing: Firing,
        kept: Kept,
        gradients: list[Any],
        cotangents: dict[Key, Any],
    ) -> None:
        """Send cotangents of what came in, and gradients of parameters."""
        found: dict[int, Any] = {}
        for each, gradient in zip(self.arguments, gradients, strict=bool(gradients)):
            if gradient is None:
                continue
            if isinstance(each, int):
                found[each] = found[each] + gradient if each in found else gradient
            elif each in cotangents:
                cotangents[each] = cotangents[each] + np.asarray(gradient)
            else:
                cotangents[each] = np.asarray(gradient)
        for place, inlet in enumerate(self.inlets):
            if inlet.back:
                inlet.give_back(firing, cotangents, kept, place)
        self._send_gradients(firing, found)

    def _finish_empty(self, firing: Firing) -> None:
        """Say that there is nothing, where something is waited for."""
        for inlet in self.inlets:
            if inlet.back and inlet.transfer is None:
                firing.send(inlet.back_output, [()])
        self._send_gradients(firing, {})

    def _send_gradients(self, firing: Firing, found: dict[int, Any]) -> None:
        held = self.held
        if held.output == NO_OUTPUT:
            return
        if held.parts:
            stored = firing.state.setdefault("gradients", {})
            stored[self.name] = {
                index: found[index] for index in held.parts if index in found
            }
        if held.copies is not None and found:
            self._send_copies(firing, held.copies, found)
        if not held.shared:
            firing.send(held.output, [()])
            return
        params = firing.state["params"]
        firing.send(
            held.output,
            tuple(
                np.asarray(found[index])[None]
                if index in found
                else np.zeros((1, *params[index].shape), params[index].dtype)
                for index in held.shared
            ),
        )

    def _send_copies(
        self, firing: Firing, copies: Parts, found: Mapping[int, Any]
    ) -> None:
        """Tell all who hold the same places their gradients here."""
        mail = copies.mail(firing.shard.index)
        if not mail:
            return
        here, places, others = (np.array(column) for column in zip(*mail, strict=True))
        columns = tuple(np.asarray(found[each])[here] for each in self.held.copied)
        output = self.held.copies_output
        send_rows(firing, output, (places, *columns), others)


def _by_time(firing: Firing, site: str) -> dict[Any, Kept]:
    kept: dict[Any, Kept] = firing.state.setdefault(("kept", site), {})
    return kept
