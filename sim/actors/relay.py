"""A relay: the real streams, tapes and merges; this fetches, keeps their timers and carries their frames."""

from functools import partial
from typing import TYPE_CHECKING

from services.relay.streams import Command, Follow, Leave, Say, SayFrame, Streams
from shared.limits import READER_QUIET_S, RELAY_ALIVE_S
from shared.log_merge import Command as MergeCommand
from shared.log_merge import Deliver, LogMerge
from shared.messages import Credit, End, OpenStream, SequencedEntry
from sim.actors.ender import READ_TIMEOUT_S
from sim.world import Process

if TYPE_CHECKING:
    from sim.region import Region

_LOOKS_MAX = 4  # for a log that is not there yet


class _Following:
    """One log being read."""

    def __init__(self, merge: LogMerge, now: float) -> None:
        self.merge, self.heard_s = merge, now
        self.looks = 0
        self.over = False


class Relay(Process):
    def __init__(self, region: "Region", name: str) -> None:
        super().__init__(region.world, name)
        self.region = region
        self.started()

    def started(self) -> None:
        self.streams = Streams(f"{self.name}-{self.boot}", self.region.names)
        self._following: dict[str, _Following] = {}
        self.world.at(RELAY_ALIVE_S * self.world.random.random(), self._tick, owner=self)

    def crashed(self) -> None:
        for reply_id in self._following:
            self.region.bus.unfollow(reply_id, self)

    @property
    def quiet(self) -> bool:
        return len(self.streams) == 0

    # --- what gateways say

    def opened(self, request: OpenStream, answer_to: str) -> None:
        self._perform(self.streams.opened(request, answer_to, self.world.now))

    def credit(self, credit: Credit) -> None:
        self._perform(self.streams.credit(credit))

    # --- the logs

    def live(self, reply_id: str, item: SequencedEntry, previous: int) -> None:
        following = self._following.get(reply_id)
        if following is not None:
            following.heard_s = self.world.now
            self._merged(reply_id, following, following.merge.live(item.seq, previous, item.entry))

    def _follow(self, reply_id: str) -> None:
        following = self._following[reply_id] = _Following(self.region.rules.merge(0), self.world.now)
        self.region.bus.follow(reply_id, self)
        self._merged(reply_id, following, following.merge.start())
        self.world.at(READER_QUIET_S, self._look, reply_id, following, owner=self)

    def _leave(self, reply_id: str) -> None:
        self._following.pop(reply_id, None)
        self.region.bus.unfollow(reply_id, self)

    def _look(self, reply_id: str, following: _Following) -> None:
        if self._following.get(reply_id) is not following or following.over:
            return
        if self.world.now - following.heard_s >= READER_QUIET_S:
            following.heard_s = self.world.now
            self._merged(reply_id, following, following.merge.quiet())
        self.world.at(READER_QUIET_S / 2, self._look, reply_id, following, owner=self)

    def _merged(self, reply_id: str, following: _Following, commands: list[MergeCommand]) -> None:
        items = []
        for command in commands:
            if isinstance(command, Deliver):
                items.append(command.item)
                following.over = isinstance(command.item.entry, End)
            else:
                serve = partial(self.region.bus.read, reply_id, command.after_seq)
                answered = partial(self._fetched, reply_id, following)
                self.world.call(self, self.region.bus, serve, answered, READ_TIMEOUT_S)
        if items and self._following.get(reply_id) is following:
            self._perform(self.streams.news(reply_id, items, self.world.now))

    def _fetched(self, reply_id: str, following: _Following, items: list[SequencedEntry] | None) -> None:
        if self._following.get(reply_id) is not following:
            return
        if items is None:
            following.merge.fetch_failed()
            return
        if not items and following.merge.last_seq == 0:
            following.looks += 1
            if following.looks >= _LOOKS_MAX:
                self._perform(self.streams.unreadable(reply_id))
                return
        self._merged(reply_id, following, following.merge.fetched(items))

    # --- what streams command

    def _perform(self, commands: list[Command]) -> None:
        todo = list(commands)
        while todo or self.streams.has_frames:
            if not todo:
                todo = self.streams.next_frames(self.world.now, 64)
                continue
            command = todo.pop(0)
            if isinstance(command, Say | SayFrame):
                self.region.post(command.subject, command.data)
            elif isinstance(command, Follow):
                self._follow(command.reply_id)
            elif isinstance(command, Leave):
                self._leave(command.reply_id)

    def _tick(self) -> None:
        for client in self.region.clients:
            self.region.publish(client, client.relay_lives, f"{self.name}-{self.boot}")
        self._perform(self.streams.tick(self.world.now))
        self.world.at(RELAY_ALIVE_S, self._tick, owner=self)
