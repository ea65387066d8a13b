from ops.log_lines import table
from shared.bus import StreamMessage
from shared.messages import Accepted, Chunk, End, Open, RequestEcho, encode, pack_ids
from shared.outcomes import EndReason
from shared.tiers import Tier

ACCEPTED = Accepted(
    reply_id="resp_x", org="o", user="u", created_s=0.0, model="m", tier=Tier.PAID, budget=64, seed=9,
    input_tokens=31, deadline_s=600.0, echo=RequestEcho(),
)  # fmt: skip
ENTRIES = [
    ACCEPTED,
    Open(attempt=1, replica="replica-1", model_version="v", first_index=0, router="router-1"),
    Chunk(attempt=1, first_index=0, ids=pack_ids([5, 6]), text="Hi\nyou", text_ends=(2, 6)),
    End(reason=EndReason.FAILED, by="router-1", detail="gave up", checked=False),
]


def test_a_log_is_printed_entry_by_entry():
    """One aligned line per entry: sequence, time, kind, token range, and what it says."""
    messages = [
        StreamMessage(subject="s", data=encode(entry), seq=seq, stored_s=seq + 0.25)
        for seq, entry in zip((7, 9, 12, 100), ENTRIES, strict=True)
    ]
    assert table(messages) == [
        "SEQ  TIME (UTC)    KIND      RANGE   TEXT",
        "7    00:00:07.250  accepted          m, paid, at most 64 tokens, prompt of 31, seed 9, for o/u",
        "9    00:00:09.250  open              attempt 1 on replica-1 by router-1, from token 0",
        "12   00:00:12.250  chunk     [0, 2)  'Hi\\nyou'",
        "100  00:01:40.250  end               failed by router-1, unchecked: gave up",
    ]
