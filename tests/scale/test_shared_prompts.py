"""Rows with one prompt, read with the prompt once: equal log-probs and gradients."""

import random
from types import SimpleNamespace

import pytest
import torch
from device import DEVICE, LOOSER
from tiny import RANKS, agent, batch_of, finished, needs_models, tiny

import model as model_module
from batch import Batch
from buffer import Step
from model import Base
from scale.shared_prompts import split_prompts

pytestmark = needs_models


def tokens(rng, count):
    return [rng.randrange(5, 20) for _ in range(count)]


def reply_to(prompt, rng, count):
    return Step(prompt, tokens(rng, count), [0.0] * count, "", "", True)


def groups():
    """Return a batch of two groups: prompts of 9 and 6 tokens, replies of 1 to 4, one chat of two turns."""
    rng = random.Random(0)
    long, short = tokens(rng, 9), tokens(rng, 6)
    episodes = [finished([reply_to(long, rng, count)]) for count in (1, 4, 3)]
    episodes += [finished([reply_to(short, rng, count)]) for count in (2, 4)]
    first = reply_to(short, rng, 2)
    second = reply_to(short + first.action_ids + tokens(rng, 1), rng, 1)
    return batch_of(*episodes, finished([first, second]))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.5}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=30, **sizes))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return Base(model, SimpleNamespace(pad_id=0), DEVICE)


def scores(base, rank, batch):
    """Return the log-probs, entropies and values of the batch, and the gradient of their weighted sums."""
    learner = agent(base, rank, critic_learning_rate=1e-2)
    torch.manual_seed(1)
    with torch.no_grad():  # far from the start, where LoRA's B and the critic's head are 0
        for p in [*learner.parameters, *learner.critic.parameters]:
            if p.abs().sum() == 0:
                p.copy_(torch.randn(p.shape) * 0.3)
    weights = torch.randn(3, *batch.input_ids.shape).to(DEVICE)
    logprobs, entropy = learner.logprobs(batch, with_entropy=True)
    values = learner.critic.values(batch)
    (weights * torch.stack([logprobs, entropy, values])).sum().backward()
    gradient = [p.grad for p in [*learner.parameters, *learner.critic.parameters] if p.grad is not None]
    return [logprobs, entropy, values], gradient


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("make", [tiny, pytest.param(gpt2, marks=pytest.mark.slow)])
def test_log_probs_values_and_gradients_equal_those_of_whole_rows(make, rank, monkeypatch):
    batch = groups()
    shared = scores(make(), rank, batch)
    monkeypatch.setattr(model_module, "split_prompts", lambda model, batch: None)
    whole = scores(make(), rank, batch)
    for part, expected in zip(shared[0] + shared[1], whole[0] + whole[1], strict=True):
        assert (part - expected).abs().max() <= 1e-5 * LOOSER * max(1.0, expected.abs().max())
    assert max(gradient.abs().max() for gradient in whole[1]) > 0.1


def test_each_prompt_is_read_once():
    base, shapes = tiny(), []
    hidden = base.hidden

    def record(model, input_ids, *args):
        shapes.append(tuple(input_ids.shape))
        return hidden(model, input_ids, *args)

    base.hidden = record
    agent(base).logprobs(groups())
    # 2 prompts of at most 9 tokens; 6 rows of at most 3 more: 4 - 1, and 2 + 1 + 1 - 1 of the chat
    assert shapes == [(2, 9), (6, 3)]


def test_a_batch_is_split_into_prompts_and_what_follows():
    steps = [Step([5, 6, 7], reply, [0.0] * len(reply), "", "", True) for reply in ([8, 9], [10])]
    steps.append(Step([5, 6], [11, 12, 13], [0.0] * 3, "", "", True))
    batch = batch_of(*(finished([step]) for step in [steps[0], steps[1], steps[0], steps[2]]))
    shared = split_prompts(tiny().model, batch)
    assert shared.prompt_ids.tolist() == [[5, 6, 7], [5, 6, 0]]
    assert shared.rest_ids.tolist() == [[8, 0], [0, 0], [8, 0], [11, 12]]
    assert shared.lengths.tolist() == [3, 3, 3, 2] and shared.prompts.tolist() == [0, 0, 0, 1]


def test_rows_are_read_whole_where_sharing_does_not_pay_or_the_model_cannot_be_read_so():
    model, batch = tiny().model, groups()
    assert split_prompts(model, batch) is not None
    rng = random.Random(1)
    other = batch_of(*(finished([reply_to(tokens(rng, 6), rng, 3)]) for _ in range(4)))
    assert split_prompts(model, other) is None  # no prompt occurs twice
    padded = [torch.nn.functional.pad(x, (2, 0)) for x in (batch.input_ids, batch.attention_mask)]
    mask = torch.nn.functional.pad(batch.action_mask, (2, 0))
    assert split_prompts(model, Batch(batch.rows, *padded, mask)) is None  # on the left
    model.config._attn_implementation = "flash_attention_2"  # takes no such mask
    assert split_prompts(model, batch) is None
    model.config._attn_implementation = "sdpa"
    model.config.layer_types, model.config.sliding_window = ["sliding_attention"] * 2, 12
    assert split_prompts(model, batch) is None  # rows of 13 tokens
    model.config.sliding_window = 13
    assert split_prompts(model, batch) is not None


@pytest.mark.parametrize("rank", RANKS)
def test_with_gradient_checkpointing_only_scoring_shares_prompts(rank, monkeypatch):
    calls = []
    monkeypatch.setattr(model_module, "split_prompts", lambda model, batch: calls.append(1))
    learner = agent(tiny(gradient_checkpointing=True), rank)
    learner.logprobs(groups())
    assert calls == []
    with torch.no_grad():
        learner.logprobs(groups())
    assert calls == [1]


@pytest.mark.parametrize("rank", RANKS)
def test_autocast_is_close_to_whole_rows(rank, monkeypatch):
    batch = groups()
    (shared, *_), _ = scores(tiny(autocast=True), rank, batch)
    monkeypatch.setattr(model_module, "split_prompts", lambda model, batch: None)
    (exact, *_), _ = scores(tiny(), rank, batch)
    (whole, *_), _ = scores(tiny(autocast=True), rank, batch)
    rounding = (whole - exact).abs().max()
    assert rounding > 0 and (shared - exact).abs().max() < 3 * rounding
