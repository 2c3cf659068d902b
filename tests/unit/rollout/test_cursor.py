from itertools import pairwise

import pytest

from areal_like.rollout.cursor import PromptCursor, PromptVisit


def walk(cursor: PromptCursor, count: int) -> list[tuple[int, int]]:
    visits = [cursor.advance() for _ in range(count)]
    return [(visit.prompt.epoch, visit.prompt.index) for visit in visits]


def test_every_epoch_visits_every_prompt_once_in_an_order_of_its_own() -> None:
    visits = walk(PromptCursor(n_prompts=50, seed=1), 150)
    orders = [[index for epoch, index in visits if epoch == e] for e in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert all(order != list(range(50)) for order in orders)


def test_the_order_depends_on_the_seed_alone() -> None:
    assert walk(PromptCursor(n_prompts=20, seed=1), 60) == walk(PromptCursor(n_prompts=20, seed=1), 60)
    assert walk(PromptCursor(n_prompts=20, seed=1), 20) != walk(PromptCursor(n_prompts=20, seed=2), 20)


def test_the_order_is_the_same_for_ever() -> None:
    """A resumed run may have other libraries; these numbers must not change."""
    assert walk(PromptCursor(n_prompts=8, seed=1), 8) == [(0, i) for i in [3, 5, 2, 0, 1, 6, 7, 4]]


def test_every_position_is_equally_likely() -> None:
    first = [PromptCursor(n_prompts=4, seed=seed).advance().prompt.index for seed in range(2000)]
    assert all(abs(first.count(index) - 500) < 5 * 19.4 for index in range(4))  # sqrt(2000 * 1/4 * 3/4) = 19.4


def test_without_shuffle_rows_come_in_their_own_order() -> None:
    assert walk(PromptCursor(n_prompts=3, seed=1, shuffle=False), 4) == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_returned_prompts_come_first_with_a_new_group_id() -> None:
    cursor = PromptCursor(n_prompts=9, seed=1, shuffle=False)
    visits = [cursor.advance() for _ in range(3)]
    for visit in reversed(visits[1:]):
        cursor.give_back(visit)
    again = [cursor.advance() for _ in range(3)]
    assert [visit.prompt.index for visit in again] == [1, 2, 3]
    assert [visit.attempt for visit in again] == [1, 1, 0]
    assert len({visit.group_id for visit in [*visits, *again]}) == 6


def test_only_expiry_counts_as_expired() -> None:
    cursor = PromptCursor(n_prompts=1, seed=1)
    cursor.give_back(cursor.advance())
    cursor.give_back(cursor.advance(), expired=True)
    visit = cursor.advance()
    assert (visit.attempt, visit.expired) == (2, 1)


@pytest.mark.parametrize("walked", [0, 3, 7, 10])
def test_a_restored_cursor_goes_on_where_it_was(walked: int) -> None:
    cursor, other = PromptCursor(n_prompts=7, seed=1), PromptCursor(n_prompts=7, seed=1)
    visits = [cursor.advance() for _ in range(walked)]
    if visits:
        cursor.give_back(visits[-1])
    other.restore(cursor.state())
    assert [other.advance() for _ in range(20)] == [cursor.advance() for _ in range(20)]


@pytest.mark.parametrize(("name", "changed"), [("n_prompts", 8), ("seed", 2), ("shuffle", False)])
def test_a_state_of_another_order_is_refused(name: str, changed: object) -> None:
    state = PromptCursor(n_prompts=7, seed=1).state()
    theirs = {"n_prompts": 7, "seed": 1, "shuffle": True, name: changed}
    with pytest.raises(ValueError, match=f"{name}="):
        PromptCursor(**theirs).restore(state)  # type: ignore[arg-type]


def test_a_cursor_with_an_end_is_exhausted_until_a_prompt_comes_back() -> None:
    cursor = PromptCursor(n_prompts=2, seed=1, epochs=2)
    visits = []
    while not cursor.exhausted:
        visits.append(cursor.advance())
    assert len(visits) == 4
    with pytest.raises(LookupError, match="2 epochs of 2 prompts"):
        cursor.advance()
    cursor.give_back(visits[-1])
    assert not cursor.exhausted
    assert cursor.advance().attempt == 1
    assert cursor.exhausted


def test_ids_sort_out_prompts_of_different_epochs() -> None:
    cursor = PromptCursor(n_prompts=1, seed=1)
    visits: list[PromptVisit] = [cursor.advance() for _ in range(3)]
    assert [visit.group_id for visit in visits] == ["e0-p0-a0", "e1-p0-a0", "e2-p0-a0"]
    assert all(earlier.prompt.epoch < later.prompt.epoch for earlier, later in pairwise(visits))


@pytest.mark.parametrize(("arguments", "rule"), [({"n_prompts": 0}, "n_prompts"), ({"epochs": -1}, "epochs")])
def test_impossible_cursors_are_refused(arguments: dict[str, int], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        PromptCursor(**{"n_prompts": 3, "seed": 1, **arguments})  # type: ignore[arg-type]
