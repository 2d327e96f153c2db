"""What an operator does with the gradients of its parameters, once a time is closed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from timelyml.ml.checkpoints import Arrays
from timelyml.ml.compiled import Compiled, compiled
from timelyml.ml.firing import Firing
from timelyml.ml.sharded.naming import Named, Naming
from timelyml.ml.sharded.optimisers import Contributions, Owned, Step, sum_in_order
from timelyml.ml.sharded.parts import Parts, told
from timelyml.ml.sharded.saving import NOT_SAVED, PARAMS, STATE, SavedArray, SaveRequest
from timelyml.ml.sharded.stations import Held
from timelyml.runtime.shard import Shard

Record: TypeAlias = tuple[int, int, bool, Any]
"""Place of a parameter, shard, whether it is a part, and the array."""


def assemble(params: Any, records: Iterable[Record]) -> Any:
    """Make a tree like `params` of the records of `Trained.weights`; later ones win."""
    leaves, structure = jax.tree.flatten(params)
    found: dict[int, dict[int, Any]] = {}
    whole: set[int] = set()
    for place, shard, is_split, array in records:
        found.setdefault(place, {})[shard] = array
        if not is_split:
            whole.add(place)
    made = []
    for place, leaf in enumerate(leaves):
        parts = found.get(place)
        if parts is None:
            made.append(np.asarray(leaf))
        elif place in whole:
            made.append(parts[0])
        else:
            made.append(np.concatenate([parts[shard] for shard in sorted(parts)]))
    return jax.tree.unflatten(structure, made)


@dataclass(frozen=True, slots=True)
class Start:
    """Puts parameters in place; a shard keeps only its part of those that are split."""

    params: tuple[tuple[int, Parts | None, Any], ...]
    """Place, how it is shared out if it is, and the whole array."""
    step: Step | None
    saved: Arrays | None = None
    """The state of the optimiser in a checkpoint, to go on from."""

    def __call__(self, shard: Shard) -> None:
        """Fill the state of a shard, unless a snapshot did."""
        state = shard.state_of("state")
        if "params" in state:
            return
        params = {
            place: jnp.array(array if parts is None else parts.held(array, shard.index))
            for place, parts, array in self.params
        }
        state["params"] = params
        if self.step is None:
            return
        fresh = self.step.owned.start(params)
        if self.saved is not None:
            split = {place: parts for place, parts, _ in self.params if parts}
            naming = Naming(self.step.owned, split)
            fresh = naming.restored(params, fresh, self.saved, shard.index)
        state["optimiser"] = fresh


@dataclass(frozen=True, slots=True)
class Source:
    """A station with gradients.

    Attributes:
        name: Of the station.
        port: Where it tells that it has them, and those of shared parameters.
        held: Which.
        copies_port: Where those of copies on other shards come; None: there are none.
    """

    name: str
    port: int
    held: Held
    copies_port: int | None = None

    @property
    def ports(self) -> tuple[int, ...]:
        """All of its ports."""
        return (self.port, *(() if self.copies_port is None else (self.copies_port,)))

    def with_copies(self, firing: Firing, own: dict[int, Any]) -> dict[int, Any]:
        """Add what others have for what they hold too, in one order on all shards."""
        if self.copies_port is None or self.held.copies is None:
            return own
        blocks, here = firing.inputs[self.copies_port], firing.shard.index
        heard: dict[int, dict[tuple[int, int], Any]] = {p: {} for p in self.held.copied}
        for source, payload in zip(blocks.sources, blocks.payloads, strict=True):
            places, *columns = payload
            for parameter, column in zip(self.held.copied, columns, strict=True):
                for place, gradient in zip(places.tolist(), column, strict=True):
                    heard[parameter][place, source] = gradient
        added = {
            parameter: self.held.copies.added(here, own.get(parameter), others)
            for parameter, others in heard.items()
        }
        return own | {p: total for p, total in added.items() if total is not None}


@dataclass(frozen=True, slots=True)
class Contributing:
    """Where gradients come from: the ports of an operator's stations."""

    trained: tuple[int, ...]
    sites: tuple[Source, ...]

    def collect(self, firing: Firing) -> Contributions:
        """Give, by trained parameter, what is to be added up."""
        found: dict[int, list[Any]] = {place: [] for place in self.trained}
        stored = firing.state.pop("gradients", {})
        for site in self.sites:
            blocks = firing.inputs[site.port]
            if site.held.shared and blocks:
                for place, stacked in zip(site.held.shared, blocks.rows, strict=True):
                    found[place].append(stacked)
            own = site.with_copies(firing, stored.get(site.name, {}))
            for place, gradient in own.items():
                found[place].append(gradient[None])
        return tuple(tuple(found[place]) for place in self.trained)


@dataclass(frozen=True, slots=True)
class Update:
    """Takes one step of the optimiser, or sends the norm that it has to wait for."""

    step: Step
    contributing: Contributing
    shared: frozenset[int]
    norm_output: int

    def __call__(self, firing: Firing) -> None:
        """Update what the shard holds."""
        state = firing.state
        state["params"].update(state.pop("assigned", {}))
        owned = self.step.owned
        contributions = self.contributing.collect(firing)
        params = owned.chosen(state["params"])
        if self.step.clip_norm is None:
            fresh, state["optimiser"] = self.step.whole(
                params, state["optimiser"], contributions
            )
            state["params"].update(fresh)
            return
        state["summed"], squares = self.step.add(params, contributions)
        own = [
            square
            for place, square in squares.items()
            if place not in self.shared or firing.shard.index == 0
        ]
        # A column for each: who adds them up does so in one order.
        firing.send(self.norm_output, np.asarray([own], np.float64))


@dataclass(frozen=True, slots=True)
class ClippedUpdate:
    """Takes the step, once the norm of all gradients is known."""

    step: Step
    port: int

    def __call__(self, firing: Firing) -> None:
        """Update what the shard holds."""
        state = firing.state
        norm = np.asarray(firing.inputs[self.port].rows[0])
        params = self.step.owned.chosen(state["params"])
        fresh, state["optimiser"] = self.step.clipped(
            params, state["optimiser"], (state.pop("summed"), norm)
        )
        state["params"].update(fresh)


@dataclass(frozen=True, slots=True)
class Norm:
    """Adds up squares of all shards of all operators, in the order of ports."""

    ports: tuple[int, ...]

    def __call__(self, firing: Firing) -> None:
        """Send the norm to all."""
        total = 0.0
        for port in self.ports:
            for payload in firing.inputs[port].payloads:
                total += float(np.sum(payload))
        firing.send(0, np.asarray([np.sqrt(total)]))


@dataclass(frozen=True, slots=True)
class SendGradients:
    """Sends gradients to whoever asked for them."""

    contributing: Contributing
    add: Compiled
    outputs: tuple[tuple[int, int, Parts | None], ...]
    """Place of a parameter, output, and how it is shared out, if it is."""

    @classmethod
    def of(
        cls,
        contributing: Contributing,
        outputs: Sequence[tuple[int, int, Parts | None]],
    ) -> SendGradients:
        """Compile the sum."""
        return cls(contributing, compiled(_sums), tuple(outputs))

    def __call__(self, firing: Firing) -> None:
        """Send each parameter's gradient; of shared ones, only one shard does."""
        params = firing.state["params"]
        trained = self.contributing.trained
        contributions = self.contributing.collect(firing)
        alone = [len(parts) == 1 == len(parts[0]) for parts in contributions]
        several = zip(contributions, alone, strict=True)
        added = self.add(tuple(() if one else parts for parts, one in several))
        sums = {  # experts are large: nothing is copied where there is nothing to add
            place: parts[0][0] if one else total
            for place, parts, one, total in zip(
                trained, contributions, alone, added, strict=True
            )
        }
        for place, output, parts in self.outputs:
            gradient = sums[place]
            if gradient is None:
                gradient = np.zeros(params[place].shape, params[place].dtype)
            if parts is not None:
                firing.send(output, np.asarray(gradient)[: parts.own])
            elif firing.shard.index == 0:
                firing.send(output, np.asarray(gradient)[None])


def _sums(contributions: Contributions) -> tuple[Any, ...]:
    return tuple(
        functools.reduce(jnp.add, [sum_in_order(part) for part in parts])
        if parts
        else None
        for parts in contributions
    )


@dataclass(frozen=True, slots=True)
class ReportState:
    """Answers with what the shard holds: parameters, and states for a checkpoint."""

    port: int
    output: int
    params: tuple[tuple[int, Parts | None], ...]
    owned: Owned
    names: tuple[str, ...]
    """Of all parameters, by place."""
    saved_output: int

    def __call__(self, firing: Firing) -> None:
        """Send records; of what all shards hold, only the first one does."""
        ((ask,),) = firing.inputs[self.port].payloads
        asked = SaveRequest(*ask)
        if asked.is_end:
            self._tell(firing)
        if asked.step != NOT_SAVED:
            self._save(firing, asked.step)

    def _tell(self, firing: Firing) -> None:
        params, index = firing.state["params"], firing.shard.index
        records: list[Record] = [
            (place, index, parts is not None, told(params[place], parts))
            for place, parts in self.params
            if parts or index == 0
        ]
        if records:
            firing.send(self.output, records)

    def _save(self, firing: Firing, step: int) -> None:
        params = firing.state["params"]
        split = {place: parts for place, parts in self.params if parts}
        held = [
            Named(self.names[place], parts is not None, told(params[place], parts))
            for place, parts in self.params
        ]
        states = Naming(self.owned, split).named(params, firing.state["optimiser"])
        records = [
            SavedArray(step, kind, named)
            for kind, every in ((PARAMS, held), (STATE, states))
            for named in every
            if named.is_part or firing.shard.index == 0
        ]
        if records:
            firing.send(self.saved_output, records)
