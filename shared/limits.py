"""Every limit and every interval, in one place, with the relations between them asserted at import.

Units are in the names. What happens when a limit is reached is in the comment beside it.
"""

KIB = 1024
MIB = 1024 * KIB

# --- leases, heartbeats, verdicts ------------------------------------------------------------------
HEARTBEAT_S = 0.25
HEARTBEAT_S_MIN = 0.02  # between two, when a full replica says that it has room again
PROBE_AFTER_S = 0.35  # a heartbeat this late: is anybody there? Nobody listening is as good as three missed
HEARTBEATS_MISSED_MAX = 3  # suspect after these *and* no log progress
ACK_WAIT_S = 2.0  # an unextended lane delivery comes back after this: a question, not a verdict
LEASE_EXTEND_S = 0.5
STUCK_STEP_FACTOR = 3.0  # "stuck" = this many times the predicted step
STUCK_STEP_S_MIN = 1.0  # and at least this: a short step on a busy machine is not stuck
ATTEMPTS_MAX = 3  # of a reply, in a row and without a token written; then it ends as `failed`
ATTEMPTS_LOST_MAX = 6  # of a reply, however much they wrote
OPENS_MAX = 12  # `open` entries of one reply, with those that were refused or handed back
ASK_TIMEOUT_S = 0.5  # one question to a replica; then it is asked again
UNANSWERED_S = 3.0  # questions unanswered this long with no log progress are a verdict
PROGRESS_CHECK_S = 0.15  # a silent replica's log is read twice, this far apart, before the verdict
QUESTIONS_MAX = 3  # redeliveries in a row that find a reply running but its log not grown; then it is stuck
LEASE_CHECK_S = 5.0  # a router that hears nothing of a running reply looks after it this often
LEASE_RETRY_S = 0.25  # after a failed read, append or archive
COMMAND_ANSWER_S = 15.0  # a command's answer that never came; the log is read again
LOG_MISSING_S = 5.0  # a lane message whose log is missing is given back for this long
ROUTER_SHARE_MIN = 4  # and at least this many from each lane consumer
ROUTER_PULL_BATCH = 16
ROUTER_PULL_S = 10.0  # one pull waits this long for messages
ROUTER_TICK_S = 0.05  # timers of leases, verdicts on replicas

# --- placement and dispatch --------------------------------------------------------------------------
DISPATCH_TIMEOUT_S = 0.5  # router -> replica; then the outcome is unknown, and the replica is asked
DISPATCH_CLAIM_S = 2.0  # a dispatch of unknown outcome takes room in the router's view this long
REPLICA_FORGET_S = 60.0  # a replica silent this long leaves the router's view
REPLICA_QUEUE_MAX = 2  # sequences bound to a full replica ahead of a free place; the rest can still move
AFFINITY_PENALTY_S = 0.25  # how much later than elsewhere a first token may come for the sake of a held prefix
ADMIT_TTFT_S_PAID = 1.0  # a replica whose queue predicts a later first token takes no more of the tier
ADMIT_TTFT_S_FREE = 2.0
ADMIT_TTFT_S_BACKGROUND = 10.0
FAIR_QUANTUM_TOKENS = 1024  # a user's share per round of the fair pick
LANE_TRICKLE_SHARE = 1 / 16  # of the tokens served while a later lane waits, what that lane may have
QUEUE_VIEW_S = 1.0  # while requests wait, who stands where is said this often
QUEUE_VIEW_REPLIES_MAX = 256  # replies named in one view; who stands behind them learns that they do
SERVED_RATE_WINDOW_S = 30.0
SERVED_RATE_MARKS_MAX = 1024  # departures remembered per queue; more shorten the window

# --- clients ---------------------------------------------------------------------------------------
PRESENCE_S = 5.0  # a relay says "a client is attached" this often
IDLE_END_S = 30.0  # no presence this long: the holder ends the reply as `idle`
SLOW_READER_S = 10.0  # a client that takes nothing this long with a full buffer is dropped; it can resume
SSE_PING_S = 10.0  # longest silence on an open stream before a comment line
STREAM_CREDITS = 32  # frames in flight relay -> gateway per stream; the relay holds the rest back
FRAME_BYTES_MAX = 256 * KIB  # entries in one frame relay -> gateway; a client that is behind gets several
RELAY_ALIVE_S = 0.5  # a gateway that misses four opens its streams elsewhere
RELAY_STREAMS_MAX = 20_000  # of one relay; past it an open is refused, and the gateway asks again
CATCH_UPS_MAX = 64  # logs one relay looks up at the same time, when many clients come at once
LOG_LOOK_S = 0.5  # how long a relay looks for a log that is not there before it says so
READER_QUIET_S = 1.0  # a log reader with nothing for this long asks again from its next sequence

# --- the token log ---------------------------------------------------------------------------------
LOG_SHARDS = 4  # buckets declared by default; an id's shard must be below this
LOG_HISTORY_MAX = 8192  # entries per key; the server drops the oldest past it without an error
LOG_AGE_S = 3600.0
LOG_BUCKET_BYTES = 256 * MIB
LOG_ADMIT_SHARE = 0.70  # admission refuses above this share of a bucket's bytes
CHUNK_TOKENS_MAX = 256  # tokens in one chunk entry; more go into the next
CHUNK_INTERVAL_S_MIN = 0.02  # coalescing: first token at once, later ones at most this often ...
CHUNK_INTERVAL_S_MAX = 0.14  # ... and at least this often, under load
APPEND_TIMEOUT_S = 2.0  # one append; then it is tried again, byte-identical
CATCH_UP_BATCH = 256  # entries asked for in one batched direct get
CATCH_UP_BYTES_MAX = 512 * KIB
FOLLOW_INBOX_MAX = 256  # live entries waiting for one log reader; what overflows is a hole, and fetched
EVENT_GAP = 16  # event numbers per token; the gaps hold structural events

# --- requests --------------------------------------------------------------------------------------
OUTPUT_TOKENS_MAX = 4096  # most a reply may be budgeted, whatever the model
REQUEST_DEADLINE_S = 600.0  # accepted -> must have ended
DEADLINE_GRACE_S = 30.0  # the last-guard sweeper ends what is this far past its deadline
DEDUPLICATION_S = 10.0
LANE_REFUSE_S = 0.05  # a full lane is said within this
LANE_MESSAGES_MAX = 10_000  # waiting and running; past it the publish is refused (err_code 10077)
LANE_BYTES_MAX = 512 * MIB
USER_BUCKETS = 4  # lane consumers per (tier, model): users are hashed over them
ROUTER_HELD_MAX = 512  # lane messages one router holds un-acknowledged and waiting; the rest stay in the lane
PAYLOAD_BYTES_MAX = 1 * MIB  # NATS default; a prompt of 131,072 ids packed as int32 is half of it

# --- HTTP ------------------------------------------------------------------------------------------
HEADER_BYTES_MAX = 16 * KIB  # 431
BODY_BYTES_MAX = 4 * MIB  # 413
INPUT_CHARS_MAX = 1_000_000
INPUT_ITEMS_MAX = 1_000
STOP_SEQUENCES_MAX = 4
STOP_CHARS_MAX = 256
METADATA_KEYS_MAX = 16
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512
IDEMPOTENCY_KEY_CHARS_MAX = 255
JSON_DEPTH_MAX = 64
LOGIT_BIAS_MAX = 1024
TOP_LOGPROBS_MAX = 20  # likeliest tokens told in each place
INPUT_BYTES_MAX = 768 * KIB  # all text of a request as UTF-8; it must fit a bus message

# --- conversations ---------------------------------------------------------------------------------
TITLE_CHARS_MAX = 80  # made from a message
TITLE_GIVEN_CHARS_MAX = 512  # set by a person
CONVERSATION_ITEMS_MAX = 20  # given when a conversation is made
CONVERSATION_REPLIES_MAX = 10_000  # past it: start another one
CONVERSATIONS_SEARCHED_MAX = 1_000  # the newest of a user
SEARCH_CHARS_MAX = 200
HISTORY_CACHE_S = 1800.0  # a conversation that nobody continues is read from its rows after this
HISTORY_CACHE_BYTES_MAX = 1 * MIB  # longer ones are always read from their rows
PAGE_MAX = 100  # entries of one list answer
PAGE_BYTES_MAX = 512 * KIB  # words in one list answer; what is more comes with the next

# --- the gateway -----------------------------------------------------------------------------------
GATEWAY_STREAMS_MAX = 20_000  # replies one gateway follows at once; past it 503
KEY_FRESH_S = 60.0  # a cached key is asked about again after this
KEY_STALE_S_MAX = 600.0  # ... and stays valid this long while nobody can be asked
KEY_UNKNOWN_S = 5.0  # an unknown key is not asked about again for this long
KEY_LOOKUP_S = 2.0
KEY_CACHE_MAX = 20_000  # keys, known and unknown; the least recently used goes
CONVERSATION_TRY_S = 3.0  # nobody there: a command is tried again this long, then 503
RELAY_MISSED_MAX = 4  # missed words of a relay; then its streams are opened elsewhere
RELAY_TRY_S = 0.25  # between two tries to open a stream
RELAY_OPEN_S = 1.0  # one try
LOOP_LAG_S_MAX = 1.0  # a gateway whose own rounds are this late takes no more streams: 503
GATEWAY_FRAMES_MAX = 16_384  # frames between the bus and the streams; past it some are lost, and streams open again
CONNECTIONS_MAX = 24_000  # of one gateway; past it they are closed as they come
HEAD_READ_S = 10.0  # a connection that has not asked anything by then is closed; one that stops within a head: 408
BODY_READ_S = 30.0  # a request whose body takes longer is given up: 408
LINGER_S = 2.0  # what still comes of a body that nobody wants is read this long, so that its client hears why
KEEP_ALIVE_S = 75.0  # between two requests; longer than proxies keep theirs, so that they close first
WRITE_STUCK_S = 20.0  # a connection whose full buffer does not drain in this time is dropped
STALL_S = 2.0  # a gap between two tokens that a person notices
RELAY_GONE_S = 20.0  # no relay this long: the client's connection is dropped; it can resume

# --- the bus ---------------------------------------------------------------------------------------
REQUEST_TIMEOUT_S = 5.0  # service to service, unless a caller states less
INBOX_MESSAGES_MAX = 4096  # a subscription's bounded inbox; what overflows is dropped and counted
BUS_CONNECT_S = 10.0  # the first connection; past it the start fails with a sentence
BUS_PING_S = 2.0  # a connection is stale after two unanswered ones
BUS_RECONNECT_S_MIN = 0.1  # before each try to reconnect, for ever, jittered up to ...
BUS_RECONNECT_S_MAX = 0.25
BUS_UNSENT_BYTES_MAX = 8 * MIB  # written to a slow link and not yet sent; past it core publishes are dropped
BUS_SUBJECT_CHARS_MAX = 1024  # longer ones are refused here: a server ends the connection over them
BUS_CLOSE_S = 2.0  # flush and leave
BUS_READ_S = 2.0  # one batched direct get
PULL_RETRY_S = 0.1  # after a pull that the server turned down
PULL_GRACE_S = 0.5  # past its expiry a pull that was never answered counts as gone
ARCHIVE_ACK_WAIT_S = 30.0  # ENDED and USAGE: a write to the database that takes longer is tried by another
LOG_END_S = 10.0  # a canceller reads and appends again until an `end` stands, this long
ENDED_AGE_S = 7 * 86_400.0
JOURNAL_AGE_S = 3 * 86_400.0
USAGE_AGE_S = 7 * 86_400.0
STREAM_BYTES_MAX = 512 * MIB

# --- safety ----------------------------------------------------------------------------------------
SAFETY_VERDICT_S = 0.3  # a natural end waits this long for its last window, then is marked unchecked
SAFETY_WINDOW_CHARS = 400  # about 100 tokens
SAFETY_PHRASE_CHARS_MAX = 80  # of one phrase in a rule
SAFETY_OVERLAP_CHARS = 256  # of a window with the one before: longer than any phrase, however it is spelled
SAFETY_WATCHES_MAX = 5_000  # replies one safety service reads; past it a watch is refused and counted
SAFETY_WITHDRAW_S = 30.0  # a flag after the end is told to conversation until it is heard, this long
SAFETY_INPUT_S = 1.0

# --- PostgreSQL ------------------------------------------------------------------------------------
STORE_POOL_MAX = 8  # connections of one process
STORE_CONNECT_S = 3.0
STORE_ACQUIRE_S = 3.0  # wait for a free connection, connecting included; then the caller is told
STORE_COMMAND_S = 5.0
STORE_MIGRATE_S = 60.0  # one migration, or the wait for another process that migrates

# --- Valkey ----------------------------------------------------------------------------------------
VALKEY_CONNECTIONS_MAX = 16  # of one process
VALKEY_CALL_S = 2.0  # one round trip, connecting included; past it the caller goes on without
VALKEY_PROBE_S = 0.25  # the same while it is away: one that is frozen takes connections, and whoever asks waits
VALKEY_AWAY_S = 1.0  # one that is away is tried again this often

# --- what a user may use (settings replace the figures of a tier) ----------------------------------
TOKENS_PER_MIN_PAID = 60_000_000  # of one model; a bucket holds a minute's worth
TOKENS_PER_MIN_FREE = 6_000_000
TOKENS_PER_MIN_BACKGROUND = 60_000_000
MINI_TOKENS_FACTOR = 4  # of the mini model a user may have this many times as much
QUOTA_LEASE_S = 720.0  # a reservation that nobody settles comes back after this
QUOTA_KEEP_S = 7200.0  # a bucket that nobody touches is full again by then, and forgotten
REQUESTS_PER_MIN_PAID = 600_000  # of one user, over all gateways
REQUESTS_PER_MIN_FREE = 60_000
REQUESTS_PER_MIN_BACKGROUND = 600_000
IN_FLIGHT_PAID = 50_000  # requests of one user that wait for a reply or stream it
IN_FLIGHT_FREE = 5_000
IN_FLIGHT_BACKGROUND = 50_000
IN_FLIGHT_LEASE_S = 60.0  # a gateway that dies leaves its requests counted this long
IN_FLIGHT_RENEW_S = 20.0

# --- usage -----------------------------------------------------------------------------------------
USAGE_BATCH_MAX = 256  # records in one transaction
USAGE_PULL_S = 2.0  # one pull, when there is nothing
USAGE_RETRY_S_MIN = 0.2  # before a batch is tried again that the database did not take, doubling up to ...
USAGE_RETRY_S_MAX = 10.0

# --- service lifecycle -----------------------------------------------------------------------------
DRAIN_S = 20.0  # SIGTERM -> finish or hand back; a second signal stops now

BLOCK_TOKENS = 16  # KV slots in a block

# --- the replica's bus shell -----------------------------------------------------------------------
APPENDS_PER_S_MAX = 1000  # of one replica: past it chunks hold more tokens ...
APPENDS_PER_S_MAX_CPU = 500  # ... and where the engine computes on the processor: each takes half a millisecond of it
APPEND_LATENCY_FACTOR = 4.0  # and a chunk waits at least this many times the latency of an append
APPEND_RETRY_S = 0.1  # after an append that was refused for lack of room, or failed otherwise
ATTEMPTS_REMEMBERED = 4096  # attempts that are over: a late dispatch of one is refused
OUTBOX_MAX = 4096  # usage records not yet stored; past it the newest is dropped and counted
OUTBOX_RETRY_S = 0.5
SNAPSHOT_BLOCKS_MAX = 60_000  # prefix blocks in one snapshot: they must fit a payload
ENGINE_STUCK_EXIT_S = 30.0  # an engine stuck this long is given up: the replica ends and is started again
FLUSH_S = 2.0  # when the engine is lost, what it had sampled is written within this

# --- the engine ------------------------------------------------------------------------------------
ENGINE_RUNNING_MAX = 64  # sequences in one batch
ENGINE_WAITING_MAX = 256  # sequences queued inside an engine; past it a submit is refused: queues belong in the lanes
ENGINE_REPORTS_MAX = 1024  # step reports not yet taken; past it the engine is held back
ENGINE_FRAME_BYTES_MAX = 16 * MIB  # between a replica and its engine
ENGINE_START_S = 300.0  # read, build, warm up; then the start has failed
ENGINE_STOP_S = 5.0  # asked to stop; then it is killed

# --- model files -----------------------------------------------------------------------------------
GGUF_KEYS_MAX = 4096
GGUF_TENSORS_MAX = 16_384
GGUF_ARRAY_MAX = 2_000_000  # a vocabulary, its scores or its merges
SAFETENSORS_HEADER_BYTES_MAX = 100 * MIB  # what the format allows
VOCABULARY_MAX = 1_000_000  # tokens
MODEL_SIZE_MAX = 1 << 24  # layers, heads, widths, vocabulary: 32 bits hold them and their like
MODEL_CONTEXT_MAX = 1 << 20  # tokens
CONTEXT_TOKENS_MIN = 32  # of an engine: a short prompt and a few tokens more
MODEL_SHARDS_MAX = 1024  # files of one model
MODEL_JSON_BYTES_MAX = 64 * MIB  # a vocabulary of 250,000 tokens takes 20

assert HEARTBEAT_S < PROBE_AFTER_S < HEARTBEAT_S * HEARTBEATS_MISSED_MAX
assert HEARTBEAT_S * HEARTBEATS_MISSED_MAX < ACK_WAIT_S, "a verdict must be possible when a redelivery asks"
assert DISPATCH_TIMEOUT_S < ACK_WAIT_S, "an unanswered dispatch must be asked about before the lease lapses"
assert LEASE_EXTEND_S * 3 < ACK_WAIT_S, "two lost extensions must not cost a lease"
assert LOG_HISTORY_MAX >= OUTPUT_TOKENS_MAX + 64, "a reply of one-token chunks must fit its key's history"
assert LOG_AGE_S >= REQUEST_DEADLINE_S + 600.0, "a live reply must never lose its head to age"
assert IDLE_END_S > 2 * PRESENCE_S, "one lost presence message must not end a reply"
assert CHUNK_INTERVAL_S_MIN < CHUNK_INTERVAL_S_MAX < READER_QUIET_S
assert CHUNK_INTERVAL_S_MAX < PROGRESS_CHECK_S, "a decoding replica must show progress between two looks"
assert ATTEMPTS_MAX < ATTEMPTS_LOST_MAX < OPENS_MAX
assert COMMAND_ANSWER_S > LOG_END_S, "a canceller at work must not be taken for lost"
assert BUS_RECONNECT_S_MIN < BUS_RECONNECT_S_MAX < ACK_WAIT_S, "a short loss of the bus must not cost a lease"
assert SAFETY_PHRASE_CHARS_MAX * 3 < SAFETY_OVERLAP_CHARS, "a phrase cut by one window must stand whole in another"
assert STORE_ACQUIRE_S + STORE_COMMAND_S < ARCHIVE_ACK_WAIT_S, "a write in hand must not be handed to another"
assert QUOTA_LEASE_S > REQUEST_DEADLINE_S + DEADLINE_GRACE_S, "a reply that runs must not get its tokens back"
assert QUOTA_KEEP_S > QUOTA_LEASE_S
assert HISTORY_CACHE_S > 10 * REQUEST_TIMEOUT_S, "the mark of what was taken back must outlive whoever read before"
assert SLOW_READER_S < WRITE_STUCK_S, "a stream that nobody reads ends as one, with its own word in the log"
assert IN_FLIGHT_RENEW_S * 2 < IN_FLIGHT_LEASE_S, "one lost renewal must not free a running request's place"
assert FRAME_BYTES_MAX * 2 < PAYLOAD_BYTES_MAX, "a frame and its envelope must fit a bus message"
assert SNAPSHOT_BLOCKS_MAX * 16 < PAYLOAD_BYTES_MAX
assert OUTPUT_TOKENS_MAX * 4 < PAYLOAD_BYTES_MAX
assert INPUT_BYTES_MAX < PAYLOAD_BYTES_MAX
assert PAGE_BYTES_MAX < PAYLOAD_BYTES_MAX / 1.5, "a page and its ids must fit a bus message"
assert RELAY_ALIVE_S * RELAY_MISSED_MAX + RELAY_OPEN_S < IDLE_END_S, "a relay's death must not end a reply as idle"
