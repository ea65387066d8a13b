"""Fuzz a running Chorus: `python -m tests.fuzz http://127.0.0.1:8080 KEY [COUNT] [SEED]`. Ends with 1 when it is at fault.

Some of the requests are good and ask for the longest reply: start it with `--stub --stub-tps 20000`.
"""

import asyncio
import json
import sys
import urllib.request

from tests.fuzz.requests import Fuzzer
from tests.fuzz.wire import fuzz


def made(url: str, key: str, path: str, body: dict[str, object]) -> str:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return str(json.loads(answer.read())["id"])


def main() -> int:
    url, key = sys.argv[1:3]
    count, seed = (int(value) for value in (*sys.argv[3:], *("20000", "1")[len(sys.argv) - 3 :]))
    conversation = made(url, key, "/v1/conversations", {"title": "fuzz"})
    reply = made(url, key, "/v1/responses", {"input": "hi", "conversation": conversation, "max_output_tokens": 8})
    statuses, wrong = asyncio.run(fuzz(url, key, Fuzzer(seed, [conversation, reply]), count))
    print(  # noqa: T201
        json.dumps({"requests": count, "seed": seed, "statuses": dict(sorted(statuses.items())), "wrong": len(wrong)})
    )
    print("\n".join(wrong[:20]))  # noqa: T201
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
