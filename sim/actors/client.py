"""A user behind a gateway: sends a message until it is taken, and follows the reply over as many relays as it takes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shared.limits import RELAY_ALIVE_S, RELAY_MISSED_MAX, RELAY_OPEN_S, RELAY_TRY_S, SSE_PING_S
from shared.messages import (
    Chunk,
    Credit,
    End,
    Frame,
    OpenStream,
    Refused,
    SequencedEntry,
    StreamOpened,
    decoder,
    unpack_ids,
)
from sim.world import Process

if TYPE_CHECKING:
    from sim.actors.relay import Relay
    from sim.region import Region

_SEND_AGAIN_S = 3.0
_SILENT_S = RELAY_ALIVE_S * RELAY_MISSED_MAX
_frame = decoder(Frame)
_opened: "msgspec.msgpack.Decoder[StreamOpened | Refused]" = msgspec.msgpack.Decoder(StreamOpened | Refused)


@dataclass(frozen=True)
class Message:
    """What a user sends: under one key, however often it is sent."""

    key: str
    seed: int
    budget: int
    conversation: str = ""


class Client(Process):
    def __init__(self, region: "Region", name: str, message: Message) -> None:
        super().__init__(region.world, name)
        self.region, self.message = region, message
        self.reply_id = ""
        self.shown: list[SequencedEntry] = []
        self.token_times: list[float] = []  # when each chunk of tokens came
        self.stops: list[float] = []  # when the user pressed stop
        self._stream = 0
        self._open = False
        self._early: list[bytes] = []  # frames that overtook the answer
        self._next_number = 1
        self._relay: Relay | None = None
        self._relay_id = ""
        self._heard_s = 0.0
        self._news_s = 0.0

    @property
    def over(self) -> bool:
        return bool(self.shown) and isinstance(self.shown[-1].entry, End)

    @property
    def tokens(self) -> list[int]:
        """What the screen shows."""
        return [each for item in self.shown if isinstance(item.entry, Chunk) for each in unpack_ids(item.entry.ids)]

    # --- sending

    def send(self) -> None:
        if self.reply_id:
            return
        conversation = self.world.random.choice(self.region.conversations)
        self.region.publish(conversation, conversation.send, self.message, self)
        self.world.at(_SEND_AGAIN_S, self.send, owner=self)

    def sent(self, reply_id: str) -> None:
        if not self.reply_id:
            self.reply_id = reply_id
            self._reopen()
            self.world.at(_SILENT_S / 2, self._look, owner=self)

    def stop(self) -> None:
        if not self.reply_id:
            return
        self.stops.append(self.world.now)
        conversation = self.world.random.choice(self.region.conversations)
        self.region.publish(conversation, conversation.cancel, self.reply_id)

    # --- following

    def _reopen(self) -> None:
        """At any relay, after the last entry that is here, under a new id: late frames hit nobody."""
        if self.over:
            return
        self._stream += 1
        self._open, self._next_number, self._relay_id = False, 1, ""
        self._early.clear()
        self._relay = relay = self.world.random.choice(self.region.relays)
        request = OpenStream(
            reply_id=self.reply_id,
            stream_id=f"{self.name}.{self._stream}",
            inbox=f"frames.{self.name}.{self._stream}",
            after_seq=self.shown[-1].seq if self.shown else 0,
            credits=8,
        )
        self.region.publish(relay, relay.opened, request, f"answer.{self.name}.{self._stream}")
        self.world.at(RELAY_OPEN_S, self._not_opened, self._stream, owner=self)

    def _not_opened(self, stream: int) -> None:
        if stream == self._stream and not self._open:
            self._reopen()

    def answered(self, stream: int, data: bytes) -> None:
        answer = _opened.decode(data)
        if stream != self._stream:
            return
        if isinstance(answer, Refused):
            self._open = True  # no second try by the timer
            self.world.at(RELAY_TRY_S, self._try_again, stream, owner=self)
        else:
            self._open, self._relay_id, self._heard_s = True, answer.relay, self.world.now
            self._news_s = self.world.now
            early, self._early = self._early, []
            for each in early:
                self.framed(stream, each)

    def _try_again(self, stream: int) -> None:
        if stream == self._stream:
            self._reopen()

    def relay_lives(self, relay_id: str) -> None:
        if relay_id == self._relay_id:
            self._heard_s = self.world.now

    def _look(self) -> None:
        if self.over:
            return
        silent = self.world.now - self._heard_s > _SILENT_S
        if self._open and self._relay_id and (silent or self.world.now - self._news_s > SSE_PING_S):
            self._reopen()
        self.world.at(RELAY_ALIVE_S, self._look, owner=self)

    def framed(self, stream: int, data: bytes) -> None:
        """A frame: the next one, an older one, or one that shows that some are missing."""
        if stream == self._stream and not self._open:
            self._early.append(data)
            return
        frame = _frame.decode(data)
        if stream != self._stream or frame.number < self._next_number:
            return
        if frame.number > self._next_number:
            self._reopen()
            return
        self._next_number += 1
        self._news_s = self.world.now
        for item in frame.entries:
            if not self.shown or item.seq > self.shown[-1].seq:
                self.region.checks.shown(self, item)
                self.shown.append(item)
                if isinstance(item.entry, Chunk):
                    self.token_times.append(self.world.now)
        if frame.closing is not None and not self.over:
            self._reopen()
        elif self._relay is not None:
            credit = Credit(stream_id=f"{self.name}.{self._stream}", count=1)
            self.region.publish(self._relay, self._relay.credit, credit)
