"""From a traced dataflow function to stations: where calls run, moves begin and end.

A station is a call with what surrounds it: the moves that arrive at it and those that
depart from it. A move departs from the call that has all that it sends, and arrives at
the only call that reads it; where there is no such call, one that gives its arguments
as they are is put in between. Then it is worked out along which edges cotangents flow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from timelyml.ml.sharded.columns import (
    Call,
    Column,
    Key,
    Move,
    Parameter,
    Stream,
    Trace,
)
from timelyml.ml.sharded.functions import Needs
from timelyml.ml.sharded.local import Same


@dataclass(slots=True, eq=False)
class Edge:
    """Columns on their way into a station, over one channel.

    Attributes:
        producer: Whose columns they are; of a move, the station that it departs from.
        columns: In order; of a move, all of its columns.
        move: None if they stay on their shard.
        back: Those whose cotangents flow back.
        is_dense: Whether a block comes for every time.
    """

    producer: Station | Stream
    consumer: Station
    columns: tuple[Column, ...]
    move: Move | None = None
    back: tuple[Column, ...] = ()
    is_dense: bool = False


@dataclass(slots=True, eq=False)
class Station:
    """A call, what arrives at it, and what departs from it."""

    call: Call
    arriving: list[Move] = field(default_factory=list)
    departing: list[Move] = field(default_factory=list)
    edges_in: list[Edge] = field(default_factory=list)
    edges_out: list[Edge] = field(default_factory=list)
    losses: tuple[Column, ...] = ()
    is_dense: bool = False
    is_live: bool = False
    """Whether cotangents reach it, and lead on."""
    needs: Needs = field(default_factory=lambda: Needs((), (), ()))

    def has(self, column: Column) -> bool:
        """Whether the station can send a column."""
        return (
            column.home is self.call
            or column in self.call.inputs
            or any(column.home is move for move in self.arriving)
        )

    @property
    def read(self) -> tuple[Column, ...]:
        """Columns of others that it needs, each once, in order."""
        sent = (
            column
            for move in self.departing
            for column in (*move.payload, *move.guides)
        )
        placed = (column for move in self.arriving for column in move.receipts)
        own = [self.call, *self.arriving]
        every = dict.fromkeys((*self.call.inputs, *sent, *placed))
        return tuple(column for column in every if column.home not in own)

    @property
    def back(self) -> list[Edge]:
        """Edges by which cotangents come back to it."""
        return [edge for edge in self.edges_out if edge.back]


@dataclass(slots=True, eq=False)
class Plan:
    """All stations in order, and what the outputs of the function became."""

    trace: Trace
    stations: list[Station] = field(default_factory=list)
    by_call: dict[int, Station] = field(default_factory=dict)
    _aliases: dict[Key, Column] = field(default_factory=dict)

    def resolved(self, column: Column) -> Column:
        """Give what stands for a column of the trace."""
        return self._aliases.get(column.key, column)

    def station_of(self, column: Column) -> Station:
        """Give the station that makes a column."""
        return self.by_call[column.home.index]

    def add(self, call: Call) -> Station:
        """Add a station for a call of this plan."""
        station = Station(call)
        self.stations.append(station)
        self.by_call[call.index] = station
        return station

    def add_same(self, name: str, columns: Sequence[Column]) -> Station:
        """Add a station that gives columns as they are; they go by its own now."""
        index = len(self.trace.homes) + len(self.stations)
        while index in self.by_call:
            index += 1
        shards = columns[0].num_shards
        call = Call(self.trace, index, name, shards, Same(), tuple(columns))
        call.columns = tuple(
            Column(call, place, column.aval) for place, column in enumerate(columns)
        )
        return self.add(call)

    def alias(self, columns: Sequence[Column], own: Sequence[Column]) -> None:
        """Let columns of this plan stand for those of the trace."""
        for column, each in zip(columns, own, strict=True):
            self._aliases[column.key] = each


def plan(
    trace: Trace,
    outputs: Iterable[Column],
    losses: Iterable[Column],
    *,
    wanted: Iterable[Stream],
    trained: Iterable[int],
) -> Plan:
    """Lay out a trace.

    Args:
        trace: What a dataflow function made.
        outputs: All columns that it gave.
        losses: Those that are parts of the loss.
        wanted: Streams whose cotangents are asked for.
        trained: Indices of parameters whose gradients are.
    """
    shown, wanted = set(outputs), set(wanted)
    made = Plan(trace)
    readers = _readers(trace)
    arriving: dict[int, list[Move]] = {}
    for home in list(trace.homes):
        if isinstance(home, Stream):
            if home in wanted or shown & set(home.columns):
                same = made.add_same(home.name, home.columns)
                made.alias(home.columns, same.call.columns)
        elif isinstance(home, Call):
            station = made.add(_renamed(made, home))
            station.arriving = arriving.get(home.index, [])
        else:
            move = _departed(made, home)
            reader = _only_reader(home, readers[home.index])
            if reader is None or shown & set(home.columns):
                station = made.add_same(home.name, move.columns)
                station.arriving = [move]
                made.alias(home.columns, station.call.columns)
            else:
                made.alias(home.columns, move.columns)
                arriving.setdefault(reader.index, []).append(move)
    for column in losses:
        resolved = made.resolved(column)
        station = made.station_of(resolved)
        station.losses = (*station.losses, resolved)
    _connect(made)
    _flow(made, wanted, set(trained))
    return made


def _readers(trace: Trace) -> dict[int, list[Call | Move]]:
    readers: dict[int, list[Call | Move]] = {home.index: [] for home in trace.homes}
    for home in trace.homes:
        if not isinstance(home, Stream):
            for index in {column.home.index for column in home.inputs}:
                readers[index].append(home)
    return readers


def _only_reader(move: Move, readers: list[Call | Move]) -> Call | None:
    """Give the call at which a move can end, if only that one reads it."""
    calls = [reader for reader in readers if isinstance(reader, Call)]
    if len(calls) != 1:
        return None
    (call,) = calls
    at_hand = {*call.columns, *call.inputs, *move.columns}
    for other in readers:
        if isinstance(other, Move) and not (
            {*other.payload, *other.guides} <= at_hand
            and not set(other.receipts) & set(move.columns)
        ):
            return None
    return call


def _renamed(made: Plan, home: Call) -> Call:
    arguments = tuple(
        made.resolved(each) if isinstance(each, Column) else each
        for each in home.arguments
    )
    call = Call(
        home.trace,
        home.index,
        home.name,
        home.num_shards,
        home.function,
        arguments,
        assigned=home.assigned,
    )
    call.columns = tuple(
        Column(call, column.place, column.aval) for column in home.columns
    )
    made.alias(home.columns, call.columns)
    return call


def _departed(made: Plan, home: Move) -> Move:
    """Give a move's station the move; an own station if no call has all it sends."""
    payload, guides, receipts = (
        tuple(made.resolved(column) for column in columns)
        for columns in (home.payload, home.guides, home.receipts)
    )
    move = Move(
        home.trace,
        home.index,
        home.name,
        home.num_shards,
        home.transfer,
        payload,
        guides,
        receipts,
    )
    move.columns = tuple(
        Column(move, column.place, column.aval) for column in home.columns
    )
    sent = (*guides, *payload)
    for column in sent:
        station = made.by_call.get(column.home.index)
        if station is not None and all(station.has(each) for each in sent):
            station.departing.append(move)
            return move
    made.add_same(f"send {home.name}", sent).departing.append(move)
    return move


def _connect(made: Plan) -> None:
    senders = {
        move.index: station for station in made.stations for move in station.departing
    }
    for station in made.stations:
        by_home: dict[int, list[Column]] = {}
        for column in station.read:
            by_home.setdefault(column.home.index, []).append(column)
        for columns in by_home.values():
            home = columns[0].home
            producer = home if isinstance(home, Stream) else made.by_call[home.index]
            _join(Edge(producer, station, tuple(columns)))
        for move in station.arriving:
            _join(Edge(senders[move.index], station, move.columns, move))
        station.is_dense = any(edge.is_dense for edge in station.edges_in)


def _join(edge: Edge) -> None:
    producer = edge.producer
    if isinstance(producer, Station):
        edge.is_dense = producer.is_dense and (
            edge.move is None or edge.move.transfer.is_dense
        )
        producer.edges_out.append(edge)
    else:
        edge.is_dense = producer.is_regular
    edge.consumer.edges_in.append(edge)


def _flow(made: Plan, wanted: set[Stream], trained: set[int]) -> None:
    """Find out which cotangents are needed, and by whom they are made."""
    active = {
        column.key
        for stream in wanted
        for column in stream.columns
        if _is_float(column)
    }
    for station in made.stations:
        for edge in station.edges_in:
            if edge.move is not None:
                pairs = zip(edge.move.payload, edge.move.columns, strict=False)
                active |= {own.key for sent, own in pairs if sent.key in active}
        if any(_is_active(each, active, trained) for each in station.call.arguments):
            active |= {c.key for c in station.call.columns if _is_float(c)}
    for station in reversed(made.stations):
        _settle_needs(station, active, trained)


def _settle_needs(station: Station, active: set[Key], trained: set[int]) -> None:
    call = station.call
    come = {column.key for edge in station.back for column in _sent(edge)}
    come |= {column.key for column in station.losses if column.key in active}
    live = tuple(column.key in come for column in call.columns)
    wanted = tuple(
        any(live) and _is_active(each, active, trained) for each in call.arguments
    )
    station.needs = Needs(
        wanted, live, tuple(column in station.losses for column in call.columns)
    )
    passed_on = come - {column.key for column in call.columns}
    made = passed_on | {
        each.key
        for each, is_wanted in zip(call.arguments, wanted, strict=True)
        if is_wanted and isinstance(each, Column)
    }
    station.is_live = any(wanted) or bool(passed_on)
    for edge in station.edges_in:
        edge.back = tuple(column for column in edge.columns if column.key in made)


def _sent(edge: Edge) -> tuple[Column, ...]:
    """Give the sender's columns whose cotangents an edge brings back."""
    if edge.move is None:
        return edge.back
    return tuple(edge.move.payload[column.place] for column in edge.back)


def _is_float(column: Column) -> bool:
    return column.aval.is_float


def _is_active(each: Column | Parameter, active: set[Key], trained: set[int]) -> bool:
    if isinstance(each, Parameter):
        return each.index in trained
    return each.key in active and each.aval.is_float
