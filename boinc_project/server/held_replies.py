"""Replies without work that are held back for a moment, because the next model version is about to come.

A client that reports the last result of a round asks for work in the same request, some tenths of a second
before there is any: validator, assimilator and work generator still have to close the round. Answered at
once, it would come again after its polling period of 5 to 10 s. So its reply waits, for `gt_hold_dry_reply`
seconds at most, until new results were made, and then the client gets one of them.

The report is processed and committed before the wait begins, and only the question for work is repeated.
Nothing waits but a coroutine: neither the scheduler's thread nor a transaction. What may be held is decided in
`scheduler.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from boinc_project.server.scheduler_service import Answer, Held, Posted

#: Seconds between looks for new results.
LOOK_INTERVAL_S = 0.1

#: Most replies that are held at once; each one keeps a connection open. The others are given at once.
MAX_HELD = 200


class HeldReplies:
    """Answers scheduler requests through `answer` and holds what may be held.

    `results_made` counts the results made so far; `is_stopping` ends every wait.
    """

    def __init__(
        self,
        answer: Callable[[Posted | Held], Awaitable[Answer]],
        *,
        results_made: Callable[[], int],
        hold_s: float,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._answer = answer
        self._results_made = results_made
        self._hold_s = hold_s
        self._is_stopping = is_stopping
        self._held = 0

    async def answer(self, posted: Posted, is_gone: Callable[[], bool]) -> bytes:
        """The reply to a request; `is_gone` tells that the client has hung up."""
        # Counted before the first answer, so that no result made since can be missed.
        seen = self._results_made()
        answer = await self._answer(posted)
        if answer.held is None or self._hold_s <= 0 or self._held >= MAX_HELD:
            return answer.reply
        self._held += 1
        try:
            return await self._hold(answer, seen, is_gone)
        finally:
            self._held -= 1

    async def _hold(self, answer: Answer, seen: int, is_gone: Callable[[], bool]) -> bytes:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._hold_s
        while answer.held is not None and (left := end - loop.time()) > 0:
            await asyncio.sleep(min(LOOK_INTERVAL_S, left))
            if self._is_stopping() or is_gone():
                break
            made = self._results_made()
            if made != seen:
                seen = made
                answer = await self._answer(answer.held)
        return answer.reply
