"""The router: lanes in, placed attempts out; it alone acks a lane message."""
