"""Plans: complete, equal in length on every rank, and with denominators of the whole minibatch."""

from hypothesis import given
from hypothesis import strategies as st

from areal_like.api.trajectory import TrajectoryTag
from areal_like.config.actor import ActorConfig
from areal_like.train.plan import plan_update

rows_of_groups = st.lists(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 10)), min_size=1, max_size=5), min_size=0, max_size=8
)


def tags_of(groups):
    return [
        TrajectoryTag(
            key=f"{g}/{i}",
            group_id=f"g{g}",
            episode_id=f"{g}e{i}",
            length=length + written,
            loss_tokens=written,
            reward=0.0,
            oldest_version=0,
            newest_version=0,
        )
        for g, rows in enumerate(groups)
        for i, (length, written) in enumerate(rows)
    ]


@given(
    rows_of_groups,
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 200),
    st.sampled_from(["packed", "padded"]),
    st.sampled_from(["token_mean", "seq_mean_token_mean"]),
)
def test_plans_of_all_ranks_fit_together(groups, minibatches, ranks, budget, packing, aggregation):
    tags = tags_of(groups)
    actor = ActorConfig.model_validate(
        {
            "ppo_n_minibatches": minibatches,
            "aggregation": aggregation,
            "mb_spec": {"max_tokens_per_mb": budget, "packing": packing},
        }
    )
    plans = [plan_update(tags, actor, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert sorted(row for plan in plans for row in plan.rows) == list(range(len(tags)))
    assert len({len(plan.prox) for plan in plans}) == 1
    for plan in plans:
        assert sorted(row for members in plan.prox for row in members) == list(plan.rows)
        for members in (*plan.prox, *(m for part in plan.minibatches for m in part.micro_batches)):
            lengths = [tags[row].length for row in members]
            used = sum(lengths) if packing == "packed" else len(lengths) * max(lengths, default=0)
            assert used <= budget or len(lengths) == 1
    for step, parts in enumerate(zip(*(plan.minibatches for plan in plans), strict=True)):
        assert len({len(part.micro_batches) for part in parts}) == 1
        members = [tags[row] for part in parts for micro in part.micro_batches for row in micro]
        if aggregation == "token_mean":
            expected = sum(tag.loss_tokens for tag in members)
        else:
            expected = sum(tag.loss_tokens > 0 for tag in members)
        assert {part.denominator for part in parts} == {float(expected)}
        others = {t.group_id for t in tags} - {t.group_id for t in members}
        assert not others & {tag.group_id for tag in members}, step
    # groups are whole: a group's rows are in one minibatch
    for g in range(len(groups)):
        holding = {
            step
            for plan in plans
            for step, part in enumerate(plan.minibatches)
            for micro in part.micro_batches
            for row in micro
            if tags[row].group_id == f"g{g}"
        }
        assert len(holding) == 1
