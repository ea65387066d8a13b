-- What each attempt cost. One row per attempt of a reply, whatever the number of deliveries; ids only, never text.
CREATE TABLE usage_records (
    reply_id      text             NOT NULL,
    attempt       integer          NOT NULL CHECK (attempt >= 1),
    org_id        text             NOT NULL,
    user_id       text             NOT NULL,
    tier          text             NOT NULL,
    model         text             NOT NULL,
    replica       text             NOT NULL,
    input_tokens  bigint           NOT NULL CHECK (input_tokens >= 0),
    cached_tokens bigint           NOT NULL CHECK (cached_tokens BETWEEN 0 AND input_tokens),
    output_tokens bigint           NOT NULL CHECK (output_tokens >= 0),
    engine_s      double precision NOT NULL CHECK (engine_s >= 0),
    at            timestamptz      NOT NULL,
    recorded_at   timestamptz      NOT NULL DEFAULT now(),
    PRIMARY KEY (reply_id, attempt)
);

CREATE INDEX usage_records_by_user ON usage_records (org_id, user_id, at);
CREATE INDEX usage_records_by_time ON usage_records (at);
