"""Ending a log from outside: what a canceller does, a router that ends a reply, and conversation's last guard."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from shared.limits import LOG_END_S
from shared.messages import End, SequencedEntry
from shared.token_log import LogView, end_move
from sim.world import Process

if TYPE_CHECKING:
    from sim.region import Region

READ_TIMEOUT_S = 0.5


class Ender:
    """Reads and appends again until an `end` stands; `done` gets the ended log, or None when the time was over."""

    def __init__(
        self, region: "Region", owner: Process, reply_id: str, end: End, done: Callable[[LogView | None], None]
    ) -> None:
        self.region, self.world, self.owner = region, region.world, owner
        self.reply_id, self.end, self.done = reply_id, end, done
        self.give_up_s = self.world.now + LOG_END_S

    def go(self) -> None:
        if self.world.now >= self.give_up_s:
            self.done(None)
            return

        def serve() -> list[SequencedEntry]:
            return self.region.bus.read(self.reply_id)

        self.world.call(self.owner, self.region.bus, serve, self._read, READ_TIMEOUT_S)

    def _read(self, items: list[SequencedEntry] | None) -> None:
        if not items:  # no answer, or nothing accepted yet
            self.world.at(0.05, self.go, owner=self.owner)
            return
        view = LogView().apply_all(items)
        move = end_move(view, self.end)
        if move is None:
            self.done(view)
            return
        expected, entry = move

        def serve() -> tuple[int | None]:
            return (self.region.bus.append(self.reply_id, expected, entry, self.owner),)

        self.world.call(self.owner, self.region.bus, serve, lambda _: self.go(), self.region.swarm.append_timeout_s)
