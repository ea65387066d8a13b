"""The OpenAI-compatible doors: each handler is one demand, from headers to answer."""

import asyncio
import functools
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from multidict import CIMultiDictProxy

from services.gateway.auth import Keys
from services.gateway.conversation_client import Conversation, OverTokensError
from services.gateway.conversations_api import ascending, page_limit
from services.gateway.events import ChatEvents, Events, ResponseEvents, terminal_event
from services.gateway.http import (
    REPLY_ID,
    SSE_HEADERS,
    ProblemError,
    bad_request,
    encode_events,
    idempotency_key,
    not_found,
    problem_of_status,
    resume_point,
)
from services.gateway.limits import rate_headers
from services.gateway.limits_store import Limits, TooManyError
from services.gateway.live import LiveStream, whole_reply
from services.gateway.measures import Measures
from services.gateway.openai_api import TOKEN_IDS, Asked, check_model, parse_chat, parse_response
from services.gateway.openai_objects import (
    Json,
    chat_completion,
    deleted_object,
    failure_of,
    input_items_page,
    model_list,
    model_object,
    response_object,
)
from services.gateway.reply import ReplyFold, stored_entries
from services.gateway.settings import GatewaySettings
from services.gateway.streams import Relays
from shared import clock
from shared.catalog import Catalog
from shared.errors import RefusedError
from shared.ids import reply_of_chat, reply_place
from shared.limits import BODY_BYTES_MAX, BODY_READ_S
from shared.messages import Allowance, Principal, ReplyRef, ReplyView
from shared.outcomes import EndReason, Refusal, RefusalKind
from shared.telemetry import Log
from shared.token_log import tokens_seen

LIMIT_HEADERS = web.RequestKey("limit_headers", dict[str, str])  # what an answer says about its user's limits
REQUEST_NAME = web.RequestKey("request_name", str)  # where the application keeps the request's id

_json = msgspec.json.Encoder().encode


def expects_continue(request: web.Request) -> bool:
    """Read from the raw headers: `app.listen` hides the expectation from aiohttp."""
    return any(
        name.lower() == b"expect" and value.strip().lower() == b"100-continue" for name, value in request.raw_headers
    )


class Demand:
    """One authenticated HTTP request."""

    def __init__(self, request: web.Request, principal: Principal, request_id: str, asked_s: float) -> None:
        self.http, self.principal, self.request_id, self.asked_s = request, principal, request_id, asked_s

    async def body(self) -> bytes:
        """Raises ProblemError 408 when it does not come in time, 415 when it is not plain; aiohttp's own 413.

        Who announces a body that is too large, or waits to hear that it is wanted, is answered before it comes.
        """
        encoding = self.headers.get("Content-Encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            raise ProblemError(problem_of_status(415, "The body must be plain: send it without Content-Encoding."))
        if (size := self.http.content_length or 0) > BODY_BYTES_MAX:
            raise web.HTTPRequestEntityTooLarge(BODY_BYTES_MAX, size)
        if expects_continue(self.http) and self.http.transport is not None:
            self.http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(BODY_READ_S):
                return await self.http.read()
        except TimeoutError:
            raise ProblemError(problem_of_status(408, f"The body did not come within {BODY_READ_S:g} s.")) from None

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        return self.http.headers

    @property
    def wants_stream(self) -> bool:
        return _flag(self.http, "stream")

    @property
    def include(self) -> tuple[str, ...]:
        """Both ways in which clients write a list."""
        query = self.http.query
        return (*query.getall("include", ()), *query.getall("include[]", ()))

    @property
    def wants_token_ids(self) -> bool:
        return TOKEN_IDS in self.include

    def say(self, allowance: Allowance | None) -> None:
        """The answer tells what is left of the user's tokens."""
        if allowance is not None:
            self.http[LIMIT_HEADERS].update(
                rate_headers("tokens", allowance.limit, allowance.remaining, allowance.reset_s)
            )

    def ref(self, region: str) -> ReplyRef:
        """The reply named in the path; raises RefusedError NOT_FOUND for what cannot be one of ours."""
        reply_id = self.http.match_info["reply_id"]
        if reply_id.startswith("chatcmpl-"):
            reply_id = reply_of_chat(reply_id)
        place = reply_place(reply_id)
        if place is None or place.region != region:
            raise not_found(f"No response with id {reply_id[:80]!r}.")
        return self.ref_of(reply_id)

    def ref_of(self, reply_id: str) -> ReplyRef:
        return ReplyRef(principal=self.principal, request_id=self.request_id, reply_id=reply_id)


Handler = Callable[[Demand], Awaitable[web.StreamResponse]]


class Doors:
    """Handlers and what they need."""

    def __init__(
        self,
        *,
        settings: GatewaySettings,
        catalog: Catalog,
        keys: Keys,
        conversation: Conversation,
        relays: Relays,
        measures: Measures,
        limits: Limits,
        log: Log,
    ) -> None:
        self._settings, self._catalog, self._keys, self._limits = settings, catalog, keys, limits
        self._conversation, self._relays = conversation, relays
        self._measures, self._log = measures, log

    def add_to(self, app: web.Application) -> None:
        router = app.router
        app.on_response_prepare.append(_say_limits)
        router.add_post("/v1/responses", self.door(self.limited(self.create_response)))
        router.add_get("/v1/responses/{reply_id}", self.door(self.get_response))
        router.add_delete("/v1/responses/{reply_id}", self.door(self.delete_response))
        router.add_post("/v1/responses/{reply_id}/cancel", self.door(self.cancel_response))
        router.add_get("/v1/responses/{reply_id}/input_items", self.door(self.list_input_items))
        router.add_post("/v1/chat/completions", self.door(self.limited(self.create_chat)))
        router.add_get("/v1/models", self.door(self.list_models))
        router.add_get("/v1/models/{model}", self.door(self.get_model))

    def door(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A handler behind the keys."""

        @functools.wraps(handler)
        async def authenticated(request: web.Request) -> web.StreamResponse:
            asked_s = clock.now_s()
            principal = await self._keys.principal(request.headers)
            return await handler(Demand(request, principal, request[REQUEST_NAME], asked_s))

        return authenticated

    def limited(self, handler: Handler) -> Handler:
        """A handler that begins a reply: within its user's requests a minute and in flight, and says what is left."""

        async def within(demand: Demand) -> web.StreamResponse:
            headers = demand.http[LIMIT_HEADERS] = {}
            try:
                async with self._limits.admitted(demand.principal, demand.request_id) as said:
                    headers.update(said)
                    return await handler(demand)
            except TooManyError as error:
                headers.update(error.headers)
                raise
            except OverTokensError as error:
                demand.say(error.allowance)
                raise

        return within

    # --- responses -------------------------------------------------------------------------------------------

    async def create_response(self, demand: Demand) -> web.StreamResponse:
        asked = parse_response(await demand.body(), self._catalog)
        reply_id = await self._send(demand, asked)
        return await self.new_response(
            demand, reply_id, stream=asked.stream, background=asked.echo.background, token_ids=asked.token_ids
        )

    async def new_response(
        self, demand: Demand, reply_id: str, *, stream: bool, background: bool, token_ids: bool
    ) -> web.StreamResponse:
        """What a client hears of the reply that it asked for."""
        if stream:
            return await self._live(demand, reply_id, ResponseEvents(token_ids=token_ids), "responses", demand.asked_s)
        if background:
            view = await self._conversation.get(demand.ref_of(reply_id))
        else:
            view = await self._whole(demand, reply_id, keep_ids=token_ids)
        return answer(response_object(view, token_ids=token_ids), reply_id)

    async def get_response(self, demand: Demand) -> web.StreamResponse:
        ref = demand.ref(self._settings.region)
        after = resume_point(demand.headers, demand.http.query)
        view = await self._conversation.get(ref)
        if not demand.wants_stream:
            return answer(response_object(view, token_ids=demand.wants_token_ids), ref.reply_id)
        if after >= 0:
            self._measures.resumed.inc()
        if view.reason is not None:
            if after >= terminal_event(view.accepted.budget):
                return web.Response(status=204, headers={REPLY_ID: ref.reply_id})
            if view.withdrawn or not view.log_alive:
                return self._stored(view, after, demand)
        events = ResponseEvents(after=after, token_ids=demand.wants_token_ids)
        return await self._live(demand, ref.reply_id, events, "responses", None)

    async def cancel_response(self, demand: Demand) -> web.StreamResponse:
        ref = demand.ref(self._settings.region)
        await self._conversation.cancel(ref)
        return answer(response_object(await self._conversation.get(ref)), ref.reply_id)

    async def delete_response(self, demand: Demand) -> web.StreamResponse:
        ref = demand.ref(self._settings.region)
        await self._conversation.delete(ref)
        return answer(deleted_object(ref.reply_id), ref.reply_id)

    async def list_input_items(self, demand: Demand) -> web.StreamResponse:
        query = demand.http.query
        limit, upwards = page_limit(query), ascending(query)
        ref = demand.ref(self._settings.region)
        items = await self._conversation.input_items(ref)
        page = input_items_page(items, after=query.get("after"), limit=limit, ascending=upwards)
        return answer(page, ref.reply_id)

    # --- chat completions ------------------------------------------------------------------------------------

    async def create_chat(self, demand: Demand) -> web.StreamResponse:
        asked = parse_chat(await demand.body(), self._catalog)
        reply_id = await self._send(demand, asked)
        if asked.stream:
            events = ChatEvents(include_usage=asked.include_usage, token_ids=asked.token_ids)
            return await self._live(demand, reply_id, events, "chat", demand.asked_s)
        view = await self._whole(demand, reply_id, keep_ids=asked.token_ids)
        failure = failure_of(view)
        if failure is not None:
            status = 504 if view.reason is EndReason.EXPIRED else 500
            return answer(failure, reply_id, status)
        return answer(chat_completion(view, token_ids=asked.token_ids), reply_id)

    # --- models ----------------------------------------------------------------------------------------------

    async def list_models(self, _: Demand) -> web.StreamResponse:
        return answer(model_list(self._catalog.models))

    async def get_model(self, demand: Demand) -> web.StreamResponse:
        name = demand.http.match_info["model"]
        check_model(name, self._catalog)
        card = self._catalog.get(name)
        assert card is not None
        return answer(model_object(card))

    # --- pieces ----------------------------------------------------------------------------------------------

    async def _send(self, demand: Demand, asked: Asked) -> str:
        check_model(asked.model, self._catalog)
        key = idempotency_key(demand.headers, demand.principal, asked.body_hash, demand.request_id)
        sent = await self._conversation.send(asked.message(demand.principal, demand.request_id, key))
        demand.say(sent.allowance)
        return sent.reply_id

    async def _live(
        self, demand: Demand, reply_id: str, events: Events, door: str, asked_s: float | None
    ) -> web.StreamResponse:
        async with self._relays.follow(reply_id) as stream:
            return await LiveStream(
                demand.http,
                stream,
                events,
                door=door,
                request_id=demand.request_id,
                stored=functools.partial(self._conversation.get, demand.ref_of(reply_id)),
                measures=self._measures,
                log=self._log,
                ping_s=self._settings.ping_s,
                asked_s=asked_s,
            ).run()

    async def _whole(self, demand: Demand, reply_id: str, *, keep_ids: bool) -> ReplyView:
        stored = functools.partial(self._conversation.get, demand.ref_of(reply_id))
        async with self._relays.follow(reply_id) as stream:
            return await whole_reply(stream, ReplyFold(keep_ids=keep_ids), stored)

    def _stored(self, view: ReplyView, after: int, demand: Demand) -> web.StreamResponse:
        """An ended reply without its log, as a stream: one delta. A client cut inside must retrieve it whole."""
        tokens = view.usage.output_tokens if view.usage is not None else len(view.ids) // 4
        if 0 < tokens_seen(after) < tokens and not view.withdrawn:
            message = "The stream of this reply has expired: retrieve it without stream."
            raise RefusedError(Refusal(kind=RefusalKind.GONE, message=message))
        token_ids = demand.wants_token_ids and not view.withdrawn
        events = ResponseEvents(after=after, token_ids=token_ids).feed(stored_entries(view))
        headers = {**SSE_HEADERS, REPLY_ID: view.accepted.reply_id}
        return web.Response(body=encode_events(events, first=True), headers=headers)


async def _say_limits(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(request.get(LIMIT_HEADERS, {}))


def answer(body: Json, reply_id: str | None = None, status: int = 200) -> web.Response:
    headers = {"Content-Type": "application/json"}
    if reply_id is not None:
        headers[REPLY_ID] = reply_id
    return web.Response(body=_json(body), status=status, headers=headers)


def _flag(request: web.Request, name: str) -> bool:
    said = request.query.get(name, "false").lower()
    if said not in ("true", "false", "1", "0"):
        raise bad_request(f"{name} must be true or false.", name)
    return said in ("true", "1")
