"""What a transport moves between two processes, next to bare ZeroMQ.

Blocks of 1 to 16 MiB go one way and both ways, with at most 64 MiB not yet
acknowledged; small messages go back and forth. timelyml and bare ZeroMQ (the same
sockets, `copy=False`, no codec, no checks) take turns in the same two processes, and
each ratio is the median of the rounds' own ratios. Then a dataflow on two worker
processes exchanges as many bytes, routing them row by row; its ratios are those of
medians, to bare blocks of the same size.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import zmq

from benchmarks.exchanged import exchanged_mb_per_s
from benchmarks.report import Report
from timelyml import Cluster
from timelyml.exchange import Codec, CurveKeys, Endpoint, Lane, ZmqTransport

MIB = 1 << 20
WINDOW_BYTES = 64 * MIB
BLOCK_MIB = (1, 4, 16)
ROUND_TRIPS = 500
TARGET = "half of bare, 700 MB/s beside 1500"
Array = np.ndarray[Any, Any]


class Link(Protocol):
    """One end of a connection: blocks one way, acknowledgements the other.

    Attributes:
        early: Blocks that overtook, on their own lane, the acknowledgement before them.
    """

    early: deque[Array]

    def connect(self, endpoint: Endpoint) -> None:
        """Connect to the other end."""

    def put(self, block: Array | None) -> None:
        """Send a block, or an acknowledgement if None; never blocks."""

    def get(self) -> Array | None:
        """Wait for the next block or acknowledgement."""


class TimelyLink:
    """The transport under test."""

    def __init__(self, index: int, bind: str) -> None:
        token = bytes(16)
        self.transport = ZmqTransport(index, codec=Codec([]), token=token, bind=bind)
        self.endpoint = self.transport.endpoint
        self.early: deque[Array] = deque()
        self._peer = 1 - index
        self._arrived: deque[Any] = deque()

    def connect(self, endpoint: Endpoint) -> None:
        """Connect to the other end."""
        self.transport.connect(self._peer, endpoint)

    def put(self, block: Array | None) -> None:
        """Send a block on the bulk lane, an acknowledgement on the control lane."""
        lane = Lane.CONTROL if block is None else Lane.BULK
        self.transport.send(self._peer, block, lane)

    def get(self) -> Array | None:
        """Wait for the next block or acknowledgement."""
        while not self._arrived:
            self._arrived += self.transport.receive()
            if not self._arrived:
                self.transport.wait(10)
        message: Array | None = self._arrived.popleft().message
        return message

    def close(self) -> None:
        """Close the transport."""
        self.transport.close()


class BareLink:
    """PUSH and PULL sockets, one pair per lane, and nothing around them."""

    def __init__(self, index: int, bind: str, keys: CurveKeys | None) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._keys = keys
        self.early: deque[Array] = deque()
        self._pulls = [self._socket(zmq.PULL) for _ in Lane]
        self._pushes = [self._socket(zmq.PUSH) for _ in Lane]
        self._poller = zmq.Poller()
        for lane, pull in enumerate(self._pulls):
            if keys is not None:
                pull.set(zmq.CURVE_SERVER, 1)
            is_ipc = bind.startswith("ipc")
            pull.bind(f"{bind}/bare-{index}-{lane}" if is_ipc else bind)
            self._poller.register(pull, zmq.POLLIN)
        control, bulk = self._pulls
        self.endpoint = Endpoint(_address(control), _address(bulk))

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set(zmq.SNDHWM if kind == zmq.PUSH else zmq.RCVHWM, 0)
        if self._keys is not None:
            socket.set(zmq.CURVE_PUBLICKEY, self._keys.public)
            socket.set(zmq.CURVE_SECRETKEY, self._keys.secret)
        return socket

    def connect(self, endpoint: Endpoint) -> None:
        """Connect to the other end."""
        for push, address in zip(
            self._pushes, (endpoint.control, endpoint.bulk), strict=True
        ):
            if self._keys is not None:
                push.set(zmq.CURVE_SERVERKEY, self._keys.public)
            push.connect(address)

    def put(self, block: Array | None) -> None:
        """Send a block, or an empty acknowledgement."""
        if block is None:
            self._pushes[Lane.CONTROL].send(b"")
        else:
            self._pushes[Lane.BULK].send(block.data, copy=False)

    def get(self) -> Array | None:
        """Wait for the next block or acknowledgement."""
        ready = dict(self._poller.poll())
        if self._pulls[Lane.CONTROL] in ready:
            self._pulls[Lane.CONTROL].recv()
            return None
        frame = self._pulls[Lane.BULK].recv(copy=False)
        return np.frombuffer(frame.buffer, np.float32)

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=1000)


def _address(pull: zmq.Socket[bytes]) -> str:
    bound: Any = pull.get(zmq.LAST_ENDPOINT)
    return str(bound.rstrip(b"\0").decode())


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(
        prog="benchmarks exchange_bandwidth", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=256, help="moved per measurement")
    options = parser.parse_args(argv)
    report = Report("Between two processes, beside bare ZeroMQ")
    # tcp is encrypted, which takes five times as long.
    for scheme, mib in (("ipc", options.mib), ("tcp", max(options.mib // 4, 16))):
        _report(report, scheme, _measure(scheme, options.rounds, mib))
    for plan, samples in _measure_flow(options.rounds, options.mib).items():
        _add(report, plan, samples)
    report.show(as_json=options.json)
    return 0


Samples = dict[str, list[float]]


def _measure(scheme: str, num_rounds: int, num_mib: int) -> dict[str, Samples]:
    """Return, by measurement, samples of `timelyml` and `bare`: MB/s or us."""
    keys = CurveKeys.generate() if scheme == "tcp" else None
    with tempfile.TemporaryDirectory(prefix="tml") as folder, ExitStack() as stack:
        bind = "tcp://127.0.0.1:*" if scheme == "tcp" else f"ipc://{folder}"
        Path(folder).chmod(0o700)
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("spawn").Process(
            target=_run, args=(1, bind, keys, there, (num_rounds, num_mib))
        )
        child.start()
        stack.callback(child.join)
        return _run(0, bind, keys, here, (num_rounds, num_mib))


def _run(
    index: int,
    bind: str,
    keys: CurveKeys | None,
    pipe: Connection,
    size: tuple[int, int],
) -> dict[str, Samples]:
    """Run the same plan at both ends; only what the first measures counts.

    `size` is the number of rounds and the MiB that each measurement moves.
    """
    timely, bare = TimelyLink(index, bind), BareLink(index, bind, keys)
    links: dict[str, Link] = {"timelyml": timely, "bare": bare}
    with ExitStack() as stack:
        for link in (timely, bare):
            stack.callback(link.close)
            pipe.send(link.endpoint)
            link.connect(pipe.recv())
        return _take_turns(index, links, *size)


def _take_turns(
    index: int, links: dict[str, Link], num_rounds: int, num_mib: int
) -> dict[str, Samples]:
    found: dict[str, Samples] = {}
    for is_warm in [False, *[True] * num_rounds]:
        for plan, run in _plans(index, num_mib).items():
            samples = found.setdefault(plan, {name: [] for name in links})
            for name, link in links.items():
                _round_trip(index, link)
                figure = run(link)
                if is_warm:
                    samples[name].append(figure)
    return found


def _plans(index: int, num_mib: int) -> dict[str, Callable[[Link], float]]:
    def round_trips(link: Link) -> float:
        seconds = [_round_trip(index, link) for _ in range(ROUND_TRIPS)]
        return median(seconds) * 1e6

    def blocks(mib: int, both_ways: bool) -> Callable[[Link], float]:
        block = np.ones(mib * MIB // 4, np.float32)
        count = num_mib // mib
        sends, receives = (count, count) if both_ways else (count, 0)
        if index == 1 and not both_ways:
            sends, receives = 0, count
        total = block.nbytes * (sends + receives)
        return lambda link: total / _stream(link, block, sends, receives) / 1e6

    plans: dict[str, Callable[[Link], float]] = {"round_trip": round_trips}
    for mib in BLOCK_MIB:
        plans[f"one_way_{mib}_mib"] = blocks(mib, both_ways=False)
        plans[f"both_ways_{mib}_mib"] = blocks(mib, both_ways=True)
    return plans


def _round_trip(index: int, link: Link) -> float:
    """Seconds of one acknowledgement there and back; also a barrier."""
    start = time.perf_counter()
    if index == 0:
        link.put(None)
        _await_acknowledgement(link)
    else:
        _await_acknowledgement(link)
        link.put(None)
    return time.perf_counter() - start


def _await_acknowledgement(link: Link) -> None:
    while (block := link.get()) is not None:
        link.early.append(block)


def _stream(link: Link, block: Array, sends: int, receives: int) -> float:
    """Seconds to send and receive blocks, every one acknowledged."""
    start = time.perf_counter()
    sent = acknowledged = received = 0
    while acknowledged < sends or received < receives:
        under_way = (sent - acknowledged) * block.nbytes
        if sent < sends and under_way < WINDOW_BYTES:
            link.put(block)
            sent += 1
        elif (link.early.popleft() if link.early else link.get()) is None:
            acknowledged += 1
        else:
            link.put(None)
            received += 1
    return time.perf_counter() - start


def _measure_flow(num_rounds: int, num_mib: int) -> Samples:
    """Return MB/s of a dataflow, one way and both ways."""
    samples: Samples = {"one_way": [], "both_ways": []}
    with Cluster(2) as cluster:
        for is_warm in [False, *[True] * num_rounds]:
            for plan, found in samples.items():
                both_ways = plan == "both_ways"
                rate = exchanged_mb_per_s(cluster, num_mib, both_ways=both_ways)
                if is_warm:
                    found.append(rate)
    return samples


def _add(report: Report, plan: str, samples: list[float]) -> None:
    """Add the median of a dataflow, and its ratio to that of bare ZeroMQ."""
    bare, found = report.value(f"ipc_{plan}_4_mib_bare"), median(samples)
    ratio = found / bare
    has_aim = _has_aim(plan)
    report.add(
        f"ipc_exchange_{plan}",
        found,
        "MB/s",
        target=TARGET if has_aim else "",
        is_met=_is_met(found, bare, ratio) if has_aim else None,
        ratio_to_bare=ratio,
    )


def _has_aim(plan: str) -> bool:
    return plan.startswith("one_way")


def _is_met(found: float, bare: float, ratio: float) -> bool:
    return ratio >= 0.5 and (bare < 1500 or found > 700)


def _report(report: Report, scheme: str, found: dict[str, Samples]) -> None:
    """Add medians, and the median of the rounds' ratios to bare ZeroMQ."""
    for plan, samples in found.items():
        bare, timely = samples["bare"], samples["timelyml"]
        ratio = median(t / b for t, b in zip(timely, bare, strict=True))
        has_aim = _has_aim(plan)
        unit = "us" if plan == "round_trip" else "MB/s"
        is_met = _is_met(median(timely), median(bare), ratio)
        report.add(f"{scheme}_{plan}_bare", median(bare), unit)
        report.add(
            f"{scheme}_{plan}",
            median(timely),
            unit,
            target=TARGET if has_aim else "",
            is_met=is_met if has_aim else None,
            ratio_to_bare=ratio,
        )
