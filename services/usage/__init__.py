"""Usage and cost records to the ledger: durably, once per attempt, off the serving path."""
