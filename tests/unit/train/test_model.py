"""Log-probs of the policy against full logits, and what is refused when a model is loaded."""

import json

import numpy as np
import pytest
import torch
from train_cases import EOS, VOCABULARY, build_model, exact_norms, random_batch
from transformers import AutoModelForCausalLM

from areal_like.algo.balance import CostModel
from areal_like.api.generation import GenerationHyperparameters
from areal_like.errors import ConfigError
from areal_like.train.attention import varlen_attention
from areal_like.train.batching import TrainRow, build_micro_batch
from areal_like.train.model import PolicyModel, Sampling, counted_cost, load_language_model, replayed_sampling


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("tied", [False, True])
def test_log_probs_equal_a_full_softmax_row_by_row(model_dir, tied_model_dir, layout, tied):
    folder = tied_model_dir if tied else model_dir
    _, rows = random_batch(turns=3)
    trajectories = list(rows.values())
    sampling = Sampling(temperature=0.6, min_new_tokens=1, stop_token_ids=(EOS, 4))
    policy = PolicyModel(exact_norms(load_language_model(folder, dtype=torch.float64, layout=layout)), sampling)
    batch = build_micro_batch(
        [TrainRow(trajectory=t, advantage=0.0) for t in trajectories], layout=layout, min_new_tokens=1
    )
    with torch.no_grad():
        logprob_T, entropy_T = policy(batch)

    reference = exact_norms(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))
    expected, entropies = [], []
    for t in trajectories:
        ids = torch.from_numpy(t.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = reference(input_ids=ids[None]).logits[0] / 0.6
        for i in range(1, t.length):
            if not t.loss_mask[i]:
                continue
            z = logits[i - 1].clone()
            if not t.loss_mask[i - 1]:
                z[[EOS, 4]] = -torch.inf
            logp = torch.log_softmax(z, -1)
            expected.append(max(float(logp[ids[i]]), -1e29))
            p = logp.exp()
            entropies.append(float(-(p * logp.clamp(min=-1e9)).sum()))
    written = np.array(expected) > -1e29  # a random row may claim to have written a banned token
    np.testing.assert_allclose(logprob_T.numpy()[written], np.array(expected)[written], rtol=0, atol=1e-12)
    np.testing.assert_allclose(entropy_T.numpy(), entropies, rtol=0, atol=1e-12)
    assert written.sum() > 20


def test_packed_rows_do_not_see_each_other(model_dir):
    """Changing the first row changes nothing in the second."""
    _, rows = random_batch()
    first, second, other = list(rows.values())[:3]
    policy = PolicyModel(load_language_model(model_dir, dtype=torch.float64, layout="packed"), Sampling())

    def second_row(neighbour):
        batch = build_micro_batch([TrainRow(trajectory=t, advantage=0.0) for t in (neighbour, second)], layout="packed")
        with torch.no_grad():
            return policy(batch)[0][batch.row_T == 1]

    torch.testing.assert_close(second_row(first), second_row(other), rtol=0, atol=1e-12)


def test_packed_attention_refuses_what_it_does_not_compute():
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match=r"sliding_window.*packing: padded"):
        varlen_attention(torch.nn.Identity(), q, q, q, None, sliding_window=2, row_lengths=(2,))
    with pytest.raises(ValueError, match="attention mask"):
        varlen_attention(torch.nn.Identity(), q, q, q, torch.zeros(1), row_lengths=(2,))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_float32_log_probs_agree_between_kernels_and_checkpointing(model_dir, attention):
    _, rows = random_batch()
    batch = build_micro_batch([TrainRow(trajectory=t, advantage=0.0) for t in rows.values()], layout="padded")
    plain = PolicyModel(load_language_model(model_dir, attention=attention), Sampling())
    saving = PolicyModel(load_language_model(model_dir, attention=attention, gradient_checkpointing=True), Sampling())
    for policy in (plain, saving):
        policy(batch)[0].sum().backward()
    torch.testing.assert_close(plain(batch)[0], saving(batch)[0], rtol=0, atol=1e-5)
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_dropout_is_off(tmp_path):
    folder = build_model(tmp_path / "m", attention_dropout=0.5)
    _, rows = random_batch()
    batch = build_micro_batch([TrainRow(trajectory=t, advantage=0.0) for t in rows.values()], layout="padded")
    policy = PolicyModel(load_language_model(folder), Sampling())
    torch.testing.assert_close(policy(batch)[0], policy(batch)[0], rtol=0, atol=0)


def test_a_folder_without_a_model_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_language_model(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_language_model(tmp_path)


def test_a_head_that_changes_its_logits_is_refused(tmp_path):
    folder = build_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | {"final_logit_softcapping": 30.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        load_language_model(folder)


@pytest.mark.parametrize(
    ("changes", "generation_eos", "expected"),
    [
        ({}, None, (EOS,)),
        ({}, [7, 9], (7, 9)),
        ({"stop_token_ids": (4,)}, 7, (4, 7)),
        ({"stop_token_ids": (4,), "ignore_eos": True}, 7, (4,)),
    ],
)
def test_banned_ids_are_those_that_servers_stop_at(model_dir, changes, generation_eos, expected):
    model = load_language_model(model_dir)
    model.generation_config.eos_token_id = generation_eos
    sampling = replayed_sampling(GenerationHyperparameters(min_new_tokens=3, temperature=0.9, **changes), model)
    assert sampling == Sampling(temperature=0.9, min_new_tokens=3, stop_token_ids=expected)


def test_a_rows_cost_is_counted_from_the_model(model_dir, tied_model_dir):
    # 2 layers of 16 hidden: q, o 16², k, v 16·8, three of 16·24, two norms of 16; a last norm; a head of 19·16
    layer = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16
    expected = CostModel(per_token=2.0 * (2 * layer + 16 + 19 * 16), per_token_pair=2.0 * 2 * 16)
    assert [counted_cost(load_language_model(folder)) for folder in (model_dir, tied_model_dir)] == [expected] * 2


def test_nothing_is_banned_where_nothing_stops(model_dir):
    sampling = replayed_sampling(
        GenerationHyperparameters(min_new_tokens=3, ignore_eos=True), load_language_model(model_dir)
    )
    assert (sampling.min_new_tokens, sampling.stop_token_ids) == (0, ())
    assert VOCABULARY > EOS
