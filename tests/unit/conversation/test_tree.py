"""A conversation's turns as a tree of items."""

from services.conversation.tree import TurnNode, nodes
from shared.ids import output_item_id


def test_a_regenerated_reply_hangs_under_the_same_message():
    """Turns that hold the same item are alternatives under it."""
    turns = [TurnNode("resp_a", None, 1.0, ["m"]), TurnNode("resp_b", None, 2.0, ["m"])]
    found = {node.item_id: node for node in nodes(turns, "resp_b")}
    assert list(found) == ["m", output_item_id("resp_a"), output_item_id("resp_b")]
    assert {found[output_item_id(reply)].parent_id for reply in ("resp_a", "resp_b")} == {"m"}
    assert [node.active for node in found.values()] == [True, False, True]


def test_a_turn_without_items_hands_its_place_on():
    """What follows a turn of which everything was deleted follows what was before it."""
    turns = [
        TurnNode("resp_a", None, 1.0, ["m"]),
        TurnNode("resp_b", "resp_a", 2.0, [], replied=False),
        TurnNode("resp_c", "resp_b", 3.0, [], replied=False),
        TurnNode("resp_d", "resp_c", 4.0, ["n"], replied=False),
    ]
    found = nodes(turns, "resp_d")
    assert [(node.item_id, node.parent_id) for node in found] == [
        ("m", None),
        (output_item_id("resp_a"), "m"),
        ("n", output_item_id("resp_a")),
    ]
