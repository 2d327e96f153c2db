"""From a plan to operators of the dataflow, gradients and updates included.

Stations that share a parameter become one operator, whose shards hold it; each other
station is an operator of its own. For every edge of the way out there is one on the way
back, by the transposed pact. The loss is added up on one shard, which tells all
stations that a time is there to be gone back over: so the way back fires on every shard
at every time, and an expert without rows has its part in it: gradients of zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from timelyml.graph import (
    Broadcast,
    Direct,
    GraphBuilder,
    LoopRef,
    Pact,
    Pipeline,
    StreamRef,
)
from timelyml.ml.firing import Rule, add_firing_operator
from timelyml.ml.sharded.columns import Column, Key, Parameter, Stream
from timelyml.ml.sharded.ending import add_loss, unpacked
from timelyml.ml.sharded.frames import (
    Frame,
    framed,
    keys,
    likes,
    place_of,
    staying_columns,
    there,
)
from timelyml.ml.sharded.learning import Learning, Learnt, start_of
from timelyml.ml.sharded.plan import Edge, Plan, Station
from timelyml.ml.sharded.stations import (
    NO_OUTPUT,
    CotangentInlet,
    Held,
    Inlet,
    Outlet,
    Site,
)
from timelyml.ml.sharded.updates import Source, Start


@dataclass(slots=True)
class Lowered:
    """The streams that came of a plan, by column or place of a parameter."""

    shown: dict[Key, StreamRef] = field(default_factory=dict)
    loss: StreamRef | None = None
    gradients: dict[int, StreamRef] = field(default_factory=dict)
    cotangents: dict[Key, StreamRef] = field(default_factory=dict)
    weights: StreamRef | None = None
    saved: StreamRef | None = None


class Lowering:
    """Builds the operators of one plan.

    Args:
        builder: Of the dataflow.
        plan: What to build.
        learnt: Parameters and what becomes of their gradients.
        shown: Columns for the user.
        name: Prefix of operators.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        plan: Plan,
        learnt: Learnt,
        *,
        shown: tuple[Column, ...],
        name: str,
    ) -> None:
        self._builder = builder
        self._plan = plan
        self._learnt = learnt
        self._name = name
        self._result = Lowered()
        self._frames = framed(plan, name)
        self._frame = {id(s): frame for frame in self._frames for s in frame.stations}
        self._ports = {
            id(station): self._frame[id(station)].reserve(station, shown)
            for station in plan.stations
        }
        self._pending: list[tuple[LoopRef, Frame, int]] = []
        self._losses: list[tuple[Frame, int, bool]] = []
        self._is_dense = any(s.losses and s.is_dense for s in plan.stations)
        self._learning: Learning | None = None
        if any(station.losses for station in plan.stations):
            tick = builder.feedback(by=0, num_shards=1)
            self._learning = Learning(builder, learnt, tick, self._is_dense)

    def run(self) -> Lowered:
        """Add all operators; give the streams."""
        for station in self._plan.stations:
            self._add_ports(station)
        for frame in self._frames:
            self._build(frame)
        for loop, frame, output in self._pending:
            loop.connect(frame.outputs[output])
        if self._learning is not None:
            self._finish(self._learning)
        return self._result

    def _from(self, frame: Frame, output: int) -> StreamRef:
        """Give the stream of an output that is not there yet."""
        loop = self._builder.feedback(by=0, num_shards=frame.num_shards)
        self._pending.append((loop, frame, output))
        return loop.stream

    def _add_ports(self, station: Station) -> None:
        frame, ports = self._frame[id(station)], self._ports[id(station)]
        for edge in station.edges_in:
            ports.forward.append(frame.port(self._source(edge), _pact(edge)))
        for edge in station.back:
            other, output = self._frame[id(edge.consumer)], self._back_output(edge)
            pact = self._back_pact(edge)
            port = frame.port(self._from(other, output), pact)
            ports.back[id(edge)] = port, pact.dense

    def _source(self, edge: Edge) -> StreamRef:
        producer = edge.producer
        if isinstance(producer, Stream):
            return producer.stream
        ports = self._ports[id(producer)]
        output = ports.stays
        if edge.move is not None:
            output = ports.moves[place_of(edge.move, producer)]
        return self._from(self._frame[id(producer)], output)

    def _back_output(self, edge: Edge) -> int:
        return self._ports[id(edge.consumer)].cotangents.get(id(edge), NO_OUTPUT)

    def _back_pact(self, edge: Edge) -> Pact:
        always = self._is_dense or _turns(edge.consumer)
        if edge.move is None:
            return Pipeline(dense=always)
        return edge.move.transfer.pact(
            is_back=True, is_dense=always and edge.consumer.is_dense
        )

    def _build(self, frame: Frame) -> None:
        sources: list[Source] = []
        for number, station in enumerate(frame.stations):
            name = f"{number} {station.call.name}"
            held = _held(frame, station)
            site = self._site(station, name, held)
            frame.sites.append(site)
            self._add_rules(frame, station, site)
            if held.output != NO_OUTPUT:
                dense = self._is_dense or _turns(station)
                pact = Broadcast(dense) if held.shared else Pipeline(dense)
                port = frame.port(self._from(frame, held.output), pact)
                sources.append(Source(name, port, held, self._copies_port(frame, held)))
        start = self._learn(frame, sources)
        frame.outputs = add_firing_operator(
            self._builder,
            frame.name,
            frame.inputs,
            frame.rules,
            num_outputs=frame.num_outputs,
            num_shards=frame.num_shards,
            regular=True,  # each rule with dense outputs fires at every time
            on_start=start,
        )
        self._show(frame)

    def _copies_port(self, frame: Frame, held: Held) -> int | None:
        if held.copies_output == NO_OUTPUT:
            return None
        return frame.port(self._from(frame, held.copies_output), Direct())

    def _learn(self, frame: Frame, sources: list[Source]) -> Start | None:
        if not frame.parameters:
            return None
        if self._learning is None:
            return start_of(frame, self._learnt)
        return self._learning.add(frame, sources)

    def _show(self, frame: Frame) -> None:
        """Note which streams are for the user."""
        for station in frame.stations:
            ports = self._ports[id(station)]
            for output, key in ports.shown:
                self._result.shown[key] = frame.outputs[output]
            if ports.loss != NO_OUTPUT:
                self._losses.append((frame, ports.loss, station.is_dense))
            for edge in station.edges_in:
                if edge.back and isinstance(edge.producer, Stream):
                    name = f"{self._name} gradients of {edge.producer.name}"
                    packed = frame.outputs[self._back_output(edge)]
                    streams = unpacked(self._builder, name, packed, len(edge.back))
                    self._result.cotangents.update(
                        zip(keys(edge.back), streams, strict=True)
                    )

    def _site(self, station: Station, name: str, held: Held) -> Site:
        ports, call = self._ports[id(station)], station.call
        return Site(
            name=name,
            prepared=call.function.prepared(station.needs),
            needs=station.needs,
            arguments=tuple(
                each.index if isinstance(each, Parameter) else each.key
                for each in call.arguments
            ),
            outputs=keys(call.columns),
            inlets=tuple(
                self._inlet(edge, port)
                for edge, port in zip(station.edges_in, ports.forward, strict=True)
            ),
            outlets=tuple(
                Outlet(output, move.transfer, keys(move.payload), keys(move.guides))
                for output, move in zip(ports.moves, station.departing, strict=True)
            ),
            stays=keys(staying_columns(station)),
            stays_output=ports.stays,
            shown=ports.shown,
            losses=keys(station.losses),
            loss_output=ports.loss,
            cotangent_inlets=tuple(
                self._cotangent_inlet(station, edge) for edge in station.back
            ),
            held=held,
            assigned=tuple(
                (place, call.columns[output].key)
                for place, output in call.assigned.items()
            ),
            is_live=station.is_live,
            may_turn=_turns(station),
        )

    def _inlet(self, edge: Edge, port: int) -> Inlet:
        wanted, producer = set(keys(edge.columns)), edge.producer
        every, like, receipts = edge.columns, edge.columns, edge.columns[:0]
        if edge.move is not None:
            receipts = edge.move.receipts
            payload = edge.move.payload  # as it comes, before it finds its places
            like = payload if receipts else edge.columns[: len(payload)]
        elif isinstance(producer, Stream):
            every = like = producer.columns
        else:
            every = like = staying_columns(producer)
        return Inlet(
            port,
            tuple(key if key in wanted else None for key in keys(every)),
            likes(like),
            transfer=None if edge.move is None else edge.move.transfer,
            is_stream=isinstance(producer, Stream),
            receipts=keys(receipts),
            back=keys(edge.back),
            back_output=self._back_output(edge),
        )

    def _cotangent_inlet(self, station: Station, edge: Edge) -> CotangentInlet:
        port, _ = self._ports[id(station)].back[id(edge)]
        if edge.move is None:
            return CotangentInlet(port, keys(edge.back))
        payload = tuple(edge.move.payload[column.place] for column in edge.back)
        place = place_of(edge.move, station)
        return CotangentInlet(port, keys(payload), place, edge.move.transfer)

    def _add_rules(self, frame: Frame, station: Station, site: Site) -> None:
        ports = self._ports[id(station)]
        shown = (output for output, _ in ports.shown)
        forward = there(ports.stays, *ports.moves, ports.loss, *shown)
        held = there(site.held.output, site.held.copies_output)
        back = (*there(*ports.cotangents.values()), *held)
        if site.turns:
            forward += back
        frame.rules.append(Rule(tuple(ports.forward), site.forward, outputs=forward))
        if self._learning is None or not site.is_live or site.turns:
            return
        inputs = [ports.back[id(edge)] for edge in station.back]
        if not any(is_dense for _, is_dense in inputs):
            inputs.append((self._learning.tick_port(frame), self._is_dense))
        numbers = tuple(port for port, _ in inputs)
        frame.rules.append(Rule(numbers, site.backward, outputs=back))

    def _finish(self, learning: Learning) -> None:
        """Add what stands beside the stations."""
        for frame, place, output in learning.given:
            self._result.gradients[place] = frame.outputs[output]
        parts = [(f.outputs[output], dense) for f, output, dense in self._losses]
        loss = add_loss(self._builder, f"{self._name} loss", parts)
        learning.tick.connect(loss)
        self._result.loss = loss
        weights, saved = learning.finish(self._name, loss)
        self._result.weights, self._result.saved = weights, saved


def _pact(edge: Edge) -> Pact:
    if edge.move is None:
        return Pipeline(dense=edge.is_dense)
    return edge.move.transfer.pact(is_back=False, is_dense=edge.is_dense)


def _turns(station: Station) -> bool:
    """Whether it may go back as it fires, and so at every time."""
    return station.is_live and station.is_dense and not station.back


def _held(frame: Frame, station: Station) -> Held:
    pairs = zip(station.call.arguments, station.needs.wanted, strict=True)
    found = {
        each.index: each.parts(frame.num_shards)
        for each, wanted in pairs
        if wanted and isinstance(each, Parameter)
    }
    if not found:
        return Held((), ())
    copied = {place: parts for place, parts in found.items() if parts and parts.copies}
    return Held(
        tuple(place for place, parts in found.items() if parts is None),
        tuple(place for place, parts in found.items() if parts is not None),
        frame.output(),
        tuple(copied),
        next(iter(copied.values()), None),  # they share it: groups are the same for all
        frame.output() if copied else NO_OUTPUT,
    )
