"""Who reads: a relay's side of one log, as a screen sees it."""

from functools import partial
from typing import TYPE_CHECKING, Any

from shared.limits import READER_QUIET_S
from shared.log_merge import Deliver, LogMerge
from shared.messages import End, SequencedEntry
from tests.model.actors import READ_TIMEOUT_S
from tests.model.world import Process

if TYPE_CHECKING:
    from tests.model.scene import Scene


class Reader(Process):
    """A relay's reading of one log for one screen; when it dies another goes on after what is on the screen."""

    def __init__(self, scene: "Scene", name: str, batch: int) -> None:
        super().__init__(scene.world, name)
        self.scene, self._batch = scene, batch
        self.shown: list[SequencedEntry] = []
        self.started()

    def started(self) -> None:
        self.merge: LogMerge = self.scene.rules.merge(self.shown[-1].seq if self.shown else 0)
        self._heard_s = self.world.now
        self._perform(self.merge.start())
        self.world.at(READER_QUIET_S, self._look, owner=self)

    def live(self, item: SequencedEntry, previous: int) -> None:
        self._heard_s = self.world.now
        self._perform(self.merge.live(item.seq, previous, item.entry))

    def _look(self) -> None:
        if self.shown and isinstance(self.shown[-1].entry, End):
            return
        if self.world.now - self._heard_s >= READER_QUIET_S and self.scene.rules.readers_ask_again:
            self._heard_s = self.world.now
            self._perform(self.merge.quiet())
        self.world.at(READER_QUIET_S / 2, self._look, owner=self)

    def _perform(self, commands: list[Any]) -> None:
        for command in commands:
            if isinstance(command, Deliver):
                self.scene.checks.shown(self, command.item)
                self.shown.append(command.item)
            else:
                serve = partial(self._fetch, command.after_seq)
                self.world.call(self, None, serve, self._fetched, READ_TIMEOUT_S)

    def _fetch(self, after_seq: int) -> list[SequencedEntry]:
        return self.scene.log.read(after_seq)[: self._batch]

    def _fetched(self, items: list[SequencedEntry] | None) -> None:
        if items is None:
            self.merge.fetch_failed()
        else:
            self._perform(self.merge.fetched(items))
