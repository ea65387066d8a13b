"""Every user of the bus tries every subject of the table on a running server; what should be refused must be."""

import json
import socket
from collections.abc import Iterator, Mapping

from ops.permissions import OPERATOR, Permissions, may_publish, may_subscribe, permissions
from shared.limits import LOG_SHARDS
from shared.subjects import Names

TIMEOUT_S = 5.0


def concrete(pattern: str) -> str:
    """A subject that the pattern covers."""
    return ".".join({"*": "some", ">": "some.thing"}.get(token, token) for token in pattern.split("."))


class Session:
    """A user's connection, one line at a time."""

    def __init__(self, host: str, port: int, user: str, password: str) -> None:
        self._socket = socket.create_connection((host, port), TIMEOUT_S)
        self._file = self._socket.makefile("rb")
        self._file.readline()  # INFO
        self._say(f"CONNECT {json.dumps({'user': user, 'pass': password, 'verbose': False, 'pedantic': False})}")
        assert not self.refused(), f"{user} cannot log in"

    def _say(self, line: str) -> None:
        self._socket.sendall(line.encode() + b"\r\n")

    def refused(self) -> bool:
        """Whether the server complained about anything said since the last time."""
        self._say("PING")
        complaint = False
        while (line := self._file.readline()) != b"PONG\r\n":
            assert line, "the server hung up"
            complaint |= line.startswith(b"-ERR")
        return complaint

    def publish(self, subject: str) -> bool:
        self._say(f"PUB {subject} 0\r\n")
        return not self.refused()

    def subscribe(self, subject: str) -> bool:
        self._say(f"SUB {subject} 1")
        allowed = not self.refused()
        self._say("UNSUB 1")
        return allowed

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def foreign(table: Mapping[str, Permissions], user: str) -> Iterator[tuple[str, str]]:
    """(verb, subject) of everything in the table that this user may not do. What it may is not tried: it would count."""
    services = [name for name in table if name != OPERATOR]
    for subject in sorted({concrete(pattern) for name in services for pattern in table[name].publish}):
        if not may_publish(table[user], subject):
            yield "publish", subject
    for pattern in sorted({pattern for name in services for pattern in table[name].subscribe} | {">", "_INBOX.>"}):
        if pattern not in table[user].subscribe and not may_subscribe(table[user], concrete(pattern)):
            yield "subscribe", pattern


def refusals(host: str, port: int, passwords: Mapping[str, str]) -> tuple[int, list[str]]:
    """How many attempts were made, and those that the server let pass."""
    table = permissions(Names("local"), LOG_SHARDS)
    tried, wrong = 0, []
    for user in table:
        if user == OPERATOR:
            continue
        session = Session(host, port, user, passwords[user])
        try:
            assert session.publish(f"_INBOX_{user}.self"), f"{user} may not use its own inbox"
            for verb, subject in foreign(table, user):
                tried += 1
                if getattr(session, verb)(subject):
                    wrong.append(f"{user} may {verb} {subject}")
        finally:
            session.close()
    return tried, wrong
