"""The KV-cache sampler: what it draws, and that its cache is never seen in the result."""

import json
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from device import DEVICE, LOOSER

pytest.importorskip("transformers")
pytest.importorskip("peft")

from batch import pad_rows, rows_of
from buffer import Step, StopReason, Trajectory
from model import load_base
from policy import Policy
from sampler import Cache, KVSampler, Sample, draw
from scale.vllm_sampler import EngineError, VLLMSampler

torch.set_num_threads(1)  # models as small as these lose time to a second one

WORDS = ["go to desk 1", "take mug 1 from bed 1", "inventory look", "nothing here open closed hot cold", "|;"]
OTHERS = [f"word{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(40)]


def make(rank=0, words=WORDS, scale=2.0, temperature=1.0, **settings):
    """A policy far from uniform whose adapter, if it has one, matters."""
    sizes = {"d_model": 16, "heads": 2, "intermediate": 32, "max_length": 256, "device": DEVICE, **settings}
    base = load_base("tiny", vocabulary=words, **sizes)
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
    """The next turn's prompts in an append-only context."""
    pairs = zip(prompts, replies, strict=True)
    return [p + r.token_ids + policy.chat.extend(r.token_ids, text) for p, r in pairs]


def batch_of(prompt, ids):
    step = Step(prompt, ids, [0.0] * len(ids), "", "", True)
    return pad_rows(rows_of(Trajectory("", "", "", [step], 1.0, True, StopReason.FINISHED)), 0, DEVICE)


def scored(policy, prompt, reply: Sample):
    """The trainer's log-probs of a reply."""
    with torch.no_grad():
        return policy.logprobs(batch_of(prompt, reply.token_ids))[0][0, len(prompt) :].tolist()


class Meter:
    """Counts the tokens a policy's decoder is given, call by call: (rows, new tokens of each)."""

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


def test_logits_that_are_no_numbers_are_not_drawn_from():
    for bad in (float("nan"), float("inf")):
        with pytest.raises(FloatingPointError, match="lower its learning rate"):
            draw(torch.tensor([[0.0, 1.0], [0.0, bad]], device=DEVICE), rngs(2), 1.0)


def test_no_setting_of_the_checkpoint_narrows_the_draw():
    policy = make(words=[*WORDS, *OTHERS[:29]])
    assert policy.base.config.vocab_size == 50
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.zero_()  # all 50 tokens equally likely
    settings = policy.model.generation_config
    settings.do_sample, settings.top_k, settings.top_p = True, 20, 0.8
    settings.repetition_penalty, settings.temperature = 1.1, 0.7
    replies = sample(policy, [[6, 7]] * 2000, max_tokens=1)
    counts = torch.bincount(torch.tensor([reply.token_ids[0] for reply in replies]), minlength=50)
    # 40 of each, standard deviation 6.3; top_k 20 would show 20 tokens
    assert counts.min() > 8 and counts.max() < 80
    assert {round(reply.logprobs[0], 4) for reply in replies} == {-3.912}  # ln 1/50


def test_equal_generators_repeat_and_different_ones_differ():
    policy = make(words=[*WORDS, *OTHERS], scale=0.2)
    group = sample(policy, [[6, 7, 8]] * 8)
    assert sample(policy, [[6, 7, 8]] * 8) == group
    assert len({tuple(reply.token_ids) for reply in group}) == 8
    assert sample(policy, [[6, 7, 8]] * 8, seed=1) != group


def test_a_row_does_not_depend_on_its_batch_mates():
    policy, prompts, generators = make(), prompts_of(12), rngs(12)
    together = KVSampler().sample(policy, prompts, list(range(12)), generators, 1.0, 20)
    assert len({len(reply.token_ids) for reply in together}) > 3
    for prompt, reply, used, fresh in zip(prompts, together, generators, rngs(12), strict=True):
        (alone,) = KVSampler().sample(policy, [prompt], [0], [fresh], 1.0, 20)
        assert alone.token_ids == reply.token_ids
        assert used.getstate() == fresh.getstate()  # nothing is drawn for a row that is done


def test_replies_end_with_a_stop_token_or_at_the_limit():
    policy = make()
    replies = sample(policy, prompts_of(40), max_tokens=6)
    assert {reply.stopped for reply in replies} == {True, False}
    for reply in replies:
        stops = [token in policy.chat.stop_ids for token in reply.token_ids]
        assert stops[:-1] == [False] * (len(stops) - 1) and stops[-1] == reply.stopped
        assert reply.stopped or len(reply.token_ids) == 6
        assert len(reply.logprobs) == len(reply.token_ids)


def test_greedy_is_what_generate_decodes():
    policy, prompts = make(words=[*WORDS, *OTHERS], scale=0.6), prompts_of(6, seed=4)
    for prompt, reply in zip(prompts, sample(policy, prompts, temperature=0.0, max_tokens=30), strict=True):
        ids = torch.tensor([prompt], device=DEVICE)
        expected = policy.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=30,
            eos_token_id=policy.chat.stop_ids,
            pad_token_id=0,
        )[0, len(prompt) :]
        assert reply.token_ids == expected.tolist()
        assert reply.logprobs == pytest.approx(scored(policy, prompt, reply), abs=1e-4 * LOOSER)


# --- the cache ------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["window", "full"])
@pytest.mark.parametrize("rank", [0, 4])
def test_log_probs_are_the_trainers_over_many_turns(rank, context):
    policy, sampler, rng = make(rank, temperature=0.8), KVSampler(), random.Random(3)
    live = dict(enumerate(prompts_of(10, seed=2)))
    lengths = set()
    for turn in range(9):
        episodes, prompts = list(live), list(live.values())
        replies = sample(policy, prompts, sampler, 0.8, max_tokens=10, seed=turn, episodes=episodes)
        for episode, prompt, reply in zip(episodes, prompts, replies, strict=True):
            assert reply.logprobs == pytest.approx(scored(policy, prompt, reply), abs=1e-4 * LOOSER)
            lengths.add(len(reply.token_ids))
            heard = " ".join(rng.choices(["look", "go", "mug 1"], k=rng.randint(1, 6)))
            new = policy.chat.extend(reply.token_ids, heard)
            live[episode] = prompt + reply.token_ids + new if context == "full" else new
            if context == "full" and rng.random() < 0.1:
                live[episode] = live[episode][3:]  # an episode whose oldest turns were cut begins anew
        if turn % 2:  # an episode ends, the others change episodes
            del live[rng.choice(list(live))]
            live = dict(rng.sample(list(live.items()), len(live)))
    assert len(live) == 6 and len(lengths) > 5


def test_only_new_tokens_are_prefilled():
    policy, sampler = make(), KVSampler()
    meter, prompts = Meter(policy), prompts_of(3, low=6, high=6)
    replies = sample(policy, prompts, sampler)
    assert meter.calls[0] == (3, 6) and set(meter.calls[1:]) <= {(3, 1), (2, 1), (1, 1)}
    # the last token of each reply, the end of the turn where it was not sampled, and <user> look <assistant>
    later = follow(policy, prompts, replies)
    new = max(len(later[i]) - len(prompts[i]) - len(replies[i].token_ids) + 1 for i in range(3))
    meter.calls.clear()
    again = sample(policy, later, sampler, seed=1)
    assert meter.calls[0] == (3, new) and new <= 5
    fresh = sample(policy, later, seed=1)
    assert [reply.token_ids for reply in again] == [reply.token_ids for reply in fresh]


def test_prompts_may_be_read_in_parts(monkeypatch):
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


def test_finished_rows_leave_the_batch():
    policy = make()
    meter = Meter(policy)
    replies = sample(policy, prompts_of(32), max_tokens=40)
    fed = sum(rows for rows, _ in meter.calls[1:])
    needed = sum(len(reply.token_ids) - 1 for reply in replies)
    assert needed <= fed <= 2.2 * needed  # never more than half of a batch is done


@pytest.mark.parametrize("rank", [0, 4])
def test_nothing_cached_survives_a_change_of_weights(rank):
    policy, sampler = make(rank), KVSampler()
    explorer, prompt = policy.fork("explorer"), prompts_of(4, low=6, high=6)
    meters = [Meter(policy), Meter(explorer)]

    def extended(actor):
        replies = sample(actor, prompt, sampler, max_tokens=3)
        return follow(actor, prompt, replies)

    def widths(actor, prompts):
        for meter in meters:
            meter.calls.clear()
        replies = sample(actor, prompts, sampler)
        for p, reply in zip(prompts, replies, strict=True):
            assert reply.logprobs == pytest.approx(scored(actor, p, reply), abs=1e-4 * LOOSER)
        return (meters[0].calls + meters[1].calls)[0][1]

    whole = max(map(len, longer := extended(policy)))
    assert widths(policy, longer) < whole  # nothing changed: reused
    longer = extended(policy)
    explorer.logprobs(batch_of([5], [6]))[0].sum().backward()
    explorer.step(1.0)
    policy.version = explorer.version
    assert widths(explorer, longer) == max(map(len, longer))  # A -> B
    assert widths(policy, longer) == max(map(len, longer))  # B -> A, although A is what it was
    longer = extended(policy)
    policy.load_state_dict(policy.state_dict())
    assert widths(policy, longer) == max(map(len, longer))  # loaded weights
    longer = extended(explorer)
    explorer.discard()
    assert policy.fork("explorer") is explorer
    assert widths(explorer, longer) == max(map(len, longer))  # a new fork of the same name


def test_reset_forgets():
    policy, sampler = make(), KVSampler()
    meter, (prompt,) = Meter(policy), prompts_of(1)
    (reply,) = sample(policy, [prompt], sampler)
    sampler.reset()
    meter.calls.clear()
    (longer,) = follow(policy, [prompt], [reply])
    sample(policy, [longer], sampler)
    assert meter.calls[0] == (1, len(longer))


def test_a_call_that_failed_leaves_nothing_to_reuse():
    policy, sampler = make(), KVSampler()
    prompts = prompts_of(3)
    replies = sample(policy, prompts, sampler)
    later = follow(policy, prompts, replies)
    logits, policy.logits = policy.logits, None
    with pytest.raises(TypeError):
        sample(policy, later, sampler)
    policy.logits = logits
    for prompt, reply in zip(later, sample(policy, later, sampler), strict=True):
        assert reply.logprobs == pytest.approx(scored(policy, prompt, reply), abs=1e-4 * LOOSER)


def test_cache_grows_takes_and_gives_back():
    cache = Cache(room=1)
    block = torch.arange(2 * 1 * 3 * 2.0, device=DEVICE).reshape(2, 1, 3, 2)
    row = torch.tensor([1], device=DEVICE)
    cache.update(block, block + 100, 0)
    cache.columns = 3
    part = cache.take(row, torch.tensor([[2, 0]], device=DEVICE))  # columns 2 and 0 of row 1
    assert part.layers[0][0][0, 0].tolist() == [[10.0, 11.0], [6.0, 7.0]] and part.columns == 2
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


def test_a_cache_grows_by_the_room_that_is_asked_for():
    cache = Cache(room=4)
    cache.update(torch.zeros(2, 1, 3, 2), torch.zeros(2, 1, 3, 2), 0)
    cache.columns = 3
    half = cache.take(torch.tensor([1]))
    half.room = 2
    half.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), 0)
    # 3 columns and 4 to come; 3, the new one and 2 to come
    assert [c.layers[0][0].shape[2] for c in (cache, half)] == [7, 6]


@pytest.mark.parametrize("rank", [0, 4])
def test_what_is_sampled_under_autocast_is_scored_alike(rank):
    policy, sampler = make(rank, autocast=True), KVSampler()
    prompts = prompts_of(4)
    replies = sample(policy, prompts, sampler)
    later = follow(policy, prompts, replies)  # with a mask and a cache
    gaps = [
        abs(a - b)
        for prompt, reply in zip(later, sample(policy, later, sampler), strict=True)
        for a, b in zip(reply.logprobs, scored(policy, prompt, reply), strict=True)
    ]
    assert sum(gaps) / len(gaps) < 0.1  # as far apart as bf16 puts two ways to add up the same


# --- refusals -------------------------------------------------------------------------------------


def test_what_cannot_be_sampled_is_refused():
    policy = make(max_length=16)
    with pytest.raises(ValueError, match="no tokens"):
        sample(policy, [[5], []])
    with pytest.raises(ValueError, match="10 tokens and a reply of up to 7 exceed the 16"):
        sample(policy, [[5] * 10], max_tokens=7)
    sample(policy, [[5] * 10], max_tokens=6)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        sample(policy, [[5]], max_tokens=0)


def test_windows_are_refused_where_they_would_matter_and_recurrence_always():
    policy = make()
    config = policy.base.config
    config.layer_types, config.sliding_window = ["full_attention", "sliding_attention"], 8
    with pytest.raises(ValueError, match="exceed the 8"):
        sample(policy, [[5] * 6], max_tokens=4)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="recurrent"):
        sample(policy, [[5]], max_tokens=4)


# --- vLLM, with a stand-in for the engine: what it is asked for. The real one: test_vllm.py --------


class StandIn:
    """In the place of vllm.LLM: keeps what it is asked, and holds each adapter's lora_B as it was loaded."""

    def __init__(self, **settings):
        self.settings, self.calls, self.adapters, self.params = settings, [], {}, []
        self.llm_engine = self  # one object answers for both
        self.engine_core = SimpleNamespace(shutdown=lambda: self.calls.append(("shutdown",)))
        self.reply = SimpleNamespace(token_ids=(6, 7), logprobs=None, finish_reason="length")

    def add_lora(self, request):
        from safetensors.torch import load_file

        assert request.lora_int_id not in self.adapters
        weights = load_file(Path(request.lora_path) / "adapter_model.safetensors")
        assert json.loads((Path(request.lora_path) / "adapter_config.json").read_text())["r"] == 4
        self.adapters[request.lora_int_id] = {k: v for k, v in weights.items() if "lora_B" in k}
        self.calls.append(("add", request.lora_name, request.lora_int_id, request.lora_path))
        return True

    def remove_lora(self, number):
        del self.adapters[number]
        self.calls.append(("remove", number))
        return True

    def reset_prefix_cache(self):
        self.calls.append(("reset",))
        return True

    def generate(self, prompts, params, lora_request, use_tqdm):
        if lora_request is None:  # the trial at the start, of the bare base
            assert len(prompts) == 1 and not self.calls and params.max_tokens == 1
            return []
        self.calls.append(("generate", lora_request.lora_int_id, len(prompts)))
        assert lora_request.lora_int_id in self.adapters
        self.params.append(params)
        reply = SimpleNamespace(**vars(self.reply))
        reply.logprobs = reply.logprobs or [{i: SimpleNamespace(logprob=-float(i))} for i in reply.token_ids]
        return [SimpleNamespace(outputs=[reply]) for _ in prompts]

    def did(self):
        """The kinds of calls since it was last asked, and their numbers."""
        calls, self.calls = self.calls, []
        return [(call[0], *(x for x in call[1:] if isinstance(x, int))) for call in calls]


@pytest.fixture
def engines(monkeypatch):
    """The stand-ins that were started."""
    started = []

    def start(**settings):
        started.append(StandIn(**settings))
        return started[-1]

    def request(name, number, path):
        return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path)

    def params(**settings):
        return SimpleNamespace(**settings)

    modules = {
        "vllm": SimpleNamespace(LLM=start, SamplingParams=params),
        "vllm.lora.request": SimpleNamespace(LoRARequest=request),
        "vllm.distributed": SimpleNamespace(cleanup_dist_env_and_memory=lambda: None),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return started


@pytest.fixture
def adapted(tmp_path):
    """A LoRA policy whose base is in a folder, as the engine needs it."""
    sizes = {"d_model": 16, "heads": 2, "intermediate": 32, "max_length": 256}
    base = load_base("tiny", vocabulary=WORDS, **sizes)
    base.save(tmp_path / "start")
    return Policy(base, lora_rank=4, lora_alpha=8, learning_rate=1e-2)


def train_a_little(policy):
    policy.logprobs(batch_of([5], [6]))[0].sum().backward()
    policy.step(1.0)


def ask(sampler, policy, prompts=((5, 6), (7,)), seed=0, temperature=1.0, max_tokens=8):
    prompts = [list(prompt) for prompt in prompts]
    numbers = list(range(len(prompts)))
    return sampler.sample(policy, prompts, numbers, rngs(len(prompts), seed), temperature, max_tokens)


def test_an_adapter_is_added_under_a_new_number_before_the_old_one_goes_and_no_prefix_is_kept(
    engines, adapted
):
    sampler = VLLMSampler(64, 0.4)
    ask(sampler, adapted)
    (engine,) = engines
    assert engine.did() == [("add", 1), ("reset",), ("generate", 1, 2)]
    ask(sampler, adapted)
    assert engine.did() == [("generate", 1, 2)]  # nothing has changed
    explorer = adapted.fork("explorer")
    ask(sampler, explorer)
    assert engine.did() == [("add", 2), ("reset",), ("generate", 2, 2)]
    train_a_little(explorer)
    ask(sampler, explorer)
    assert engine.did() == [("add", 3), ("remove", 2), ("reset",), ("generate", 3, 2)]
    ask(sampler, adapted)  # A is what it was, and still there
    assert engine.did() == [("generate", 1, 2)]
    explorer.discard()
    with pytest.raises(RuntimeError, match="discarded"):
        ask(sampler, explorer)
    ask(sampler, adapted.fork("explorer"))
    assert engine.did() == [("add", 4), ("remove", 3), ("reset",), ("generate", 4, 2)]
    adapted.load_state_dict(adapted.state_dict())  # a resumed run
    ask(sampler, adapted)
    assert engine.did() == [("add", 5), ("remove", 1), ("reset",), ("generate", 5, 2)]


def test_the_engine_has_the_weights_of_now_in_a_folder_and_under_a_name_of_their_own(engines, adapted):
    sampler = VLLMSampler(64, 0.4)
    seen = []
    for _ in range(3):
        train_a_little(adapted)
        ask(sampler, adapted)
        (engine,) = engines
        _, name, number, path = next(call for call in engine.calls if call[0] == "add")
        engine.calls.clear()
        seen.append((name, number, path))
        assert list(engine.adapters) == [number]
        for key, loaded in engine.adapters[number].items():
            own = key.removeprefix("base_model.model.").replace("lora_B", "lora_B.policy")
            assert torch.equal(loaded, adapted.named[own])
        assert loaded.abs().max() > 0
        assert not Path(path).parent.exists()  # it was read: nothing is left on the disk
    assert all(len(set(kind)) == 3 for kind in zip(*seen, strict=True))
    sampler.close()
    assert engine.did() == [("shutdown",)]


def test_a_reset_reaches_the_engine_if_there_is_one(engines, adapted):
    sampler = VLLMSampler(64, 0.4)
    sampler.reset()
    ask(sampler, adapted)
    (engine,) = engines
    engine.did()
    sampler.reset()
    assert engine.did() == [("reset",)]
    engine.reset_prefix_cache = lambda: False
    with pytest.raises(RuntimeError, match="keeps its prefix cache"):
        sampler.reset()


def test_each_row_has_a_seed_of_its_own_and_every_setting_is_given(engines, adapted):
    sampler, seeds = VLLMSampler(64, 0.4), []
    for seed in (0, 1, 0):
        ask(sampler, adapted, [[5, 6]] * 8, seed=seed, temperature=0.7, max_tokens=9)
        seeds.append([params.seed for params in engines[0].params[-1]])
    assert seeds[0] == seeds[2] and len(set(seeds[0] + seeds[1])) == 16
    ask(sampler, adapted, [[5, 6]] * 3, temperature=0.7, max_tokens=9)  # fewer rows beside them
    assert [params.seed for params in engines[0].params[-1]] == seeds[0][:3]
    params = vars(engines[0].params[0][0])
    del params["seed"]
    assert params == {
        **{"n": 1, "temperature": 0.7, "max_tokens": 9, "min_tokens": 0, "logprobs": 0, "detokenize": False},
        **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop_token_ids": adapted.chat.stop_ids},
        **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    }


def test_the_engine_is_started_from_the_base_with_tempered_log_probs(engines, adapted, tmp_path):
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    ask(VLLMSampler(64, 0.3), adapted)
    settings = engines[0].settings
    assert settings["model"] == str((tmp_path / "start").resolve()) and settings["max_model_len"] == 64
    assert settings["logprobs_mode"] == "processed_logprobs" and settings["generation_config"] == "vllm"
    assert (settings["dtype"], settings["max_lora_rank"]) == ("float32", 8)
    assert settings["skip_tokenizer_init"] and settings["enable_lora"]
    assert (torch.get_num_threads(), torch.set_num_threads) == (threads, set_threads)


def test_an_engine_that_does_not_start_is_told_with_its_own_words(engines, adapted, monkeypatch):
    def fail(self, *_, **__):
        raise RuntimeError("no kernel\n  for this")

    monkeypatch.setattr(StandIn, "generate", fail)
    with pytest.raises(EngineError, match="start: no kernel for this"):
        ask(VLLMSampler(64, 0.4), adapted)


def test_replies_come_with_the_log_prob_of_each_token(engines, adapted):
    sampler = VLLMSampler(64, 0.4)
    assert ask(sampler, adapted) == [Sample([6, 7], [-6.0, -7.0], stopped=False)] * 2
    (engine,) = engines
    end = adapted.chat.end_id
    engine.reply = SimpleNamespace(token_ids=(6, end), logprobs=None, finish_reason="stop")
    assert ask(sampler, adapted) == [Sample([6, end], [-6.0, -float(end)], stopped=True)] * 2
    engine.reply.finish_reason = "abort"
    with pytest.raises(RuntimeError, match="abort"):
        ask(sampler, adapted)
    engine.reply.logprobs = [{6: SimpleNamespace(logprob=math.nan)}, {end: SimpleNamespace(logprob=0.0)}]
    with pytest.raises(FloatingPointError, match="lower its learning rate"):
        ask(sampler, adapted)


def test_what_vllm_cannot_sample_never_reaches_it(engines, adapted):
    sampler = VLLMSampler(16, 0.4)
    with pytest.raises(ValueError, match="10 tokens and a reply of up to 7 exceed the 16"):
        ask(sampler, adapted, [[5], [5] * 10], max_tokens=7)
    with pytest.raises(ValueError, match="no tokens"):
        ask(sampler, adapted, [[5], []])
    with pytest.raises(ValueError, match="full weights would go stale"):
        ask(sampler, make())
    with pytest.raises(ValueError, match="save it first"):
        ask(sampler, make(rank=4))
    assert not engines
    ask(sampler, adapted, [[5] * 10], max_tokens=6)
    assert len(engines) == 1
