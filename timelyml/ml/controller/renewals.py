"""Islands that form anew: after a loss, or with more or fewer hosts.

New processes are started and form beside what is left of the old ones. Only then do
slices move over, with what the old hosts still have; these leave when they have sent all
of it. So an island that drains stands still for as long as its values take to go over,
and one that lost a host keeps what the others have. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from timelyml.errors import BufferLostError, PeerError, SliceError, TimelyError
from timelyml.ml.controller.arrivals import has_left
from timelyml.ml.controller.buffers import Buffers
from timelyml.ml.controller.dispatching import Dispatch
from timelyml.ml.controller.moves import Moves
from timelyml.ml.controller.outbox import Outbox, StartHosts
from timelyml.ml.controller.records import SliceRecord, device_name
from timelyml.ml.hosts import Formed, Gone, Present
from timelyml.ml.resources import ResourceEffect, ResourceManager, SliceState
from timelyml.runtime.failure import pack_error

MAX_TRIES = 3
"""So often new processes are started for an island before it is given up."""

FORM_S = 60.0
"""By then new processes have come and joined."""

SEND_S = 10.0
"""So long hosts that must die may take to send what they have, once it can go."""


@dataclass(slots=True)
class Island:
    """The processes that form an island together.

    Attributes:
        name: As clients know it.
        order: Of its scheduler.
        hosts: In the order of their ranks.
        is_own: Whether its processes were started here, so that others can be, and
            requests wait until it is there.
        generation: How often the island had formed before.
        arrived: Hosts that wait for the rest.
        present: Those that are there, with what they have.
        dead: Those that are gone, or get no order any more.
        before: What it takes the place of.
        num_tries: How often it was tried in vain to form it.
        is_renewing: Whether others are on their way to take its place, or have.
        is_replaced: Whether they have.
        error: Why it is lost, if so.
        cause: Why its hosts have to end, or the first of them died, if so.
        ends_s: When its hosts are ended, whatever they have not sent.
    """

    name: str
    order: str
    hosts: tuple[int, ...]
    is_own: bool
    generation: int = 0
    arrived: set[int] = field(default_factory=set)
    present: dict[int, Present] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    before: Island | None = None
    num_tries: int = 0
    is_renewing: bool = False
    is_replaced: bool = False
    error: TimelyError | None = None
    cause: TimelyError | None = None
    ends_s: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every host has come, or none will."""
        return self.error is not None or len(self.present) == len(self.hosts)

    @property
    def is_coming(self) -> bool:
        """Whether devices of it are on their way."""
        is_forming = not self.is_complete and bool(self.living)
        return is_forming or (self.is_renewing and not self.is_replaced)

    @property
    def living(self) -> list[int]:
        """The hosts that can still be told something."""
        return [host for host in self.hosts if host not in self.dead]


class Renewals:
    """Ends islands that lost hosts or are to change, and begins others in their place.

    Args:
        islands: All islands, by their order; changed here.
        of_host: The island of each host; changed here.
        manager: Gives slices devices.
        moves: Carries slices over.
        slices: All slices.
        buffers: What lies on them.
        dispatch: What runs on them.
        outbox: Takes what follows.
        follow: Takes what the manager decides.
        add_order: Makes a scheduler under a name.
    """

    def __init__(
        self,
        islands: dict[str, Island],
        of_host: dict[int, Island],
        *,
        manager: ResourceManager,
        moves: Moves,
        slices: dict[str, SliceRecord],
        buffers: Buffers,
        dispatch: Dispatch,
        outbox: Outbox,
        follow: Callable[[Iterable[ResourceEffect]], None],
        add_order: Callable[[str], None],
    ) -> None:
        self._islands = islands
        self._of_host = of_host
        self._manager = manager
        self._moves = moves
        self._slices = slices
        self._buffers = buffers
        self._dispatch = dispatch
        self._outbox = outbox
        self._follow = follow
        self._add_order = add_order

    def lose(self, host: int, error: TimelyError) -> None:
        """Take note that a host is dead, with what only it had."""
        island = self._of_host.get(host)
        if island is None or host in island.dead:
            return
        island.dead.add(host)
        # JAX ends processes that were joined with one that dies: they name that one.
        error = island.cause = island.cause or error
        self._outbox.mute([host])
        self._say_gone(island, host, error)
        self._moves.lose(host)
        hit = [x for x in self._slices.values() if host in x.hosts and not x.error]
        self._abandon(island, hit, error)
        effects = []
        if str(host) in self._manager.inventory.hosts:
            effects = self._manager.lose_host(str(host))
        packed = pack_error(_ended(island, error))
        names = {slice_.name for slice_ in hit}
        self._dispatch.lose(island.order, host, names, packed)
        self._follow(effects)
        self._buffers.fetches.lose_host(host)
        if not island.is_own:
            self._end(island, error)
        elif island.is_complete and island.error is None:
            self.renew(island, len(island.hosts), error)
        else:
            self._try_again(island, error)
        self._end_if_empty(island)

    def end_stuck(self, host: int, error: TimelyError) -> None:
        """Have an island end whose host does not come back from what runs there."""
        island = self._of_host[host]
        if island.ends_s is not None:
            return
        island.ends_s = float("inf")  # until there is somewhere to go
        island.cause = error
        hit = [x for x in self._slices.values() if x.order == island.order]
        self._abandon(island, hit, error)
        packed = pack_error(error)
        names = {slice_.name for slice_ in hit}
        for each in island.living:
            self._dispatch.lose(island.order, each, names, packed)
        if island.is_own:
            self.renew(island, len(island.hosts), error)
        else:
            self._end(island, error)

    def renew(self, island: Island, num_hosts: int, error: TimelyError | None) -> None:
        """Have other processes take the place of an island."""
        if not island.is_renewing:
            island.is_renewing = True
            island.num_tries += 1
            self._outbox.start_hosts(StartHosts(island.order, island.name, num_hosts))
            island.error = island.error or (error if not island.living else None)

    def hosts_started(self, order: str, hosts: tuple[int, ...], now_s: float) -> None:
        """Take note of the processes that were started; none if that cannot be."""
        island = self._islands.get(order)
        if island is None:
            return
        if not hosts:
            self._give_up(island)
            return
        generation = max(
            each.generation
            for each in self._islands.values()
            if each.name == island.name
        )
        generation += 1
        new = Island(
            island.name,
            f"{island.name}/{generation}",
            hosts,
            is_own=True,
            generation=generation,
            before=island,
        )
        new.ends_s = now_s + FORM_S
        self._islands[new.order] = new
        self._of_host.update(dict.fromkeys(hosts, new))
        self._add_order(new.order)

    def arrived(self, host: int) -> bool:
        """Let an island's processes join once all have come; False if it has none."""
        island = self._of_host.get(host)
        if island is None or island.before is None:
            return False
        island.arrived.add(host)
        if len(island.arrived) == len(island.hosts):
            for each in island.hosts:
                self._outbox.send(each, Formed(island.name, island.hosts))
        return True

    def formed(self, island: Island, now_s: float) -> None:
        """Let slices go over to an island that took another's place."""
        before, island.before = island.before, None
        if before is None:
            return
        island.ends_s, before.is_replaced = None, True
        if before.ends_s is not None:
            before.ends_s = now_s + SEND_S
        names = [
            device_name(host, index)
            for host in before.living
            for index in range(before.present[host].num_devices)
        ]
        self._follow(self._manager.withdraw(names))
        self._end_if_empty(before)

    def step(self) -> None:
        """Let hosts go that have nothing any more."""
        for island in list(self._islands.values()):
            if island.is_renewing:
                self._retire(island)

    def tick(self, now_s: float) -> None:
        """End hosts that had to send what they have, and did not in time."""
        for island in list(self._islands.values()):
            if island.ends_s is None or island.ends_s > now_s:
                continue
            if island.before is not None:
                self._try_again(island, _late(island))
            for host in island.living:
                self._dismiss(island, host)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if ever."""
        found = (x.ends_s for x in self._islands.values() if x.ends_s is not None)
        return min((each for each in found if each != float("inf")), default=None)

    def _say_gone(self, island: Island, host: int, error: TimelyError) -> None:
        """Tell hosts, which wait for what others send, what became of one of them."""
        gone = Gone(host, island.name, str(error))
        for each in self._islands.values():
            for other in each.living:
                self._outbox.order(other, gone)

    def _abandon(
        self, island: Island, hit: Iterable[SliceRecord], error: TimelyError
    ) -> None:
        packed = pack_error(_ended(island, error))
        for slice_ in hit:
            self._moves.abandon(slice_)
            kept = self._buffers.lose(
                slice_, island.living, str(error), self._dispatch.is_waiting
            )
            self._buffers.memory.lose(slice_, kept, packed)

    def _end(self, island: Island, error: TimelyError) -> None:
        """Give up an island whose processes others start."""
        island.error = island.error or error
        for host in island.living:
            self._outbox.dismiss(host)
            self.lose(host, error)
        if not island.living:
            self._give_up(island)

    def _try_again(self, island: Island, error: TimelyError) -> None:
        """Start others in place of those that could not form an island."""
        before, island.before = island.before, None
        island.error = island.error or error
        for host in island.living:
            self._dismiss(island, host)
        if before is None:
            return
        self._drop(island)
        before.is_renewing = False
        if before.num_tries < MAX_TRIES:
            self.renew(before, len(island.hosts), error)
        else:
            self._give_up(before)

    def _give_up(self, island: Island) -> None:
        """Leave an island as it is, or tell its slices that there is none any more."""
        island.is_renewing = False
        for host in island.living if island.ends_s is not None else ():
            self._dismiss(island, host)
        for slice_ in list(self._slices.values()):
            is_hit = slice_.order == island.order and slice_.is_abandoned
            if is_hit and slice_.error is None:
                self._fail(slice_, island)

    def _fail(self, slice_: SliceRecord, island: Island) -> None:
        if self._manager.state(slice_.name) is SliceState.MOVING:
            return  # it goes elsewhere
        slice_.error = pack_error(
            SliceError(
                f"slice {slice_.name!r} is gone with its island {island.name!r}; got "
                f"{island.error or island.cause}; expected its devices to stay; ask for another slice",
                slice=slice_.name,
                available=self._manager.inventory.describe(),
            )
        )
        self._follow(self._manager.release(slice_.name))
        self._buffers.refuse_held(slice_, slice_.error)
        self._dispatch.reopen(slice_)

    def _retire(self, island: Island) -> None:
        """Let those hosts leave on which nothing is, and from which nothing comes."""
        for host in island.living:
            names = [
                device_name(host, index)
                for index in range(island.present[host].num_devices)
            ]
            inventory = self._manager.inventory
            is_withdrawn = not any(map(inventory.is_usable, names))
            is_used = self._manager.is_awaited(names) or self._moves.is_sending(host)
            is_left = any(host in each.hosts for each in self._slices.values())
            if is_withdrawn and not is_used and not is_left:
                self._dismiss(island, host)

    def _dismiss(self, island: Island, host: int) -> None:
        if str(host) in self._manager.inventory.hosts:
            self._follow(self._manager.lose_host(str(host)))
        self._outbox.dismiss(host, is_at_once=island.ends_s is not None)
        island.dead.add(host)
        self._say_gone(island, host, _cause(island, host))
        self._moves.lose(host)
        self._end_if_empty(island)

    def _end_if_empty(self, island: Island) -> None:
        """Forget an island of which nothing is left, and whose place is taken."""
        if island.is_replaced and not island.living:
            self._drop(island)

    def _drop(self, island: Island) -> None:
        self._islands.pop(island.order, None)
        self._dispatch.islands.remove(island.order)


def _cause(island: Island, host: int) -> TimelyError:
    """Return why a host sends nothing any more that was let go or ended."""
    return island.error or island.cause or has_left(host, island.name)


def _late(island: Island) -> PeerError:
    missing = sorted(set(island.hosts) - island.present.keys())
    return PeerError(
        f"island {island.name!r} did not form anew in {FORM_S:g} s; got no devices of "
        f"workers {missing}; expected all of {list(island.hosts)}; look at their stderr",
        reason="it did not form in time",
    )


def _ended(island: Island, error: TimelyError) -> BufferLostError:
    return BufferLostError(
        f"a computation is lost with island {island.name!r}; got {error}; expected its "
        f"devices to stay; run it again",
        island=island.name,
        reason=str(error),
    )
