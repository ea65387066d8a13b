"""The integration suite's tests of the whole path, once more, against the composed system."""

import pytest

from tests.compose.stack import Stack
from tests.integration.test_whole_path import (
    connect,
    test_a_cut_at_every_token_resumes_on_the_other_gateway,
    test_a_key_is_needed,
    test_a_killed_service_does_not_cost_the_reply,
    test_bad_input_is_refused_in_openai_shape,
    test_both_gateways_tell_the_same_story,
    test_fifty_sends_with_one_key_are_one_reply,
    test_flagged_output_ends_as_content_filter,
    test_foreign_and_unknown_ids_give_the_same_404,
    test_live_cuts_resume_on_the_other_gateway,
    test_stop_mid_reply_keeps_what_was_shown_and_the_next_turn_sees_it,
    test_streamed_reply_has_the_events_in_order,
    test_the_log_outlives_the_bus,
    test_the_official_client_works_unchanged,
    wires,
)

__all__ = [
    "connect",
    "test_a_cut_at_every_token_resumes_on_the_other_gateway",
    "test_a_key_is_needed",
    "test_a_killed_service_does_not_cost_the_reply",
    "test_bad_input_is_refused_in_openai_shape",
    "test_both_gateways_tell_the_same_story",
    "test_fifty_sends_with_one_key_are_one_reply",
    "test_flagged_output_ends_as_content_filter",
    "test_foreign_and_unknown_ids_give_the_same_404",
    "test_live_cuts_resume_on_the_other_gateway",
    "test_stop_mid_reply_keeps_what_was_shown_and_the_next_turn_sees_it",
    "test_streamed_reply_has_the_events_in_order",
    "test_the_log_outlives_the_bus",
    "test_the_official_client_works_unchanged",
    "wires",
]
pytestmark = pytest.mark.timeout(3600)


@pytest.fixture
def chorus(stack: Stack) -> Stack:
    return stack
