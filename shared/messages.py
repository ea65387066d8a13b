"""Every message on the bus: msgpack maps with a type tag and a version, unknown fields ignored, additive only.

A field is never removed, renamed or given another meaning; `tests/contract` decodes frozen samples of each
earlier version. Token ids travel packed as little-endian int32 (`pack_ids`), block hashes as 16 bytes each.
Times ending in `_s` are seconds; `created_s` and the like are seconds since the epoch.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from shared.outcomes import EndReason, Refusal
from shared.tiers import Tier

# --- packing ---------------------------------------------------------------------------------------


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids -> little-endian int32 bytes."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of `pack_ids`; raises ValueError when `data` is not a whole number of int32."""
    unpacked = array("i")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of everything on the bus. The tag is the class name, `v` the version it was written with."""

    v: int = 1


# --- who and how -----------------------------------------------------------------------------------


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Whose key it is. `tier` is a ceiling."""

    org: str
    user: str
    tier: Tier
    key_id: str


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. Ranges are checked at the door; nobody behind it checks again.

    `temperature` 0 is greedy. `top_k` 0 and `min_p` 0.0 are off. Randomness is keyed by (`seed`, position).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False  # superset: benches and peers' workloads fix the length
    seed: int | None = None  # drawn by conversation when the client gave none
    logprobs: int | None = None  # tell each token's log probability, and those of so many likeliest ones


class RequestEcho(msgspec.Struct, frozen=True, kw_only=True):
    """What the response object repeats of the request, so that every gateway can show it from the log alone."""

    door: str = "responses"  # or "chat"
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    metadata: dict[str, str] = {}
    service_tier: str = "auto"
    top_logprobs: int = 0
    background: bool = False
    store: bool = True
    requested_model: str = ""  # what was asked for, when the ladder or a limit chose another
    notice: str | None = None  # said to the user: why another model answers


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """One typed item of a message. Only text is produced and read so far."""

    role: str  # system | developer | user | assistant
    text: str
    id: str = ""
    kind: str = "text"


# --- gateway -> conversation (`conversation.<verb>`, request/reply) ----------------------------------


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of a user's tokens of one model: now, and in how many seconds all of it is back."""

    limit: int  # tokens a minute
    remaining: int
    reset_s: float


class SendMessage(Message, frozen=True, kw_only=True):
    """A user's message, parsed and checked at the door."""

    principal: Principal
    request_id: str
    model: str
    items: tuple[InputItem, ...]
    sampling: Sampling
    echo: RequestEcho
    idempotency_key: str | None = None
    body_hash: bytes = b""  # of the canonical body; same key + other body is a refusal
    branch_from: str | None = None  # the reply of its conversation that it follows, or ROOT; None: the head


class Sent(Message, frozen=True, kw_only=True):
    """The reply that is (already) being written."""

    reply_id: str
    attached: bool = False  # an earlier request with the same idempotency key made it
    allowance: Allowance | None = None  # after this one was reserved


class ReplyRef(Message, frozen=True, kw_only=True):
    """Names a reply for get, cancel, delete and input_items; answered with NOT_FOUND when not the principal's."""

    principal: Principal
    request_id: str
    reply_id: str


class KeyLookup(Message, frozen=True, kw_only=True):
    """Gateway -> conversation: whose key is this? The answer is KeyFound or Refused (NOT_FOUND)."""

    digest: bytes  # SHA-256 of the key; the key itself never travels


class KeyFound(Message, frozen=True, kw_only=True):
    """The key stands and is not revoked."""

    principal: Principal


class KeyRevoked(Message, frozen=True, kw_only=True):
    """On `control.keys`: whoever has this key in a cache forgets it now."""

    key_id: str


class Done(Message, frozen=True, kw_only=True):
    """It was done."""


class InputItems(Message, frozen=True, kw_only=True):
    """Conversation -> gateway: what a reply was made from, in order."""

    items: tuple[InputItem, ...]


class Refused(Message, frozen=True, kw_only=True):
    """The answer to any request that is said no to."""

    refusal: Refusal
    allowance: Allowance | None = None  # when it was the user's tokens that did not suffice


# --- conversations (`conversation.conversation_<verb>` and `conversation.regenerate`) -----------------

ROOT = "root"  # as `branch_from`: a new beginning of the conversation


class CreateConversation(Message, frozen=True, kw_only=True):
    """Answered with ConversationView. `items` are what was said before Chorus came in."""

    principal: Principal
    request_id: str
    title: str | None = None
    metadata: dict[str, str] = {}
    items: tuple[InputItem, ...] = ()


class ConversationRef(Message, frozen=True, kw_only=True):
    """Names a conversation for get and delete; answered with NOT_FOUND when not the principal's."""

    principal: Principal
    request_id: str
    conversation_id: str


class UpdateConversation(Message, frozen=True, kw_only=True):
    """What is None stays; an empty title is made anew from the first message. Answered with ConversationView."""

    principal: Principal
    request_id: str
    conversation_id: str
    title: str | None = None
    metadata: dict[str, str] | None = None
    head: str | None = None  # the reply whose branch becomes the active one


class ListConversations(Message, frozen=True, kw_only=True):
    """The principal's, last changed first, after the one named `after`. Answered with ConversationPage."""

    principal: Principal
    request_id: str
    limit: int
    after: str | None = None
    search: str = ""


class ConversationView(Message, frozen=True, kw_only=True):
    """A conversation as its owner sees it."""

    id: str
    created_s: float
    updated_s: float
    title: str
    metadata: dict[str, str]
    head: str | None = None
    in_flight: str | None = None


class ConversationPage(Message, frozen=True, kw_only=True):
    """Part of a user's conversations."""

    conversations: tuple[ConversationView, ...]
    has_more: bool


class ListItems(Message, frozen=True, kw_only=True):
    """Items of the active branch, or of all `branches`, after that named `after`. Answered with ConversationItems."""

    principal: Principal
    request_id: str
    conversation_id: str
    limit: int
    after: str | None = None
    ascending: bool = False
    branches: bool = False


class AddItems(Message, frozen=True, kw_only=True):
    """Items behind a conversation's head, to which nobody has replied. Answered with ConversationItems: these."""

    principal: Principal
    request_id: str
    conversation_id: str
    items: tuple[InputItem, ...]


class ItemRef(Message, frozen=True, kw_only=True):
    """Names an item of a conversation, on any branch. Answered with ConversationItems that hold it alone; when it is
    to be deleted, with ConversationView.
    """

    principal: Principal
    request_id: str
    conversation_id: str
    item_id: str


class ConversationItem(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a conversation's tree. `written` by the model, as `reply_id`; a message names the first reply to it."""

    item: InputItem
    parent_id: str | None
    reply_id: str
    active: bool
    created_s: float
    written: bool = False
    ended: bool = True
    reason: EndReason | None = None
    withdrawn: bool = False
    model: str = ""
    notice: str | None = None


class ConversationItems(Message, frozen=True, kw_only=True):
    """Part of a conversation's items; fewer than asked for when they are long."""

    items: tuple[ConversationItem, ...]
    has_more: bool


class RegenerateReply(Message, frozen=True, kw_only=True):
    """Another reply to the same message, beside `reply_id` (None: the head). Answered with Sent."""

    principal: Principal
    request_id: str
    conversation_id: str
    reply_id: str | None = None
    model: str | None = None
    background: bool = False
    idempotency_key: str | None = None
    body_hash: bytes = b""


# --- the token log -----------------------------------------------------------------------------------


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one reply; `cached_tokens` are those of the input found in a prefix cache."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0


class Accepted(Message, frozen=True, kw_only=True, tag="accepted"):
    """First entry of a reply's log: by conversation, before the lane publish."""

    reply_id: str
    org: str
    user: str
    created_s: float
    model: str
    tier: Tier
    budget: int  # most output tokens
    seed: int
    input_tokens: int
    deadline_s: float  # seconds after created_s by which the reply must have ended
    echo: RequestEcho


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How likely a token was as the model gave it, before bias, penalties, temperature. Special tokens: no bytes."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()  # the likeliest in its place, likeliest first


class Open(Message, frozen=True, kw_only=True, tag="open"):
    """By the router before each dispatch; ends the right of the writer before."""

    attempt: int  # 1, 2, 3
    replica: str
    model_version: str
    first_index: int  # tokens in the log before it
    router: str = ""
    returned: int = 0  # opens before this one that were refused or handed back: not held against the reply


class Chunk(Message, frozen=True, kw_only=True, tag="chunk"):
    """Tokens and the text they release: by the replica. Immutable: a retry is byte-identical."""

    attempt: int
    first_index: int
    ids: bytes  # packed int32
    text: str
    text_ends: tuple[int, ...]  # per token, the end of its text in `text`, in code points
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache; in an attempt's first chunk
    logprobs: tuple[TokenLogprob, ...] = ()  # per token, when the request asked for them

    @property
    def count(self) -> int:
        return len(self.ids) // 4


class End(Message, frozen=True, kw_only=True, tag="end"):
    """Last entry. `end` is the cancel: whoever ends a reply writes this, and nothing follows it."""

    reason: EndReason
    by: str  # service name and instance, with the attempt when a replica wrote it
    detail: str = ""  # a sentence for a person, when `failed` or `safety`
    checked: bool = True  # False: the safety verdict on the last window did not come in time
    ended_s: float = 0.0
    core_s: float | None = None  # what the attempt that came to this end cost, in seconds of a core (or a GPU)


Entry = Accepted | Open | Chunk | End


class SequencedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry and its place in the bucket's stream."""

    seq: int
    entry: Entry


# --- lanes and replicas --------------------------------------------------------------------------------


class GenerateRequest(Message, frozen=True, kw_only=True):
    """One demand on the router for tokens of a reply; waits in its lane until the reply has ended."""

    accepted: Accepted
    accepted_seq: int  # stream sequence of the `accepted` entry
    prompt: bytes  # packed int32
    block_hashes: bytes  # 16 bytes per full block of the prompt, chained
    sampling: Sampling  # seed filled in
    domain: bytes = b""  # salt of the hash chain (tenant isolation)

    @property
    def reply_id(self) -> str:
        return self.accepted.reply_id


class Dispatch(Message, frozen=True, kw_only=True):
    """Router -> replica: run this attempt. `written` are the token ids of the log up to `open`."""

    request: GenerateRequest
    attempt: int
    open_seq: int  # the writer's first append expects this sequence
    written: bytes
    router: str
    ack_subject: str  # the lane delivery; the replica extends it, and nothing else
    deadline_left_s: float
    delivered: int = 0  # of that delivery: the replica extends and reports to the newest it heard of


class Dispatched(Message, frozen=True, kw_only=True):
    """Replica -> router: taken; this attempt's entries will follow, or an AttemptOver."""

    replica: str
    number: int = 0  # the how many-th dispatch since the replica's boot: heartbeats with as many count it
    router: str = ""  # whom it reports to: another one when that one's delivery is newer


class DispatchRefused(Message, frozen=True, kw_only=True):
    """Replica -> router: not taken, and nothing was written; the attempt may go elsewhere."""

    replica: str
    reason: str  # full | draining | other_model | never_fits | bad_request | not_ready | over (this attempt was here)
    detail: str = ""


class Ask(Message, frozen=True, kw_only=True):
    """Router -> replica after a redelivery: do you run this? If so, extend this newer delivery and report to me."""

    reply_id: str
    router: str
    ack_subject: str
    delivered: int = 0  # an older delivery than the replica knows of changes nothing there


class Holding(Message, frozen=True, kw_only=True):
    """Replica -> router: the answer to Ask. `running` False: it knows nothing of this reply, or has finished it."""

    replica: str
    reply_id: str
    running: bool
    attempt: int = 0
    router: str = ""  # whom it reports to: another one when that one's delivery is newer


class AttemptOver(Message, frozen=True, kw_only=True):
    """Replica -> the router that holds the lease: this attempt writes no more, and its blocks are free."""

    reply_id: str
    attempt: int
    replica: str
    outcome: str  # ended | replaced | aborted | handed_back | failed | adopted (runs on, reports to a newer delivery)
    detail: str = ""


class Cancel(Message, frozen=True, kw_only=True):
    """`end` already stands in the log; this only makes it fast."""

    reply_id: str
    reason: EndReason


class StepModel(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted seconds of a step = base + per_token * tokens computed + per_attended * pairs of a token computed and
    one it attends to. `per_context_s` (of tokens read, once for each sequence) is told by earlier versions only.
    """

    base_s: float
    per_token_s: float
    per_context_s: float = 0.0
    per_attended_s: float = 0.0


class ReplicaHealth(Message, frozen=True, kw_only=True):
    """Four a second on `health.<replica>`; the boot id changes when the process does."""

    replica: str
    boot_id: str
    model: str
    model_version: str
    accepting: bool
    blocks_total: int
    blocks_free: int
    running: int
    running_max: int
    waiting: int
    waiting_tokens: dict[str, int]  # per tier: prompt tokens not yet computed
    step: StepModel
    step_age_s: float  # how long the running step has been running; 0 when idle
    step_predicted_s: float
    tokens_per_s: float
    http: str = ""
    dispatches: int = 0  # taken since boot: figures of this heartbeat cover them
    step_tokens: int = 256  # token budget of a step


class BlocksChanged(Message, frozen=True, kw_only=True):
    """Prefix blocks stored and evicted since the message numbered one less.

    A snapshot (the answer on `replica.<id>.blocks`, or `number` 0 at boot) holds the whole set as of `number`.
    """

    replica: str
    boot_id: str
    number: int
    stored: bytes
    evicted: bytes = b""


class QueueView(Message, frozen=True, kw_only=True):
    """Router -> relays, once a second while requests wait: who waits, in the order they will be served."""

    router: str
    tier: Tier
    model: str
    waiting: int
    served_per_s: float  # requests leaving this queue
    reply_ids: tuple[str, ...]  # the first of them


# --- relay <-> gateway -----------------------------------------------------------------------------------


class OpenStream(Message, frozen=True, kw_only=True):
    """Gateway -> a relay: follow this reply and send frames to `inbox`. Ownership was checked before."""

    reply_id: str
    stream_id: str
    inbox: str
    after_seq: int = 0  # the gateway already has the log up to here (a relay died)
    credits: int = 8
    presence: bool = True


class StreamOpened(Message, frozen=True, kw_only=True):
    """Relay -> gateway: frames will follow; credits go to `credit_subject`. `relay` is new at each of its starts."""

    relay: str
    credit_subject: str


class Credit(Message, frozen=True, kw_only=True):
    """Gateway -> relay: frames written to the client since the last credit; `close` when the client left."""

    stream_id: str
    count: int = 0
    close: bool = False


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Ephemeral word to a waiting client; never replayed."""

    kind: str  # queued | resuming
    position: int | None = None
    eta_s: float | None = None
    message: str = ""


class Frame(Message, frozen=True, kw_only=True):
    """Relay -> gateway: log entries in order, or a notice. `closing` says why nothing more will come."""

    stream_id: str
    number: int
    entries: tuple[SequencedEntry, ...] = ()
    notice: Notice | None = None
    closing: str | None = None  # ended | gone | draining | slow


class RelayAlive(Message, frozen=True, kw_only=True):
    """Twice a second per relay: a gateway that misses four reopens its streams elsewhere."""

    relay: str


class Presence(Message, frozen=True, kw_only=True):
    """A client is attached to this reply."""

    reply_id: str


# --- what is kept ------------------------------------------------------------------------------------------


class EndedReply(Message, frozen=True, kw_only=True):
    """A reply whole, in the ENDED stream, deduplicated by its id."""

    accepted: Accepted
    reason: EndReason
    text: str
    ids: bytes
    usage: Usage
    attempts: int
    ended_s: float
    checked: bool = True
    detail: str = ""
    first_token_s: float | None = None
    opened_s: float | None = None  # when the first `open` was stored: until then it had waited in its lane
    core_s: float | None = None  # of its last attempt, when that came to a natural end; USAGE has every attempt's


class ReplyView(Message, frozen=True, kw_only=True):
    """What conversation knows of a reply, running or stored."""

    accepted: Accepted
    text: str = ""
    ids: bytes = b""
    reason: EndReason | None = None  # None while it is being written
    usage: Usage | None = None
    checked: bool = True
    withdrawn: bool = False  # a later flag took the text back
    log_alive: bool = True  # False: only the stored text is left
    ended_s: float | None = None
    detail: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()  # from the log alone: they are not stored


class UsageRecord(Message, frozen=True, kw_only=True):
    """What one attempt cost, in the USAGE stream, deduplicated by (reply, attempt)."""

    reply_id: str
    attempt: int
    org: str
    user: str
    tier: Tier
    model: str
    replica: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    engine_s: float  # engine seconds, the step's time shared over its sequences
    at_s: float
    core_s: float | None = None  # the same in seconds of a core (or a GPU): times as many as its engine has


class JournalRecord(Message, frozen=True, kw_only=True):
    """A state change or decision with its reason and inputs; never prompts or keys."""

    at_s: float
    service: str
    kind: str
    reply_id: str | None = None
    data: dict[str, Any] = {}


# --- safety ------------------------------------------------------------------------------------------------


class SafetyCheck(Message, frozen=True, kw_only=True):
    """Conversation or a replica -> safety: is this text flagged? For `output`, the last window of the reply."""

    stage: str  # input | output
    text: str
    reply_id: str = ""


class Verdict(Message, frozen=True, kw_only=True):
    """Safety's answer. `category` and `rule` say why, when flagged."""

    flagged: bool
    category: str = ""
    rule: str = ""


class SafetyWatch(Message, frozen=True, kw_only=True):
    """Router -> safety at each open: read this reply's log in windows until it ends."""

    reply_id: str


class WithdrawReply(Message, frozen=True, kw_only=True):
    """Safety -> conversation: a flag came after the end; take the stored text back."""

    reply_id: str
    category: str
    shown_tokens: int


Request = (
    SendMessage
    | ReplyRef
    | KeyLookup
    | CreateConversation
    | ConversationRef
    | UpdateConversation
    | ListConversations
    | ListItems
    | AddItems
    | ItemRef
    | RegenerateReply
    | Dispatch
    | Ask
    | OpenStream
    | SafetyCheck
    | SafetyWatch
    | WithdrawReply
)
Answer = (
    Sent
    | ReplyView
    | KeyFound
    | Done
    | InputItems
    | ConversationView
    | ConversationPage
    | ConversationItems
    | Refused
    | Dispatched
    | DispatchRefused
    | Holding
    | StreamOpened
    | Verdict
    | BlocksChanged
)
Event = (
    Cancel
    | AttemptOver
    | ReplicaHealth
    | BlocksChanged
    | QueueView
    | Credit
    | Frame
    | RelayAlive
    | Presence
    | EndedReply
    | UsageRecord
    | JournalRecord
    | KeyRevoked
    | GenerateRequest
    | Accepted
    | Open
    | Chunk
    | End
)

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """A message as it stands on the bus."""
    return _encoder.encode(message)


T = TypeVar("T")


def decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """A reusable decoder of one message or a union; raises msgspec.DecodeError (ValidationError) on bad input."""
    return msgspec.msgpack.Decoder(kind)


def block_hash_list(packed: bytes) -> Sequence[bytes]:
    """Packed 16-byte hashes, one by one."""
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]
