-- Conversations as people see them: a title, an order, branches.
ALTER TABLE conversations
    ADD COLUMN title      text        NOT NULL DEFAULT '',      -- '': not yet known
    ADD COLUMN updated_at timestamptz NOT NULL DEFAULT now(),
    ADD COLUMN version    bigint      NOT NULL DEFAULT 0,       -- one more with each reply that begins: a send names the one it saw
    ADD COLUMN epoch      bigint      NOT NULL DEFAULT 0;       -- one more whenever something that was said is taken back
CREATE INDEX conversations_newest ON conversations (org, usr, updated_at DESC, id DESC);

-- `items`: a turn without a reply, what was said before Chorus came in.
ALTER TABLE replies ADD COLUMN kind text NOT NULL DEFAULT 'reply';   -- reply | items

CREATE INDEX replies_in_flight ON replies (conversation_id) WHERE conversation_id IS NOT NULL AND status <> 'ended';
