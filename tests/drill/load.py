"""Many clients at once, in a thread of their own: the drill's own text stays a plain sequence of what happens.

with Load(system, streams=32) as load:
    load.until(lambda: load.writing >= 30, "the replies are being written")
    system.kill("replica-1")
    ...
load.stories            everything every client saw, ended
"""

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Self, TypeVar

import uvloop

from tests.drill.follower import Follower, Story
from tests.integration.system import System, eventually

T = TypeVar("T")
LEAVE_S = 120.0


async def _end_all() -> None:
    """Whatever still runs is cancelled, and has ended."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


class Clients:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="clients", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.start(_end_all()).result(LEAVE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def do(self, work: Coroutine[Any, Any, T], deadline_s: float = LEAVE_S) -> T:
        return self.start(work).result(deadline_s)


class Load(Clients):
    """Keeps `streams` replies open; each that ends is followed by another, until the block is left: then all end."""

    def __init__(
        self,
        system: System,
        *,
        streams: int,
        tokens: tuple[int, int] = (60, 120),
        seed: int = 1,
        spread_s: float = 1.0,
        pause_s: float = 0.0,
        model: str = "stub",
        scripted: bool = True,
        more: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.stories: list[Story] = []
        self._system, self._streams, self._tokens = system, streams, tokens
        self._random, self._spread_s, self._pause_s = random.Random(seed), spread_s, pause_s
        self._model, self._scripted, self._more = model, scripted, more
        self._leaving = False
        self._all: Future[None] | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        self._all = self.start(self._run())
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Until the last reply has ended; when the drill itself failed, at once."""
        self._leaving = True
        assert self._all is not None, "entered"
        try:
            if kind is not None:
                self._all.cancel()
            with contextlib.suppress(CancelledError):
                self._all.result(LEAVE_S)
        finally:
            super().__exit__(kind, *rest)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self._streams):
                group.create_task(self._user(number))

    async def _user(self, number: int) -> None:
        await asyncio.sleep(self._spread_s * number / self._streams)
        while not self._leaving:
            follower = Follower(
                self._system.gateways,
                self._system.key(),
                seed=self._random.getrandbits(31),
                tokens=self._random.randint(*self._tokens),
                model=self._model,
                scripted=self._scripted,
                more=self._more,
            )
            self.stories.append(follower.story)
            await follower.run()
            await asyncio.sleep(self._pause_s * self._random.random())

    # --- what a drill asks -----------------------------------------------------------------------------------

    @property
    def open(self) -> list[Story]:
        return [story for story in list(self.stories) if not story.over]

    @property
    def writing(self) -> int:
        """Replies whose first token is here and whose end is not."""
        return sum(bool(story.ids) for story in self.open)

    def until(self, condition: Callable[[], Any], what: str, deadline_s: float = 30.0) -> Any:
        return eventually(condition, what, deadline_s)

    def pass_time(self, seconds: float) -> None:
        """The load runs on."""
        until = time.monotonic() + seconds
        eventually(lambda: time.monotonic() >= until, "time passes", seconds + 5.0)
