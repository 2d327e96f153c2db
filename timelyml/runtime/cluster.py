"""Clusters: workers that outlive runs, in this process or in others.

The options say where workers live; everything else is the same. A session, one set
of workers with its controller, is started when it is first needed and replaced as
a whole when a worker is lost.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from timelyml.errors import ConfigError, RunStoppedError
from timelyml.exchange import CONTROLLER, InProcessHub
from timelyml.graph import Graph
from timelyml.runtime.cluster_options import ClusterOptions
from timelyml.runtime.config import RunConfig, ShippedRun, default_mode
from timelyml.runtime.controller import Controller
from timelyml.runtime.failure import deserted_error
from timelyml.runtime.guests import Invitation
from timelyml.runtime.launch import InlineEndpoint, InlineLauncher, ThreadLauncher
from timelyml.runtime.options import check_known, check_listener, refusal
from timelyml.runtime.process_session import ProcessOptions, process_session
from timelyml.runtime.record import OnMessage, RunRecord
from timelyml.runtime.result import Result
from timelyml.runtime.run import Run, RunIdentity
from timelyml.runtime.run_plan import RunPlan
from timelyml.runtime.session import Session
from timelyml.runtime.shipping import ship
from timelyml.runtime.signals import HeldSignals, Interrupts


class Cluster:
    """Workers that run many dataflows, in turn and side by side.

    A context manager: workers are started on entry and ended on exit. Takes the
    options of `ClusterOptions`.
    """

    def __init__(self, workers: int = 4, **options: Any) -> None:
        known = [field.name for field in dataclasses.fields(ClusterOptions)]
        check_known("a cluster", options, known)
        self.options = ClusterOptions(workers=workers, **options)
        self._generations = itertools.count(1)
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._is_closed = False

    @property
    def num_workers(self) -> int:
        """How many workers a run has that starts now; others may join later."""
        return len(self._members())

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that a run has that starts now, by which some can be chosen."""
        return tuple(self._members())

    def start(
        self,
        graph: Graph,
        *,
        on_message: OnMessage | None = None,
        workers: Sequence[int] | None = None,
        **config: Any,
    ) -> Run:
        """Start a dataflow and return its handle at once.

        Args:
            graph: What to run.
            on_message: Called with (operator, shard, tag, body) for what operators
                send to the driver; in the controller's thread, so it must be quick.
            workers: Some of those of the cluster, which are workers 0, 1, ... of the
                run in this order; the end of any other does not concern it. Default:
                all.
            config: Options of `RunConfig`.

        Raises:
            ShippingError: Something in the graph cannot be shipped to workers.
            ConfigError: An option is unknown or has a value that cannot work.
            PlacementError: A shard is placed on a worker that does not exist.
        """
        return self._start(graph, on_message, config, workers=workers)

    def run(
        self,
        graph: Graph,
        *,
        on_message: OnMessage | None = None,
        workers: Sequence[int] | None = None,
        **config: Any,
    ) -> Result:
        """Run a dataflow to its end and return what it collected.

        Nothing can be sent to inputs, so they are closed at once. An inline cluster
        runs it in the calling thread, where a debugger can follow. In the main
        thread SIGINT and SIGTERM let it drain first, then end the program as usual;
        a second signal gives it up at once.

        Raises:
            TimelyError: As `start`; or the run failed, see `Run.result`.
        """
        with Interrupts() as interrupts:
            session = self._usable_session()
            is_caller_driven = self.options.mode == "inline" and not session.has_thread
            run = self._start(
                graph,
                on_message,
                config,
                workers=workers,
                is_caller_driven=is_caller_driven,
            )
            run.close_inputs()
            if is_caller_driven:
                return _drive_in_caller(session, run, interrupts)
            return run.wait(interrupts)

    def service(self, name: str) -> Any:
        """Return the half of a service that stands beside the controller.

        It is driven by a thread of the cluster from now on, so call only what it
        says may be called from others. It goes on when workers are lost, with those
        that are left, and so do runs that start then.

        Raises:
            ConfigError: The cluster has no such service.
        """
        session = self._session
        if session is None or session.controller.is_stopped:
            session = self._usable_session()
        session.start_thread()
        return session.controller.services.get(name)

    def invite(self) -> Invitation:
        """Return what a process needs to join; from any thread.

        It takes part in services, and in the runs that are started from then on.

        Raises:
            ConfigError: Its workers are no processes, or are not started.
        """
        session = self._session
        if session is None or session.invite is None:
            raise ConfigError(
                f"nobody can join {self!r}; got a process that would; expected workers "
                "that are processes, and started; use mode 'processes'"
            )
        return session.invite()

    def close(self) -> None:
        """End every run and every worker; closing twice changes nothing."""
        self._close(False)

    def __enter__(self) -> Self:
        try:
            self._usable_session()
        except BaseException:
            self._close(True)  # __exit__ will not come
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(kind is not None)

    def __repr__(self) -> str:
        return f"<Cluster of {self.options.workers} workers, {self.options.mode}>"

    def _start(
        self,
        graph: Graph,
        on_message: OnMessage | None,
        config: Mapping[str, Any],
        *,
        workers: Sequence[int] | None = None,
        is_caller_driven: bool = False,
        is_only_run: bool = False,
    ) -> Run:
        asked_at = time.monotonic()
        if not isinstance(graph, Graph):
            raise ConfigError(
                f"a cluster cannot run that; got {graph!r}; expected a Graph; call "
                "flow.run(cluster=cluster), or pass what flow.build() returns"
            )
        check_listener(on_message)
        if not (members := self._members()):
            raise deserted_error(self)
        if workers is not None:
            members = _chosen(workers, members)
        num_processes = len(members) if self.options.mode == "processes" else 1
        mode = default_mode(num_processes, len(os.sched_getaffinity(0)))
        run_config = make_config({"progress_mode": mode, **config})
        resolved = graph.resolve(len(members), placement=run_config.placement)
        shipped = ship(ShippedRun(resolved, run_config))
        session = self._usable_session()
        generation = next(self._generations)
        record = RunRecord(
            resolved,
            on_message=on_message,
            on_listener_error=lambda error: controller.ask(
                generation, lambda run, now: run.fail(error, now)
            ),
            # Names the cluster, so that a run whose handle was dropped goes on.
            on_end=(lambda: self._request_close(session)) if is_only_run else None,
            is_driven_here=lambda: session.is_driven_here,
        )
        controller = session.controller
        identity = RunIdentity(generation, resolved, run_config)
        settle = self._close if is_only_run else None
        run = Run(identity, controller, record, settle=settle, owner=self)
        plan = RunPlan(
            generation,
            resolved,
            run_config,
            shipped,
            len(members),
            build_timeout_s=self.options.startup_timeout_s,
            workers=tuple(members),
        )
        session.follow(identity, record)
        controller.submit(plan, record.apply, asked_at)
        if not is_caller_driven:
            session.start_thread()
        return run

    def _members(self) -> Sequence[int]:
        session = self._session
        if session is None or not session.is_usable:
            return range(self.options.workers)
        return session.controller.members()

    def _close(self, at_once: bool) -> None:
        with self._lock:
            self._is_closed = True
            session = self._session
            self._forget_finalizer()
        if session is not None:
            session.close(at_once=at_once)

    def _forget_finalizer(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()

    def _request_close(self, session: Session) -> None:
        session.request_close()

    def _usable_session(self) -> Session:
        with HeldSignals(), self._lock:
            if self._is_closed:
                msg = "the cluster is closed; got a run to start; make another cluster"
                raise RunStoppedError(msg)
            if self._session is None or not self._session.is_usable:
                if self._session is not None:
                    self._session.close()
                self._forget_finalizer()
                self._session = self._new_session()
                # Also when the program ends without close(); holds no cluster.
                self._finalizer = weakref.finalize(self, self._session.abandon)
            return self._session

    def _new_session(self) -> Session:
        options = self.options
        if options.mode == "processes":
            session = process_session(
                ProcessOptions(
                    options.workers,
                    options.transport,
                    options.startup_timeout_s,
                    options.heartbeat_timeout_s,
                    options.environment,
                    options.num_devices,
                    options.services,
                    options.host,
                    options.advertise,
                    self._generations,
                )
            )
            session.start_thread()  # workers come and go while nobody asks
            return session
        return _local_session(options, self._generations)


def run_graph(
    graph: Graph,
    *,
    workers: int | None = None,
    on_message: OnMessage | None = None,
    cluster: Mapping[str, Any] | None = None,
    **config: Any,
) -> Result:
    """Run a dataflow on a cluster of its own: inline, or on `workers` processes."""
    with _own_cluster(workers, cluster or {}) as own:
        return own.run(graph, on_message=on_message, **config)


def start_graph(
    graph: Graph,
    *,
    workers: int | None = None,
    on_message: OnMessage | None = None,
    cluster: Mapping[str, Any] | None = None,
    **config: Any,
) -> Run:
    """Start a dataflow on a cluster of its own, which ends with it."""
    own = _own_cluster(workers, cluster or {})
    try:
        return own._start(graph, on_message, config, is_only_run=True)  # noqa: SLF001
    except BaseException:
        own._close(True)  # noqa: SLF001
        raise


def make_config(options: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a run.

    Raises:
        ConfigError: An option is unknown or has a value that cannot work.
    """
    known = [field.name for field in dataclasses.fields(RunConfig)]
    check_known("a run", options, known)
    return RunConfig(**options)


def _chosen(workers: Sequence[int], members: Sequence[int]) -> Sequence[int]:
    """Return the workers of a run that has some of a cluster's.

    Raises:
        ConfigError: One is not there or named twice, or there is none.
    """
    chosen = tuple(workers) if isinstance(workers, Sequence) else ()
    is_known = all(type(x) is int and x in members for x in chosen)
    if not chosen or not is_known or len({*chosen}) < len(chosen):
        rule = f"some of {list(members)}, each once; cluster.workers has those there"
        raise refusal("workers", workers, rule)
    return chosen


def _own_cluster(workers: int | None, options: Mapping[str, Any]) -> Cluster:
    if workers is None:
        return Cluster(1, **{"mode": "inline", **options})
    return Cluster(workers, **options)


def _local_session(options: ClusterOptions, generations: Iterator[int]) -> Session:
    hub = InProcessHub()
    transport = hub.transport(CONTROLLER)
    controller = Controller(
        transport,
        options.workers,
        clock=time.monotonic,
        startup_timeout_s=options.startup_timeout_s,
        services=options.services,
        generations=generations,
    )
    if options.mode == "threads":
        launcher = ThreadLauncher(hub, options.workers, options.services)
        return Session(controller, transport, launcher, controller)
    inline = InlineLauncher(hub, options.services)
    return Session(controller, transport, inline, InlineEndpoint(controller, inline))


def _drive_in_caller(session: Session, run: Run, interrupts: Interrupts) -> Result:
    """Run in the calling thread; a signal drains, a second one gives up."""
    try:
        session.drive_until(lambda: run.done() or interrupts.was_interrupted)
        if not run.done() and session.is_usable:
            run.request_stop()
            session.drive_until(lambda: run.done() or interrupts.is_insisted_on())
        if not run.done() and interrupts.is_insisted_on():
            raise KeyboardInterrupt  # noqa: TRY301  as the handler, if it was lost
    except BaseException:
        run.request_cancel()
        session.drive_until(run.done)
        raise
    return run.conclude(interrupts, None, is_in_time=True)
