"""Shows what plain JAX does with collectives in no order, and the same here.

Run it with `python -m examples.gang_scheduling`. Plain JAX runs in processes of its
own, since it aborts them, or gets wrong numbers; the same computations then run on an
island of two processes, submitted by two clients in opposite orders.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import Annotated

import typer

from examples.gang_scheduling import ordered
from examples.gang_scheduling.plain_abort import LAUNCHES, LENGTH

TIMEOUT_S = 120.0
ABORT_FLAGS = (
    "--xla_force_host_platform_device_count=8 "
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=2 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=4"
)


def main(
    rounds: Annotated[int, typer.Option(help="sums that each client asks for")] = 500,
) -> None:
    """Show both, one after the other."""
    print(f"plain JAX, 8 virtual devices, {LAUNCHES} collectives under way:")
    print("  " + plain_abort())
    print("here, the same:")
    print(f"  the sum is {ordered.many(LAUNCHES, LENGTH)}")
    print("plain JAX, 2 processes that launch two sums in opposite orders:")
    for line in plain_swap():
        print("  " + line)
    print(f"here, 2 processes, 2 clients in opposite orders, {2 * rounds} sums each:")
    wrong = ordered.opposite(rounds)
    print(
        f"  {len(wrong)} wrong numbers" + "".join(f"\n  {each}" for each in wrong[:5])
    )
    if wrong:
        raise typer.Exit(1)


def plain_abort() -> str:
    """Return how the process ended, in words."""
    done = _start("plain_abort", XLA_FLAGS=ABORT_FLAGS, NPROC="2")
    done.communicate(timeout=TIMEOUT_S)
    if done.returncode == -signal.SIGABRT:
        return "XLA aborted the process"
    return f"the process ended with code {done.returncode}"


def plain_swap() -> list[str]:
    """Return what the two processes printed, in the order of their ranks."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    both = [_start("plain_swap", str(rank), address) for rank in range(2)]
    lines = []
    for each in both:
        try:
            printed, _ = each.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            each.kill()
            printed, _ = each.communicate()
            printed += "it hangs\n"
        lines += [
            line for line in printed.splitlines() if not line.startswith("[Gloo]")
        ]
    return lines


def _start(module: str, *args: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"examples.gang_scheduling.{module}", *args],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": "16", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


if __name__ == "__main__":
    typer.run(main)
