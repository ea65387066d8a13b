"""What only a composed system shows: its images, its secrets, its proxy; containers killed, restarted, made anew."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.compose.permissions import refusals
from tests.compose.stack import Stack, docker
from tests.integration.system import eventually
from tests.integration.test_whole_path import follow_to_the_end, message
from tests.integration.wire import Heard, Wire

pytestmark = pytest.mark.timeout(3600)
SERVICES = ("gateway", "relay", "conversation", "router", "safety", "usage", "replica-stub")
GATEWAY_MB_MAX = 250


@pytest.fixture
def wire(stack: Stack) -> Iterator[Wire]:
    """Through the proxy."""
    with Wire(stack.proxy, stack.key()) as made:
        yield made


def killed_while_writing(wire: Wire, body: dict[str, Any], kill: Callable[[], None]) -> Heard:
    """A reply during which `kill` is called once it is being written."""
    heard = Heard()

    def when_writing() -> None:
        eventually(lambda: len(heard.token_ids) > 20, "the reply is being written")
        kill()

    thread = threading.Thread(target=when_writing)
    thread.start()
    follow_to_the_end([wire], body, heard)
    thread.join()
    return heard


def test_tokens_come_through_the_proxy_as_they_are_written(wire: Wire) -> None:
    """While the first tokens are read through the proxy, the reply is still being written."""
    body = {**message(300), "stream": True}
    with wire.http.stream("POST", "/v1/responses", json=body) as response:
        lines = response.iter_lines()
        created = next(line for line in lines if line.startswith("data: "))
        reply_id = created.split('"id":"', 1)[1].split('"', 1)[0]
        assert any("output_text.delta" in line for line in lines)
        assert wire.get(f"/v1/responses/{reply_id}").json()["status"] == "in_progress"


def running_replica(stack: Stack, service: str = "replica-stub") -> str:
    """The replica of the fast model that is writing."""
    names = (f"{service}-1", f"{service}-2")
    return eventually(
        lambda: next((name for name in names if stack.metrics(name)["chorus_replica_running"]), None),
        "a replica writes",
    )


def test_docker_kill_of_the_writing_replica(stack: Stack, wire: Wire) -> None:
    """The replica that writes a reply is killed: the other one writes on what it would have written."""
    reference = wire.stream(message(300))
    victims: list[str] = []

    def kill() -> None:
        victims.append(running_replica(stack))
        docker("kill", stack.container(victims[0]))

    heard = killed_while_writing(wire, message(300), kill)
    docker("start", stack.container(victims[0]))
    assert (heard.text, heard.token_ids) == (reference.text, reference.token_ids)
    assert heard.numbers == sorted(set(heard.numbers))
    eventually(lambda: stack.healthy(victims[0]), "the replica is back", 60)


@pytest.mark.parametrize("victim", ["gateway-1", "gateway-2", "relay-1", "relay-2"])
def test_docker_kill_of_a_door(stack: Stack, wire: Wire, victim: str) -> None:
    """A door is killed during a reply: the client comes again to the same address and gets the rest, nothing twice."""
    reference = wire.stream(message(300))

    def kill() -> None:
        docker("kill", stack.container(victim))

    heard = killed_while_writing(wire, message(300), kill)
    docker("start", stack.container(victim))
    assert (heard.text, heard.token_ids) == (reference.text, reference.token_ids)
    assert heard.numbers == sorted(set(heard.numbers))
    eventually(lambda: stack.healthy(victim), f"{victim} is back", 60)


def test_every_image_is_slim_and_its_user_ordinary(stack: Stack) -> None:
    """No service runs as root or has a compiler; none of these holds torch; the gateway's image stays small."""
    for service in SERVICES:
        image = f"chorus-{service}"
        script = "id -u; command -v cc gcc g++ clang ld; python -c 'import importlib.util as u; print(u.find_spec(\"torch\"))'"
        found = docker("run", "--rm", "--network", "none", "--entrypoint", "sh", image, "-c", script).split()
        assert found[0] != "0", image
        assert found[1:] == ["None"], image
    assert int(docker("image", "inspect", "--format", "{{.Size}}", "chorus-gateway")) <= GATEWAY_MB_MAX * 1000**2


def test_a_service_reads_no_secret_of_another(stack: Stack) -> None:
    """In the shared volume each container reads its own variables and nobody else's passwords."""
    script = "cd /run/chorus; for f in *.env *.conf *.json *.password; do cat $f >/dev/null 2>&1 && echo $f; done; true"
    for service in SERVICES:
        own = "replica.env" if service.startswith("replica") else f"{service}.env"
        assert stack.execute(f"{service}-1", "sh", "-c", script).split() == [own]


@pytest.mark.parametrize("profiles", ["cpu", "gpu", "stub,metrics", "cpu,metrics,tools"])
def test_every_profile_is_understood(stack: Stack, profiles: str) -> None:
    """This machine's Compose finds nothing wrong with any profile, and all that it needs."""
    assert {"proxy", "setup"} <= set(stack.compose("config", "--services", profiles=profiles).split())
    stack.compose("config", "--quiet", profiles=profiles)


def test_no_secret_is_in_the_configuration(stack: Stack) -> None:
    """What compose knows of the containers holds no password and no key."""
    shown = stack.compose("config") + "".join(str(stack.inspect(name)["Config"]["Env"]) for name in stack.containers())
    assert "sk-chorus" not in shown
    for secret in secrets(stack):
        assert secret not in shown


def test_each_user_of_the_bus_is_refused_what_is_not_its_own(stack: Stack) -> None:
    """Every subject of every service, tried as every other service: refused by the server unless the table allows it."""
    host, _, port = stack.published("nats-1", 4222).rpartition(":")
    tried, wrong = refusals(host, int(port), credentials(stack)["nats"])
    assert not wrong, "\n".join(wrong)
    assert tried > 500


def test_restart_of_everything_keeps_history(stack: Stack, wire: Wire) -> None:
    """After a restart of every container the reply is there, and the next turn continues it."""
    before = wire.post("/v1/responses", message(20)).json()
    stack.compose("restart", "--timeout", "30")
    stack.until_ready()
    check_history(wire, before)


@pytest.mark.parametrize("order", [("setup-1", "model-stub-1"), ("model-stub-1", "setup-1")])
def test_the_steps_before_the_services_may_run_in_any_order(stack: Stack, wire: Wire, order: tuple[str, str]) -> None:
    """A restart of everything keeps no order: whichever step is last, services that start afterwards find their model."""
    for step in order:
        docker("start", "--attach", stack.container(step))
    for service in ("gateway-1", "replica-stub-1"):
        docker("restart", stack.container(service))
    stack.until_ready()
    assert wire.stream(message(4)).final is not None


def test_down_and_up_again_loses_nothing(stack: Stack, wire: Wire) -> None:
    """Containers removed and made anew: same passwords, same keys, the history is there."""
    before, passwords, keys = wire.post("/v1/responses", message(20)).json(), secrets(stack), stack.ready["keys"]
    stack.down()
    assert not stack.containers()
    stack.compose("up", "-d")
    stack.until_ready()
    assert secrets(stack) == passwords
    assert stack.ready["keys"] == keys
    check_history(wire, before)


def check_history(wire: Wire, before: dict) -> None:
    def stored() -> httpx.Response | None:
        answer = wire.get(f"/v1/responses/{before['id']}")
        return answer if answer.status_code == 200 else None

    assert eventually(stored, "the reply is there", 60).json()["output"] == before["output"]
    follow = wire.post("/v1/responses", message(4, previous_response_id=before["id"]))
    assert follow.status_code == 200, follow.text
    assert follow.json()["usage"]["input_tokens"] > before["usage"]["input_tokens"] + 20


def credentials(stack: Stack) -> dict:
    volume = next(m["Name"] for m in stack.inspect("setup-1")["Mounts"] if m["Destination"] == "/run/chorus")
    script = ("--rm", "--network", "none", "--user", "0", "-v", f"{volume}:/run/chorus:ro", "--entrypoint", "cat")
    return json.loads(docker("run", *script, "chorus-ops", "/run/chorus/credentials.json"))


def secrets(stack: Stack) -> list[str]:
    known = credentials(stack)
    return sorted([*known["nats"].values(), known["postgres"], known["valkey"]])
