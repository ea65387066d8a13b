-- Seconds of a core (or a GPU), which is what is paid for: an engine second on eight cores is eight of them.
-- Attempts charged before this know their engine seconds only.
ALTER TABLE usage_records ADD COLUMN core_s double precision CHECK (core_s >= 0);
