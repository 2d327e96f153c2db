"""The thread of an asyncio loop: nothing of it is left once it was closed."""

from __future__ import annotations

import asyncio
import threading

from timelyml.operators.loop_thread import LoopThread


def loops():
    return [each for each in threading.enumerate() if each.name == "timelyml-loop"]


def test_coroutines_that_begin_others_as_they_end_are_all_over():
    ended = []
    thread = LoopThread()
    began = threading.Event()

    async def wait(depth):
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(depth)
            if depth < 3:
                thread.start(lambda: wait(depth + 1))

    before = len(loops())
    thread.start(lambda: wait(1))
    began.wait()
    thread.close()
    thread.close()

    assert len(loops()) == before
    assert ended == [1, 2, 3]
    assert thread._loop.is_closed()


def test_a_loop_that_was_never_used_has_no_thread():
    thread = LoopThread()
    thread.close()
    assert thread._loop is None
