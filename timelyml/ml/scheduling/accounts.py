"""Who has had how much device time: exact, per client and group of devices.

Each client has a virtual time on each group of devices it uses: device time divided by
the client's weight. Among clients that want a group, the one with the least goes next,
so that each gets device time in proportion to its weight, whatever the lengths of its
programs. A launch is charged what it is expected to take, and corrected to what it
took, so that nothing is lost however wrong an estimate was.

Accounts are per group, not per island: a client that used devices which nobody else
wanted owes nobody anything for them.

Source:
    Stride scheduling (Waldspurger and Weihl, 1995), with the rule for clients that come
    back of start-time fair queueing (Goyal, Vin and Cheng, 1996): the island has a
    virtual time of its own, and idling saves up no more than `credit_ns`.
"""

from __future__ import annotations

from collections.abc import Iterable

from timelyml.errors import ProgramError
from timelyml.ml.scheduling.values import DEFAULT_WINDOW_NS


class _Account:
    """Virtual time of one client on one group; `remainder` keeps the division exact."""

    __slots__ = ("num_active", "remainder", "virtual_ns")

    def __init__(
        self, virtual_ns: int, remainder: int = 0, num_active: int = 0
    ) -> None:
        self.virtual_ns = virtual_ns
        self.remainder = remainder
        self.num_active = num_active


class Accounts:
    """Virtual times of all clients.

    Args:
        credit_ns: Device time by which a client that had nothing to run for a while may
            be ahead of the others when it comes back. It covers the gap between one
            call and the next of a client that waits for each.
    """

    def __init__(self, credit_ns: int = DEFAULT_WINDOW_NS) -> None:
        self._credit_ns = credit_ns
        self._weights: dict[str, int] = {}
        self._by_group: dict[int, dict[str, _Account]] = {}
        self._floors: dict[int, int] = {}

    def join(self, client: str, weight: int = 1) -> None:
        """Admit a client, or change its weight.

        Raises:
            ProgramError: The weight is not a positive whole number.
        """
        if weight < 1:
            raise ProgramError(
                f"client {client!r} has an impossible weight; got {weight!r}; expected "
                f"a whole number of 1 or more; scale all weights up instead",
                client=client,
            )
        self._weights[client] = weight
        for accounts in self._by_group.values():
            if client in accounts:
                accounts[client].remainder = 0

    def leave(self, client: str) -> None:
        """Forget a client that has nothing left to run."""
        del self._weights[client]
        for accounts in self._by_group.values():
            accounts.pop(client, None)

    def enter(self, client: str, groups: Iterable[int]) -> None:
        """Count one more gang of the client that wants these groups or runs on them."""
        for group in groups:
            accounts = self._by_group.setdefault(group, {})
            account = accounts.get(client)
            if account is None or not account.num_active:
                account = self._return(client, group, accounts)
            account.num_active += 1

    def exit(self, client: str, groups: Iterable[int]) -> None:
        """Count one gang less."""
        for group in groups:
            account = self._by_group[group][client]
            if account.num_active == 1:
                # A client that leaves takes its place with it: who comes next starts
                # level with it, not with what was when it came.
                self._refresh_group(group)
            account.num_active -= 1

    def charge(self, client: str, groups: Iterable[int], device_ns: int) -> None:
        """Add device time, or take back what was charged too much."""
        weight = self._weights[client]
        for group in groups:
            account = self._by_group[group][client]
            total = device_ns + account.remainder
            account.virtual_ns += total // weight
            account.remainder = total % weight

    def is_alone(self, client: str, groups: Iterable[int]) -> bool:
        """Whether no other client that is here has wanted any of these groups."""
        for group in groups:
            accounts = self._by_group.get(group)
            if accounts and (len(accounts) > 1 or client not in accounts):
                return False
        return True

    def num_clients(self, group: int) -> int:
        """Return how many clients that are here have wanted this group."""
        return len(self._by_group.get(group, ()))

    def refresh(self) -> None:
        """Let the virtual time of each group follow its clients, before using `lag`."""
        for group in self._by_group:
            self._refresh_group(group)

    def lag(self, client: str, groups: Iterable[int]) -> int:
        """Return how far a client is ahead where it is furthest ahead; least goes next.

        Groups have virtual times that cannot be compared with each other, only with
        the group's own.
        """
        return max(
            self._by_group[group][client].virtual_ns - self._floors[group]
            for group in groups
        )

    def split(self, parent: int, child: int) -> None:
        """Give the new group what the group that it came from had."""
        self._by_group[child] = {
            client: _Account(each.virtual_ns, each.remainder, each.num_active)
            for client, each in self._by_group.get(parent, {}).items()
        }
        self._floors[child] = self._floors.get(parent, 0)

    def drop_group(self, group: int) -> None:
        """Forget a group whose devices are gone."""
        self._by_group.pop(group, None)
        self._floors.pop(group, None)

    def _return(
        self, client: str, group: int, accounts: dict[str, _Account]
    ) -> _Account:
        self._refresh_group(group)
        floor = self._floors[group]
        account = accounts.get(client)
        if account is None:
            account = accounts[client] = _Account(floor)
        least = floor - self._credit_ns // self._weights[client]
        account.virtual_ns = max(account.virtual_ns, least)
        return account

    def _refresh_group(self, group: int) -> None:
        floor = self._floors.get(group, 0)
        active = [
            account.virtual_ns
            for account in self._by_group[group].values()
            if account.num_active
        ]
        self._floors[group] = max(floor, min(active)) if active else floor
