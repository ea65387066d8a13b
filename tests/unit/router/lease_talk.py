"""A lease in dialogue: what it is told and what it says, in one line each."""

import itertools
from typing import Any

from services.router import lease_events as ev
from services.router.leases import Lease, State
from shared.messages import (
    Accepted,
    Chunk,
    End,
    Entry,
    GenerateRequest,
    Open,
    RequestEcho,
    Sampling,
    SequencedEntry,
    pack_ids,
)
from shared.outcomes import EndReason
from shared.tiers import Tier
from shared.token_log import LogView

REPLY = "resp_local0000000000000000000000000000"
ME, OTHER = "router-me", "router-other"


def request(*, background: bool = False) -> GenerateRequest:
    accepted = Accepted(
        reply_id=REPLY,
        org="o",
        user="u",
        created_s=0.0,
        model="m",
        tier=Tier.FREE,
        budget=100,
        seed=1,
        input_tokens=3,
        deadline_s=600.0,
        echo=RequestEcho(background=background),
    )
    return GenerateRequest(
        accepted=accepted, accepted_seq=1, prompt=pack_ids([1, 2, 3]), block_hashes=b"", sampling=Sampling(seed=1)
    )


def delivered(number: int = 1, *, deadline_left_s: float = 600.0, background: bool = False) -> ev.Delivered:
    return ev.Delivered(
        reply_id=REPLY,
        request=request(background=background),
        ack_subject=f"ack.{number}",
        delivered=number,
        deadline_left_s=deadline_left_s,
    )


def opened(attempt: int = 1, replica: str = "r1", *, router: str = ME, tokens: int = 0, returned: int = 0) -> Open:
    return Open(
        attempt=attempt, replica=replica, model_version="1", first_index=tokens, router=router, returned=returned
    )


def chunk(first_index: int, attempt: int = 1) -> Chunk:
    return Chunk(attempt=attempt, first_index=first_index, ids=pack_ids([first_index]), text="a", text_ends=(1,))


def end(reason: EndReason = EndReason.STOP_TOKEN) -> End:
    return End(reason=reason, by="replica")


class Talk:
    """One lease, a clock, and the log as the shell would read it: entries at sequences 1, 2, 3, ..."""

    def __init__(self, first: ev.Delivered | None = None, *entries: Entry) -> None:
        self.now = 1000.0
        self.suspects: set[str] = set()
        self.log: list[Entry] = [request().accepted, *entries]
        self.lease = Lease(
            first or delivered(),
            router=ME,
            suspect=lambda replica, _: replica in self.suspects,
            tickets=itertools.count(1),
            now=self.now,
        )
        self.commands: list[ev.Command] = []
        self.ticket = 0  # of the command last asked
        self._hear(self.lease.start(self.now))

    def _hear(self, commands: list[ev.Command]) -> list[ev.Command]:
        self.commands = commands
        for command in commands:
            self.ticket = getattr(command, "ticket", self.ticket)
        return commands

    @property
    def state(self) -> State:
        return self.lease.state

    def tell(self, event: Any) -> list[ev.Command]:
        return self._hear(self.lease.on(event, self.now))

    def answer(self, kind: type[ev.Answer], **fields: Any) -> list[ev.Command]:
        """Answers the last command that wants one."""
        return self.tell(kind(reply_id=REPLY, ticket=self.ticket, **fields))

    def read(self) -> list[ev.Command]:
        """The shell reads the log as it stands."""
        view = LogView().apply_all(SequencedEntry(seq=seq, entry=entry) for seq, entry in enumerate(self.log, 1))
        return self.answer(ev.LogRead, view=view)

    def wait(self, seconds: float) -> list[ev.Command]:
        """Time passes, tick by tick; the commands of all ticks."""
        end_at, commands = self.now + seconds, []
        while self.now < end_at:
            self.now = min(end_at, max(self.lease.wake_at, self.now + 0.001))
            commands += self.tell(ev.Tick())
        return self._hear(commands)

    # --- ways to where a test begins

    def waiting(self) -> "Talk":
        self.read()
        assert self.state is State.WAITING
        return self

    def opening(self, replica: str = "r1") -> "Talk":
        self.tell(ev.Placed(reply_id=REPLY, replica=replica, model_version="1"))
        assert self.state is State.OPENING
        return self

    def dispatching(self, replica: str = "r1") -> "Talk":
        self.opening(replica)
        self.log.append(said(self.commands, ev.AppendOpen).entry)
        self.answer(ev.OpenAppended, seq=len(self.log))
        assert self.state is State.DISPATCHING
        return self

    def running(self, replica: str = "r1") -> "Talk":
        if self.state is State.READING:
            self.waiting()
        self.dispatching(replica)
        self.answer(ev.DispatchTaken, router=ME)
        assert self.state is State.RUNNING
        return self


def said(commands: list[ev.Command], kind: type[Any]) -> Any:
    """The one command of this kind."""
    found = [command for command in commands if isinstance(command, kind)]
    assert len(found) == 1, f"{len(found)} {kind.__name__} in {commands}"
    return found[0]


def kinds(commands: list[ev.Command]) -> list[str]:
    return [type(command).__name__ for command in commands]
