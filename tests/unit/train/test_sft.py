"""Supervised steps against torch's cross entropy row by row, in float64."""

import numpy as np
import pytest
import torch
from train_cases import build_engine, exact_norms, random_batch, weights_of
from transformers import AutoModelForCausalLM

from areal_like.config.actor import ActorConfig, MicroBatchConfig
from areal_like.train.sft import SftUpdate, supervised_row


def rows_to_learn():
    _, rows = random_batch()
    return [supervised_row(row.token_ids.tolist(), row.loss_mask.tolist()) for row in rows.values()]


@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_a_step_is_that_of_the_mean_cross_entropy(model_dir, one_rank, packing):
    rows = rows_to_learn()
    actor = ActorConfig.model_validate({"optimizer": {"lr": 3e-3}, "mb_spec": {"packing": packing}})
    engine = build_engine(model_dir, one_rank, actor)
    update = SftUpdate(engine, MicroBatchConfig(max_tokens_per_mb=25, packing=packing))
    reports = [update.run(rows) for _ in range(2)]

    model = exact_norms(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64))
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    for report in reports:
        losses = []
        for row in rows:
            ids = torch.from_numpy(row.token_ids.astype(np.int64))
            labels = torch.where(torch.from_numpy(row.loss_mask == 1), ids, -100)[1:]
            logits = model(input_ids=ids[None]).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        loss = torch.stack(losses).sum() / sum(int(row.loss_mask.sum()) for row in rows)
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        assert report.loss == pytest.approx(float(loss.detach()), abs=1e-12)
    found = weights_of(engine)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(found[name], parameter.detach().numpy(), rtol=0, atol=1e-10, err_msg=name)
    assert reports[1].loss < reports[0].loss


def test_nothing_to_learn_is_an_error(model_dir, one_rank):
    engine = build_engine(model_dir, one_rank, ActorConfig())
    with pytest.raises(ValueError, match="nothing to learn"):
        SftUpdate(engine).run([supervised_row([1, 2], [0, 0])])
