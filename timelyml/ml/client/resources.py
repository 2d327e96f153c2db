"""The devices of a cluster as a client sees them, and what it may change about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from timelyml.errors import ConfigError
from timelyml.ml.client.gauge import MemoryGauge
from timelyml.ml.client.slices import Slice
from timelyml.ml.client.tracing import Ask, DeviceTrace
from timelyml.ml.controller.monitored import AskHosts, HostInfo, Hosts
from timelyml.ml.controller.resource_messages import (
    AskDevices,
    ChangeDevices,
    ChangeSlice,
    DeviceInfo,
    Devices,
    ReformIsland,
)


class Resources:
    """Devices of all islands, which can be taken out of use while programs run.

    Args:
        ask: Sends what `make` returns for the number of a request, and waits for the
            answer: what is asked for, in words, and for how long.
        send: Sends what is not answered.
    """

    def __init__(self, ask: Ask, send: Callable[[Any], None]) -> None:
        self._ask = ask
        self._send = send

    def devices(self) -> tuple[DeviceInfo, ...]:
        """Return all devices there are, with the slices that stand on each."""
        answer: Devices = self._ask(AskDevices, "the list of devices", None)
        return answer.devices

    def hosts(self) -> tuple[HostInfo, ...]:
        """Return what each worker process that has devices says of itself.

        They are asked in one epoch of their upkeep, after all that was decided before:
        what was given back by then, or belonged to a client that was gone, is not there
        any more. They answer while functions are compiled, but not one that does not
        come to it; it is left out once it is given up.
        """
        answer: Hosts = self._ask(AskHosts, "the list of hosts", None)
        return answer.hosts

    def trace(self) -> DeviceTrace:
        """Return a context manager that tells what devices did inside of it, and when.

        Hosts say when a launch began and ended with the news that it is over, traced or
        not; transfers are told of only while somebody traces. Times are of one clock:
        see `DeviceTrace`.

        Raises:
            AdmissionError: When it is left, if this client has begun 16 more inside.
        """
        return DeviceTrace(self._ask)

    def gauge(self) -> MemoryGauge:
        """Return a gauge that tells how much of chosen values devices held at once.

        The client's oldest ends if 16 are open.
        """
        return MemoryGauge(self._ask, self._send)

    def withdraw(
        self,
        devices: Iterable[str],
        *,
        force: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Take devices out of use; returns once no slice stands on them.

        Slices on them move to other devices with all that is theirs, or, if none are
        free, wait for some; calls on them wait too. No client need notice.

        Args:
            devices: Their names, as `devices()` has them.
            force: Whether to take them from the slices of other clients too.
            timeout_s: How long to wait; they leave all the same.

        Raises:
            PlacementError: There is no such device; or other clients, which it names,
                have slices there, and `force` is not said.
            DeadlineError: They were not free in time.
        """
        names = tuple(devices)
        self._ask(
            lambda request: ChangeDevices(request, names, is_usable=False, force=force),
            f"the withdrawal of devices {list(names[:5])}",
            timeout_s,
        )

    def restore(self, devices: Iterable[str]) -> None:
        """Give devices back to use; slices that wait for some get them.

        Raises:
            PlacementError: There is no such device.
        """
        names = tuple(devices)
        self._ask(
            lambda request: ChangeDevices(request, names, is_usable=True),
            f"the return of devices {list(names[:5])}",
            None,
        )

    def reform(
        self,
        island: str,
        *,
        hosts: int,
        force: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Have an island form anew, of so many processes with as many devices each.

        These are started first, and what runs on the island goes on meanwhile. Then its
        slices move over, with all that is theirs, or wait if there are too few devices;
        the old processes end once nothing is left on them. Returns when that is so.

        Args:
            island: Its name, which stays.
            hosts: How many processes it is to have, more or fewer than now; 1,024 at
                most.
            force: Whether to do so under the slices of other clients too.
            timeout_s: How long to wait; it goes on all the same.

        Raises:
            ConfigError: `hosts` is no count.
            PlacementError: There is no such island, or no process could be started; or
                other clients, which it names, have slices there, and `force` is not said.
            DeadlineError: It was not over in time.
        """
        if type(hosts) is not int:
            raise ConfigError(
                f"island {island!r} cannot form anew; got hosts={hosts!r}; expected how "
                f"many processes it is to have, an int",
                option="hosts",
            )
        self._ask(
            lambda request: ReformIsland(request, island, hosts, force),
            f"island {island!r} of {hosts} hosts",
            timeout_s,
        )

    def change_slice(
        self, slice_: Slice, change: str, island: str | None, timeout_s: float | None
    ) -> None:
        """Change where a slice stands; returns once it is so. See the slice's methods."""
        self._ask(
            lambda request: ChangeSlice(request, slice_.name, change, island),
            f"the change of slice {slice_.name!r} to {change}",
            timeout_s,
        )
