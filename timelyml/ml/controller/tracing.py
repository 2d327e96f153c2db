"""What devices did and when, for clients that ask: launches and transfers, on one clock.

Hosts say of each launch when it ended, by clocks of their own. When a trace begins and
when it ends the controller asks them what time it is: the answer was given between
question and arrival, which bounds how far the host's clock is from its own, and several
answers bound it closer. Where no difference at all explains every answer, as on one
machine, clocks count as one; elsewhere the middle of the bounds is taken.

Source:
    Cristian, "Probabilistic clock synchronization" (1989); bounds are intersected as
    Marzullo does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from timelyml.errors import AdmissionError
from timelyml.ml.controller.messages import Acknowledged, Refused
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.traced import AskTrace, LaunchSpan, Traced, TransferSpan
from timelyml.ml.controller.work import Work
from timelyml.ml.hosts import Arrival, AskTime, Done, Reports, Time
from timelyml.runtime.failure import pack_error

MAX_SPANS = 100_000
"""Of each kind, that are kept of a trace; the oldest go first."""

NUM_QUESTIONS = 4
"""That each host is asked at a time; the quickest answer tells most."""

ANSWER_S = 5.0
"""What a host does not answer by then, a trace goes without."""

MAX_TRACES = 16
"""Of one client at a time; one more takes the place of the first."""

_NS = 1_000_000_000


class Clock:
    """How far the clock of a host is ahead of the controller's, as answers bound it.

    >>> clock = Clock()
    >>> clock.learn(asked_ns=0, said_ns=1_000, heard_ns=100)
    >>> clock.ahead_ns, clock.error_ns
    (950, 50)
    >>> clock.learn(asked_ns=200, said_ns=1_190, heard_ns=220)
    >>> clock.ahead_ns, clock.error_ns
    (980, 10)
    """

    def __init__(self) -> None:
        self._bounds: tuple[int, int] | None = None

    @property
    def is_known(self) -> bool:
        """Whether there was an answer."""
        return self._bounds is not None

    def learn(self, *, asked_ns: int, said_ns: int, heard_ns: int) -> None:
        """Take an answer, which was given some time between asking and hearing it."""
        least, most = said_ns - heard_ns, said_ns - asked_ns
        if self._bounds is not None:
            closer = max(least, self._bounds[0]), min(most, self._bounds[1])
            if closer[0] <= closer[1]:  # or clocks have drifted since
                least, most = closer
        self._bounds = least, most

    @property
    def ahead_ns(self) -> int:
        """How far it is ahead."""
        least, most = self._bounds or (0, 0)
        return 0 if least <= 0 <= most else (least + most) // 2

    @property
    def error_ns(self) -> int:
        """How far that may be wrong; 0 where clocks count as one."""
        least, most = self._bounds or (0, 0)
        return (most - least) // 2 if self.ahead_ns else 0


@dataclass(slots=True)
class _Host:
    """A host, its clock, and how many questions it is still to answer."""

    island: str
    clock: Clock = field(default_factory=Clock)
    questions_left: int = 0
    asked_ns: int = 0


class _Trace:
    """What is kept for one client."""

    def __init__(self) -> None:
        self.launches: deque[LaunchSpan] = deque(maxlen=MAX_SPANS)
        self.transfers: deque[TransferSpan] = deque(maxlen=MAX_SPANS)
        self.num_seen = 0


@dataclass(slots=True)
class _Waiting:
    """A request that is answered once hosts have said what time it is."""

    client: int
    message: AskTrace
    hosts: set[int]
    deadline_s: float


class Traces:
    """What clients have asked to be told of what devices do.

    Args:
        outbox: Takes questions and answers.
        by_sequence: What has which place in the order of which island.
    """

    def __init__(
        self, outbox: Outbox, by_sequence: Mapping[tuple[str, int], tuple[Work, int]]
    ) -> None:
        self._outbox = outbox
        self._by_sequence = by_sequence
        self._hosts: dict[int, _Host] = {}
        self._gone: dict[int, _Host] = {}  # since somebody traces
        self._traces: dict[tuple[int, int], _Trace] = {}  # by client and first request
        self._waiting: list[_Waiting] = []

    @property
    def is_on(self) -> bool:
        """Whether anybody wants to know."""
        return bool(self._traces)

    def welcome(self, host: int, island: str, now_s: float) -> None:
        """Hear of a host that is there from now on."""
        self._hosts[host] = _Host(island)
        if self.is_on:
            self._ask(host, now_s)

    def lose(self, host: int) -> None:
        """Wait no more for a host that is gone; what it did stays in traces."""
        known = self._hosts.pop(host, None)
        if known is not None and self.is_on:
            self._gone[host] = known
        self._heard_all(host)

    def handle(self, client: int, message: object, now_s: float) -> bool:
        """Take what a client asks for, if it is a trace or the end of one.

        It is answered once all hosts have said what time it is.
        """
        if isinstance(message, AskTrace):
            self._handle(client, message, now_s)
            return True
        return False

    def _handle(self, client: int, message: AskTrace, now_s: float) -> None:
        if not message.ends:
            own = [each for each in self._traces if each[0] == client]
            if len(own) == MAX_TRACES:
                del self._traces[own[0]]
            self._traces[client, message.request] = _Trace()
        elif (client, message.ends) not in self._traces:
            refused = Refused(message.request, pack_error(_no_such_trace(client)))
            self._outbox.tell(client, refused)
            return
        hosts = {each for each in self._hosts if not self._outbox.is_muted(each)}
        waiting = _Waiting(client, message, hosts, now_s + ANSWER_S)
        self._waiting.append(waiting)
        for host in hosts:
            self._ask(host, now_s)
        if not hosts:
            self._answer(waiting)

    def leave(self, client: int) -> None:
        """Forget what a client asked for."""
        self._waiting = [each for each in self._waiting if each.client != client]
        self._end([each for each in self._traces if each[0] == client])

    def reported(self, order: str, host: int, reports: Reports) -> None:
        """Keep what a host says, by its clock until somebody asks for it."""
        spans = [self._launch(order, host, each) for each in reports.done]
        moves = [self._transfer(host, each) for each in reports.moves]
        for trace in self._traces.values():
            trace.launches.extend(spans)
            trace.transfers.extend(moves)
            trace.num_seen += len(spans) + len(moves)

    def time(self, host: int, message: Time, now_s: float) -> None:
        """Hear what time it is on a host; ask again, or go on with who waits for it."""
        known = self._hosts.get(host)
        if known is None or not known.questions_left:
            return
        known.clock.learn(
            asked_ns=known.asked_ns,
            said_ns=message.now_ns,
            heard_ns=round(now_s * _NS),
        )
        known.questions_left -= 1
        if known.questions_left:
            self._put(host, known, now_s)
        else:
            self._heard_all(host)

    def tick(self, now_s: float) -> None:
        """Answer those that have waited long enough for hosts."""
        for each in [each for each in self._waiting if each.deadline_s <= now_s]:
            self._waiting.remove(each)
            self._answer(each)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if ever."""
        return min((each.deadline_s for each in self._waiting), default=None)

    def _ask(self, host: int, now_s: float) -> None:
        known = self._hosts[host]
        is_asked = bool(known.questions_left)
        known.questions_left = NUM_QUESTIONS
        if (
            not is_asked
        ):  # or the answer to the one under way would be taken for this one's
            self._put(host, known, now_s)

    def _put(self, host: int, known: _Host, now_s: float) -> None:
        known.asked_ns = round(now_s * _NS)
        self._outbox.send(host, AskTime(self.is_on))

    def _heard_all(self, host: int) -> None:
        """Answer who waited for a host last."""
        for each in list(self._waiting):
            each.hosts.discard(host)
            if not each.hosts:
                self._waiting.remove(each)
                self._answer(each)

    def _answer(self, waiting: _Waiting) -> None:
        client, request = waiting.client, waiting.message.request
        if not waiting.message.ends:
            self._outbox.tell(client, Acknowledged(request))
            return
        key = client, waiting.message.ends
        trace = self._traces[key]
        clocks = {
            x: each.clock for x, each in (*self._gone.items(), *self._hosts.items())
        }
        ahead_s = {
            x: each.ahead_ns / _NS for x, each in clocks.items() if each.is_known
        }
        launches = tuple(
            replace(
                each,
                began_s=each.began_s - ahead_s[each.host],
                ended_s=each.ended_s - ahead_s[each.host],
            )
            for each in trace.launches
            if each.host in ahead_s
        )
        transfers = tuple(
            replace(
                each,
                began_s=each.began_s - ahead_s[each.source],
                ended_s=each.ended_s - ahead_s[each.host],
            )
            for each in trace.transfers
            if each.host in ahead_s and each.source in ahead_s
        )
        num_left_out = trace.num_seen - len(launches) - len(transfers)
        # Of two hosts, as the one may be off this way and the other that way.
        errors_s = sorted(each.error_ns / _NS for each in clocks.values())
        error_s = sum(errors_s[-2:])
        answer = Traced(request, launches, transfers, num_left_out, error_s)
        self._outbox.tell(client, answer)
        self._end([key])

    def _end(self, keys: Iterable[tuple[int, int]]) -> None:
        was_on = self.is_on
        for key in keys:
            self._traces.pop(key, None)
        if was_on and not self.is_on:
            self._gone.clear()
            for host in self._hosts:
                self._outbox.send(host, AskTime(is_traced=False))

    def _launch(self, order: str, host: int, done: Done) -> LaunchSpan:
        work, gang = self._by_sequence[order, done.sequence]
        name, slice_, results = work.owner.described(work, gang)
        began_ns = done.ended_ns - done.device_ns
        times = began_ns / _NS, done.ended_ns / _NS
        island = self._island_of(host)
        return LaunchSpan(name, work.client, slice_, island, host, results, *times)

    def _transfer(self, host: int, arrival: Arrival) -> TransferSpan:
        return TransferSpan(
            arrival.source, self._island_of(arrival.source), host,
            self._island_of(host), arrival.size_bytes,
            arrival.sent_ns / _NS, arrival.arrived_ns / _NS,
        )  # fmt: skip

    def _island_of(self, host: int) -> str:
        known = self._hosts.get(host) or self._gone.get(host)
        return "" if known is None else known.island


def _no_such_trace(client: int) -> AdmissionError:
    return AdmissionError(
        f"client {client} has no such trace any more; got its end after {MAX_TRACES} "
        f"newer ones began; expected fewer at a time; read one before the next"
    )
