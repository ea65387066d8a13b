"""A client that reads the wire byte by byte: what the tests compare, independent of the gateway's own code."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import httpx2 as httpx

TIMEOUT = httpx.Timeout(60.0, connect=5.0)
CLOSING = {"response.completed", "response.incomplete", "response.failed"}


@dataclass
class Heard:
    """What came over one or more connections of one reply."""

    reply_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    final: dict[str, Any] | None = None

    def take(self, event: dict[str, Any]) -> None:
        self.types.append(event["type"])
        self.numbers.append(event["sequence_number"])
        if event["type"] == "response.created":
            self.reply_id = event["response"]["id"]
        elif event["type"] == "response.output_text.delta":
            self.text += event["delta"]
            self.token_ids += event.get("token_ids", [])
        elif event["type"] in CLOSING:
            self.final = event["response"]

    @property
    def last(self) -> int:
        return self.numbers[-1]


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON of each event; asserts the framing that SDKs rely on."""
    block: dict[str, str] = {}
    for line in response.iter_lines():
        if line == "":
            if block:
                parsed = json.loads(block["data"])
                assert block["event"] == parsed["type"]
                assert block["id"] == str(parsed["sequence_number"])
                yield parsed
            block = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            assert name != "data" or "data" not in block, "one data line per event"
            block[name] = value


class Wire:
    """One key on one gateway."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def stream(self, body: dict[str, Any], headers: dict[str, str] | None = None, until: int | None = None) -> Heard:
        """Post a streamed response and read it; `until` cuts the connection after that event number."""
        body = {"stream": True, "include": ["chorus.token_ids"], **body}
        with self.http.stream("POST", "/v1/responses", json=body, headers=headers or {}) as response:
            return self._read(response, until)

    def resume(self, reply_id: str, after: int | None, into: Heard | None = None, *, until: int | None = None) -> Heard:
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        path = f"/v1/responses/{reply_id}?stream=true&include[]=chorus.token_ids"
        with self.http.stream("GET", path, headers=headers) as response:
            return self._read(response, until, into)

    @staticmethod
    def _read(response: httpx.Response, until: int | None, into: Heard | None = None) -> Heard:
        if response.status_code == 204:
            return into or Heard()
        if response.status_code != 200:
            response.read()
            raise AssertionError(f"{response.status_code}: {response.text}")
        heard = into or Heard()
        for event in events(response):
            heard.take(event)
            if heard.final is not None or (until is not None and heard.last >= until):
                return heard
        raise AssertionError(f"the stream of {heard.reply_id} ended without its last event")

    def post(self, path: str, body: dict[str, Any] | None = None, **kwargs: Any) -> httpx.Response:
        return self.http.post(path, json=body, **kwargs)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)
