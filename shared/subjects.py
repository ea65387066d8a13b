"""Every name on the bus. All begin with the region; ids hold no dots, so a name is always unambiguous.

streams    <region>_LANE_PAID|FREE|BACKGROUND   <region>_ENDED   <region>_JOURNAL   <region>_USAGE
buckets    <region>_replies_<k>      stream KV_<bucket>, captured subject $KV.<bucket>.<reply>
subjects   <region>.lane.<tier>.<model>.<user bucket>        captured by the lane streams
           <region>.live.<k>.<reply>                          republished log entries
           <region>.conversation.<verb>  <region>.relay.open  <region>.safety.check|watch   queue groups
           <region>.replica.<id>.dispatch|ask|blocks          one replica
           <region>.health.<replica>  .blocks.<replica>  .presence.<reply>  .queue.<tier>.<model>
           <region>.control.cancel.<reply>  .control.drain.<replica>  .control.keys
           <region>.control.over.<router>                      replica -> router: an attempt is over
           <region>.frames.<gateway>.<stream>  <region>.credit.<relay>  <region>.relay.alive
           <region>.ended.<reply>  <region>.usage.<reply>  <region>.journal.<service>
"""

import hashlib
import re
from dataclasses import dataclass

from shared.ids import reply_place
from shared.limits import USER_BUCKETS
from shared.tiers import Tier

_TOKEN = re.compile(r"^[A-Za-z0-9_-]+$")


def subject_token(name: str) -> str:
    """`name` as one subject token: other characters become `_`, so that no name can add a dot or a wildcard."""
    return name if _TOKEN.match(name) else re.sub(r"[^A-Za-z0-9_-]", "_", name) or "_"


def user_bucket(org: str, user: str) -> int:
    """Which of the USER_BUCKETS lane consumers a user's requests go through."""
    digest = hashlib.blake2b(f"{org}\0{user}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % USER_BUCKETS


@dataclass(frozen=True)
class Names:
    """The names of one region."""

    region: str = "local"

    # streams and consumers
    def lane_stream(self, tier: Tier) -> str:
        return f"{self.region}_LANE_{tier.upper()}"

    def lane_subject(self, tier: Tier, model: str, bucket: int) -> str:
        return f"{self.region}.lane.{tier}.{subject_token(model)}.{bucket}"

    def lane_filter(self, tier: Tier) -> str:
        return f"{self.region}.lane.{tier}.>"

    def lane_consumer(self, tier: Tier, model: str, bucket: int) -> str:
        return f"lane_{tier}_{subject_token(model)}_{bucket}"

    @property
    def ended_stream(self) -> str:
        return f"{self.region}_ENDED"

    @property
    def journal_stream(self) -> str:
        return f"{self.region}_JOURNAL"

    @property
    def usage_stream(self) -> str:
        return f"{self.region}_USAGE"

    def ended(self, reply: str) -> str:
        return f"{self.region}.ended.{reply}"

    def usage(self, reply: str) -> str:
        return f"{self.region}.usage.{reply}"

    def journal(self, service: str) -> str:
        return f"{self.region}.journal.{service}"

    # the token log
    def log_bucket(self, shard: int) -> str:
        return f"{self.region}_replies_{shard}"

    def log_stream(self, shard: int) -> str:
        return f"KV_{self.log_bucket(shard)}"

    def log_filter(self, shard: int) -> str:
        return f"$KV.{self.log_bucket(shard)}.>"

    def log_subject(self, reply: str) -> str:
        """Where entries of `reply` are appended; raises ValueError for what is not a reply id."""
        return f"$KV.{self.log_bucket(self._shard(reply))}.{reply}"

    def log_stream_of(self, reply: str) -> str:
        return self.log_stream(self._shard(reply))

    def live(self, reply: str) -> str:
        """Where accepted entries of `reply` are republished, in stream order."""
        return f"{self.region}.live.{self._shard(reply)}.{reply}"

    def live_filter(self, shard: int) -> str:
        return f"{self.region}.live.{shard}.>"

    def _shard(self, reply: str) -> int:
        place = reply_place(reply)
        if place is None or place.region != self.region:
            raise ValueError(f"{reply!r} is not a reply of region {self.region!r}")
        return place.shard

    # commands between services
    def conversation(self, verb: str) -> str:
        return f"{self.region}.conversation.{verb}"

    @property
    def relay_open(self) -> str:
        return f"{self.region}.relay.open"

    @property
    def relay_alive(self) -> str:
        return f"{self.region}.relay.alive"

    def credit(self, relay: str) -> str:
        return f"{self.region}.credit.{relay}"

    def frames(self, gateway: str, stream: str) -> str:
        return f"{self.region}.frames.{gateway}.{stream}"

    @property
    def safety_check(self) -> str:
        return f"{self.region}.safety.check"

    @property
    def safety_watch(self) -> str:
        return f"{self.region}.safety.watch"

    def dispatch(self, replica: str) -> str:
        return f"{self.region}.replica.{replica}.dispatch"

    def ask(self, replica: str) -> str:
        return f"{self.region}.replica.{replica}.ask"

    def blocks_snapshot(self, replica: str) -> str:
        return f"{self.region}.replica.{replica}.blocks"

    # reports and controls
    def health(self, replica: str) -> str:
        return f"{self.region}.health.{replica}"

    def blocks(self, replica: str) -> str:
        return f"{self.region}.blocks.{replica}"

    def presence(self, reply: str) -> str:
        return f"{self.region}.presence.{reply}"

    def queue(self, tier: Tier, model: str) -> str:
        return f"{self.region}.queue.{tier}.{subject_token(model)}"

    @property
    def queue_filter(self) -> str:
        """Every queue's view: relays turn them into position and ETA."""
        return f"{self.region}.queue.>"

    def cancel(self, reply: str) -> str:
        return f"{self.region}.control.cancel.{reply}"

    def drain(self, replica: str) -> str:
        return f"{self.region}.control.drain.{replica}"

    @property
    def keys(self) -> str:
        return f"{self.region}.control.keys"

    def attempt_over(self, router: str) -> str:
        return f"{self.region}.control.over.{router}"
