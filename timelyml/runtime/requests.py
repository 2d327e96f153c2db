"""What the shards of one operator ask to be told of, and what it keeps open.

A request holds a capability until it is answered, at what its time becomes at each
output; most are made for the time of the delivery that is being processed, which
justifies them as they are.
"""

from __future__ import annotations

from timelyml.errors import CapabilityError
from timelyml.graph import OperatorSpec
from timelyml.progress import Capability, Timestamp, UserTime
from timelyml.runtime.completion import Completion, Ports
from timelyml.runtime.notifications import Notification, NotificationQueue
from timelyml.runtime.operator import Logic
from timelyml.runtime.rights import BY_CAPABILITY, Rights


class Requests:
    """The requests of one operator on one worker.

    Args:
        spec: The operator.
        logic: Its callbacks and their order.
        rights: What justifies a request.
        completion: Of its inputs.
    """

    def __init__(
        self, spec: OperatorSpec, logic: Logic, rights: Rights, completion: Completion
    ) -> None:
        self.notifications = NotificationQueue(
            in_order=logic.in_order,
            first={ports: each.first for ports, each in logic.precedence.items()},
        )
        self._operator = spec.name
        self._rights = rights
        self._completion = completion
        self._all_ports: Ports = tuple(range(spec.num_inputs))
        self._all_outputs = range(spec.num_outputs)
        self._is_dense: dict[Ports, bool] = {}
        self._sites: dict[int, str] = {}  # by shard: where its capabilities come from

    def ask(
        self,
        shard: int,
        time: UserTime,
        ports: Ports | None,
        outputs: Ports | None,
    ) -> None:
        """Ask for a notification; see `Shard.notify_at`."""
        wanted = self._all_ports if ports is None else ports
        rights = self._rights
        via = rights.via_port
        is_as_is = outputs is None and rights.is_processed_as_is(time)
        if not is_as_is:
            rights.check(time)
        pending = self.notifications.find(shard, time, wanted)
        if pending is not None:
            if (via, outputs) not in pending.asked:
                self._add_to(pending, time, outputs)
            return
        if is_as_is:
            site = self._sites.get(shard) or self._site(shard)
            held = [rights.mint(output, time, site) for output in self._all_outputs]
            pending = Notification(time, shard, wanted, via, held, ((via, None),))
        else:
            pending = Notification(time, shard, wanted, max(via, BY_CAPABILITY), [])
            self._add_to(pending, time, outputs)
        self.wait_for(pending)

    def wait_for(self, request: Notification) -> None:
        """Keep a request that is not there yet until its ports are complete."""
        ports = request.ports
        is_dense = self._is_dense.get(ports)
        if is_dense is None:
            is_dense = self._is_dense[ports] = self._completion.is_by_shard(ports)
        self.notifications.add(request, is_dense=is_dense)

    def _add_to(
        self, pending: Notification, time: Timestamp, outputs: Ports | None
    ) -> None:
        """Keep open what this call asks for and no earlier one did."""
        rights, held = self._rights, tuple(pending.capabilities)
        pending.capabilities += [
            self._hold(output, held_at, pending.shard, time)
            for output, held_at in rights.kept_open(time, outputs)
            if not any(rights.is_at(c, output, held_at) for c in held)
        ]
        pending.asked += ((rights.via_port, outputs),)

    def _hold(
        self, output: int, held_at: Timestamp, shard: int, time: Timestamp
    ) -> Capability:
        if not self._rights.may_send(output, held_at):
            name = self._operator
            msg = (
                f"operator {name!r} shard {shard} may not be notified at "
                f"{time!r}; got nothing processed or held that leads there; expected the "
                "time of the delivery or later; ask while something justifies it"
            )
            raise CapabilityError(msg, operator=name, shard=shard, time=time)
        return self._rights.mint(output, held_at, self._site(shard))

    def _site(self, shard: int) -> str:
        site = self._sites.get(shard)
        if site is None:
            site = f"notification of {self._operator!r} shard {shard}"
            self._sites[shard] = site
        return site
