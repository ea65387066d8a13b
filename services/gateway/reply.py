"""What a client is shown of one reply: a fold over its log, tolerant where a reader may be. Pure.

`shared.token_log.LogView` is the strict fold of those who write. A gateway reads what a relay sends: entries may
come again (another relay, a bucket written anew), so tokens it already has are skipped; a hole is an error.
"""

from collections.abc import Sequence

from shared.errors import TokenLogError
from shared.messages import (
    Accepted,
    Chunk,
    End,
    Entry,
    Open,
    ReplyView,
    SequencedEntry,
    TokenLogprob,
    Usage,
    unpack_ids,
)
from shared.outcomes import EndReason

_PIECES_MAX = 64  # a thousand one-word strings weigh ten times their text


class ReplyFold:
    """A reply as far as its log is known. `keep_ids`: whether token ids are kept, for those who asked for them;
    `keep_logprobs`: whether log probabilities are, for doors that tell them again at the end.
    """

    def __init__(self, *, keep_ids: bool = False, keep_logprobs: bool = True) -> None:
        self.accepted: Accepted | None = None
        self.attempts = 0
        self.tokens = 0
        self.cached_tokens = 0
        self.end: End | None = None
        self.last_seq = 0
        self._texts: list[str] = []
        self._ids: list[bytes] | None = [] if keep_ids else None
        self._logprobs: list[TokenLogprob] = []
        self._keep_logprobs = keep_logprobs

    def add(self, item: SequencedEntry) -> None:
        """The next entry; raises TokenLogError when something before it is missing."""
        entry: Entry = item.entry
        if isinstance(entry, Chunk):
            self._add_chunk(entry)
        elif isinstance(entry, Accepted):
            self.accepted = self.accepted or entry
        elif self.accepted is None:
            raise TokenLogError(f"{type(entry).__name__} before accepted: the log's head is missing")
        elif isinstance(entry, Open):
            self.attempts = max(self.attempts, entry.attempt)
        else:
            self.end = self.end or entry
        self.last_seq = max(self.last_seq, item.seq)

    def _add_chunk(self, chunk: Chunk) -> None:
        if self.accepted is None:
            raise TokenLogError("a chunk before accepted: the log's head is missing")
        if chunk.first_index > self.tokens:
            raise TokenLogError(f"a chunk at token {chunk.first_index}, but {self.tokens} are here")
        have = self.tokens - chunk.first_index
        if have < chunk.count:
            self._texts.append(text_from(chunk, self.tokens))
            if len(self._texts) >= _PIECES_MAX:
                self._texts = ["".join(self._texts)]
            if self._ids is not None:
                self._ids.append(chunk.ids[4 * have :])
            if self._keep_logprobs:
                self._logprobs += chunk.logprobs[have:]
            self.tokens = chunk.first_index + chunk.count
        if chunk.cached_tokens is not None:
            self.cached_tokens = max(self.cached_tokens, chunk.cached_tokens)

    @property
    def text(self) -> str:
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    @property
    def view(self) -> ReplyView:
        """The same shape that conversation answers with; raises TokenLogError before `accepted`."""
        if self.accepted is None:
            raise TokenLogError("nothing was accepted under this id")
        end = self.end
        return ReplyView(
            accepted=self.accepted,
            text=self.text,
            ids=b"".join(self._ids or ()),
            reason=None if end is None else end.reason,
            usage=Usage(
                input_tokens=self.accepted.input_tokens,
                output_tokens=self.tokens,
                cached_tokens=self.cached_tokens,
            ),
            checked=end is None or end.checked,
            ended_s=None if end is None else end.ended_s,
            detail="" if end is None else end.detail,
            logprobs=tuple(self._logprobs),
        )


def text_from(chunk: Chunk, index: int) -> str:
    """The text of a chunk's tokens from token `index` of the reply on."""
    skip = index - chunk.first_index
    if skip <= 0:
        return chunk.text
    return chunk.text[chunk.text_ends[skip - 1] :] if skip < chunk.count else ""


def ids_from(chunk: Chunk, index: int) -> list[int]:
    """The token ids of a chunk from token `index` of the reply on."""
    return unpack_ids(chunk.ids[4 * max(0, index - chunk.first_index) :])


def logprobs_from(chunk: Chunk, index: int) -> tuple[TokenLogprob, ...]:
    """Of the chunk's tokens from token `index` of the reply on, when the log has any."""
    return chunk.logprobs[max(0, index - chunk.first_index) :]


def stored_entries(view: ReplyView) -> Sequence[SequencedEntry]:
    """An ended reply whose log is gone, as the shortest log that says the same: one chunk, one delta.

    A reply whose text was withdrawn keeps its tokens in the usage, and shows none.
    """
    if view.reason is None:
        raise TokenLogError("a stored reply has ended")
    tokens = view.usage.output_tokens if view.usage else len(view.ids) // 4
    text = "" if view.withdrawn else view.text
    entries: list[Entry] = [view.accepted]
    if tokens:
        entries.append(Open(attempt=1, replica="", model_version="", first_index=0))
        entries.append(
            Chunk(
                attempt=1,
                first_index=0,
                ids=view.ids if len(view.ids) == 4 * tokens and not view.withdrawn else bytes(4 * tokens),
                text=text,
                text_ends=(0,) * (tokens - 1) + (len(text),),
                cached_tokens=view.usage.cached_tokens if view.usage else None,
            )
        )
    entries.append(
        End(
            reason=EndReason.SAFETY if view.withdrawn else view.reason,
            by="stored",
            detail=view.detail,
            checked=view.checked,
            ended_s=view.ended_s or 0.0,
        )
    )
    return [SequencedEntry(seq=seq, entry=entry) for seq, entry in enumerate(entries, 1)]
