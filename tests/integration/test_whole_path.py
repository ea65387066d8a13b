"""A message in, a reply streaming back, through every service as its own process (scripted replicas)."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import httpx2 as httpx
import openai
import pytest

from tests.integration.system import System, eventually, running
from tests.integration.wire import Heard, Wire

pytestmark = pytest.mark.timeout(240)
TPS = 60
FAST = "stub"


class Connect(Protocol):
    def __call__(self, gateway: int, tier: str = "paid") -> Wire: ...


@pytest.fixture(scope="module")
def chorus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("whole") / "data", "--stub", "--stub-tps", str(TPS)) as system:
        yield system


@pytest.fixture
def connect(chorus: System) -> Iterator[Connect]:
    """Connections to a gateway by its index, closed at the end; may be called from threads."""
    with ExitStack() as stack:
        yield lambda gateway, tier="paid": stack.enter_context(Wire(chorus.gateways[gateway], chorus.key(tier)))


@pytest.fixture
def wires(connect: Connect) -> list[Wire]:
    return [connect(0), connect(1)]


def message(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": FAST, "input": "Plan a day in Hampi", "max_output_tokens": tokens, "seed": 7, **more}


def start_background(wire: Wire, tokens: int, **more: Any) -> str:
    answer = wire.post("/v1/responses", message(tokens, background=True, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def of_replicas(chorus: System, sample: str) -> float:
    """A gauge or counter summed over the replicas."""
    names = [service["name"] for service in chorus.ready["services"] if service["name"].startswith("replica-")]
    pages = [chorus.metrics(name) for name in names]
    return sum(value for page in pages for name, value in page.items() if name.split("{")[0] == sample)


def blocks_free(chorus: System) -> float:
    return of_replicas(chorus, "chorus_replica_blocks_free")


def generated(chorus: System) -> float:
    return of_replicas(chorus, "chorus_replica_tokens_sampled_total")


def idle_blocks(chorus: System) -> float:
    """All blocks, once all are free."""
    free = blocks_free(chorus)
    return free if free == of_replicas(chorus, "chorus_replica_blocks") else 0


def test_streamed_reply_has_the_events_in_order(wires: list[Wire]) -> None:
    """A streamed reply opens, writes and closes in the order that SDKs expect, numbered upwards."""
    heard = wires[0].stream(message(20))
    kinds = [kind for kind in heard.types if kind != "response.queued"]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert heard.numbers == sorted(set(heard.numbers))
    assert heard.final is not None
    assert heard.final["usage"]["output_tokens"] == 20 == len(heard.token_ids)
    assert heard.final["incomplete_details"] == {"reason": "max_output_tokens"}


def test_log_probabilities_come_with_their_tokens_by_every_door(chorus: System) -> None:
    """Asked for by the official client, streamed and whole: one for each token, their texts joined are the text."""
    client = openai.OpenAI(base_url=f"{chorus.gateways[0]}/v1", api_key=chorus.key("paid"))
    asked: dict[str, Any] = {"model": FAST, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=1).choices[0]
    assert whole.logprobs is not None
    told = [list(whole.logprobs.content or ())]
    stream = client.chat.completions.create(**asked, logprobs=True, top_logprobs=1, stream=True)
    pieces = [chunk.choices[0] for chunk in stream]
    told.append([entry for piece in pieces if piece.logprobs is not None for entry in piece.logprobs.content or ()])
    streamed = "".join(piece.delta.content or "" for piece in pieces)
    response = client.responses.create(
        model=FAST, input="hi", max_output_tokens=12, include=["message.output_text.logprobs"], top_logprobs=1
    )
    told.append(list(response.output[0].content[0].logprobs))
    for entries, text in zip(told, (whole.message.content, streamed, response.output_text), strict=True):
        assert len(entries) == 12
        assert "".join(entry.token for entry in entries) == text
        assert all(entry.logprob == 0.0 and entry.top_logprobs[0].token == entry.token for entry in entries)


def test_both_gateways_tell_the_same_story(wires: list[Wire]) -> None:
    """A finished reply replayed by the other gateway has the same numbers for the same text."""
    heard = wires[0].stream(message(40))
    again = wires[1].resume(heard.reply_id, None)
    assert (again.text, again.token_ids) == (heard.text, heard.token_ids)
    assert again.numbers[0] == 0
    assert again.last == heard.last


def test_a_cut_at_every_token_resumes_on_the_other_gateway(wires: list[Wire]) -> None:
    """Cut after any token, the rest comes from the other gateway: text and token ids as in the uncut reply."""
    whole = wires[0].stream(message(101))
    assert len(whole.token_ids) == 101

    def cut(index: int) -> tuple[str, list[int]]:
        number = 1000 + 16 * index
        first = Heard()
        texts = wires[0].get(f"/v1/responses/{whole.reply_id}?include[]=chorus.token_ids").json()
        ids = texts["chorus"]["token_ids"]
        rest = wires[1].resume(whole.reply_id, number, first)
        return rest.text, ids[: index + 1] + rest.token_ids

    for index in range(101):
        text, ids = cut(index)
        assert ids == whole.token_ids, f"token {index}"
        assert whole.text.endswith(text), f"token {index}"
        assert len(text) < len(whole.text) or index < 0


def test_live_cuts_resume_on_the_other_gateway(wires: list[Wire], connect: Connect) -> None:
    """Connections cut while the reply is being written go on elsewhere, without a token lost or repeated."""
    reference = wires[0].stream(message(60))

    def one(index: int) -> Heard:
        mine = [
            Wire(str(wire.http.base_url), wire.http.headers["Authorization"].removeprefix("Bearer ")) for wire in wires
        ]
        heard = mine[0].stream(message(60), until=1000 + 16 * index)
        return mine[1].resume(heard.reply_id, heard.last, heard)

    with ThreadPoolExecutor(12) as pool:
        for heard in pool.map(one, range(0, 60, 5)):
            assert heard.text == reference.text
            assert heard.token_ids == reference.token_ids
            assert heard.numbers == sorted(set(heard.numbers))


def test_the_official_client_works_unchanged(chorus: System) -> None:
    """openai-python streams, retrieves, resumes in the background, cancels, and counts tokens in chat."""
    with openai.OpenAI(base_url=chorus.gateways[0] + "/v1", api_key=chorus.key(), max_retries=0) as client:
        check_responses(client)
        check_background(client)
        check_chat(client)


def check_responses(client: openai.OpenAI) -> None:
    deltas = [
        event.delta
        for event in client.responses.create(model=FAST, input="hello", max_output_tokens=12, stream=True)
        if event.type == "response.output_text.delta"
    ]
    whole = client.responses.create(model=FAST, input="hello", max_output_tokens=12)
    assert "".join(deltas)
    assert whole.usage is not None
    assert whole.usage.output_tokens == 12
    assert client.responses.retrieve(whole.id).output_text == whole.output_text
    assert {model.id for model in client.models.list()} >= {FAST, f"{FAST}-mini"}


def check_background(client: openai.OpenAI) -> None:
    background = client.responses.create(model=FAST, input="hello", max_output_tokens=60, background=True, stream=True)
    seen = []
    for event in background:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    background.close()
    reply_id = seen[0].response.id
    rest = list(client.responses.retrieve(reply_id, stream=True, starting_after=seen[-1].sequence_number))
    assert rest[-1].type == "response.incomplete"
    text = "".join(e.delta for e in [*seen, *rest] if e.type == "response.output_text.delta")
    assert text == client.responses.retrieve(reply_id).output_text

    running_one = client.responses.create(model=FAST, input="hello", max_output_tokens=2000, background=True)
    cancelled = client.responses.cancel(running_one.id)
    assert cancelled.status == "cancelled"


def check_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=FAST, messages=[{"role": "user", "content": "hi"}], max_tokens=8)
    assert chat.usage is not None
    assert (chat.usage.completion_tokens, chat.choices[0].finish_reason) == (8, "length")
    chunks = list(
        client.chat.completions.create(
            model=FAST,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1


def test_fifty_sends_with_one_key_are_one_reply(chorus: System, connect: Connect) -> None:
    """The same Idempotency-Key sent 50 times in parallel over both gateways makes one reply and 50 equal streams."""
    before, key = generated(chorus), {"Idempotency-Key": f"fifty-{uuid4().hex}"}

    def one(index: int) -> Heard:
        return connect(index % 2).stream(message(30, seed=None), headers=key)

    with ThreadPoolExecutor(50) as pool:
        heard = list(pool.map(one, range(50)))
    assert len({h.reply_id for h in heard}) == 1
    assert len({h.text for h in heard}) == 1
    assert all(h.token_ids == heard[0].token_ids for h in heard)
    eventually(lambda: generated(chorus) >= before + 30, "the tokens are counted")
    assert generated(chorus) == before + 30
    assert connect(0).post("/v1/responses", message(31), headers=key).status_code == 422


def test_stop_mid_reply_keeps_what_was_shown_and_the_next_turn_sees_it(chorus: System, wires: list[Wire]) -> None:
    """A stopped reply ends once, its blocks come back, the partial text is stored and is part of the next turn."""
    baseline = eventually(lambda: idle_blocks(chorus), "all blocks are free")
    reply_id = start_background(wires[0], 2000)
    heard = Heard()

    def stop_soon() -> None:
        eventually(lambda: len(heard.token_ids) > 5, "some text is there")
        assert wires[1].post(f"/v1/responses/{reply_id}/cancel").json()["status"] == "cancelled"

    thread = threading.Thread(target=stop_soon)
    thread.start()
    wires[0].resume(reply_id, None, heard)
    thread.join()
    assert heard.final is not None
    assert heard.final["status"] == "cancelled"
    assert sum(kind in {"response.incomplete", "response.completed", "response.failed"} for kind in heard.types) == 1
    assert 0 < len(heard.token_ids) < 2000
    eventually(lambda: blocks_free(chorus) == baseline, "the blocks are free again", 5)
    stored = wires[0].get(f"/v1/responses/{reply_id}").json()
    assert stored["output"][0]["content"][0]["text"] == heard.text
    follow = wires[0].post("/v1/responses", message(4, previous_response_id=reply_id)).json()
    alone = wires[0].post("/v1/responses", message(4)).json()
    assert follow["usage"]["input_tokens"] >= alone["usage"]["input_tokens"] + len(heard.token_ids)
    again = wires[0].post(f"/v1/responses/{reply_id}/cancel").json()
    assert (again["status"], again["output"]) == (stored["status"], stored["output"])


def test_foreign_and_unknown_ids_give_the_same_404(wires: list[Wire], connect: Connect) -> None:
    """Another user's reply cannot be told from one that never was, on any verb."""
    reply_id = start_background(wires[0], 4)
    foreign = connect(0, "free")
    unknown = "resp_local00" + "0" * 26

    def answers(target: str) -> list[tuple[int, Any]]:
        calls = [
            foreign.get(f"/v1/responses/{target}"),
            foreign.get(f"/v1/responses/{target}?stream=true"),
            foreign.get(f"/v1/responses/{target}/input_items"),
            foreign.post(f"/v1/responses/{target}/cancel"),
            foreign.http.delete(f"/v1/responses/{target}"),
            foreign.post("/v1/responses", message(4, previous_response_id=target)),
        ]
        return [(call.status_code, json.loads(call.text.replace(target, "ID"))) for call in calls]

    assert answers(reply_id) == answers(unknown)
    assert [status for status, _ in answers(unknown)] == [404] * 6


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "no-such-model", "input": "x"}, 404, "model"),
        ({"model": FAST}, 400, "input"),
        ({"model": FAST, "input": 5}, 400, "input"),
        ({"model": FAST, "input": "x", "temperature": 9}, 400, "temperature"),
        ({"model": FAST, "input": "x", "max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"model": FAST, "input": "word " * 20_000}, 400, "input"),
    ],
)
def test_bad_input_is_refused_in_openai_shape(wires: list[Wire], body: dict[str, Any], status: int, param: str) -> None:
    """What cannot be served is refused early, with the field that is wrong."""
    answer = wires[0].post("/v1/responses", body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param


def test_a_key_is_needed(chorus: System) -> None:
    """Without a valid key nothing is told."""
    with Wire(chorus.gateways[0], "sk-chorus-nobody") as stranger:
        assert stranger.get("/v1/models").status_code == 401


def test_flagged_output_ends_as_content_filter(wires: list[Wire]) -> None:
    """A message that the input check flags is refused before anything is generated."""
    answer = wires[0].post("/v1/responses", message(4) | {"input": "chorus-canary-flag please"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "content_policy_violation"


@pytest.mark.parametrize("victim", ["gateway-1", "relay-1", "conversation-1", "router-1"])
def test_a_killed_service_does_not_cost_the_reply(chorus: System, wires: list[Wire], victim: str) -> None:
    """Kill -9 of a service during a reply: the client resumes and ends with the undisturbed text."""
    reference = wires[1].stream(message(150))
    heard = Heard()
    killed: list[int] = []

    def kill_when_writing() -> None:
        eventually(lambda: len(heard.token_ids) > 20, "the reply is being written")
        killed.append(chorus.kill(victim, signal.SIGKILL))

    thread = threading.Thread(target=kill_when_writing)
    thread.start()
    follow_to_the_end(wires, message(150), heard)
    thread.join()
    assert heard.text == reference.text
    assert heard.token_ids == reference.token_ids
    assert heard.numbers == sorted(set(heard.numbers))
    chorus.restarted(victim, killed[0])


def follow_to_the_end(wires: list[Wire], body: dict[str, Any], heard: Heard) -> None:
    """What a client does: post, and resume on whichever gateway answers until a closing event came."""
    until = time.monotonic() + 40
    started = False
    while heard.final is None:
        assert time.monotonic() < until, f"no end; {len(heard.token_ids)} tokens so far"
        for wire in wires:
            try:
                if started:
                    wire.resume(heard.reply_id, heard.last, heard)
                else:
                    stream_into(wire, body, heard)
            except (OSError, AssertionError, httpx.HTTPError):
                time.sleep(0.1)
            started = bool(heard.reply_id)
            if heard.final is not None:
                return


def stream_into(wire: Wire, body: dict[str, Any], heard: Heard) -> None:
    whole = {"stream": True, "include": ["chorus.token_ids"], **body}
    with wire.http.stream("POST", "/v1/responses", json=whole) as response:
        wire._read(response, None, heard)


def test_the_log_outlives_the_bus(chorus: System, wires: list[Wire]) -> None:
    """Kill -9 of the bus during a reply: its log is there after the restart, and the reply comes to an end."""
    reply_id = start_background(wires[0], 200)
    before = wires[0].resume(reply_id, None, until=1000)
    nats = chorus.kill("nats")
    eventually(lambda: chorus.pid("nats") not in (0, nats), "the supervisor restarted the bus", 20)

    def over() -> bool:
        try:
            answer = wires[0].get(f"/v1/responses/{reply_id}")
        except httpx.HTTPError:
            return False
        return answer.status_code == 200 and answer.json()["status"] in {"completed", "incomplete", "failed"}

    eventually(over, "the reply came to an end", 40)
    heard = wires[1].resume(reply_id, None)
    assert heard.token_ids[: len(before.token_ids)] == before.token_ids
    assert heard.text.startswith(before.text)


def test_data_folder_holds_no_secret_for_others(chorus: System) -> None:
    """What `chorus up` writes about keys and passwords is readable by its owner only."""
    assert (Path(chorus.data) / "ready.json").stat().st_mode & 0o077 == 0
