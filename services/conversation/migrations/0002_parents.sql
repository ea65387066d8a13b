-- A reply that is deleted leaves the line: what followed it then follows what was before it.
CREATE INDEX replies_parent ON replies (parent_id) WHERE parent_id IS NOT NULL;
