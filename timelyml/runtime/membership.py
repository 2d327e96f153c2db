"""Who is in the cluster: workers that are awaited, there, silent or lost.

Pure: it is told what was heard and what time it is, and answers with the workers
to be given up. Membership is fixed; once a worker, or a link between two, is lost the
cluster is broken, and its session is replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from timelyml.errors import PeerError
from timelyml.exchange import Endpoint
from timelyml.runtime.whereabouts import Place

MOST_NAMED = 8
"""Of workers that are late, in one sentence."""


class Keeper(Protocol):
    """Whoever started the workers, as far as the controller needs it."""

    def stderr_tail(self, worker: int) -> str:
        """Return the last lines that a worker wrote to stderr."""

    def activity(self, worker: int) -> str:
        """Return what a worker is doing, where it can be seen from here."""

    def place(self, worker: int) -> Place | None:
        """Return in which callback of an operator a worker is, or was as it died."""

    def kill(self, worker: int) -> None:
        """End a worker that was given up, so that it cannot wake up late."""

    def spawn(self, worker: int) -> None:
        """Start one more worker, which becomes a guest."""

    def retire(self, worker: int) -> None:
        """Let a worker end that was told to leave, and end it if it does not."""


class Phase(Enum):
    """How far the cluster has come."""

    STARTING = "waiting for workers to come"
    CONNECTING = "waiting for workers to connect to each other"
    READY = "ready"
    BROKEN = "broken"


@dataclass(slots=True)
class Member:
    """What is known of one worker."""

    process_id: int | None = None
    endpoint: Endpoint | None = None
    has_come: bool = False
    is_connected: bool = False
    last_heard: float = 0.0
    error: PeerError | None = None
    stderr_tail: str = ""


@dataclass(slots=True)
class Membership:
    """The workers of one session of a cluster.

    Attributes:
        num_workers: Fixed for the session.
        now: Clock time at which the session began.
        startup_timeout_s: By then every worker has come and connected.
        heartbeat_timeout_s: Silence after which a worker is given up; None where
            workers share the controller's process and send no heartbeats.
    """

    num_workers: int
    now: float
    startup_timeout_s: float = 60.0
    heartbeat_timeout_s: float | None = None
    members: list[Member] = field(init=False)
    phase: Phase = field(init=False, default=Phase.STARTING)
    error: PeerError | None = field(init=False, default=None)
    _startup_deadline: float = field(init=False)
    _checked: float = field(init=False)

    def __post_init__(self) -> None:
        self.members = [Member(last_heard=self.now) for _ in range(self.num_workers)]
        self._startup_deadline = self.now + self.startup_timeout_s
        if not self.num_workers:
            self.phase = Phase.READY
        self._checked = self.now

    def hello(
        self, worker: int, process_id: int, endpoint: Endpoint | None, now: float
    ) -> bool:
        """Note that a worker has come; True if now every one has."""
        member = self.members[worker]
        member.process_id, member.endpoint = process_id, endpoint
        member.has_come, member.last_heard = True, now
        if self.phase is Phase.STARTING and all(m.has_come for m in self.members):
            self.phase = Phase.CONNECTING
            return True
        return False

    def connected(self, worker: int) -> bool:
        """Note that a worker can reach its peers; True if now every one can."""
        self.members[worker].is_connected = True
        if self.phase is Phase.CONNECTING and all(m.is_connected for m in self.members):
            self.phase = Phase.READY
            return True
        return False

    def endpoints(self) -> dict[int, Endpoint | None]:
        """Return where those workers listen that are not lost."""
        members = enumerate(self.members)
        return {worker: m.endpoint for worker, m in members if m.error is None}

    def heard(self, worker: int, now: float) -> None:
        """Note a sign of life."""
        self.members[worker].last_heard = now

    def lose(
        self, worker: int, what: str, *, stderr_tail: str = "", **place: Any
    ) -> PeerError:
        """Give a worker up, because of `what` (`was killed by SIGKILL`).

        `place` tells operator, shard and time, as values of the error.
        """
        member = self.members[worker]
        if member.error is None:
            member.stderr_tail = stderr_tail
            member.error = self._lost_error(worker, what, place)
            self.error = self.error or member.error
            self.phase = Phase.BROKEN
        return member.error

    def lose_link(self, worker: int, peer: int, reason: str) -> PeerError:
        """Give the session up, since one worker hears no more of another."""
        msg = (
            f"{self.describe(worker)} lost its link from {self.describe(peer)}; got "
            f"{reason}; expected an unbroken link; start again what ends with it"
        )
        self.phase = Phase.BROKEN
        error = PeerError(msg, worker=worker, peer=peer, reason=reason)
        self.error = self.error or error
        return error

    def overdue(self, now: float) -> list[tuple[int, str]]:
        """Return the workers to be given up by now, each with the reason.

        A long pause since the last call means that this process itself was
        suspended: then nobody has been silent, nobody was listening.
        """
        pause = now - self._checked
        self._checked = now
        if (
            self.heartbeat_timeout_s is not None
            and pause > self.heartbeat_timeout_s / 2
        ):
            self._startup_deadline += pause
            for member in self.members:
                member.last_heard += pause
        if self.phase in (Phase.STARTING, Phase.CONNECTING):
            return self._late(now)
        if self.heartbeat_timeout_s is None:
            return []
        # Services go on with the others after a loss, so these are listened to as well.
        return [
            (worker, self._silence(self.members[worker], now))
            for worker in self.living()
            if now - self.members[worker].last_heard >= self.heartbeat_timeout_s
        ]

    def next_deadline(self) -> float | None:
        """Return the time by which `overdue` has to be asked again."""
        if self.phase in (Phase.STARTING, Phase.CONNECTING):
            return self._startup_deadline
        if self.heartbeat_timeout_s is not None:
            heard = (self.members[worker].last_heard for worker in self.living())
            first = min(heard, default=self._checked)
            # also at least that often, or our own pauses would look like silence
            often = self._checked + self.heartbeat_timeout_s / 4
            return min(first + self.heartbeat_timeout_s, often)
        return None

    def living(self) -> list[int]:
        """Return the workers that have come and are not lost."""
        return [
            worker
            for worker, member in enumerate(self.members)
            if member.has_come and member.error is None
        ]

    def absent(self) -> list[int]:
        """Return the workers that are still awaited: to come, or to connect."""
        if self.phase is Phase.STARTING:
            return [w for w, member in enumerate(self.members) if not member.has_come]
        if self.phase is Phase.CONNECTING:
            return [w for w, m in enumerate(self.members) if not m.is_connected]
        return []

    def describe(self, worker: int) -> str:
        """Return a worker for people: `worker 1 (pid 4711)`."""
        process_id = self.members[worker].process_id
        return f"worker {worker}" + (f" (pid {process_id})" if process_id else "")

    def _late(self, now: float) -> list[tuple[int, str]]:
        if now < self._startup_deadline:
            return []
        late = self.absent()
        is_starting = self.phase is Phase.STARTING
        what = "never came" if is_starting else "never connected to its peers"
        names = ", ".join(map(str, late[:MOST_NAMED]))
        if len(late) > MOST_NAMED:
            names += f" and {len(late) - MOST_NAMED} more"
        waited = f"waited {self.startup_timeout_s:g} s for workers {names}"
        return [(worker, f"{what}; {waited}") for worker in late]

    def _silence(self, member: Member, now: float) -> str:
        return f"stopped answering {now - member.last_heard:.1f} s ago"

    def _lost_error(
        self, worker: int, what: str, place: Mapping[str, Any]
    ) -> PeerError:
        member = self.members[worker]
        rule = (
            "to stay; start again what ends with it"
            if member.has_come
            else "to come; start fewer, or give them longer by startup_timeout_s"
        )
        msg = (
            f"{self.describe(worker)} {what}; got a cluster without it; expected all "
            f"{self.num_workers} workers {rule}"
        )
        error = PeerError(
            msg, worker=worker, process_id=member.process_id, reason=what, **place
        )
        if tail := member.stderr_tail.strip():
            error.add_note(f"last lines of its stderr:\n{tail}")
        return error


def circumstances(
    worker: int, keeper: Keeper | None, refused: Mapping[str, int]
) -> str:
    """Say if a worker is stopped, or frames were refused: somebody spoke otherwise."""
    doing = keeper.activity(worker) if keeper is not None else ""
    refusals = f"; frames were refused: {dict(refused)}" if refused else ""
    return (f"; it is {doing}" if doing else "") + refusals
