"""Context assembly: joined by ids, inside the budget, and never a control token from a person's text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.conversation.assembly import (
    Budget,
    ContextTooLongError,
    Piece,
    Skeleton,
    assemble,
    budget,
    join,
)
from services.conversation.prompts import PromptModel
from services.conversation.template import ChatTemplate
from shared.catalog import ModelCard
from shared.tokenizer import StubTokenizer

STUB = StubTokenizer()
END = STUB.special_ids["<|im_end|>"]
MODEL = PromptModel(
    ModelCard(id="stub", file="stub", context_tokens=512, output_tokens_max=128), STUB, ChatTemplate(STUB.chat_template)
)
CONTROLS = frozenset(STUB.special_ids.values())

texts = st.one_of(
    st.text(max_size=40), st.lists(st.sampled_from([*STUB.special_ids, "\n", "system", "a"]), max_size=6).map("".join)
)
roles = st.sampled_from(["user", "system", "developer", "assistant"])
messages = st.lists(st.tuples(roles, texts), min_size=1, max_size=5)


def pieces(parts: list[tuple[str, str]]) -> list[Piece]:
    return [Piece(role, STUB.encode(text)) for role, text in parts]


def assembled(instructions, history, message, history_max=10_000, prompt_max=10_000):
    room = Budget(history_max, prompt_max, 10_000, 10_000)
    return assemble(instructions, history, message, room=room, skeleton=MODEL.skeleton, stop_ids=STUB.stop_ids)


@given(messages)
def test_control_ids_come_from_the_template_alone(parts) -> None:
    """Whatever people type, the control ids of a context are those around empty texts, in the same order."""
    ids = assembled([], [], pieces(parts)).ids
    empty = assembled([], [], pieces([(role, "") for role, _ in parts])).ids
    assert [token for token in ids if token in CONTROLS] == [token for token in empty if token in CONTROLS]


@given(messages)
def test_a_context_is_the_rendered_template_as_ids(parts) -> None:
    """Joined by ids, harmless texts give what encoding the rendered conversation whole gives."""
    harmless = [(role, text.replace("<", "(")) for role, text in parts]
    names = {"developer": "system"}
    whole = "".join(f"<|im_start|>{names.get(role, role)}\n{text}<|im_end|>\n" for role, text in harmless)
    assert assembled([], [], pieces(harmless)).ids == STUB.encode_template(whole + "<|im_start|>assistant\n")


@given(st.lists(messages, max_size=4), messages, st.lists(st.integers(0, 255), max_size=9), st.booleans())
def test_a_longer_context_begins_as_the_shorter_one_did(history, message, written, stopped) -> None:
    """The next turn's context begins with this turn's context and the ids the model wrote, its stop token included."""
    turns = [pieces(turn) for turn in history]
    before = assembled([], turns, pieces(message)).ids
    reply = [*written, END] if stopped else written
    answered = [*pieces(message), Piece("assistant", reply, written=True)]
    after = assembled([], [*turns, answered], pieces([("user", "next")])).ids
    assert after[: len(before) + len(reply)] == before + reply


@given(st.lists(messages, max_size=6), messages, messages, st.integers(1, 400), st.integers(0, 100))
def test_the_oldest_turns_go_and_instructions_stay(
    instructions_parts, history_parts, message_parts, history_max, more
) -> None:
    """What fits is the instructions, every pinned item, and the longest run of newest turns. Without any turn a
    message may be longer than with; past that it is refused.
    """
    instructions = pieces(instructions_parts[0]) if instructions_parts else []
    history = [pieces([part]) for part in history_parts]
    message = pieces(message_parts)

    def whole(kept: int) -> list[int]:
        old = [piece for turn in history[: len(history) - kept] for piece in turn]
        pinned = [piece for piece in old if piece.role in ("system", "developer")]
        rest = [piece for turn in history[len(history) - kept :] for piece in turn]
        every = [*instructions, *pinned, *rest, *message]
        return join(every, MODEL.skeleton(tuple(piece.role for piece in every)), STUB.stop_ids)

    fitting = [kept for kept in range(len(history) + 1) if len(whole(kept)) <= history_max]
    if fitting:
        context = assembled(instructions, history, message, history_max, history_max + more)
        assert context.ids == whole(max(fitting))
        assert context.turns_dropped == len(history) - max(fitting)
    elif len(whole(0)) <= history_max + more:
        assert assembled(instructions, history, message, history_max, history_max + more).ids == whole(0)
    else:
        with pytest.raises(ContextTooLongError) as caught:
            assembled(instructions, history, message, history_max, history_max + more)
        assert (caught.value.count, caught.value.limit) == (len(whole(0)), history_max + more)


def test_a_stop_token_is_taken_off_only_where_the_template_writes_it() -> None:
    """A written piece keeps a last stop token that the template would not write, and any that is not last."""
    written = Piece("assistant", [1, END, 2, END], written=True)
    assert join([written], Skeleton(((7,), (END, 8)), (0,)), STUB.stop_ids) == [7, 1, END, 2, END, 8]
    assert join([written], Skeleton(((7,), (8,)), (0,)), STUB.stop_ids) == [7, 1, END, 2, END, 8]
    typed = Piece("assistant", [1, END])
    assert join([typed], Skeleton(((7,), (END,)), (0,)), STUB.stop_ids) == [7, 1, END, END]


@given(st.integers(8, 4096), st.integers(1, 4096), st.one_of(st.none(), st.integers(1, 5000)), st.data())
def test_prompt_and_output_fit_the_context(context, output_max, asked, data) -> None:
    """Any prompt up to the limit leaves room for at least one token, and for all that were asked for and allowed."""
    output_max = min(output_max, context - 1)
    room = budget(context, output_max, asked)
    prompt = data.draw(st.integers(1, room.prompt_max))
    output = room.output(prompt)
    assert 1 <= room.history_max <= room.prompt_max
    assert prompt + output <= context
    assert 1 <= output <= output_max
    if asked is not None:
        assert output == min(asked, output_max)
