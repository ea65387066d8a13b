"""What must hold, whatever the code does: looked at from outside, from the logs, the lane, the screens and the rows.

None of it knows leases, writers or merges; each checker states a fact and raises RuleBrokenError with its own name.

    LogRules      linear, contiguous, one end, only the last open writes, and every token is the script's
    Screens       a screen shows the log in its order: nothing else, nothing left out, nothing twice
    Attempts      bounded; nobody at work is replaced; what runs was opened for it
    Lane          keeps a message until an end stands and ENDED has the reply
    Turns         one reply in flight per conversation
    Ledger        reserved == settled + refunded, each reply once
"""

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

from shared.limits import IDLE_END_S
from shared.messages import Accepted, Chunk, Dispatch, End, EndedReply, Entry, Open, SequencedEntry, unpack_ids
from shared.outcomes import EndReason
from sim.opens import may_go_on, too_many
from sim.script import token
from sim.trace import brief
from sim.world import Process, RuleBrokenError, World

if TYPE_CHECKING:
    from sim.actors.client import Client
    from sim.actors.replica import Replica
    from sim.actors.router import Router
    from sim.bus import Queued
    from sim.region import Region

FRESH_S = 2.5  # a writer that appended this lately, and was heard of all the while, is at work
COMMANDS_PER_S_MAX = 80  # of one router, for one reply


class Facts:
    """What is known of one reply from its log."""

    def __init__(self, accepted: Accepted) -> None:
        self.accepted = accepted
        self.ids: list[int] = []
        self.text = ""
        self.opens: list[Open] = []
        self.end: End | None = None
        self.given_back: set[int] = set()
        self.over: set[int] = set()


class Checks:
    """All checkers of a region. The region's parts tell it what happens; it believes none of them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.region: Region
        self.facts: dict[str, Facts] = {}
        self._turns: dict[str, list[str]] = defaultdict(list)
        self._asked_for: dict[str, set[EndReason]] = defaultdict(set)
        self._reserved: dict[str, int] = {}
        self._settled: dict[str, int] = {}
        self._commands: dict[tuple[str, str], deque[float]] = {}
        self._given_back: set[tuple[str, int]] = set()
        self._over: set[tuple[str, int]] = set()
        self.failovers = 0

    def fail(self, check: str, detail: str) -> None:
        raise RuleBrokenError(check, f"{detail} (at {self.world.now:.4f} s)")

    # --- the logs

    def appended(self, reply_id: str, item: SequencedEntry, by: Process) -> None:
        """Called with each entry that a log takes, before it stands there."""
        entry = item.entry
        facts = self.facts.get(reply_id)
        if facts is None:
            self._accepted(reply_id, entry, by)
            return
        if facts.end is not None:
            self.fail("exactly one end, nothing after it", f"{by.name} appended {brief(entry)}")
        if isinstance(entry, Chunk):
            self._chunk(facts, entry, by)
        elif isinstance(entry, Open):
            self._open(reply_id, facts, entry, by)
        elif isinstance(entry, End):
            self._end(reply_id, facts, entry, by)
        else:
            self.fail("accepted once", f"{by.name} appended {brief(entry)} to a log that has begun")

    def _accepted(self, reply_id: str, entry: Entry, by: Process) -> None:
        if not isinstance(entry, Accepted):
            self.fail("a log begins with accepted", f"{by.name} appended {brief(entry)}")
            return
        facts = self.facts[reply_id] = Facts(entry)
        conversation = facts.accepted.echo.conversation_id
        if conversation is None:
            return
        for earlier in self._turns[conversation]:
            if self.facts[earlier].end is None:
                self.fail("one reply in flight per conversation", f"{reply_id[-4:]} begins beside {earlier[-4:]}")
        self._turns[conversation].append(reply_id)

    def _chunk(self, facts: Facts, chunk: Chunk, by: Process) -> None:
        if chunk.first_index != len(facts.ids):
            detail = f"{by.name} wrote from {chunk.first_index} after {len(facts.ids)} tokens"
            self.fail("indices are contiguous", detail)
        if not facts.opens or chunk.attempt != facts.opens[-1].attempt:
            self.fail("only the last open may write", f"attempt {chunk.attempt} by {by.name}")
        for each in unpack_ids(chunk.ids):
            if each != token(facts.accepted.seed, len(facts.ids)):
                self.fail("a token is what an undisturbed replica writes", f"{by.name}, token {len(facts.ids)}")
            facts.ids.append(each)
        facts.text += chunk.text

    def _open(self, reply_id: str, facts: Facts, entry: Open, by: Process) -> None:
        if entry.attempt != len(facts.opens) + 1:
            self.fail("attempts count up by one", f"attempt {entry.attempt} after {len(facts.opens)}")
        if entry.first_index != len(facts.ids):
            detail = f"{entry.first_index}, but there are {len(facts.ids)}"
            self.fail("an open says how many tokens stand", detail)
        if too_many([*facts.opens, entry], len(facts.ids)):
            self.fail("attempts are bounded", f"attempt {entry.attempt}, {entry.returned} given back")
        if facts.opens:
            self.failovers += 1
            self._open_needed(reply_id, facts.opens[-1], by)
        facts.opens.append(entry)

    def _open_needed(self, reply_id: str, before: Open, by: Process) -> None:
        """Whoever is at work, heard of and not refused shall not be replaced."""
        key = (reply_id, before.attempt)
        if key in self._given_back or key in self._over:
            return
        replica, router = self.region.replica(before.replica), self.region.router(by.name)
        heard = self.region.undisturbed(replica, FRESH_S) and self.region.undisturbed(router, FRESH_S)
        grew = self.world.now - self.region.bus.logs[reply_id].grew_s < FRESH_S
        if replica.at_work(*key) and heard and grew:
            self.fail("nobody at work is replaced", f"{by.name} replaced {replica.name}, attempt {before.attempt}")

    def _end(self, reply_id: str, facts: Facts, end: End, by: Process) -> None:
        facts.end = end
        asked = self._asked_for[reply_id]
        if end.reason in (EndReason.USER_STOP, EndReason.SUPERSEDED) and end.reason not in asked:
            self.fail("a reason is true", f"{end.reason} by {by.name}, asked for by nobody")
        age_s = self.world.now - facts.accepted.created_s
        if end.reason is EndReason.IDLE and age_s < IDLE_END_S:
            self.fail("a reason is true", f"idle by {by.name} after {age_s:.1f} s")
        if end.reason is EndReason.EXPIRED and age_s < facts.accepted.deadline_s:
            self.fail("a reason is true", f"expired by {by.name} before the deadline")
        if end.reason is EndReason.FAILED and may_go_on(facts.opens, len(facts.ids)):
            detail = f"{by.name} gave up after {len(facts.opens)} opens: {end.detail}"
            self.fail("three attempts before it fails", detail)
        if end.reason.natural and len(facts.ids) != facts.accepted.budget:
            self.fail("a natural end is complete", f"{len(facts.ids)} of {facts.accepted.budget} tokens")

    # --- replicas, routers, the lane

    def asked_for(self, reply_id: str, reason: EndReason) -> None:
        """Somebody wants it ended so."""
        self._asked_for[reply_id].add(reason)

    def given_back(self, reply_id: str, attempt: int) -> None:
        """Its replica refused it or handed it back."""
        self._given_back.add((reply_id, attempt))

    def attempt_over(self, reply_id: str, attempt: int) -> None:
        self._over.add((reply_id, attempt))

    def forgotten(self, replica: "Replica") -> None:
        """It crashed: what it ran is over, whoever knows."""
        self._over |= {(attempt.reply_id, attempt.number) for attempt in replica.table}

    def runs(self, replica: "Replica", dispatch: Dispatch) -> None:
        """What a replica runs was opened for it."""
        for opened in self.facts[dispatch.request.reply_id].opens:
            if opened.attempt == dispatch.attempt and opened.replica == replica.name:
                return
        self.fail("what runs has been opened", f"{replica.name} runs attempt {dispatch.attempt}")

    def commanded(self, router: "Router", command: Any) -> None:
        """A router that gets nowhere waits before it tries again."""
        recent = self._commands.setdefault((router.name, command.reply_id), deque(maxlen=COMMANDS_PER_S_MAX))
        if len(recent) == COMMANDS_PER_S_MAX and self.world.now - recent[0] < 1.0:
            self.fail("nobody tries again without a pause", f"{router.name}, last {brief(command)}")
        recent.append(self.world.now)

    def left_the_lane(self, message: "Queued") -> None:
        facts = self.facts.get(message.name)
        if facts is None or facts.end is None:
            self.fail("the lane keeps a reply until an end stands", f"{message.name[-4:]} was acked before")
        if message.name not in self.region.bus.archive:
            self.fail("the lane keeps a reply until ENDED has it", f"{message.name[-4:]} was acked before")

    def archived(self, reply: EndedReply) -> None:
        facts = self.facts[reply.accepted.reply_id]
        if facts.end is None or reply.reason is not facts.end.reason:
            self.fail("what is archived is what stands in the log", f"{reply.reason}, but {facts.end}")
        if unpack_ids(reply.ids) != facts.ids or reply.text != facts.text:
            self.fail("what is archived is what stands in the log", "other tokens or another text")

    # --- screens

    def shown(self, client: "Client", item: SequencedEntry) -> None:
        """A shown token never changes: a screen shows the log, entry by entry."""
        standing = self.region.bus.logs[client.reply_id].entries
        at = len(client.shown)
        if at >= len(standing) or standing[at] != item:
            there = brief(standing[at].entry) if at < len(standing) else "nothing"
            detail = f"{client.name} shows {brief(item.entry)} as entry {at}, where {there} stands"
            self.fail("a screen shows the log in its order", detail)

    # --- the ledger

    def reserved(self, accepted: Accepted) -> None:
        if accepted.reply_id in self._reserved:
            self.fail("reserved once", accepted.reply_id)
        self._reserved[accepted.reply_id] = accepted.budget

    def settled(self, reply: EndedReply) -> None:
        """The archive charges what stands in the log and gives the rest back."""
        reply_id, used = reply.accepted.reply_id, reply.usage.output_tokens
        if reply_id in self._settled:
            self.fail("settled once", reply_id)
        facts = self.facts.get(reply_id)
        if used != (len(facts.ids) if facts else 0) or used > self._reserved[reply_id]:
            self.fail("reserved is settled plus refunded", f"{used} of {self._reserved[reply_id]} reserved")
        self._settled[reply_id] = used

    # --- when the weather has been good for long

    def at_rest(self) -> None:
        """Everything has come to its end: on every screen, in every replica, in the lane and in the rows."""
        region = self.region
        for client in region.clients:
            if not client.over:
                self.fail("every message ends on its screen", f"{client.name} at {len(client.shown)} entries")
        for reply_id, facts in self.facts.items():
            if facts.end is None:
                self.fail("every reply ends", reply_id[-4:])
        if region.bus.lane.messages or region.bus.ended.messages:
            self.fail("the queues empty", f"{len(region.bus.lane.messages)} in the lane")
        self._nothing_held()
        if self._reserved.keys() != self._settled.keys():
            detail = f"{len(self._reserved)} reserved, {len(self._settled)} settled"
            self.fail("reserved is settled plus refunded", detail)

    def _nothing_held(self) -> None:
        region = self.region
        for replica in region.replicas:
            if not replica.quiet:
                self.fail("blocks are conserved", f"{replica.name}: {replica.scheduler.load()}, {len(replica.table)}")
        for router in region.routers:
            if len(router.table):
                self.fail("no lease outlives its message", f"{router.name} holds {router.table.leases()[0].state}")
