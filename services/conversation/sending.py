"""The way of one message: from `SendMessage` to a request in its lane, or to a refusal that says why.

idempotency key ─known─> attach                            rows, key and outbox in one transaction
      │ new                                                                  │
      └─> model ─> input check │ context ─> [quota] ─> [supersede] ─> begin ─┴> accepted, lane ─> answer
                                                                                  └ full ─> ended honestly, key free
"""

import asyncio
import dataclasses
import math
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

import msgspec

from services.conversation.archive import Archive
from services.conversation.contexts import Contexts, MessageContext
from services.conversation.conversations import Conversations
from services.conversation.figures import Figures
from services.conversation.history_cache import name_of
from services.conversation.input_check import InputCheck
from services.conversation.marks import QueuedMarks
from services.conversation.prompts import PromptModel
from services.conversation.queueing import Queueing
from services.conversation.quotas import OverLimitError, Quotas
from services.conversation.rows import Claim, IdempotencyKey, NewReply
from services.conversation.shards import Shards
from services.conversation.store import MovedOnError, Store, StoreAwayError
from shared import clock
from shared.blocks import block_hashes
from shared.errors import BusError, LogGoneError, RefusedError, TokenLogError
from shared.limits import PAYLOAD_BYTES_MAX, REQUEST_DEADLINE_S
from shared.log_store import LogStore
from shared.messages import Accepted, Allowance, End, GenerateRequest, SendMessage, Sent, encode, pack_ids
from shared.outcomes import EndReason, Refusal, RefusalKind
from shared.subjects import Names, user_bucket
from shared.telemetry import Journal, Log
from shared.tiers import Tier, lane_for
from shared.token_log import ended_reply

ATTACH_S = 2.0  # another send with the same key is waited for this long
ATTACH_POLL_S = 0.02
GIVE_UP_S = 1.0  # to end the log of what could not be queued; past it the sweeper does
_REQUEST_BYTES_MAX = PAYLOAD_BYTES_MAX - 1024  # the sequence of `accepted` and headers are still to come

_T = TypeVar("_T")
_U = TypeVar("_U")


class Sender:
    """All parts of the way; `name` is this instance, as `end` entries name it."""

    def __init__(
        self,
        *,
        name: str,
        names: Names,
        models: dict[str, PromptModel],
        store: Store,
        logs: LogStore,
        contexts: Contexts,
        conversations: Conversations,
        check: InputCheck,
        quotas: Quotas,
        mini: PromptModel | None,
        queueing: Queueing,
        shards: Shards,
        marks: QueuedMarks,
        archive: Archive,
        journal: Journal,
        figures: Figures,
        log: Log,
        isolate_tenants: bool = False,
    ) -> None:
        self._name, self._names, self._models = name, names, models
        self._store, self._logs, self._contexts, self._check = store, logs, contexts, check
        self._conversations, self._queueing, self._shards, self._archive = conversations, queueing, shards, archive
        self._marks, self._journal, self._figures, self._log = marks, journal, figures, log
        self._quotas, self._mini, self._isolate = quotas, mini, isolate_tenants

    async def send(self, message: SendMessage) -> Sent:
        """The reply being written; raises RefusedError, StoreAwayError, BusError."""
        attached = await self._attach(message, await self._claim(message))
        return attached or await self._start(message)

    async def _claim(self, message: SendMessage) -> Claim | None:
        key = message.idempotency_key
        return None if key is None else await self._store.claim_of(message.principal, key)

    # --- an earlier send with the same key -----------------------------------------------------------------

    async def _attach(self, message: SendMessage, claim: Claim | None) -> Sent | None:
        """The reply of an earlier send, once it is in its lane; None when that one was refused: this is the first."""
        give_up_s = clock.now_s() + ATTACH_S
        while claim is not None:
            if claim.body_hash != message.body_hash:
                raise RefusedError(
                    Refusal(
                        kind=RefusalKind.KEY_REUSED,
                        message="This Idempotency-Key was used before with another body. Use a new key.",
                    )
                )
            if claim.queued:
                self._figures.attached.inc()
                return Sent(reply_id=claim.reply_id, attached=True)
            if clock.now_s() >= give_up_s:
                return await self._take_over(message, claim)
            await asyncio.sleep(ATTACH_POLL_S)
            claim = await self._store.claim_of(message.principal, message.idempotency_key or "")
        return None

    async def _take_over(self, message: SendMessage, claim: Claim) -> Sent:
        """Whoever held the key has died on the way. A stored reply is queued from the outbox; one that left no rows
        only we can queue, because only we hold its words.
        """
        if message.echo.store:
            raise RefusedError(
                Refusal(
                    kind=RefusalKind.UNAVAILABLE,
                    message="The reply of this Idempotency-Key is not in its queue yet. Try again in a few seconds.",
                    retry_after_s=2.0,
                )
            )
        self._journal.note("send_taken_over", claim.reply_id)
        return await self._start(message, reply_id=claim.reply_id)

    # --- a new reply -----------------------------------------------------------------------------------------

    async def _start(self, message: SendMessage, reply_id: str | None = None) -> Sent:
        """`reply_id`: go on with a reply whose key is claimed already."""
        model = self._models.get(message.model)
        if model is None:
            raise RefusedError(
                Refusal(
                    kind=RefusalKind.UNKNOWN_MODEL,
                    message=f"The model {message.model!r} does not exist. GET /v1/models lists those that do.",
                    param="model",
                )
            )
        lane = lane_for(message.principal.tier, message.echo.service_tier)
        self._queueing.check(lane)
        context = await self._checked_context(message, model)
        self._figures.turns_dropped.inc(context.turns_dropped)
        offer = _Offer(message, model, context, lane, reply_id or self._shards.new_reply_id())
        offer, allowance = await self._reserved(offer)
        subject = self._names.lane_subject(
            lane, offer.message.model, user_bucket(message.principal.org, message.principal.user)
        )
        accepted = self._accepted(offer)
        try:
            request, claim = self._request(offer, accepted), None
            if offer.context.in_flight:
                claim = await self._claim(message)  # what is in flight may be of a send with the same key
                if claim is None:
                    offer = await self._superseding(offer)
                    accepted = self._accepted(offer)
                    request = self._request(offer, accepted)
            if claim is None and reply_id is None:
                claim = await self._begin(offer, subject, request)
        except MovedOnError:
            await self._quotas.release(accepted)
            return await self._start(message)
        except BaseException:
            await self._quotas.release(accepted)
            raise
        if claim is not None:
            await self._quotas.release(accepted)
            return await self._attach(message, claim) or await self._start(message)
        await self._queue(subject, request)
        return Sent(reply_id=accepted.reply_id, allowance=allowance)

    async def _reserved(self, offer: "_Offer") -> tuple["_Offer", Allowance | None]:
        """The offer that the user's tokens suffice for: what was asked, else the mini model's, which says so.

        Raises OverLimitError when neither has tokens left, or the mini model cannot take the context.
        """
        try:
            return offer, await self._reserve(offer)
        except OverLimitError as over:
            mini = self._mini
            if mini is None or mini is offer.model:
                raise
            message = _answered_by(mini, offer.message, over)
            try:
                before = offer.context
                context = await self._contexts.of(
                    message, mini, before.parent_id, before.history, wait=not before.in_flight
                )
                smaller = offer._replace(message=message, model=mini, context=_placed(context, before))
                allowance = await self._reserve(smaller)
            except RefusedError:
                raise over from None
        self._figures.mini.inc()
        self._journal.note("answered_by_mini", offer.reply_id, asked=offer.message.model, used=mini.card.id)
        return smaller, allowance

    async def _reserve(self, offer: "_Offer") -> Allowance | None:
        amount = len(offer.context.ids) + offer.context.budget
        return await self._quotas.reserve(offer.message.principal, offer.model.card, offer.lane, offer.reply_id, amount)

    async def _checked_context(self, message: SendMessage, model: PromptModel) -> MessageContext:
        """Check and context side by side; in a conversation one after the other, as of now: a reply that is being
        written there goes on until nothing speaks against the message any more.
        """
        if message.echo.conversation_id is None:
            parent_id = message.echo.previous_response_id
            check, context = self._check.ask(message), self._contexts.of(message, model, parent_id)
            return (await _together(check, context))[1]
        await self._check.ask(message)
        place = await self._conversations.place(message)
        history = name_of(message.principal, message.echo.conversation_id, place.epoch)
        behind = await self._contexts.of(message, model, place.parent_id, history, wait=not place.in_flight)
        return dataclasses.replace(behind, line_version=place.version, in_flight=place.in_flight, history=history)

    async def _superseding(self, offer: "_Offer") -> "_Offer":
        """Once nothing else of its conversation is being written. What was written since the tokens were reserved is in
        the context, and not in the reservation.
        """
        before = offer.context
        for reply_id in before.in_flight:
            await self._conversations.supersede(reply_id)
        if not before.running:
            return offer
        context = await self._contexts.of(offer.message, offer.model, before.parent_id, before.history)
        return offer._replace(context=_placed(context, before))

    def _accepted(self, offer: "_Offer") -> Accepted:
        message = offer.message
        seed = message.sampling.seed if message.sampling.seed is not None else clock.random_seed()
        return Accepted(
            reply_id=offer.reply_id,
            org=message.principal.org,
            user=message.principal.user,
            created_s=clock.wall_s(),
            model=message.model,
            tier=offer.lane,
            budget=offer.context.budget,
            seed=seed,
            input_tokens=len(offer.context.ids),
            deadline_s=REQUEST_DEADLINE_S,
            echo=message.echo,
        )

    def _request(self, offer: "_Offer", accepted: Accepted) -> GenerateRequest:
        ids, domain = offer.context.ids, offer.model.domain(accepted.org.encode() if self._isolate else b"")
        request = GenerateRequest(
            accepted=accepted,
            accepted_seq=0,
            prompt=pack_ids(ids),
            block_hashes=b"".join(block_hashes(ids, domain)),
            sampling=msgspec.structs.replace(offer.message.sampling, seed=accepted.seed),
            domain=domain,
        )
        size = len(encode(request))
        if size > _REQUEST_BYTES_MAX:
            raise RefusedError(
                Refusal(
                    kind=RefusalKind.BAD_REQUEST,
                    message=f"The request takes {size} bytes with its instructions and metadata, and at most "
                    f"{_REQUEST_BYTES_MAX} can be queued. Shorten them.",
                )
            )
        return request

    async def _begin(self, offer: "_Offer", subject: str, request: GenerateRequest) -> Claim | None:
        """Rows (of a stored reply) and key; the claim that was there first, when there was one."""
        message, context = offer.message, offer.context
        key = message.idempotency_key
        idempotency = None if key is None else IdempotencyKey(key, message.body_hash)
        if message.echo.store:
            new = NewReply(
                accepted=request.accepted,
                parent_id=context.parent_id,
                sampling=request.sampling,
                tokenizer=offer.model.tokenizer_name,
                items=context.items,
                lane_subject=subject,
                request=encode(request),
                line_version=context.line_version,
            )
            return await self._store.begin(new, idempotency)
        return None if idempotency is None else await self._store.claim(request.accepted, idempotency)

    async def _queue(self, subject: str, request: GenerateRequest) -> None:
        try:
            ended = await self._queueing.queue(subject, request)
        except RefusedError as error:
            self._journal.note("send_refused", request.reply_id, refusal=error.refusal.kind.value)
            await self._give_up(request.accepted, error.refusal.message)
            raise
        except (BusError, LogGoneError) as error:
            self._journal.note("send_failed", request.reply_id, error=str(error))
            await self._give_up(request.accepted, "It could not be queued.")
            raise
        if ended is not None:
            await self._archive.store([ended])
        self._marks.note(request.reply_id)

    async def _give_up(self, accepted: Accepted, detail: str) -> None:
        """End it honestly. Whatever fails here, the sweeper finds a reply long past its deadline and does the rest."""
        reply_id = accepted.reply_id
        end = End(reason=EndReason.FAILED, by=self._name, detail=detail, ended_s=clock.wall_s())
        try:
            await self._store.give_up(reply_id, detail)
            view = await self._logs.end(reply_id, end, GIVE_UP_S)
            await self._archive.store([ended_reply(view)])
        except (StoreAwayError, BusError, TokenLogError, LogGoneError) as error:
            self._log.warning("left_to_the_sweeper", reply_id=reply_id, error=str(error))


class _Offer(NamedTuple):
    """A message and everything that its reply would begin with."""

    message: SendMessage
    model: PromptModel
    context: MessageContext
    lane: Tier
    reply_id: str


def _placed(context: MessageContext, before: MessageContext) -> MessageContext:
    """Where `before` stands."""
    return dataclasses.replace(
        context, line_version=before.line_version, in_flight=before.in_flight, history=before.history
    )


def _answered_by(mini: PromptModel, message: SendMessage, over: OverLimitError) -> SendMessage:
    wait_s = max(1, math.ceil(over.refusal.retry_after_s or 1))
    notice = (
        f"You have reached your limit for {message.model}, so {mini.card.id} answers. "
        f"{message.model} is there again in about {wait_s} s."
    )
    asked = message.echo.requested_model or message.model
    echo = msgspec.structs.replace(message.echo, notice=notice, requested_model=asked)
    return msgspec.structs.replace(message, model=mini.card.id, echo=echo)


async def _together(one: Coroutine[Any, Any, _T], other: Coroutine[Any, Any, _U]) -> tuple[_T, _U]:
    """Both, side by side; the first error of either, bare, and the other is cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            first, second = group.create_task(one), group.create_task(other)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return first.result(), second.result()
