-- Who may call: only digests of keys are kept.
CREATE TABLE keys (
    id         text        PRIMARY KEY,
    digest     bytea       NOT NULL UNIQUE,   -- SHA-256
    org        text        NOT NULL,
    usr        text        NOT NULL,
    tier       text        NOT NULL,
    label      text        NOT NULL DEFAULT '',
    created_at timestamptz NOT NULL DEFAULT now(),
    revoked_at timestamptz
);
CREATE INDEX keys_owner ON keys (org, usr, created_at);

-- A conversation object: a line of replies of which one is in flight.
CREATE TABLE conversations (
    id         text        PRIMARY KEY,
    org        text        NOT NULL,
    usr        text        NOT NULL,
    metadata   json        NOT NULL DEFAULT '{}',
    head_id    text,                           -- its newest reply
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX conversations_owner ON conversations (org, usr, created_at);

-- Replies and the messages they answer; never one sent with store=false.
-- JSON columns are `json`, not `jsonb`: text may hold any character, NUL included, and comes back as it went in.
CREATE TABLE replies (
    id              text        PRIMARY KEY,
    org             text        NOT NULL,
    usr             text        NOT NULL,
    conversation_id text,
    parent_id       text,                      -- previous_response_id; may name a reply deleted since
    model           text        NOT NULL,
    tokenizer       text        NOT NULL,      -- whose ids `token_ids` are
    tier            text        NOT NULL,
    status          text        NOT NULL,      -- states of replies.py
    reason          text,                      -- EndReason, once ended
    detail          text        NOT NULL DEFAULT '',
    created_at      timestamptz NOT NULL,
    deadline_at     timestamptz NOT NULL,
    ended_at        timestamptz,
    accepted        json        NOT NULL,      -- the log's first entry, the request's echo in it
    sampling        json        NOT NULL,
    output          json        NOT NULL DEFAULT '[]',   -- typed items
    token_ids       bytea       NOT NULL DEFAULT '',     -- packed int32
    message_tokens  integer     NOT NULL,      -- context tokens of its own input items
    input_tokens    integer     NOT NULL,      -- of the whole context
    cached_tokens   integer     NOT NULL DEFAULT 0,
    output_tokens   integer     NOT NULL DEFAULT 0,
    attempts        integer     NOT NULL DEFAULT 0,
    checked         boolean     NOT NULL DEFAULT true,   -- false: output safety had no verdict in time
    withdrawn       boolean     NOT NULL DEFAULT false   -- a later flag took the text back
);
CREATE INDEX replies_owner ON replies (org, usr, created_at);
CREATE INDEX replies_conversation ON replies (conversation_id, created_at) WHERE conversation_id IS NOT NULL;
CREATE INDEX replies_unended ON replies (deadline_at) WHERE status <> 'ended';

-- Typed items of the messages, in order.
CREATE TABLE items (
    reply_id text    NOT NULL REFERENCES replies ON DELETE CASCADE,
    position integer NOT NULL,
    id       text    NOT NULL,
    org      text    NOT NULL,
    usr      text    NOT NULL,
    role     text    NOT NULL,
    content  json    NOT NULL,
    token_ids bytea  NOT NULL,                 -- of its text, packed int32, by the reply's tokenizer
    PRIMARY KEY (reply_id, position)
);

-- One reply per key and user; no content, so store=false is here too.
CREATE TABLE idempotency (
    org        text        NOT NULL,
    usr        text        NOT NULL,
    key        text        NOT NULL,
    body_hash  bytea       NOT NULL,
    reply_id   text        NOT NULL,
    queued     boolean     NOT NULL DEFAULT false,   -- its request is in the lane, so there is something to attach to
    created_at timestamptz NOT NULL,
    PRIMARY KEY (org, usr, key)
);
CREATE INDEX idempotency_reply ON idempotency (reply_id);
CREATE INDEX idempotency_age ON idempotency (created_at);

-- Requests stored and not yet in their lane: a row leaves when its request is queued.
CREATE TABLE outbox (
    reply_id   text        PRIMARY KEY REFERENCES replies ON DELETE CASCADE,
    org        text        NOT NULL,
    usr        text        NOT NULL,
    subject    text        NOT NULL,
    payload    bytea       NOT NULL,           -- GenerateRequest, its accepted_seq still 0
    created_at timestamptz NOT NULL
);
CREATE INDEX outbox_age ON outbox (created_at);

-- Logs and ENDED records still to be removed, because the reply was deleted or withdrawn. No owner: ids only, and a
-- reply sent with store=false may be here.
CREATE TABLE purges (
    reply_id text        PRIMARY KEY,
    cause    text        NOT NULL,             -- deleted | withdrawn
    due_at   timestamptz NOT NULL
);
CREATE INDEX purges_due ON purges (due_at);
