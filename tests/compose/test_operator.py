"""The operator's command as a container beside the composed system: the tests that `chorus up` has to pass."""

import pytest

from tests.compose.stack import Stack
from tests.integration.test_up import test_a_reply_s_log_is_printed, test_keys_are_created_listed_and_revoked

__all__ = ["test_a_reply_s_log_is_printed", "test_keys_are_created_listed_and_revoked"]
pytestmark = pytest.mark.timeout(3600)


@pytest.fixture
def system(stack: Stack) -> Stack:
    return stack
