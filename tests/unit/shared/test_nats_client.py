"""Header lines are read as the client library reads them."""

from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client

from shared.bus.nats_client import LeanClient

_line = st.one_of(
    st.binary(max_size=40),
    st.builds(
        lambda name, colon, value: name + colon + value,
        st.sampled_from([b"Nats-Sequence", b" Padded ", b"In side", b"", b"\xc3\xa4", b"nats-sequence", b"A\tB"]),
        st.sampled_from([b":", b": ", b":\t", b" :"]),
        st.binary(max_size=20),
    ),
)


@given(st.lists(_line, max_size=8))
def test_the_lean_parser_agrees_with_the_library(lines: list[bytes]):
    """Whatever bytes stand in a header block, both give the same names and values."""
    raw = b"\r\n".join([*lines, b"", b""])
    assert LeanClient._parse_header_lines(raw) == Client._parse_header_lines(raw)
