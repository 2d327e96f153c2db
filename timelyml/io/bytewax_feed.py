"""Streams from Bytewax dataflows, which run on their own engine in their own processes.

Each shard has one process of a Bytewax cluster: it starts it, hears it and ends it.
A record's time is its epoch in Bytewax. With several processes the shards tell each
other where their processes listen, on an edge from the operator to itself, and ask
those of silent processes to let others pass.
"""

from __future__ import annotations

import importlib.util
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timelyml.errors import ConfigError, OperatorError, PeerError, ShippingError
from timelyml.graph import Broadcast, GraphBuilder, Placement, StreamRef
from timelyml.io.bytewax_boot import GuestBoot
from timelyml.io.bytewax_host import GuestProcess, Lost
from timelyml.io.bytewax_messages import Broken, FedBlock, Finished, Passed
from timelyml.io.bytewax_positions import Live
from timelyml.operators import OperatorBuilder
from timelyml.operators.checks import check_callable, check_count
from timelyml.operators.schema import SCHEMA, Guards, SchemaLike, as_schema, declare
from timelyml.progress import Capability, Timestamp
from timelyml.runtime.failure import unpack_exception
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard
from timelyml.runtime.shipping import dumps

CREDIT_BYTES = 8 << 20
FIRST_EPOCH = 1  # of Bytewax
QUEUE_TAG = "bytewax-queue"
"""Tag of what each shard tells the driver at its end: the most bytes that waited."""

LISTENS, WANTS = 0, 1  # what shards tell each other: (what, shard, port or epoch)

Build = Callable[[Callable[[Any], None]], Any]


def bytewax(
    flow: GraphBuilder,
    build: Build,
    *,
    processes: int = 1,
    columns: bool = False,
    epoch_interval_s: float = 10.0,
    regular: bool = False,
    credit_bytes: int = CREDIT_BYTES,
    placement: Placement | None = None,
    schema: SchemaLike | None = None,
    name: str | None = None,
) -> StreamRef:
    """Make a stream of what a Bytewax dataflow sends, which runs in processes of its own.

    Items travel by timelyml's own codec: arrays are not pickled, and not copied on
    their way. What waits, on its way and in the worker, stays within `credit_bytes`;
    beyond it the Bytewax process blocks, hence its sources too. A record's time is its
    epoch in Bytewax, of which the first is 1; epochs without records leave no trace.
    Where several processes feed, one that stays silent so long that others may not
    open further epochs is taken to be as far as they are.

    Args:
        flow: The dataflow.
        build: Called in each Bytewax process with a function `send`; it makes a
            `bytewax.dataflow.Dataflow`, calls `send(stream)` once with the stream that
            leaves it, and returns the dataflow.
        processes: Processes of the Bytewax cluster, each with one worker; also the
            shards of the stream.
        columns: Each item is a block of columns (an array, or a pytree of arrays of
            equal leading axes). Default: each item is a record.
        epoch_interval_s: How long an epoch of Bytewax is; 0: each batch of a source.
        regular: Each item is an epoch of its own, counted from 0, whatever its epoch in
            Bytewax, so that a dense edge may follow; only with one process.
        credit_bytes: Bytes that may wait between each process and its shard.
        placement: Which worker holds which shard, and so starts which process.
        schema: Columns of what is sent; default: the first block of a shard fixes
            them, if it is columns.
        name: Shown in traces and errors; default: "bytewax".

    Raises:
        ConfigError: Bytewax is not installed, or an option is out of range.
        GraphError: `build` cannot be called.
        ShippingError: `build` cannot be pickled.
    """
    who = name or "bytewax"
    check_callable(who, "build", build)
    check_count(who, "processes", processes)
    check_count(who, "credit_bytes", credit_bytes)
    _check_options(who, processes, epoch_interval_s, regular=regular)
    declared = as_schema(schema)
    feeding = _Feeding(
        _pickled(who, build),
        columns,
        float(epoch_interval_s),
        regular,
        credit_bytes,
        Guards("source", declared),
    )
    builder = OperatorBuilder(
        flow,
        "bytewax",
        name=name,
        is_source=True,
        states=("state", SCHEMA),
        num_shards=processes,
        regular=regular,
        placement=placement,
    )
    if processes == 1:
        builder.add_output()
        (out,) = builder.build(feeding.logic(feeding.start_one))
        return declare(out, declared)
    loop_name = None if name is None else f"processes of {name}"
    told = flow.feedback(None, by=1, name=loop_name, num_shards=processes)
    builder.add_input(told.stream, Broadcast())
    out_port, told_port = builder.add_output({}), builder.add_output({})
    refs = builder.build(feeding.logic(feeding.start_several))
    told.connect(refs[told_port])
    return declare(refs[out_port], declared)


def _check_options(
    who: str, processes: int, epoch_interval_s: float, *, regular: bool
) -> None:
    if not epoch_interval_s >= 0:
        raise ConfigError(
            f"operator {who!r} has option 'epoch_interval_s' out of range; got "
            f"{epoch_interval_s!r}; expected 0 or more; correct the option",
            operator=who,
            option="epoch_interval_s",
        )
    if regular and processes > 1:
        raise ConfigError(
            f"operator {who!r} cannot be regular; got {processes} processes, whose items "
            f"have no order; expected one; drop one of the options",
            operator=who,
            option="regular",
        )
    if importlib.util.find_spec("bytewax") is None:
        raise ConfigError(
            f"operator {who!r} needs Bytewax; got no module of that name; expected it "
            f"to be installed; install it, with a Python below 3.13",
            operator=who,
        )


@dataclass(slots=True)
class _Fed(Live):
    """One shard: its process, and its rights to send records and to tell others."""

    rights: list[Capability]
    guest: GuestProcess | None = None
    ports: dict[int, int] = field(default_factory=dict)
    reserved: socket.socket | None = None
    stop_at: int | None = None
    wanted: int = 0  # by others that may not open it before we are there
    asked_for: int = 0

    def __reduce__(self) -> Any:
        return Live, ()

    @property
    def epoch(self) -> int:
        """The first epoch that may still get something."""
        time = self.rights[0].time
        assert isinstance(time, int)  # noqa: S101  for the type checker
        return time

    def go_to(self, epoch: int) -> None:
        """Give up all earlier epochs."""
        if epoch > self.epoch:
            for right in self.rights:
                right.downgrade(epoch)

    def end(self) -> None:
        """End the process and send nothing more."""
        for right in self.rights:
            right.release()
        self.rights.clear()
        if self.guest is not None:
            self.guest.close()
        if self.reserved is not None:
            self.reserved.close()


@dataclass(frozen=True, slots=True)
class _Feeding:
    """The callbacks of one operator; shipped with it. `guests` is each worker's own."""

    build: bytes
    has_columns: bool
    epoch_interval_s: float
    is_regular: bool
    credit_bytes: int
    guards: Guards
    guests: list[GuestProcess] = field(default_factory=list)

    def logic(self, on_start: Callable[[Shard], None]) -> Logic:
        return Logic(
            on_start=on_start,
            on_batch=self.hear,
            on_notify=self.start_guests,
            on_activate=self.turn,
            on_message=_obey,
            on_close=self.close,
        )

    def close(self) -> None:
        """Free the processes, however the run ended."""
        for guest in self.guests:
            guest.close()

    def start_one(self, shard: Shard) -> None:
        _refuse_to_go_on(shard)
        fed = shard.state["live"] = _Fed([shard.initial_capability()])
        if not self.is_regular:
            fed.go_to(FIRST_EPOCH)
        self._start(shard, fed, [])

    def start_several(self, shard: Shard) -> None:
        """Reserve a port, and tell the others."""
        _refuse_to_go_on(shard)
        rights = [shard.initial_capability(output) for output in (0, 1)]
        fed = shard.state["live"] = _Fed(rights)
        # Bound but not listening: nobody else gets it, and the process still can.
        fed.reserved = socket.socket()
        fed.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        fed.reserved.bind(("127.0.0.1", 0))
        port = fed.reserved.getsockname()[1]
        shard.output(1).send(0, [(LISTENS, shard.index, port)])
        fed.go_to(FIRST_EPOCH)

    def hear(self, shard: Shard, delivery: Delivery) -> None:
        fed: _Fed = shard.state["live"]
        for what, sender, value in delivery.payload:
            if what == LISTENS:
                fed.ports[sender] = value
                shard.notify_at(delivery.time, outputs=())
            else:
                fed.wanted = max(fed.wanted, value)
                shard.activate()

    def start_guests(self, shard: Shard, _: Timestamp) -> None:
        fed: _Fed = shard.state["live"]
        if fed.rights:
            addresses = [f"127.0.0.1:{port}" for _, port in sorted(fed.ports.items())]
            self._start(shard, fed, addresses)

    def _start(self, shard: Shard, fed: _Fed, addresses: list[str]) -> None:
        boot = GuestBoot(
            name=shard.operator,
            process_index=shard.index,
            addresses=addresses,
            epoch_interval_s=self.epoch_interval_s,
            credit_bytes=self.credit_bytes,
            has_columns=self.has_columns,
            is_regular=self.is_regular,
            token="",
            bind="",
            host={},
            sys_path=[path or str(Path.cwd()) for path in sys.path],
            num_build_bytes=len(self.build),
        )
        fed.guest = GuestProcess(boot, self.build, shard.waker())
        self.guests.append(fed.guest)

    def turn(self, shard: Shard) -> None:
        """Take one message of the process into the dataflow."""
        fed: _Fed = shard.state["live"]
        if fed.guest is None or not fed.rights:
            return
        if fed.stop_at is not None and fed.epoch >= fed.stop_at:
            fed.end()
            return
        match fed.guest.peek():
            case FedBlock(epoch, _, payload, is_last):
                fed.go_to(epoch)
                if not shard.can_start_epoch(fed.epoch):
                    _ask_to_pass(shard, fed)
                    return  # activated again once it may
                self.guards.of(shard).check(payload)
                is_open = self.is_regular and not is_last
                shard.output().send(fed.epoch, payload, is_last=not is_open)
                if is_last:
                    fed.go_to(epoch + 1)
            case Passed(epoch):
                fed.go_to(epoch)
            case Finished():
                shard.emit(QUEUE_TAG, fed.guest.peak_queued_bytes)
                fed.end()
                return
            case Broken() as broken:
                raise _failure(shard, broken)
            case Lost(how):
                raise PeerError(
                    f"bytewax process {shard.index} of {shard.operator!r} {how}; "
                    f"expected it to come to its end; see what it wrote to stderr",
                    process=shard.index,
                )
            case _:
                fed.go_to(fed.wanted)  # silent: do not hold back the others
                return
        fed.guest.take()
        shard.activate()


def _ask_to_pass(shard: Shard, fed: _Fed) -> None:
    """Tell the others, once, that an epoch cannot begin before they are there."""
    if shard.num_shards > 1 and fed.asked_for < fed.epoch:
        fed.asked_for = fed.epoch
        shard.output(1).send(fed.epoch, [(WANTS, shard.index, fed.epoch)])


def _failure(shard: Shard, broken: Broken) -> Exception:
    """Return the user's exception, with what Bytewax says of where it was raised."""
    error = unpack_exception(broken.error)
    if not isinstance(error, Exception):
        error = OperatorError(broken.step)
    error.add_note(
        f"in bytewax process {shard.index} of {shard.operator!r}: {broken.step}\n"
        f"{broken.traceback_text}"
    )
    return error


def _refuse_to_go_on(shard: Shard) -> None:
    """Refuse what was begun elsewhere: nothing would keep records from coming twice."""
    if "live" in shard.state:
        raise ConfigError(
            f"operator {shard.operator!r} cannot go on with what was begun elsewhere; got "
            f"a Bytewax dataflow, of which no position is known; expected the start of a "
            f"run; begin anew, or read its sources with read()",
            operator=shard.operator,
        )


def _obey(shard: Shard, body: tuple[Any, ...]) -> None:
    fed: _Fed = shard.state["live"]
    match body:
        case ("stop", None):
            fed.end()
        case ("stop", epoch):  # regular: what the others read of it must be whole
            fed.stop_at = epoch
            shard.activate()


def _pickled(who: str, build: Build) -> bytes:
    try:
        return dumps(build)
    except Exception as error:
        raise ShippingError(
            f"operator {who!r} cannot ship its build function; got "
            f"{type(error).__name__}: {error}; expected a function that pickles; create "
            f"what it needs inside it",
            who=who,
        ) from error
