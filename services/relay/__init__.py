"""Reads token logs for clients: attach, resume, fan-out, presence, slow readers. Keeps nothing."""
