"""`VLLMSampler` with a stub in the place of vLLM's engine: the calls it makes, and their order.

test_vllm.py runs the real vLLM.
"""

import json
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from batch import pad_rows, rows_of
from buffer import Step, StopReason, Trajectory
from demo.tiny_model import tiny_base
from policy import Policy
from sampler import Sample
from scale.vllm_sampler import EngineError, VLLMSampler

torch.set_num_threads(1)  # models this small are slower with more threads

WORDS = ("go to desk 1", "take mug 1 from bed 1", "inventory look", "nothing here open closed")


class StubEngine:
    """Stands in for vllm.LLM and its llm_engine.

    It records its settings and calls, and keeps the lora_B weights of each loaded adapter. It answers every
    prompt with `reply`. Without log-probs in `reply`, the log-prob of a token is minus its id.
    """

    def __init__(self, **settings):
        self.settings, self.calls, self.adapters, self.params = settings, [], {}, []
        self.llm_engine = self
        self.engine_core = SimpleNamespace(shutdown=lambda: self.calls.append(("shutdown",)))
        self.reply = SimpleNamespace(token_ids=(6, 7), logprobs=None, finish_reason="length")

    def add_lora(self, request):
        from safetensors.torch import load_file

        folder = Path(request.lora_path)
        assert request.lora_int_id not in self.adapters
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
        weights = load_file(folder / "adapter_model.safetensors")
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
        if lora_request is None:  # the trial of the base at the start
            assert len(prompts) == 1 and not self.calls and params.max_tokens == 1
            return []
        self.calls.append(("generate", lora_request.lora_int_id, len(prompts)))
        assert lora_request.lora_int_id in self.adapters
        self.params.append(params)
        reply = SimpleNamespace(**vars(self.reply))
        reply.logprobs = reply.logprobs or [{i: SimpleNamespace(logprob=-float(i))} for i in reply.token_ids]
        return [SimpleNamespace(outputs=[reply]) for _ in prompts]

    def new_calls(self):
        """Return the kinds of the calls since the last time, with their numbers."""
        calls, self.calls = self.calls, []
        return [(call[0], *(x for x in call[1:] if isinstance(x, int))) for call in calls]


@pytest.fixture
def engines(monkeypatch):
    """Replace vLLM's modules. Returns the list of the engines that were started."""
    started = []

    def start(**settings):
        started.append(StubEngine(**settings))
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


def make_policy(rank=4, folder=None):
    """Make a tiny policy. folder: where its base is saved first."""
    base = tiny_base(WORDS, d_model=16, heads=2, intermediate=32, max_length=256)
    if folder is not None:
        base.save(folder)
    return Policy(base, lora_rank=rank, lora_alpha=8, learning_rate=1e-2)


@pytest.fixture
def policy(tmp_path):
    """A LoRA policy whose base is saved in a folder, where the engine can load it."""
    return make_policy(folder=tmp_path / "start")


def train_a_little(policy):
    step = Step([5], [6], [0.0], "", "", True)
    rows = rows_of(Trajectory("", "", "", [step], 1.0, True, StopReason.FINISHED))
    policy.logprobs(pad_rows(rows, 0))[0].sum().backward()
    policy.step(1.0)


def sample(sampler, policy, prompts=((5, 6), (7,)), seed=0, temperature=1.0, max_tokens=8):
    prompts = [list(prompt) for prompt in prompts]
    rngs = [random.Random(f"{seed} {i}") for i in range(len(prompts))]
    return sampler.sample(policy, prompts, list(range(len(prompts))), rngs, temperature, max_tokens)


def test_a_new_adapter_is_added_before_the_old_one_is_removed_and_no_prefix_is_kept(engines, policy):
    sampler = VLLMSampler(64, 0.4)
    sample(sampler, policy)
    (engine,) = engines
    assert engine.new_calls() == [("add", 1), ("reset",), ("generate", 1, 2)]
    sample(sampler, policy)
    assert engine.new_calls() == [("generate", 1, 2)]  # nothing has changed
    explorer = policy.fork("explorer")
    sample(sampler, explorer)
    assert engine.new_calls() == [("add", 2), ("reset",), ("generate", 2, 2)]
    train_a_little(explorer)
    sample(sampler, explorer)
    assert engine.new_calls() == [("add", 3), ("remove", 2), ("reset",), ("generate", 3, 2)]
    sample(sampler, policy)  # A has not changed, and its adapter is still loaded
    assert engine.new_calls() == [("generate", 1, 2)]
    explorer.discard()
    with pytest.raises(RuntimeError, match="discarded"):
        sample(sampler, explorer)
    sample(sampler, policy.fork("explorer"))
    assert engine.new_calls() == [("add", 4), ("remove", 3), ("reset",), ("generate", 4, 2)]
    policy.load_state_dict(policy.state_dict())  # a resumed run
    sample(sampler, policy)
    assert engine.new_calls() == [("add", 5), ("remove", 1), ("reset",), ("generate", 5, 2)]


def test_each_adapter_has_the_current_weights_and_a_new_name_number_and_folder(engines, policy):
    sampler = VLLMSampler(64, 0.4)
    names, numbers, paths = [], [], []
    for _ in range(3):
        train_a_little(policy)
        sample(sampler, policy)
        (engine,) = engines
        _, name, number, path = next(call for call in engine.calls if call[0] == "add")
        engine.calls.clear()
        names.append(name)
        numbers.append(number)
        paths.append(path)
        assert list(engine.adapters) == [number]
        for key, loaded in engine.adapters[number].items():
            own = key.removeprefix("base_model.model.").replace("lora_B", "lora_B.policy")
            assert torch.equal(loaded, policy.named[own])
        assert loaded.abs().max() > 0
        assert not Path(path).parent.exists()  # the folder was removed after loading
    assert len(set(names)) == len(set(numbers)) == len(set(paths)) == 3
    sampler.close()
    assert engine.new_calls() == [("shutdown",)]


def test_reset_clears_the_prefix_cache_of_a_started_engine(engines, policy):
    sampler = VLLMSampler(64, 0.4)
    sampler.reset()
    sample(sampler, policy)
    (engine,) = engines
    engine.new_calls()
    sampler.reset()
    assert engine.new_calls() == [("reset",)]
    engine.reset_prefix_cache = lambda: False
    with pytest.raises(RuntimeError, match="keeps its prefix cache"):
        sampler.reset()


def test_each_row_has_its_own_seed_and_every_setting_is_explicit(engines, policy):
    sampler, seeds = VLLMSampler(64, 0.4), []
    for seed in (0, 1, 0):
        sample(sampler, policy, [[5, 6]] * 8, seed=seed, temperature=0.7, max_tokens=9)
        seeds.append([params.seed for params in engines[0].params[-1]])
    assert seeds[0] == seeds[2] and len(set(seeds[0] + seeds[1])) == 16
    sample(sampler, policy, [[5, 6]] * 3, temperature=0.7, max_tokens=9)
    assert [params.seed for params in engines[0].params[-1]] == seeds[0][:3]  # independent of the other rows
    params = vars(engines[0].params[0][0])
    del params["seed"]
    assert params == {
        "n": 1,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "max_tokens": 9,
        "stop_token_ids": policy.chat.stop_ids,
        "logprobs": 0,
        "detokenize": False,
    }


def test_the_engine_starts_from_the_base_with_log_probs_at_the_temperature(engines, policy, tmp_path):
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    sample(VLLMSampler(64, 0.3), policy)
    settings = engines[0].settings
    assert settings["model"] == str((tmp_path / "start").resolve()) and settings["max_model_len"] == 64
    assert settings["logprobs_mode"] == "processed_logprobs" and settings["generation_config"] == "vllm"
    assert (settings["dtype"], settings["max_lora_rank"]) == ("float32", 8)
    assert settings["skip_tokenizer_init"] and settings["enable_lora"]
    assert settings["block_size"] == 32 and "gpu_memory_utilization" not in settings  # on a CPU
    assert (torch.get_num_threads(), torch.set_num_threads) == (threads, set_threads)


def test_an_engine_that_does_not_start_raises_an_error_with_vllm_s_reason(engines, policy, monkeypatch):
    def fail(self, *_, **__):
        raise RuntimeError("no kernel\n  for this")

    monkeypatch.setattr(StubEngine, "generate", fail)
    with pytest.raises(EngineError, match="start: no kernel for this"):
        sample(VLLMSampler(64, 0.4), policy)


def test_a_sample_has_the_log_prob_of_each_token(engines, policy):
    sampler = VLLMSampler(64, 0.4)
    assert sample(sampler, policy) == [Sample([6, 7], [-6.0, -7.0], stopped=False)] * 2
    (engine,) = engines
    end = policy.chat.end_id
    engine.reply = SimpleNamespace(token_ids=(6, end), logprobs=None, finish_reason="stop")
    assert sample(sampler, policy) == [Sample([6, end], [-6.0, -float(end)], stopped=True)] * 2
    engine.reply.finish_reason = "abort"
    with pytest.raises(RuntimeError, match="abort"):
        sample(sampler, policy)
    engine.reply.logprobs = [{6: SimpleNamespace(logprob=math.nan)}, {end: SimpleNamespace(logprob=0.0)}]
    with pytest.raises(FloatingPointError, match="lower its learning rate"):
        sample(sampler, policy)


def test_refused_calls_do_not_start_the_engine(engines, policy):
    sampler = VLLMSampler(16, 0.4)
    with pytest.raises(ValueError, match="10 tokens and a reply of up to 7 exceed the 16"):
        sample(sampler, policy, [[5], [5] * 10], max_tokens=7)
    with pytest.raises(ValueError, match="no tokens"):
        sample(sampler, policy, [[5], []])
    with pytest.raises(ValueError, match="full weights would be out of date"):
        sample(sampler, make_policy(rank=0))
    with pytest.raises(ValueError, match="save it first"):
        sample(sampler, make_policy())
    assert not engines
    sample(sampler, policy, [[5] * 10], max_tokens=6)
    assert len(engines) == 1
