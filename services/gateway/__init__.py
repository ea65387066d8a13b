"""HTTP and SSE edge: API keys, parsing, the OpenAI-compatible doors, numbered events. Keeps nothing."""
