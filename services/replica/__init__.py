"""The replica: one engine, its inbox on the bus, and its appends to token logs."""
