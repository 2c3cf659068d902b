from __future__ import annotations

from areal_like.client.routing import RoutingView, ServerLoad, choose_server, group_key, session_key


def _view(loads: dict[str, int], **affinity: str) -> RoutingView:
    servers = tuple(ServerLoad(name=name, in_flight=n) for name, n in loads.items())
    keys = {("session:" if k.startswith("s") else "group:") + k: v for k, v in affinity.items()}
    return RoutingView(servers=servers, affinity=keys)


def test_fewest_in_flight_then_fewest_ever_then_name() -> None:
    assert choose_server(_view({"a": 3, "b": 1, "c": 2}), session_id=None, group_id=None) == "b"
    view = RoutingView(servers=(ServerLoad(name="a", dispatched=5), ServerLoad(name="b", dispatched=4)))
    assert choose_server(view, session_id=None, group_id=None) == "b"
    assert choose_server(_view({"b": 1, "a": 1}), session_id=None, group_id=None) == "a"


def test_a_conversation_stays_however_busy_its_server_is() -> None:
    assert choose_server(_view({"a": 1000, "b": 0}, s1="a"), session_id="s1", group_id=None) == "a"


def test_a_group_stays_until_its_server_is_overloaded() -> None:
    assert choose_server(_view({"a": 8, "b": 0}, g1="a"), session_id=None, group_id="g1") == "a"
    assert choose_server(_view({"a": 9, "b": 0}, g1="a"), session_id=None, group_id="g1") == "b"
    assert choose_server(_view({"a": 28, "b": 10}, g1="a"), session_id=None, group_id="g1") == "a"


def test_the_conversation_comes_before_the_group() -> None:
    assert choose_server(_view({"a": 0, "b": 0}, s1="b", g1="a"), session_id="s1", group_id="g1") == "b"


def test_affinity_to_a_server_that_left_is_forgotten() -> None:
    assert choose_server(_view({"b": 5, "c": 1}, s1="a", g1="a"), session_id="s1", group_id="g1") == "c"


def test_a_server_that_failed_this_request_serves_only_if_no_other_is_left() -> None:
    view = _view({"a": 0, "b": 9}, s1="a")
    assert choose_server(view, session_id="s1", group_id=None, avoid=frozenset({"a"})) == "b"
    assert choose_server(view, session_id="s1", group_id=None, avoid=frozenset({"a", "b"})) == "a"


def test_no_server_is_no_choice() -> None:
    assert choose_server(_view({}), session_id="s1", group_id="g1") is None


def test_a_session_and_a_group_of_one_name_are_two_keys() -> None:
    assert session_key("x") != group_key("x")
