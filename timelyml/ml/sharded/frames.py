"""Operators in the making: which stations they hold, and their ports so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from timelyml.errors import ConfigError
from timelyml.graph import InputSpec, Pact, StreamRef
from timelyml.ml.firing import Rule
from timelyml.ml.sharded.columns import Column, Move, Parameter
from timelyml.ml.sharded.plan import Plan, Station
from timelyml.ml.sharded.stations import NO_OUTPUT, Key, Like, Site


@dataclass(slots=True)
class Ports:
    """The ports of one station on the operator that holds it.

    Attributes:
        forward: Inputs, by edge that comes in.
        back: Inputs of cotangents and whether they are dense, by edge that goes out.
        stays: Output of what others on the same shard read.
        moves: Outputs, by move that departs.
        loss: Output of its part of the loss.
        shown: Outputs and columns for the user.
        cotangents: Outputs, by edge that came in.
    """

    stays: int
    moves: list[int]
    loss: int
    shown: tuple[tuple[int, Key], ...]
    cotangents: dict[int, int]
    forward: list[int] = field(default_factory=list)
    back: dict[int, tuple[int, bool]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Frame:
    """An operator in the making."""

    name: str
    stations: list[Station]
    inputs: list[InputSpec] = field(default_factory=list)
    num_outputs: int = 0
    rules: list[Rule] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    outputs: tuple[StreamRef, ...] = ()

    @property
    def num_shards(self) -> int:
        """Shards of all its stations."""
        return self.stations[0].call.num_shards

    @property
    def parameters(self) -> dict[int, Parameter]:
        """All parameters of its stations."""
        every = (p for station in self.stations for p in station.call.parameters)
        return {parameter.index: parameter for parameter in every}

    def port(self, stream: StreamRef, pact: Pact) -> int:
        """Add an input."""
        self.inputs.append(InputSpec(stream, pact))
        return len(self.inputs) - 1

    def output(self) -> int:
        """Add an output."""
        self.num_outputs += 1
        return self.num_outputs - 1

    def reserve(self, station: Station, shown: Iterable[Column]) -> Ports:
        """Add the outputs of a station."""
        stays = any(edge.move is None for edge in station.edges_out)
        return Ports(
            stays=self.output() if stays else NO_OUTPUT,
            moves=[self.output() for _ in station.departing],
            loss=self.output() if station.losses else NO_OUTPUT,
            shown=tuple(
                (self.output(), column.key)
                for column in dict.fromkeys(shown)
                if column.home is station.call
            ),
            cotangents={
                id(edge): self.output() for edge in station.edges_in if edge.back
            },
        )


def framed(plan: Plan, prefix: str) -> list[Frame]:
    """Group stations by the parameters that they share.

    Raises:
        ConfigError: They share one, but not its shards.
    """
    frames: list[Frame] = []
    for station in plan.stations:
        held = {parameter.index for parameter in station.call.parameters}
        joined = [frame for frame in frames if held & set(frame.parameters)]
        if not joined:
            frames.append(Frame(station.call.name, [station]))
            continue
        first, *others = joined
        first.stations.append(station)
        for other in others:
            first.stations += other.stations
            frames.remove(other)
        order = {id(each): place for place, each in enumerate(plan.stations)}
        first.stations.sort(key=lambda each: order[id(each)])
    taken: dict[str, int] = {}
    for frame in frames:
        _check(frame)
        again = taken.get(frame.name, 0)
        taken[frame.name] = again + 1
        frame.name = f"{prefix} {frame.name}" + (f" {again + 1}" if again else "")
    return frames


def _check(frame: Frame) -> None:
    counts = {station.call.num_shards for station in frame.stations}
    every = [p for station in frame.stations for p in station.call.parameters]
    split = {parameter.index for parameter in every if parameter.is_split}
    whole = {parameter.index for parameter in every if not parameter.is_split}
    places = {(parameter.index, parameter.copies) for parameter in every}
    if len(counts) > 1 or split & whole or len(places) > len(split | whole):
        raise ConfigError(
            f"calls share a parameter but not its shards; got {frame.name!r} on "
            f"{sorted(counts)} shards, split: {sorted(split)}, whole: {sorted(whole)}; "
            "expected the same shards and the same split; use a parameter of its own",
            operator=frame.name,
        )


def staying_columns(station: Station) -> tuple[Column, ...]:
    """Give the columns of a station that others on the same shard read."""
    every = (
        column
        for edge in station.edges_out
        if edge.move is None
        for column in edge.columns
    )
    return tuple(dict.fromkeys(every))


def place_of(move: Move, station: Station) -> int:
    """Give the place of a move among those that depart from a station."""
    return [each.index for each in station.departing].index(move.index)


def keys(columns: Iterable[Column]) -> tuple[Key, ...]:
    """Give the keys of columns."""
    return tuple(column.key for column in columns)


def likes(columns: Iterable[Column]) -> tuple[Like, ...]:
    """Give the types of columns."""
    return tuple((column.shape, column.dtype) for column in columns)


def there(*outputs: int) -> tuple[int, ...]:
    """Give those outputs that there are."""
    return tuple(output for output in outputs if output != NO_OUTPUT)
