"""Test the memory plan: arithmetic by hand, the bytes that autograd keeps, refusals; slow: measured peaks."""

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
import flags
import model as model_module
import train
from batch import pad_rows, rows_of
from buffer import Step, StopReason, Trajectory
from model import Base
from policy import Policy
from scale import plan
from scale.plan import KNOWN, Precision

torch.set_num_threads(1)
SEVEN = KNOWN["Qwen/Qwen2.5-7B-Instruct"]


def args_of(*argv):
    return flags.prepare(["--plan", *argv])


PAPER = ("--preset", "paper-alfworld", "--model", "Qwen/Qwen2.5-7B-Instruct")


# --- shapes ---------------------------------------------------------------------------------------


def test_known_models_have_their_published_number_of_parameters():
    counts = {name.split("/")[1]: shape.parameters for name, shape in KNOWN.items()}
    assert counts == {
        "Qwen2.5-0.5B-Instruct": 494_032_768,
        "Qwen2.5-1.5B-Instruct": 1_543_714_304,
        "Qwen2.5-3B-Instruct": 3_085_938_688,
        "Qwen2.5-7B-Instruct": 7_615_616_512,
        "Llama-3.2-1B-Instruct": 1_235_814_400,
        "Llama-3.2-3B-Instruct": 3_212_749_824,
    }


def test_a_rank_64_adapter_of_the_7b_model_by_hand():
    # in + out of q 3584 + 3584, k and v 3584 + 512 each, o 3584 + 3584, gate, up and down 3584 + 18944 each:
    # 7168 + 2 * 4096 + 7168 + 3 * 22528 = 90112; times 28 layers, times rank 64
    assert SEVEN.adapter(64) == 90_112 * 28 * 64 == 161_480_704


def small(kind="qwen2", **more):
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config, model = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[kind]
    sizes = {"vocab_size": 331, "hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    torch.manual_seed(0)
    return model(config(**sizes, **more))


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folders_shape_counts_the_models_parameters(kind, tied, tmp_path):
    model = small(kind, tie_word_embeddings=tied)
    model.config.save_pretrained(tmp_path)  # no weights
    shape = plan.shape_of(str(tmp_path))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.backbone == sum(p.numel() for p in model.get_decoder().parameters())
    agent = Policy(Base(model, SimpleNamespace(pad_id=0)), lora_rank=8)
    assert shape.adapter(8) == sum(p.numel() for p in agent.parameters)
    (tmp_path / "adapter").mkdir()
    base = json.dumps({"base_model_name_or_path": str(tmp_path)})
    (tmp_path / "adapter" / "adapter_config.json").write_text(base)
    assert plan.shape_of(str(tmp_path / "adapter")) == shape


def test_the_policy_of_a_run_that_was_moved_has_the_shape_of_its_start(tmp_path):
    config = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    for folder, file, content in (
        ("start", "config.json", config | {"num_attention_heads": 4, "vocab_size": 100}),
        ("policy", "adapter_config.json", {"base_model_name_or_path": "/old/place/start"}),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(json.dumps(content))
    assert plan.shape_of(str(tmp_path / "policy")).layers == 3


def test_a_model_without_a_shape_is_an_error(tmp_path, monkeypatch):
    def offline(*_, **__):
        raise OSError("offline")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", offline)
    with pytest.raises(ValueError, match="some-org/model is not known.*offline.*Qwen2.5-7B"):
        plan.shape_of("some-org/model")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="'gpt2'.*qwen2"):
        plan.shape_of(str(tmp_path))
    for config, why in (("[1]", "no JSON object"), ('{"model_type": "qwen2"}', "does not describe a model")):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(ValueError, match=why):
            plan.shape_of(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="line 1"):  # json's own message
        plan.shape_of(str(tmp_path))


# --- bytes ----------------------------------------------------------------------------------------


def test_the_7b_models_parts_by_hand():
    args = args_of(*PAPER)
    parts = plan.update_bytes(args, SEVEN, tokens=8192, actions=1024)
    assert parts["weights"] == 7_615_616_512 * 2  # 15.2 GB of bf16
    assert parts["adapters"] == 2 * 161_480_704 * 4  # A and B, fp32
    assert parts["optimizer"] == 2 * 161_480_704 * 8  # two moments of each
    assert parts["gradients"] == 161_480_704 * 4  # one agent is trained at a time
    # hidden states and their gradient 2 * 1024 * 3584 * 2 bytes; 6.5 blocks of 64 * 152064 * 4 bytes
    assert parts["log-probs"] == 14_680_064 + 253_034_496
    # keys and values: 28 layers * 2 * 512 * 2 bytes
    assert plan.kv_bytes(SEVEN, plan.precision(args)) == 57_344
    # 128 episodes of 2048 + 512 tokens, twice
    assert plan.rollout_bytes(args, SEVEN)["KV cache"] == 2 * 128 * 2560 * 57_344


def test_full_weights_are_copied_and_ppo_has_critics():
    args = args_of(*PAPER, "--lora_rank", "0", "--algo", "ppo")
    parts = plan.agent_bytes(args, SEVEN)
    assert parts["weights"] == 4 * 7_615_616_512  # the reference
    assert parts["trained copies"] == 2 * 4 * 7_615_616_512
    assert parts["optimizer"] == 2 * 8 * 7_615_616_512
    assert parts["critics and their optimizer"] == 2 * 12 * (7_615_616_512 + 3_585)
    alone = args_of(*PAPER, "--lora_rank", "0", "--method", "outcome")
    assert plan.agent_bytes(alone, SEVEN)["trained copies"] == 4 * 7_615_616_512


def test_the_implicit_reward_is_a_third_agent_and_needs_no_step_reward_model():
    args = args_of(*PAPER, "--dense_reward", "implicit")
    parts = plan.agent_bytes(args, SEVEN)
    assert parts["implicit reward"] == 161_480_704 * (4 + 8)  # an adapter in fp32 and its two moments
    others = plan.agent_bytes(args_of(*PAPER), SEVEN)
    assert others["implicit reward"] == 0 and parts == others | {"implicit reward": 161_480_704 * 12}
    assert "step reward model" not in plan.plan_of(args)[0]
    assert "implicit reward" in plan.plan_of(args)[0]


def test_a_loop_of_the_paper_by_hand():
    # 14 on-policy tasks of 8 in each of 3 + 3 updates, 28 tasks of 8 for the buffer; 2 tasks of 8 replayed
    assert plan.loop_size(args_of(*PAPER)) == {
        "loops": 50,
        "updates": 6,
        "episodes": 6 * 112 + 224,
        "replayed episodes": 48,
        "turns": 896 * 50,
        "sampled tokens": 896 * 50 * 512,
        "prompt tokens": 896 * 50 * 2048,
        "trained turns": (672 + 48) * 50,
    }
    cheap = plan.loop_size(args_of(*PAPER, "--buffer_source", "phase1"))
    assert cheap["episodes"] == 6 * 14 * 8  # B plays no tasks for the buffer
    spear = plan.loop_size(args_of(*PAPER, "--method", "spear", "--spear_buffer", "256"))
    # 3 updates on 16 tasks of 8 episodes of 50 turns, each with at most 256 imitated turns
    assert (spear["episodes"], spear["trained turns"]) == (384, 384 * 50 + 3 * 256)
    ppo = plan.loop_size(args_of(*PAPER, "--algo", "ppo", "--method", "outcome"))
    assert (ppo["updates"], ppo["episodes"], ppo["replayed episodes"]) == (3, 3 * 128, 0)


def batch_of(rows, prompt, reply, vocab=331):
    rng = random.Random(0)

    def episode():
        prompt_ids, reply_ids = ([rng.randrange(vocab) for _ in range(n)] for n in (prompt, reply))
        step = Step(prompt_ids, reply_ids, [0.0] * reply, "", "", True)
        return Trajectory("", "", "", [step], 1.0, True, StopReason.FINISHED)

    return pad_rows([row for _ in range(rows) for row in rows_of(episode())], 0)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("rank, dtype", [(0, "float32"), (8, "float32"), (8, "bfloat16")])
def test_activations_equal_the_bytes_that_autograd_keeps(rank, dtype, autocast):
    model = small()
    model_module.cast(model, getattr(torch, dtype))
    base = Base(model, SimpleNamespace(pad_id=0), autocast=autocast)
    agent, batch = Policy(base, lora_rank=rank), batch_of(rows=2, prompt=60, reply=41)
    kept, weights = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (
                storage.nbytes(),
                x,
            )  # x: keep it alive, so that its address stays its own
        return x

    agent.activate()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        states = base.read(model, batch)
    shape = plan.read_config(model.config.to_dict(), "small")
    precision = Precision(rank, 4 if dtype == "float32" else 2, autocast)
    expected, _ = plan.backward_bytes(shape, precision, tokens=2 * 100, checkpointing=False)
    expected -= states.numel() * states.element_size()  # the result itself
    if autocast and dtype == "float32":
        expected -= 2 * 331 * 64  # the output layer's cast is needed only for log-probs
    assert sum(size for size, _ in kept.values()) == pytest.approx(expected, rel=0.03)


# --- the printed plan -----------------------------------------------------------------------------


def test_the_plan_is_printed_without_weights_or_games(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train.main(["--plan", *PAPER])  # within 80 GB
    out = capsys.readouterr().out
    assert "7,615,616,512 parameters" in out and "161,480,704" in out and "15.23" in out
    assert "896 episodes played, 48 replayed" in out
    with pytest.raises(SystemExit) as stopped:
        train.main(["--plan", *PAPER, "--parallel_episodes", "256"])
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and err.count("\n") == 1
    # KV cache: 2 * 256 * 2560 tokens of 57,344 bytes = 75.2 GB; weights 15.2 GB
    assert err.startswith("error: --gpu_memory_gb 80: the rollout needs ")
    assert "GB, mostly KV cache 75.2 (--parallel_episodes) and weights 15.2 (--model, --dtype); change" in err


def refusal_of(*argv, gb=80.0):
    args = args_of("--method", "outcome", "--gpu_memory_gb", str(gb), *argv)
    return plan.refusal(args, KNOWN[args.model], None)


def test_a_refusal_names_the_largest_parts_and_their_flags():
    seven = ("--preset", "paper-webshop", "--model", "Qwen/Qwen2.5-7B-Instruct", "--parallel_episodes", "4")
    assert refusal_of(*seven) is None
    without = refusal_of(*seven, "--no-gradient_checkpointing", "--tokens_per_micro_batch", "16384")
    assert "the update needs" in without and "the rollout" not in without
    assert (
        "mostly activations" in without and "(--tokens_per_micro_batch, --gradient_checkpointing)" in without
    )
    full = refusal_of(*seven, "--lora_rank", "0")  # 7.6e9 * (4 reference + 4 + 8 A + 4 gradients) = 152 GB
    assert "mostly optimizer 60.9 (--lora_rank) and" in full  # 7.6e9 * 8


@pytest.mark.parametrize("moment, part, flag, value", [
    ("rollout", "KV cache", "parallel_episodes", 64),
    ("rollout", "weights", "dtype", "bfloat16"),
    ("rollout", "adapters", "lora_rank", 8),
    ("update", "optimizer", "lora_rank", 8),
    ("update", "gradients", "lora_rank", 8),
    ("update", "activations", "gradient_checkpointing", True),
    ("update", "activations", "tokens_per_micro_batch", 4096),
    ("update", "working memory", "tokens_per_micro_batch", 4096),
    ("update", "log-probs", "tokens_per_micro_batch", 4096),
    ("update", "critics and their optimizer", "algo", "grpo"),
    ("reward model fit", "activations", "gradient_checkpointing", True),
])  # fmt: skip
def test_a_parts_flag_makes_it_smaller(moment, part, flag, value):
    args = args_of(*PAPER, "--algo", "ppo", "--no-gradient_checkpointing", "--dtype", "float32")
    assert f"--{flag}" in (plan.LEVERS | plan.LEVERS_AT.get(moment, {}))[part]
    before, after = (
        plan.moments(a, SEVEN, SEVEN) for a in (args, dataclasses.replace(args, **{flag: value}))
    )
    assert after[moment].get(part, 0) < before[moment][part]


def test_every_part_has_a_flag():
    for argv in ([], ["--algo", "ppo", "--lora_rank", "0"], ["--sampler", "vllm"]):
        args = dataclasses.replace(args_of(*PAPER, "--gpu_memory_gb", "80", *argv), warm_start=8)
        for parts in plan.moments(args, SEVEN, SEVEN).values():
            assert parts.keys() - {"slack"} <= plan.LEVERS.keys()


def test_vllm_takes_its_share_of_the_gpu():
    seven = ("--preset", "paper-webshop", "--model", "Qwen/Qwen2.5-7B-Instruct", "--sampler", "vllm")
    args = args_of("--gpu_memory_gb", "80", *seven)
    found = plan.moments(args, SEVEN, SEVEN)
    for moment in ("rollout", "update"):
        assert found[moment]["vLLM and its cache"] == 32e9 and "KV cache" not in found[moment]  # 0.4 * 80
    assert "vLLM and its cache" not in found["reward model fit"]  # the expert plays: vLLM starts later
    with_policy = dataclasses.replace(args, reward_model_source="policy")
    assert plan.moments(with_policy, SEVEN, SEVEN)["reward model fit"]["vLLM and its cache"] == 32e9
    # bf16 weights 15.23 GB, two adapters 0.65 GB. A pass over 8192 tokens, base and adapter in bf16:
    # (2 * 2 + 2 * 2) * 18944 + 16 * 3584 = 208,896 bytes each, 1.71 GB. An episode's cache: 4096 + 512 tokens
    # of 28 * 2 * 512 * 2 = 57,344 bytes, 0.264 GB
    episode = (args.max_prompt_tokens + args.max_new_tokens) * 57_344
    left = 32e9 - 2 * (7_615_616_512 + 2 * 161_480_704) - 8192 * 208_896
    assert plan.vllm_episodes(args, SEVEN) == pytest.approx(left / episode)
    assert refusal_of(*seven) is None
    # 15.231 + 0.646 + 1.711 GB and one episode of 0.264 GB
    assert refusal_of(*seven, "--vllm_memory", "0.2") == (
        "--vllm_memory 0.2: 16.0 GB of the GPU must hold vLLM's copy of the model and the cache of one "
        "episode, 17.9 GB; raise it or take a larger GPU"
    )
    assert "mostly vLLM and its cache 64.0 (--vllm_memory)" in refusal_of(*seven, "--vllm_memory", "0.8")


def test_the_tiny_model_has_a_plan(capsys):
    train.main(["--plan", "--gpu_memory_gb", "16"])
    assert "warm start" in capsys.readouterr().out


def test_a_model_of_unknown_shape_is_a_usage_error(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(SystemExit) as stopped:
        train.main(["--plan", "--preset", "paper-alfworld", "--model", str(tmp_path)])
    assert stopped.value.code == 2 and f"--model {tmp_path}: " in capsys.readouterr().err


# --- measured peaks -----------------------------------------------------------------------------

SIZES = {  # 62 million parameters: 32000 * 512, and 12 layers of 3.8 million
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
ROWS, PROMPT, REPLY = 2, 200, 56  # a micro-batch: 512 tokens, 112 of them action tokens
UPDATE = """
import json, random, sys
import peft, torch
from types import SimpleNamespace
from transformers import Qwen2Config, Qwen2ForCausalLM
import rspo
from buffer import Group, Step, StopReason, Trajectory
from model import Base
from policy import Policy

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

sizes, settings, rank, checkpointing, prompt, reply = json.loads(sys.argv[1])
torch.set_num_threads(1)
after_imports = kilobytes("VmRSS")
rng = random.Random(0)
draw = lambda count: [rng.randrange(sizes["vocab_size"]) for _ in range(count)]
step = lambda: Step(draw(prompt), draw(reply), [0.0] * reply, "", "", True)
play = lambda won: Trajectory("", "", "", [step(), step()], won, won == 1.0, StopReason.FINISHED)
groups = [Group(str(g), [play(float(i % 2)) for i in range(2)]) for g in range(2)]
base = Base(Qwen2ForCausalLM(Qwen2Config(**sizes)), SimpleNamespace(pad_id=0), "cpu", checkpointing)
agent = Policy(base, lora_rank=rank, lora_alpha=64.0, learning_rate=1e-5)
metrics = rspo.update(agent, groups, [], "outcome", rspo.Config(**settings), random.Random(0))
assert metrics["optimizer_steps"] == 2
print((kilobytes("VmHWM") - after_imports) * 1024)
"""


def measured(rank, checkpointing, settings):
    """Return the peak bytes of one update in a new process, beyond the memory of its imports.

    The threshold gives each tensor its own pages, which are returned when it is freed. Otherwise the peak
    would include freed tensors of earlier micro-batches, which glibc's heap keeps.
    """
    arguments = json.dumps([SIZES, settings, rank, checkpointing, PROMPT, REPLY])
    command, root = (
        [sys.executable, "-W", "ignore", "-c", UPDATE, arguments],
        Path(plan.__file__).parent.parent,
    )
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads its memory from /proc")
@pytest.mark.parametrize("rank, checkpointing", [(0, False), (64, True)])
def test_the_plan_is_within_15_percent_of_the_peak(rank, checkpointing):
    # Two optimizer steps of two micro-batches: in the second, moments and gradients exist beside activations
    settings = {"method": "outcome", "tasks_per_update": 2, "group_size": 2, "minibatch_turns": 4}
    settings |= {"kl_coef": 0.0, "tokens_per_micro_batch": ROWS * (PROMPT + REPLY)}
    args = flags.Args(
        **settings, lora_rank=rank, dtype="float32", autocast=False, gradient_checkpointing=checkpointing
    )
    parts = plan.update_bytes(
        args, plan.read_config({"model_type": "qwen2", **SIZES}, ""), ROWS * 256, ROWS * REPLY
    )
    planned = plan.total(plan.with_slack(parts, context=0))
    assert planned == pytest.approx(measured(rank, checkpointing, settings), rel=0.15)
