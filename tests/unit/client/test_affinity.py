from __future__ import annotations

from areal_like.client.affinity import AffinityTable


def test_remembers_conversation_and_group() -> None:
    table = AffinityTable()
    table.remember("a", session_id="s", group_id="g")
    table.remember("b", session_id=None, group_id="g")
    table.remember("c", session_id=None, group_id=None)
    assert dict(table) == {"session:s": "a", "group:g": "b"}


def test_the_least_recently_used_key_goes_first() -> None:
    table = AffinityTable(capacity=2)
    for key in ("1", "2", "1", "3"):
        table.remember("a", session_id=key, group_id=None)
    assert sorted(table) == ["session:1", "session:3"]
    assert len(table) == 2
