"""The pull loop on a durable consumer: one request outstanding, an inbox that stays, nothing between two pulls.

pull ──> NEXT {batch, expires} ──> deliveries ───────> ready ──> returned, at most `most`
            │                   └─ the last of the batch ─┐
            ├── status 404 | 408 | 409 | 503 ─────────────┼──> none outstanding: ask again
            └── no word at expiry + grace | disconnected ─┘
"""

import asyncio
import itertools

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from shared import clock
from shared.bus import Delivery, wire
from shared.bus.nats_link import Link, unsubscribe
from shared.errors import BusClosedError, BusTimeoutError, NoRespondersError
from shared.limits import INBOX_MESSAGES_MAX, PULL_GRACE_S, PULL_RETRY_S


class NatsPuller:
    """The `Puller` port. One task pulls at a time.

    A request answered in part stays outstanding until it expires; what it still brings waits here for the next
    pull. A message that comes again meanwhile takes the place of its older delivery.
    """

    def __init__(self, link: Link, stream: str, consumer: str) -> None:
        self._link = link
        self._subject = f"{wire.API}.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = link.own_subject()
        self._numbers = itertools.count(1)
        self._subscription: NatsSubscription | None = None
        self._ready: dict[int, Delivery] = {}  # by sequence, in the order they came
        self._wake = asyncio.Event()
        self._outstanding = ""  # reply subject of the request the server holds
        self._outstanding_left = 0
        self._outstanding_until_s = 0.0
        self._not_before_s = 0.0
        self._nobody = False  # the last word was that nobody serves such a consumer
        self.closed = False
        link.on_lost.add(self._on_lost)

    async def pull(self, most: int, timeout_s: float) -> list[Delivery]:
        """Raises NoRespondersError when at its end nobody serves such a consumer, BusClosedError when closed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_ready(most, clock.now_s() + timeout_s)
        except TimeoutError:
            if self._nobody and not self._ready:
                raise NoRespondersError(f"nobody serves {self._subject}") from None
        return [self._ready.pop(seq) for seq in list(self._ready)[:most]]

    async def _until_ready(self, most: int, deadline_s: float) -> None:
        while not self._ready:
            if self.closed or self._link.gone:
                raise BusClosedError("the puller is closed")
            now_s = clock.now_s()
            if now_s >= self._outstanding_until_s:
                self._outstanding = ""
            self._wake.clear()
            if self._outstanding:
                await self._sleep(self._outstanding_until_s - now_s)
            elif now_s < self._not_before_s:
                await self._sleep(self._not_before_s - now_s)
            else:
                await self._request(most, deadline_s)

    async def _sleep(self, seconds: float) -> None:
        """Until there is news, at most so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _request(self, most: int, deadline_s: float) -> None:
        """Ask for `most`, to expire with this pull; an own subscription, so that closing it withdraws the request."""
        if self._subscription is None:
            self._subscription = await self._link.listen(f"{self._inbox}.*", "", self._on_message, INBOX_MESSAGES_MAX)
        await self._link.ready()
        expires_s = max(0.001, deadline_s - clock.now_s())
        reply = f"{self._inbox}.{next(self._numbers)}"
        self._outstanding, self._outstanding_left = reply, most
        self._outstanding_until_s = clock.now_s() + expires_s + PULL_GRACE_S
        try:
            await self._link.send(self._subject, wire.pull_body(most, expires_s), reply)
        except BusTimeoutError:
            self._outstanding = ""  # lost at this moment; `ready` waits for its return

    async def _on_message(self, message: Msg) -> None:
        status = wire.status_of(message.headers) if not message.data else None
        if status is not None:
            self._on_status(message.subject, status)
        else:
            delivery = wire.delivery_of(message.subject, message.data, message.reply)
            self._ready.pop(delivery.seq, None)
            self._ready[delivery.seq] = delivery
            self._nobody = False
            self._outstanding_left -= 1
            if self._outstanding_left <= 0:
                self._outstanding = ""
        self._wake.set()

    def _on_status(self, reply: str, status: str) -> None:
        if reply != self._outstanding:
            return  # of a request already given up
        self._outstanding = ""
        self._nobody = status == wire.STATUS_NO_RESPONDERS
        if status not in (wire.STATUS_EXPIRED, wire.STATUS_NOT_FOUND):
            self._not_before_s = clock.now_s() + PULL_RETRY_S

    def _on_lost(self) -> None:
        """The server has forgotten our request with the connection."""
        self._outstanding = ""
        self._wake.set()

    async def close(self) -> None:
        """Withdraw the request and give back what nobody took."""
        if self.closed:
            return
        self.closed = True
        self._wake.set()
        self._link.on_lost.discard(self._on_lost)
        if self._subscription is not None:
            await unsubscribe(self._subscription)
        while self._ready and not self._link.gone:
            _, delivery = self._ready.popitem()
            await self._link.publish(delivery.ack_subject, wire.NAK, "", None)
