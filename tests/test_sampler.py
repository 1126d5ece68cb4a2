"""`KVSampler`: its draws, and equal results with and without cached turns."""

import random

import pytest
import torch
from device import DEVICE, LOOSER

pytest.importorskip("transformers")
pytest.importorskip("peft")

from batch import pad_rows, rows_of
from buffer import Step, StopReason, Trajectory
from demo.tiny_model import tiny_base
from policy import Policy
from sampler import Cache, KVSampler, draw

torch.set_num_threads(1)  # models this small are slower with more threads

WORDS = ["go to desk 1", "take mug 1 from bed 1", "inventory look", "nothing here open closed hot cold", "|;"]
OTHERS = [f"word{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(40)]


def make(rank=0, words=WORDS, scale=2.0, temperature=1.0, **settings):
    """Make a tiny policy far from uniform. With a rank its adapter is not zero."""
    sizes = {"d_model": 16, "heads": 2, "intermediate": 32, "max_length": 256, "device": DEVICE}
    base = tiny_base(tuple(words), **{**sizes, **settings})
    policy = Policy(base, lora_rank=rank, lora_alpha=8, learning_rate=1e-2, temperature=temperature)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in base.model.parameters():
            if p.ndim == 2:
                p.mul_(scale)
        for key, p in policy.named.items():
            if "lora_B" in key:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return policy


def rngs(count, seed=0):
    return [random.Random(f"{seed} {i}") for i in range(count)]


def prompts_of(count, low=2, high=9, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(5, 21) for _ in range(rng.randint(low, high))] for _ in range(count)]


def sample(policy, prompts, sampler=None, temperature=1.0, max_tokens=8, seed=0, episodes=None):
    sampler, episodes = sampler or KVSampler(), episodes or list(range(len(prompts)))
    return sampler.sample(policy, prompts, episodes, rngs(len(prompts), seed), temperature, max_tokens)


def follow(policy, prompts, replies, text="look"):
    """Return the next turn's prompts in the full context."""
    pairs = zip(prompts, replies, strict=True)
    return [p + r.token_ids + policy.chat.extend(r.token_ids, text) for p, r in pairs]


def batch_of(prompts, replies):
    """Return the batch of these one-turn episodes; `replies` are lists of token ids."""
    rows = []
    for prompt, ids in zip(prompts, replies, strict=True):
        step = Step(prompt, ids, [0.0] * len(ids), "", "", True)
        rows += rows_of(Trajectory("", "", "", [step], 1.0, True, StopReason.FINISHED))
    return pad_rows(rows, 0, DEVICE)


def scored(policy, prompts, replies):
    """Return the trainer's log-probs of each reply."""
    with torch.no_grad():
        rows = policy.logprobs(batch_of(prompts, [reply.token_ids for reply in replies]))[0].tolist()
    spans = [(len(prompt), len(reply.token_ids)) for prompt, reply in zip(prompts, replies, strict=True)]
    return [row[start : start + count] for row, (start, count) in zip(rows, spans, strict=True)]


def assert_scored_alike(policy, prompts, replies):
    """Check that the trainer computes the log-probs that were sampled."""
    for reply, expected in zip(replies, scored(policy, prompts, replies), strict=True):
        assert reply.logprobs == pytest.approx(expected, abs=1e-4 * LOOSER)


class Meter:
    """Records the shape of each forward pass of a policy: (rows, new tokens of each row)."""

    def __init__(self, policy):
        self.calls, self.hidden = [], policy.hidden
        policy.hidden = self

    def __call__(self, input_ids, *args, **kwargs):
        self.calls.append(tuple(input_ids.shape))
        return self.hidden(input_ids, *args, **kwargs)


# --- draws ----------------------------------------------------------------------------------------


def test_a_uniform_number_picks_by_cumulative_probability():
    class Fixed:
        def __init__(self, value):
            self.value = value

        def random(self):
            return self.value

    # probabilities 0, 0.2, 0, 0.5, 0.3, 0: cumulative 0, 0.2, 0.2, 0.7, 1.0, 1.0
    logits = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0], device=DEVICE).log()
    numbers = [0.0, 0.19, 0.21, 0.69, 0.71, 1 - 2**-53]
    token, logprob = draw(logits.expand(6, 6), [Fixed(u) for u in numbers], 1.0)
    assert token.tolist() == [1, 1, 3, 3, 4, 4]
    # ln 0.2 = -1.60944, ln 0.5 = -0.69315, ln 0.3 = -1.20397
    expected = torch.tensor([-1.60944, -1.60944, -0.69315, -0.69315, -1.20397, -1.20397])
    torch.testing.assert_close(logprob.cpu(), expected, atol=1e-5, rtol=0)


def test_temperature_shapes_the_draw_and_its_log_prob():
    logits = torch.tensor([[2.0, 0.0]], device=DEVICE).expand(2000, 2)
    token, logprob = draw(logits, rngs(2000), 0.5)
    # p(1) = 1 / (1 + e^4) = 0.018, so 36 of 2000, standard deviation 6
    assert 12 < int((token == 1).sum()) < 60
    assert logprob[token == 0][0].item() == pytest.approx(-0.01815, abs=1e-5)
    assert logprob[token == 1][0].item() == pytest.approx(-4.01815, abs=1e-5)
    assert draw(logits, rngs(2000), 0.0)[0].sum() == 0


def test_nan_and_infinite_logits_are_refused():
    for bad in (float("nan"), float("inf")):
        with pytest.raises(FloatingPointError, match="lower its learning rate"):
            draw(torch.tensor([[0.0, 1.0], [0.0, bad]], device=DEVICE), rngs(2), 1.0)


def test_the_checkpoint_s_generation_settings_are_ignored():
    policy = make(words=[*WORDS, *OTHERS[:29]])
    assert policy.base.config.vocab_size == 50
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.zero_()  # all 50 tokens equally likely
    settings = policy.model.generation_config
    settings.do_sample, settings.top_k, settings.top_p = True, 20, 0.8
    settings.repetition_penalty, settings.temperature = 1.1, 0.7
    replies = sample(policy, [[6, 7]] * 2000, max_tokens=1)
    counts = torch.bincount(torch.tensor([reply.token_ids[0] for reply in replies]), minlength=50)
    # 2000 / 50 = 40 of each, standard deviation 6.3; top_k 20 would leave only 20 tokens
    assert counts.min() > 8 and counts.max() < 80
    assert {round(reply.logprobs[0], 4) for reply in replies} == {-3.912}  # ln 1/50


def test_equal_generators_repeat_and_different_ones_differ():
    policy = make(words=[*WORDS, *OTHERS], scale=0.2)
    group = sample(policy, [[6, 7, 8]] * 8)
    assert sample(policy, [[6, 7, 8]] * 8) == group
    assert len({tuple(reply.token_ids) for reply in group}) == 8
    assert sample(policy, [[6, 7, 8]] * 8, seed=1) != group


def test_a_row_does_not_depend_on_its_batch_mates():
    policy, prompts, generators = make(), prompts_of(8), rngs(8)
    together = KVSampler().sample(policy, prompts, list(range(8)), generators, 1.0, 20)
    assert len({len(reply.token_ids) for reply in together}) > 3
    for prompt, reply, used, fresh in zip(prompts, together, generators, rngs(8), strict=True):
        (alone,) = KVSampler().sample(policy, [prompt], [0], [fresh], 1.0, 20)
        assert alone.token_ids == reply.token_ids
        assert used.getstate() == fresh.getstate()  # nothing is drawn for a row that has stopped


def test_replies_end_with_a_stop_token_or_at_the_limit():
    policy = make()
    replies = sample(policy, prompts_of(40), max_tokens=6)
    assert {reply.stopped for reply in replies} == {True, False}
    for reply in replies:
        stops = [token in policy.chat.stop_ids for token in reply.token_ids]
        assert stops[:-1] == [False] * (len(stops) - 1) and stops[-1] == reply.stopped
        assert reply.stopped or len(reply.token_ids) == 6
        assert len(reply.logprobs) == len(reply.token_ids)


def test_greedy_replies_equal_those_of_generate():
    policy, prompts = make(words=[*WORDS, *OTHERS], scale=0.6), prompts_of(4, seed=4)
    replies = sample(policy, prompts, temperature=0.0, max_tokens=16)
    for prompt, reply in zip(prompts, replies, strict=True):
        ids = torch.tensor([prompt], device=DEVICE)
        expected = policy.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=16,
            eos_token_id=policy.chat.stop_ids,
            pad_token_id=0,
        )[0, len(prompt) :]
        assert reply.token_ids == expected.tolist()
    assert_scored_alike(policy, prompts, replies)


# --- the cache ------------------------------------------------------------------------------------


def check_many_turns(rank, context, count, turns):
    """Play `count` episodes whose replies differ in length; check every log-prob against the trainer's.

    At every second turn one episode ends and the others change their order.
    """
    policy, sampler, rng = make(rank, temperature=0.8), KVSampler(), random.Random(3)
    live = dict(enumerate(prompts_of(count, seed=2)))
    lengths = set()
    for turn in range(turns):
        episodes, prompts = list(live), list(live.values())
        replies = sample(policy, prompts, sampler, 0.8, max_tokens=10, seed=turn, episodes=episodes)
        assert_scored_alike(policy, prompts, replies)
        for episode, prompt, reply in zip(episodes, prompts, replies, strict=True):
            lengths.add(len(reply.token_ids))
            message = " ".join(rng.choices(["look", "go", "mug 1"], k=rng.randint(1, 6)))
            new = policy.chat.extend(reply.token_ids, message)
            live[episode] = prompt + reply.token_ids + new if context == "full" else new
            if context == "full" and rng.random() < 0.1:
                live[episode] = live[episode][3:]  # the oldest turns were cut: no cached token is reusable
        if turn % 2:
            del live[rng.choice(list(live))]
            live = dict(rng.sample(list(live.items()), len(live)))
    assert len(live) == count - turns // 2 and len(lengths) > 5


@pytest.mark.parametrize("rank, context", [(0, "window"), (4, "full")])
def test_log_probs_equal_the_trainer_s_over_turns(rank, context):
    check_many_turns(rank, context, count=8, turns=4)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["window", "full"])
@pytest.mark.parametrize("rank", [0, 4])
def test_log_probs_equal_the_trainer_s_over_many_turns(rank, context):
    check_many_turns(rank, context, count=20, turns=15)


def test_only_new_tokens_are_prefilled():
    policy, sampler = make(), KVSampler()
    meter, prompts = Meter(policy), prompts_of(3, low=6, high=6)
    replies = sample(policy, prompts, sampler)
    assert meter.calls[0] == (3, 6) and set(meter.calls[1:]) <= {(3, 1), (2, 1), (1, 1)}
    # New: the reply's last token, the end of the turn if it was not sampled, and <user> look <assistant>
    later = follow(policy, prompts, replies)
    new = max(len(later[i]) - len(prompts[i]) - len(replies[i].token_ids) + 1 for i in range(3))
    meter.calls.clear()
    again = sample(policy, later, sampler, seed=1)
    assert meter.calls[0] == (3, new) and new <= 5
    fresh = sample(policy, later, seed=1)
    assert [reply.token_ids for reply in again] == [reply.token_ids for reply in fresh]


def test_prompts_can_be_prefilled_in_parts(monkeypatch):
    def two_turns():
        policy, sampler = make(), KVSampler()
        meter, prompts = Meter(policy), prompts_of(5)
        replies = sample(policy, prompts, sampler)
        later = follow(policy, prompts, replies)
        meter.calls.clear()
        return replies + sample(policy, later, sampler, seed=1), meter.calls[0][0]

    whole, rows = two_turns()
    monkeypatch.setattr("sampler.PREFILL_TOKENS", 8)
    parts, fewer = two_turns()
    assert rows == 5 and fewer < 5
    assert [reply.token_ids for reply in parts] == [reply.token_ids for reply in whole]
    for part, reply in zip(parts, whole, strict=True):
        assert part.logprobs == pytest.approx(reply.logprobs, abs=1e-5 * LOOSER)


def test_stopped_rows_leave_the_batch():
    policy = make()
    meter = Meter(policy)
    replies = sample(policy, prompts_of(32), max_tokens=40)
    fed = sum(rows for rows, _ in meter.calls[1:])
    needed = sum(len(reply.token_ids) - 1 for reply in replies)
    assert needed <= fed <= 2.2 * needed  # at most half of a batch has stopped


@pytest.mark.parametrize("rank", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_nothing_cached_is_reused_after_a_change_of_weights(rank):
    policy, sampler, prompts = make(rank), KVSampler(), prompts_of(4, low=6, high=6)
    explorer = policy.fork("explorer")
    meters = {"policy": Meter(policy), "explorer": Meter(explorer)}

    def next_prompts(agent):
        """Sample one turn, so that the cache is the agent's; return the prompts of the next turn."""
        return follow(agent, prompts, sample(agent, prompts, sampler, max_tokens=3))

    def prefilled(agent, later):
        """Sample the next turn, check its log-probs, and return how many tokens of a row were prefilled."""
        meter = meters[agent.name]
        meter.calls.clear()
        assert_scored_alike(agent, later, sample(agent, later, sampler))
        return meter.calls[0][1]

    def whole(later):
        return max(len(prompt) for prompt in later)

    later = next_prompts(policy)
    assert prefilled(policy, later) < whole(later)  # nothing has changed: reused
    later = next_prompts(policy)
    explorer.logprobs(batch_of([[5]], [[6]]))[0].sum().backward()
    explorer.step(1.0)
    policy.version = explorer.version
    assert prefilled(explorer, later) == whole(later)  # from A to B
    assert prefilled(policy, later) == whole(later)  # from B to A, whose weights have not changed
    later = next_prompts(policy)
    policy.load_state_dict(policy.state_dict())
    assert prefilled(policy, later) == whole(later)  # loaded weights
    later = next_prompts(explorer)
    explorer.discard()
    assert policy.fork("explorer") is explorer
    assert prefilled(explorer, later) == whole(later)  # a new fork with the same name


def test_reset_clears_the_cache():
    policy, sampler = make(), KVSampler()
    meter, (prompt,) = Meter(policy), prompts_of(1)
    (reply,) = sample(policy, [prompt], sampler)
    sampler.reset()
    meter.calls.clear()
    (longer,) = follow(policy, [prompt], [reply])
    sample(policy, [longer], sampler)
    assert meter.calls[0] == (1, len(longer))


def test_nothing_is_reused_after_a_call_that_failed():
    policy, sampler = make(), KVSampler()
    prompts = prompts_of(3)
    replies = sample(policy, prompts, sampler)
    later = follow(policy, prompts, replies)
    logits, policy.logits = policy.logits, None
    with pytest.raises(TypeError):
        sample(policy, later, sampler)
    policy.logits = logits
    meter = Meter(policy)
    assert_scored_alike(policy, later, sample(policy, later, sampler))
    assert meter.calls[0] == (3, max(len(prompt) for prompt in later))


def test_the_cache_takes_rows_and_columns_and_puts_new_columns_back():
    cache = Cache(6)
    block = torch.arange(2 * 1 * 3 * 2.0, device=DEVICE).reshape(2, 1, 3, 2)
    row = torch.tensor([1], device=DEVICE)
    cache.update(block, block + 100, 0)
    cache.columns = 3
    part = cache.take(row, torch.tensor([[2, 0]], device=DEVICE))  # columns 2 and 0 of row 1
    assert part.layers[0][0][0, 0, :2].tolist() == [[10.0, 11.0], [6.0, 7.0]] and part.columns == 2
    whole = cache.take(row)
    for value in (1.0, 2.0, 3.0):
        block = torch.full((1, 1, 1, 2), value, device=DEVICE)
        whole.update(block, -block, 0)
        whole.columns += 1
    cache.put_back(row, whole)
    assert cache.columns == 6
    keys, values = (x[:, 0, :6, 0].tolist() for x in cache.layers[0])
    assert keys == [[0.0, 2.0, 4.0, 0.0, 0.0, 0.0], [6.0, 8.0, 10.0, 1.0, 2.0, 3.0]]
    assert values == [[100.0, 102.0, 104.0, 0.0, 0.0, 0.0], [106.0, 108.0, 110.0, -1.0, -2.0, -3.0]]


def test_the_cache_allocates_its_size_at_once():
    cache = Cache(7)
    cache.update(torch.zeros(2, 1, 3, 2), torch.zeros(2, 1, 3, 2), 0)
    cache.columns = 3
    half = cache.take(torch.tensor([1]))
    cache.size = 9
    cache.update(torch.zeros(2, 1, 1, 2), torch.zeros(2, 1, 1, 2), 0)
    assert [c.layers[0][0].shape for c in (cache, half)] == [(2, 1, 9, 2), (1, 1, 7, 2)]


@pytest.mark.parametrize("context", ["window", "full"])
def test_each_buffer_is_allocated_once_a_call(context, monkeypatch):
    policy, sampler, prompts = make(), KVSampler(), prompts_of(4, low=6, high=6)
    replies = sample(policy, prompts, sampler)
    later = follow(policy, prompts, replies) if context == "full" else prompts_of(4, seed=1)
    feed, sizes = KVSampler._read, set()

    def read(sampler, *args):
        states = feed(sampler, *args)
        sizes.update(buffer.shape[2] for pair in sampler._cache.layers for buffer in pair)
        return states

    monkeypatch.setattr(KVSampler, "_read", read)
    sample(policy, later, sampler, seed=1)
    after = {buffer.shape[2] for pair in sampler._cache.layers for buffer in pair}
    assert len(sizes) == 1 and after == sizes and sampler._cache.columns <= max(sizes)


def test_equal_prompts_are_read_once():
    policy, (one, two) = make(), prompts_of(2, low=6, high=6)
    meter = Meter(policy)
    replies = sample(policy, [one, two, one, one, two])
    assert meter.calls[0] == (2, 6) and meter.calls[1][0] == 5
    assert_scored_alike(policy, [one, two, one, one, two], replies)
    alone = [
        KVSampler().sample(policy, [p], [0], [rngs(5)[i]], 1.0, 8)[0] for i, p in enumerate([one, two, one])
    ]
    assert [reply.token_ids for reply in replies[:3]] == [reply.token_ids for reply in alone]


@pytest.mark.parametrize("rank", [0, 4])
def test_log_probs_under_autocast_are_close_to_the_trainer_s(rank):
    policy, sampler = make(rank, autocast=True), KVSampler()
    prompts = prompts_of(4)
    later = follow(policy, prompts, sample(policy, prompts, sampler))
    replies = sample(policy, later, sampler)  # with a mask and cached columns
    gaps = []
    for reply, expected in zip(replies, scored(policy, later, replies), strict=True):
        gaps += [abs(a - b) for a, b in zip(reply.logprobs, expected, strict=True)]
    assert sum(gaps) / len(gaps) < 0.1  # bf16 rounds sums of another order differently


# --- refusals -------------------------------------------------------------------------------------


def test_empty_prompts_and_replies_that_do_not_fit_are_refused():
    policy = make(max_length=16)
    with pytest.raises(ValueError, match="no tokens"):
        sample(policy, [[5], []])
    with pytest.raises(ValueError, match="10 tokens and a reply of up to 7 exceed the 16"):
        sample(policy, [[5] * 10], max_tokens=7)
    sample(policy, [[5] * 10], max_tokens=6)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        sample(policy, [[5]], max_tokens=0)


def test_recurrent_layers_and_sequences_beyond_an_attention_window_are_refused():
    policy = make()
    config = policy.base.config
    config.layer_types, config.sliding_window = ["full_attention", "sliding_attention"], 8
    with pytest.raises(ValueError, match="exceed the 8"):
        sample(policy, [[5] * 6], max_tokens=4)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="recurrent"):
        sample(policy, [[5]], max_tokens=4)
