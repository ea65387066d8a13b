"""Who may say and hear what on the bus: one NATS user per service, each with its own inbox.

    gateway ──ask──> conversation ──lane──> router ──dispatch──> replica ──chunks──> token logs ──live──> relay, safety
       ^                  ^                    │                                                           │
       └── frames ────────┼──── ENDED ─────────┘                                                           │
             └────────────┼───────────────────────────── relay <───────────────────────────────────────────┘

The subjects are those of `shared.subjects`. An answer goes to the asker's inbox: `responds` lets a service publish
there, once per request it received, and nowhere else. A wildcard stands for whole subject tokens only, so the log
buckets are named one by one.
"""

from dataclasses import dataclass

from shared.subjects import Names
from shared.tiers import Tier

SERVICES = ("gateway", "conversation", "router", "replica", "relay", "safety", "usage", "fleet")
OPERATOR = "ops"
USERS = (*SERVICES, OPERATOR)

_API = "$JS.API"
_RESPONDERS = frozenset({"conversation", "replica", "relay", "safety"})


@dataclass(frozen=True)
class Permissions:
    """Subject patterns one user may publish to and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    responds: bool = False


def inbox_prefix(user: str) -> str:
    """Under this a user's answers arrive; nobody else may listen there."""
    return f"_INBOX_{user}"


def permissions(names: Names, shards: int) -> dict[str, Permissions]:
    """Every user's permissions in one region with `shards` log buckets."""
    bus = _Patterns(names, shards)
    said, heard = _said(names, bus), _heard(names, bus)
    table = {
        user: Permissions(
            publish=(f"{inbox_prefix(user)}.>", names.journal(user), *said[user]),
            subscribe=(f"{inbox_prefix(user)}.>", *heard[user]),
            responds=user in _RESPONDERS,
        )
        for user in SERVICES
    }
    table[OPERATOR] = Permissions(publish=(">",), subscribe=(">",))
    return table


def _said(names: Names, bus: "_Patterns") -> dict[str, list[str]]:
    """What each service publishes, beside its own inbox and journal."""
    return {
        "gateway": [
            names.conversation("*"),
            names.relay_open,
            names.credit("*"),
        ],
        "conversation": [
            *bus.append_logs,
            *bus.read_logs,
            *bus.purge,
            *(names.lane_filter(tier) for tier in Tier),
            names.cancel("*"),
            names.safety_check,
            *bus.consume(names.ended_stream),
            *bus.declare(),
        ],
        "router": [
            *bus.append_logs,
            *bus.read_logs,
            names.dispatch("*"),
            names.ask("*"),
            names.blocks_snapshot("*"),
            names.ended("*"),
            names.cancel("*"),
            names.queue_filter,
            names.safety_watch,
            *(pattern for tier in Tier for pattern in bus.consume(names.lane_stream(tier))),
            *bus.declare(),
        ],
        "replica": [
            *bus.append_logs,
            *bus.read_logs,
            names.health("*"),
            names.blocks("*"),
            names.attempt_over("*"),
            names.usage("*"),
            names.safety_check,
            *(bus.acknowledge(names.lane_stream(tier)) for tier in Tier),  # it extends; it neither acks nor naks
        ],
        "relay": [
            *bus.read_logs,
            names.frames("*", "*"),
            names.presence("*"),
            names.relay_alive,
        ],
        "safety": [
            *bus.append_logs,
            *bus.read_logs,
            names.cancel("*"),
            names.conversation("withdraw"),
            names.safety_watch,  # handing its watches over when it leaves
        ],
        "usage": [*bus.consume(names.usage_stream), *bus.declare(names.usage_stream)],
        "fleet": [names.drain("*"), *bus.state_bucket],
    }


def _heard(names: Names, bus: "_Patterns") -> dict[str, list[str]]:
    """What each service subscribes to, beside its own inbox."""
    return {
        "gateway": [names.frames("*", "*"), names.relay_alive, names.keys],
        "conversation": [names.conversation("*")],
        "router": [
            names.health("*"),
            names.blocks("*"),
            names.presence("*"),
            names.cancel("*"),
            names.attempt_over("*"),
        ],
        "replica": [
            names.dispatch("*"),
            names.ask("*"),
            names.blocks_snapshot("*"),
            names.cancel("*"),
            names.drain("*"),
            names.presence("*"),
        ],
        "relay": [names.relay_open, names.credit("*"), names.queue_filter, *bus.live],
        "safety": [names.safety_check, names.safety_watch, *bus.live],
        "usage": [],
        "fleet": [names.health("*"), names.queue_filter],
    }


class _Patterns:
    """JetStream subjects by what they are for."""

    def __init__(self, names: Names, shards: int) -> None:
        logs = [names.log_stream(shard) for shard in range(shards)]
        self._consumed = [*(names.lane_stream(tier) for tier in Tier), names.ended_stream, names.usage_stream]
        self._streams = [*logs, *self._consumed, names.journal_stream]
        self.append_logs = [names.log_filter(shard) for shard in range(shards)]
        self.live = [names.live_filter(shard) for shard in range(shards)]
        # The bare subject takes a batched request; with a subject behind it, the last entry of that subject.
        self.read_logs = [f"{_API}.DIRECT.GET.{log}{tail}" for log in logs for tail in ("", ".>")]
        self.purge = [f"{_API}.STREAM.PURGE.{name}" for name in (*logs, names.ended_stream)]
        state = f"{names.region}_fleet"
        self.state_bucket = [
            f"$KV.{state}.>",
            f"{_API}.DIRECT.GET.KV_{state}.>",
            *(f"{_API}.STREAM.{verb}.KV_{state}" for verb in ("INFO", "CREATE", "UPDATE")),
        ]

    def declare(self, only: str | None = None) -> list[str]:
        """The idempotent apply step: streams (all, or one) and their durable consumers; never their removal."""
        streams = [name for name in self._streams if only in (None, name)]
        consumed = [name for name in self._consumed if only in (None, name)]
        return [
            *(f"{_API}.STREAM.{verb}.{name}" for name in streams for verb in ("INFO", "CREATE", "UPDATE")),
            *(f"{_API}.CONSUMER.CREATE.{name}.>" for name in consumed),
        ]

    def consume(self, stream: str) -> list[str]:
        """Pull from the durable consumers of `stream`, look at them, acknowledge."""
        return [
            f"{_API}.CONSUMER.INFO.{stream}.*",
            f"{_API}.CONSUMER.MSG.NEXT.{stream}.*",
            self.acknowledge(stream),
        ]

    def acknowledge(self, stream: str) -> str:
        return f"$JS.ACK.{stream}.>"


def matches(pattern: str, subject: str) -> bool:
    """Whether a NATS pattern (`*` one token, `>` one or more at the end) covers a subject."""
    wanted, given = pattern.split("."), subject.split(".")
    for index, part in enumerate(wanted):
        if part == ">":
            return len(given) > index
        if index >= len(given) or part not in ("*", given[index]):
            return False
    return len(wanted) == len(given)


def may_publish(who: Permissions, subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in who.publish)


def may_subscribe(who: Permissions, subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in who.subscribe)
