"""The worker: it owns the dataflows of all runs that it takes part in.

It is a pure reactor around a transport: `step` handles what arrived and gives
every run one turn. Sockets, threads and signal handlers are the launcher's business,
so that the simulator drives this very class.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from timelyml.errors import InvariantError, PeerError, PeerLostError, summary_of
from timelyml.exchange import (
    CONTROLLER,
    Codec,
    Lane,
    LinkFailure,
    Transport,
    Unreadable,
)
from timelyml.progress import ProgressBatch
from timelyml.runtime import forks
from timelyml.runtime.dataflow import Dataflow
from timelyml.runtime.deploying import deploy
from timelyml.runtime.failure import operator_failure, own_failure, pack_error
from timelyml.runtime.messages import (
    Connect,
    Connected,
    CreditMessage,
    DataMessage,
    Deploy,
    Drop,
    Dropped,
    Failed,
    GuestCame,
    Inspect,
    LinkLost,
    OperatorMessage,
    Ready,
    Report,
    ServiceMessage,
    Shutdown,
    Start,
    StopSources,
    generation_of,
)
from timelyml.runtime.pickles import unreadable_failure
from timelyml.runtime.service import ServiceHost, ServiceSpec
from timelyml.runtime.signals import is_interrupt
from timelyml.runtime.timers import earliest


class Worker:
    """One worker of a cluster, driven by `step`."""

    def __init__(
        self,
        index: int,
        transport: Transport,
        *,
        codec: Codec,
        clock: Callable[[], float],
        spill_directory: Path,
        services: Sequence[ServiceSpec] = (),
        memory: Any = None,
    ) -> None:
        self.index = index
        self.is_stopped = False
        self.is_orphaned = False  # it stopped, since it lost its controller
        self.num_stale = 0  # messages of runs that are over
        self._transport = transport
        self._codec = codec
        self._clock = clock
        self._spill_directory = spill_directory
        self._memory = memory  # for where it is, shared with who started its process
        self._dataflows: dict[int, Dataflow] = {}
        self._started: list[Dataflow] = []
        self._finishing: set[int] = set()  # complete, but not yet known to be here
        self._services = ServiceHost(
            services,
            "worker",
            index=index,
            send=self._send_for_service,
            wake=transport.wake,
            clock=clock,
        )
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            DataMessage: self._on_data,
            ProgressBatch: self._on_progress,
            CreditMessage: self._on_credit,
            Connect: self._on_connect,
            GuestCame: self._on_guest,
            Deploy: self._on_deploy,
            Start: self._on_start,
            OperatorMessage: self._on_operator_message,
            StopSources: self._on_stop_sources,
            Drop: self._on_drop,
            Inspect: self._on_inspect,
            ServiceMessage: self._services.handle,
            Shutdown: self._on_shutdown,
            LinkFailure: self._on_link_failure,
            Unreadable: self._on_unreadable,
        }

    def step(self) -> bool:
        """Handle what arrived and give every run a turn; True if anything was done."""
        incoming = self._transport.receive()
        for peer, message in incoming:
            if self.is_stopped:
                return True
            self._handle(peer, message)
        worked = self._services.step() or bool(incoming)
        for dataflow in list(self._started):
            if self.is_stopped:
                return True
            has_worked = self._guarded(dataflow, dataflow.step)
            worked = has_worked or worked
            if dataflow.log is not None:
                self._guarded(dataflow, dataflow.log.turned, dataflow.has_work())
            if dataflow.generation in self._finishing and dataflow.is_done():
                self._forget(dataflow.generation)
        return worked

    def has_work(self) -> bool:
        """Whether `step` would do something even if nothing arrives."""
        for dataflow in self._started:
            if dataflow.has_work():
                return True
        return self._services.has_work()

    def next_deadline(self) -> float | None:
        """The clock's time at which `step` has to be called again, if any."""
        first = min(self._services.deadlines(), default=None)
        for dataflow in self._started:
            first = earliest(first, dataflow.next_deadline())
        return first

    def service(self, name: str) -> Any:
        """Return the half of a service that is here; for the thread that drives it."""
        return self._services.get(name)

    @property
    def num_runs(self) -> int:
        """Runs that it holds anything of."""
        return len(self._dataflows)

    def activity(self) -> str:
        """What the worker is doing, for heartbeats; may be read from any thread."""
        for dataflow in list(self._started):
            instance = dataflow.running
            if instance is not None:
                where = f"shard {instance.current[0]}, run {dataflow.generation}"
                return f"operator {instance.name!r}, {where}"
        return "waiting"

    def _handle(self, peer: int, message: Any) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            msg = (
                f"worker {self.index} got a message that is not for a worker; got "
                f"{message!r:.200}; expected what a controller or a worker says; report "
                "it, as this is a bug"
            )
            raise InvariantError(msg)
        handler(peer, message)

    def _run_of(self, generation: int) -> Dataflow | None:
        dataflow = self._dataflows.get(generation)
        if dataflow is None or dataflow.has_failed:
            self.num_stale += 1
            return None
        return dataflow

    def _on_data(self, peer: int, message: DataMessage) -> None:
        dataflow = self._run_of(message.generation)
        if dataflow is not None:
            peer = dataflow.numbers.get(peer, peer)
            if dataflow.log is not None:
                self._guarded(dataflow, dataflow.log.heard, peer, message.progress)
            self._guarded(dataflow, dataflow.receive_data, peer, message)

    def _on_progress(self, peer: int, batch: ProgressBatch) -> None:
        dataflow = self._run_of(batch.generation)
        if dataflow is not None:
            if dataflow.log is not None:
                number = dataflow.numbers.get(peer, peer)
                self._guarded(dataflow, dataflow.log.heard, number, batch)
            self._guarded(dataflow, dataflow.progress.accept, batch)

    def _on_credit(self, peer: int, message: CreditMessage) -> None:
        dataflow = self._run_of(message.generation)
        if dataflow is not None:
            number = dataflow.numbers.get(peer, peer)
            dataflow.receive_credit(number, message)

    def _on_connect(self, _: int, message: Connect) -> None:
        for peer, endpoint in enumerate(message.endpoints):
            if peer != self.index and endpoint is not None:
                self._transport.connect(peer, endpoint)
        self._tell(Connected(self.index))
        self._services.joined()

    def _on_guest(self, _: int, message: GuestCame) -> None:
        self._transport.connect(message.worker, message.endpoint, is_watched=True)

    def _on_deploy(self, _: int, message: Deploy) -> None:
        generation = message.generation
        try:
            dataflow = deploy(
                message,
                self.index,
                self._transport,
                codec=self._codec,
                clock=self._clock,
                spill_directory=self._spill_directory,
                memory=self._memory,
                service=self._services.get,
            )
        except BaseException as error:
            if is_interrupt(error):
                raise
            self._report(generation, error)  # a shipped value may raise anything
            return
        self._dataflows[generation] = dataflow
        graph, number = dataflow.graph, dataflow.worker_index
        self._tell(Ready(generation, number, graph.fingerprint(), graph.describe()))

    def _on_start(self, _: int, message: Start) -> None:
        dataflow = self._run_of(message.generation)
        if dataflow is not None:
            self._started.append(dataflow)
            if dataflow.log is not None:
                here = [len(instance.shards) for instance in dataflow.instances]
                self._guarded(dataflow, dataflow.log.begin, dataflow.graph, here)
            self._guarded(dataflow, dataflow.start)

    def _on_operator_message(self, _: int, message: OperatorMessage) -> None:
        dataflow = self._run_of(message.generation)
        if dataflow is not None:
            dataflow.post(message.operator, message.shard, message.body)

    def _on_stop_sources(self, _: int, message: StopSources) -> None:
        dataflow = self._run_of(message.generation)
        if dataflow is not None:
            dataflow.stop_sources(message.epoch)

    def _on_drop(self, _: int, message: Drop) -> None:
        dataflow = self._dataflows.get(message.generation)
        if message.reason == "complete" and dataflow in self._started:
            self._finishing.add(message.generation)
        else:
            self._forget(message.generation)

    def _forget(self, generation: int) -> None:
        dataflow = self._dataflows.pop(generation, None)
        self._finishing.discard(generation)
        metrics: dict[str, Any] = {}
        if dataflow is not None:
            if dataflow in self._started:
                self._started.remove(dataflow)
            metrics = self._metrics_of(dataflow)
            dataflow.close()
        self._tell(Dropped(generation, self.index, metrics))

    def _on_inspect(self, _: int, message: Inspect) -> None:
        dataflow = self._run_of(message.generation)
        if dataflow is None:
            return
        report = Report(
            message.generation,
            self.index,
            message.request,
            self._metrics_of(dataflow),
            tuple(dataflow.holdings()),
        )
        self._tell(report)

    def _metrics_of(self, dataflow: Dataflow) -> dict[str, Any]:
        refused = dict(self._transport.metrics.frames_refused)
        return {**dataflow.metrics(), "frames_refused": refused}

    def _on_shutdown(self, _peer: int, _message: Shutdown) -> None:
        self.leave()

    def leave(self) -> None:
        """Give up every run and free what they hold outside of memory."""
        for dataflow in self._dataflows.values():
            dataflow.close()
        self._dataflows.clear()
        self._started.clear()
        self._services.close()
        forks.forget(self)
        self.is_stopped = True

    def _on_unreadable(self, peer: int, message: Unreadable) -> None:
        generation = generation_of(message.message)
        if generation < 0:  # of no run: what it said is lost
            reason = f"a value that does not unpickle: {summary_of(message.error)}"
            self._on_link_failure(peer, LinkFailure(reason))
            return
        dataflow = self._run_of(generation)
        if dataflow is not None:
            error = unreadable_failure(
                dataflow.graph,
                message,
                peer=dataflow.numbers.get(peer, peer),
                here=dataflow.worker_index,
            )
            self._report(generation, error)

    def _on_link_failure(self, peer: int, message: LinkFailure) -> None:
        for dataflow in self._dataflows.values():
            if _counts_on(dataflow, peer):
                self._set_failed(dataflow)
        who = "the controller" if peer == CONTROLLER else f"worker {peer}"
        msg = (
            f"worker {self.index} lost its link from {who}; got {message.reason}; "
            "expected an unbroken link; start the run again"
        )
        self._services.lost(peer, PeerError(msg, worker=peer, reason=message.reason))
        self._tell(LinkLost(self.index, peer, message.reason))
        if peer == CONTROLLER:
            self._leave_orphaned()

    def _tell(self, message: object) -> None:
        try:
            self._transport.send(CONTROLLER, message)
        except PeerLostError:
            self._leave_orphaned()

    def _leave_orphaned(self) -> None:
        """Leave, since nobody can tell this worker anything any more, nor hear it."""
        self.is_orphaned = True
        self.leave()

    def _send_for_service(self, peer: int, message: object, lane: Lane) -> None:
        with contextlib.suppress(PeerLostError):  # it is told that the peer is lost
            self._transport.send(peer, message, lane)

    def _guarded(
        self, dataflow: Dataflow, action: Callable[..., Any], *arguments: Any
    ) -> bool:
        """Run `action`; what it raises fails this run, and no other."""
        if dataflow.has_failed:
            return False
        try:
            return bool(action(*arguments))
        except BaseException as error:  # exits too: an operator fails its run only
            if is_interrupt(error):
                raise
            instance = dataflow.running
            if instance is not None and not isinstance(error, InvariantError):
                shard, time = instance.current
                error = operator_failure(
                    error,
                    operator=instance.name,
                    worker=dataflow.worker_index,
                    shard=shard if shard >= 0 else None,
                    time=time,
                )
            self._report(dataflow.generation, error)
            return True

    def disown(self) -> None:
        """End this process as soon as it acts as the worker: it is a fork."""
        fork: Any = forks.Fork(self.index, self.activity())
        self._transport = self._clock = fork
        for dataflow in self._dataflows.values():
            dataflow.disown(fork)

    def _set_failed(self, dataflow: Dataflow) -> None:
        """Do nothing more for a run, until it is dropped."""
        dataflow.has_failed = True
        dataflow.whereabouts.leave()  # where a callback may have raised
        if dataflow in self._started:
            self._started.remove(dataflow)

    def _report(self, generation: int, error: BaseException) -> None:
        dataflow = self._dataflows.get(generation)
        if dataflow is not None:
            self._set_failed(dataflow)
        failure = own_failure(f"worker {self.index}", error)
        self._tell(Failed(generation, self.index, pack_error(failure)))


def _counts_on(dataflow: Dataflow, peer: int) -> bool:
    """Whether a worker, by its number in the cluster, takes part in a run."""
    numbers = dataflow.numbers
    return peer in numbers if numbers else peer < dataflow.num_workers
