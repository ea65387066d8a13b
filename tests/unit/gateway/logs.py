"""Logs for tests of what clients are shown: tokens with texts, cut into chunks and attempts in any way."""

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from shared.messages import (
    Accepted,
    Chunk,
    End,
    Entry,
    Open,
    RequestEcho,
    SequencedEntry,
    TokenLogprob,
    pack_ids,
)
from shared.outcomes import EndReason
from shared.tiers import Tier

REPLY = "resp_local0101JDZZZZZZZZZZZZZZZZZZZZZZ"
FIRST_ID = 1000


def accepted(budget: int = 64, **more) -> Accepted:
    echo = more.pop("echo", RequestEcho(requested_model="stub"))
    return Accepted(
        reply_id=REPLY,
        org="acme",
        user="alice",
        created_s=1_700_000_000.25,
        model="stub",
        tier=Tier.PAID,
        budget=budget,
        seed=1,
        input_tokens=7,
        deadline_s=600.0,
        echo=echo,
        **more,
    )


def opened(attempt: int = 1, first_index: int = 0) -> Open:
    return Open(attempt=attempt, replica="r1", model_version="v1", first_index=first_index)


def odds_of(index: int, text: str) -> TokenLogprob:
    """Log probabilities that tell the tokens of a reply apart."""
    return TokenLogprob(text.encode(), -0.25 * (index + 1), ((b"x", -0.125), (text.encode(), -0.25 * (index + 1))))


def chunk(
    first: int, texts: Sequence[str], attempt: int = 1, cached: int | None = None, *, logprobs: bool = False
) -> Chunk:
    ends, whole = [], ""
    for text in texts:
        whole += text
        ends.append(len(whole))
    ids = pack_ids(range(FIRST_ID + first, FIRST_ID + first + len(texts)))
    odds = tuple(odds_of(at, text) for at, text in enumerate(texts, first)) if logprobs else ()
    return Chunk(
        attempt=attempt,
        first_index=first,
        ids=ids,
        text=whole,
        text_ends=tuple(ends),
        cached_tokens=cached,
        logprobs=odds,
    )


def end(reason: EndReason = EndReason.STOP_TOKEN, **more) -> End:
    return End(reason=reason, by="test", ended_s=1_700_000_003.0, **more)


def sequenced(entries: Sequence[Entry]) -> list[SequencedEntry]:
    return [SequencedEntry(seq=10 + 3 * at, entry=entry) for at, entry in enumerate(entries)]


def log_of(
    texts: Sequence[str],
    cuts: Sequence[int] = (),
    *,
    failovers: Sequence[int] = (),
    reason: EndReason | None = EndReason.STOP_TOKEN,
    head: Accepted | None = None,
    logprobs: bool = False,
) -> list[SequencedEntry]:
    """The log of a reply with these token texts, chunks cut at `cuts`, a new attempt before each token of `failovers`."""
    bounds = sorted({0, len(texts), *cuts, *failovers})
    entries: list[Entry] = [head or accepted(), opened()]
    attempt = 1
    for start, stop in itertools.pairwise(bounds):
        if start in failovers and start:
            attempt += 1
            entries.append(opened(attempt, start))
        entries.append(chunk(start, texts[start:stop], attempt, logprobs=logprobs))
    if reason is not None:
        entries.append(end(reason))
    return sequenced(entries)


token_texts = st.lists(
    st.sampled_from(["", "a", " the", "é", "\n", "\r\n", "👩‍💻", '"\\', "data: x\n\nid: 5\n"]), max_size=24
)


@st.composite
def chunkings(draw, texts: Sequence[str], reason: EndReason | None = EndReason.STOP_TOKEN):
    """(a log of `texts`, how it is dealt out to the reader)."""
    places = st.integers(0, max(0, len(texts)))
    items = log_of(
        texts,
        draw(st.lists(places, max_size=8)),
        failovers=draw(st.lists(places, max_size=2)),
        reason=reason,
    )
    deals = sorted({0, len(items), *draw(st.lists(st.integers(0, len(items)), max_size=6))})
    return [items[start:stop] for start, stop in itertools.pairwise(deals)]
