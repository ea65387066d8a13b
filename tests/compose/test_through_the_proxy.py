"""What a client does, once more with the proxy as its only address: each connection may meet another gateway."""

from dataclasses import dataclass

import pytest

from tests.compose.stack import Stack
from tests.integration.test_whole_path import (
    connect,
    test_a_key_is_needed,
    test_bad_input_is_refused_in_openai_shape,
    test_fifty_sends_with_one_key_are_one_reply,
    test_foreign_and_unknown_ids_give_the_same_404,
    test_live_cuts_resume_on_the_other_gateway,
    test_stop_mid_reply_keeps_what_was_shown_and_the_next_turn_sees_it,
    test_streamed_reply_has_the_events_in_order,
    test_the_official_client_works_unchanged,
    wires,
)

__all__ = [
    "connect",
    "test_a_key_is_needed",
    "test_bad_input_is_refused_in_openai_shape",
    "test_fifty_sends_with_one_key_are_one_reply",
    "test_foreign_and_unknown_ids_give_the_same_404",
    "test_live_cuts_resume_on_the_other_gateway",
    "test_stop_mid_reply_keeps_what_was_shown_and_the_next_turn_sees_it",
    "test_streamed_reply_has_the_events_in_order",
    "test_the_official_client_works_unchanged",
    "wires",
]
pytestmark = pytest.mark.timeout(3600)


@dataclass
class Proxied(Stack):
    """The same system to whom nobody has told where its gateways are."""

    @property
    def gateways(self) -> list[str]:
        return [self.proxy, self.proxy]


@pytest.fixture
def chorus(stack: Stack) -> Proxied:
    return Proxied(**vars(stack))
