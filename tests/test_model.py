"""Log-probs of action tokens, padding, precision, checkpointing, loading, and the refusal of other models."""

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from device import DEVICE, LOOSER
from tiny import BATCH, RANKS, agent, batch_of, episode, finished, needs_models, tiny, train

import losses
import model as model_module
from batch import Batch, micro_batches, pad_rows, rows_of
from buffer import Step
from model import Base, load_base, rise_and_fall, token_logprobs
from policy import Policy

# --- log-probs


class Successor(torch.nn.Module):
    """A causal LM of 10 tokens: (last token + 1) mod 10 has probability 0.9, the others share the rest."""

    _is_stateful, dtype = False, torch.float32

    def __init__(self, cap=None):
        super().__init__()
        self.config = SimpleNamespace(
            vocab_size=10, model_type="successor", hidden_size=10, get_text_config=lambda: self.config
        )
        self.cap = cap
        self.head = torch.nn.Linear(10, 10, bias=False)
        with torch.no_grad():
            share = torch.full((10, 10), math.log(0.1 / 9))
            share[(torch.arange(10) + 1) % 10, torch.arange(10)] = math.log(0.9)
            self.head.weight.copy_(share)

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=False):
        hidden = torch.nn.functional.one_hot(input_ids, 10).float()
        logits = self.head(hidden)
        if self.cap:
            logits = logits.clamp(min=self.cap)
        return SimpleNamespace(last_hidden_state=hidden, logits=logits)

    def get_decoder(self):
        return self

    def get_output_embeddings(self):
        return self.head


def test_a_log_prob_belongs_to_the_token_of_its_column():
    step = Step([0, 1], [2, 3, 4], [0.0] * 3, "", "", True)
    learner = Policy(Base(Successor(), SimpleNamespace(pad_id=0), DEVICE))
    logprobs, entropy = learner.logprobs(batch_of(finished([step])), with_entropy=True)
    # ln 0.9 = -0.10536, at the columns of 2, 3, 4
    expected = torch.tensor([0.0, 0.0, -0.10536, -0.10536, -0.10536])
    torch.testing.assert_close(logprobs[0].cpu(), expected, atol=1e-5, rtol=0)
    # entropy = -0.9 ln 0.9 - 0.1 ln(0.1/9) = 0.09482 + 0.44998
    expected = torch.tensor([0.0, 0.0, 0.5448, 0.5448, 0.5448])
    torch.testing.assert_close(entropy[0].cpu(), expected, atol=1e-4, rtol=0)


def test_temperature_divides_the_logits():
    # logits [2, 0] at 0.5: -ln(1 + e^-4) = -0.01815
    hidden, target = torch.tensor([[2.0, 0.0]], device=DEVICE), torch.tensor([0], device=DEVICE)
    scores = token_logprobs(lambda h: h, hidden, target, 0.5, chunk=10)
    assert scores[0].item() == pytest.approx(-0.01815, abs=1e-5)


@needs_models
@pytest.mark.parametrize("rank", RANKS)
def test_chunks_equal_the_whole(rank, monkeypatch):
    def gradients():
        learner = agent(tiny(), rank, temperature=0.7)
        logprobs, entropy = learner.logprobs(BATCH, with_entropy=True)
        (logprobs.sum() + 0.3 * entropy.sum()).backward()
        return logprobs, entropy, [p.grad.clone() for p in learner.parameters]

    whole = gradients()
    monkeypatch.setattr(model_module, "chunk_of", lambda vocabulary: 3)
    torch.testing.assert_close(whole, gradients(), atol=1e-5 * LOOSER, rtol=1e-4)


@needs_models
def test_log_probs_equal_those_of_the_whole_model():
    learner = agent(tiny(), temperature=0.5)
    logits = learner.model(BATCH.input_ids, attention_mask=BATCH.attention_mask).logits / 0.5
    logprobs = learner.logprobs(BATCH)[0]
    for i, j in BATCH.action_mask.nonzero().tolist():
        expected = logits[i, j - 1].log_softmax(-1)[BATCH.input_ids[i, j]]
        assert logprobs[i, j].item() == pytest.approx(expected.item(), abs=1e-5 * LOOSER)


@needs_models
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_padding_and_neighbours_change_no_log_prob(kind):
    if kind == "qwen2":
        base = tiny()
    else:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.5}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=30, **sizes))
        base = Base(model, SimpleNamespace(pad_id=0), DEVICE)
    learner = agent(base)
    alone = batch_of(episode(2, seed=5))
    expected = learner.logprobs(alone)[0][alone.action_mask]
    with_longer = batch_of(episode(2, seed=5), episode(5, seed=6))
    actual = learner.logprobs(with_longer)[0][0][with_longer.action_mask[0]]
    torch.testing.assert_close(actual, expected, atol=1e-4 * LOOSER, rtol=0)
    for pads in (3, 8):  # on the left
        padded = [
            torch.nn.functional.pad(x, (pads, 0))
            for x in (alone.input_ids, alone.attention_mask, alone.action_mask)
        ]
        actual = learner.logprobs(Batch(alone.rows, *padded))[0][padded[-1]]
        torch.testing.assert_close(actual, expected, atol=1e-4 * LOOSER, rtol=0)


@pytest.mark.slow
@needs_models
@pytest.mark.parametrize("rank", RANKS)
def test_micro_batches_do_not_change_the_gradient(rank):
    rows = [row for seed in range(4) for row in rows_of(episode(seed + 1, seed=seed))]
    gradients = []
    for tokens in (1, 40, 10**6):
        learner = agent(tiny(), rank)
        for batch in micro_batches(rows, tokens, 0, DEVICE):
            (learner.logprobs(batch)[0].sum() / 30).backward()
        gradients.append([p.grad for p in learner.parameters])
    torch.testing.assert_close(gradients[0], gradients[2], atol=1e-6 * LOOSER, rtol=1e-4)
    torch.testing.assert_close(gradients[1], gradients[2], atol=1e-6 * LOOSER, rtol=1e-4)


@needs_models
def test_an_action_token_in_column_0_is_refused():
    step = Step([], [5, 6], [0.0, 0.0], "", "", True)
    batch = pad_rows(rows_of(finished([step])), 0)
    with pytest.raises(AssertionError, match="column 0"):
        agent(tiny()).logprobs(batch)


# --- memory and precision

MEMORY_OF_LOG_PROBS = """
import torch, model
torch.set_num_threads(1)

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

generator = torch.Generator().manual_seed(0)
vocabulary, width, count = 151_936, 896, 2048
output = torch.randn(vocabulary, width, generator=generator).mul_(0.05)
hidden = torch.randn(count, width, generator=generator)
targets = torch.randint(vocabulary, (count,), generator=generator)
logits_of = lambda hidden: torch.nn.functional.linear(hidden, output)

def both(hidden, targets, chunk):
    hidden = hidden.clone().requires_grad_()
    scores = model.token_logprobs(logits_of, hidden, targets, 0.9, chunk, with_entropy=True)
    (scores[0].sum() - 0.01 * scores[1].sum()).backward()
    return [scores[0].detach(), scores[1].detach(), hidden.grad]

chunk = model.chunk_of(vocabulary)
both(hidden[:2], targets[:2], chunk)
before = kilobytes("VmRSS")
got = both(hidden, targets, chunk)
print((kilobytes("VmHWM") - before) * 1024 / 1e9)
hidden = hidden[:256].clone().requires_grad_()
logprobs = (logits_of(hidden) / 0.9).log_softmax(-1)
entropy = -(logprobs.exp() * logprobs).sum(-1)
logprobs = logprobs[torch.arange(256), targets[:256]]
(logprobs.sum() - 0.01 * entropy.sum()).backward()
print(max(float((a[:256] - b).abs().max()) for a, b in zip(got, [logprobs, entropy, hidden.grad])))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads its memory from /proc")
def test_log_probs_over_a_large_vocabulary_need_little_memory():
    command = [sys.executable, "-c", MEMORY_OF_LOG_PROBS]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    gigabytes, gap = map(float, done.stdout.split())
    assert gigabytes < 0.3  # all logits and their softmax at once: 2048 * 151936 * 4 bytes * 2 = 2.5 GB
    assert gap < 1e-5


def kept_for_backward(learner):
    """Count the elements that autograd keeps for the gradient of the log-probs, without weights."""
    sizes = {}

    def keep(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = learner.logprobs(BATCH)[0]
    weights = {p.untyped_storage().data_ptr() for p in learner.model.parameters()}
    kept = sum(size for place, size in sizes.items() if place not in weights)
    del scores  # alive until here: its storages must not be used again
    return kept


@needs_models
def test_gradient_checkpointing_keeps_only_the_inputs_of_layers():
    whole = kept_for_backward(agent(tiny(layers=4)))
    assert kept_for_backward(agent(tiny(layers=4, gradient_checkpointing=True))) < whole / 3


@needs_models
@pytest.mark.parametrize("rank", RANKS)
def test_gradient_checkpointing_changes_no_gradient(rank):
    results = []
    for checkpointing in (False, True):
        learner = agent(tiny(gradient_checkpointing=checkpointing), rank, critic_learning_rate=1e-2)
        loss = learner.logprobs(BATCH)[0].sum() + (learner.critic.values(BATCH) - 1).pow(2).sum()
        learner.reference_logprobs(BATCH)  # backward recomputes the layers while other weights are in use
        loss.backward()
        results.append([p.grad for p in learner.parameters])
        assert not any(module.training for module in learner.model.modules())
    torch.testing.assert_close(results[0], results[1])


@needs_models
def test_full_weights_of_a_bf16_model_are_kept_in_fp32():
    policy = agent(tiny(dtype="bfloat16"), learning_rate=1e-6)
    assert policy.logprobs(BATCH)[0].dtype == torch.float32
    assert torch.equal(policy.logprobs(BATCH)[0], policy.reference_logprobs(BATCH))
    before = [p.detach().clone() for p in policy.parameters]
    train(policy)
    # an update of 1e-6 is far below the resolution of bf16
    assert all((old != new).any() for old, new in zip(before, policy.parameters, strict=True))


@needs_models
def test_adapters_over_a_bf16_base_are_fp32():
    policy = agent(tiny(dtype="bfloat16"), 4)
    assert {p.dtype for p in policy.parameters} == {torch.float32} and policy.model.dtype == torch.bfloat16
    train(policy)
    assert policy.logprobs(BATCH)[0].dtype == torch.float32


@needs_models
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", RANKS)
def test_autocast_computes_in_bf16_but_scores_and_losses_stay_in_fp32(rank, dtype):
    exact = agent(tiny(), rank).logprobs(BATCH)[0].detach()
    learner = agent(tiny(dtype=dtype, autocast=True), rank, critic_learning_rate=1e-2)
    mask = BATCH.action_mask
    logprobs, entropy = learner.logprobs(BATCH, with_entropy=True)
    gap = (logprobs.detach() - exact)[mask].abs().mean()
    assert 0 < gap < 0.05
    values = learner.critic.values(BATCH)
    old = exact + 0.1 * mask
    loss, _ = losses.clipped_surrogate(logprobs, old, old, mask.float(), mask, 0.2)
    kl = losses.kl_to_reference(logprobs, learner.reference_logprobs(BATCH), mask)
    loss = losses.masked_mean(loss + 0.01 * kl - 0.001 * entropy, mask, mask.sum())
    assert {x.dtype for x in (logprobs, entropy, loss, values)} == {torch.float32}
    (loss + (values - 1).pow(2).mean()).backward()
    gradients = [p.grad for p in learner.parameters if p.grad is not None]
    assert gradients and all(g.isfinite().all() and g.dtype == torch.float32 for g in gradients)


@needs_models
def test_autocast_follows_the_stored_weights_by_default():
    def autocast(rank, **settings):
        return agent(tiny(**settings), rank).base.autocast

    assert not autocast(0) and autocast(0, dtype="bfloat16")
    assert not autocast(4, dtype="bfloat16")  # the frozen base computes in bf16 without it
    assert not autocast(0, dtype="bfloat16", autocast=False) and autocast(4, dtype="bfloat16", autocast=True)


def test_supervised_learning_rates_rise_over_a_tenth_then_fall():
    # 20 updates, 2 of rise: 1/2, 2/2, then 18 of 18 left, 17 of 18, ..., 1 of 18
    assert [rise_and_fall(i, 20) for i in (0, 1, 2, 11, 19)] == [0.5, 1, 1, 0.5, 1 / 18]
    assert rise_and_fall(0, 1) == 1


# --- loading and refusals


def test_a_model_with_more_than_an_output_layer_is_refused():
    with pytest.raises(ValueError, match="'successor'.*cap"):
        Base(Successor(cap=-1.0), SimpleNamespace(pad_id=0), DEVICE)


@needs_models
def test_a_model_with_damaged_weights_is_refused(tmp_path):
    base = tiny()
    base.model.get_input_embeddings().weight.data[7] = float("nan")
    base.save(tmp_path)
    with pytest.raises(ValueError, match="not numbers"):
        load_base(str(tmp_path))


@needs_models
@pytest.mark.parametrize(
    "file, why",
    [
        ("config.json", "cannot load"),
        ("model.safetensors", "cannot load"),
        ("tokenizer.json", "cannot load"),
        ("chat_template.jinja", "no chat template"),
    ],
)
def test_an_incomplete_model_folder_is_refused_by_name(tmp_path, file, why):
    tiny().save(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(ValueError, match=why) as caught:
        load_base(str(tmp_path))
    assert f"--model {tmp_path}: " in str(caught.value)


@needs_models
def test_a_model_that_cannot_be_fetched_is_refused_by_name(monkeypatch):
    def offline(*_, **__):
        raise OSError("offline")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", offline)
    with pytest.raises(ValueError, match="some-org/some-model.*a hub id that can be fetched"):
        load_base("some-org/some-model")


@needs_models
def test_dropout_of_a_checkpoint_is_ignored(tmp_path):
    base = tiny()
    base.model.config.attention_dropout = 0.5
    base.save(tmp_path)
    policy = agent(load_base(str(tmp_path), device=DEVICE), 4)
    train(policy)
    assert torch.equal(policy.logprobs(BATCH)[0], policy.logprobs(BATCH)[0])
    assert policy.model.config.attention_dropout == 0 and not any(m.training for m in policy.model.modules())


@needs_models
@pytest.mark.parametrize("bias", ["none", "all"])
def test_an_adapter_folder_is_merged_so_the_reference_is_the_adapted_model(tmp_path, bias):
    import peft

    base = tiny()
    base.save(tmp_path / "base")
    config = peft.LoraConfig(
        r=4, target_modules="all-linear", lora_dropout=0.5, bias=bias, task_type="CAUSAL_LM"
    )
    tuned = peft.get_peft_model(base.model, config)
    with torch.no_grad():
        for key, p in tuned.named_parameters():
            if "lora_B" in key or (bias == "all" and key.endswith(".bias")):
                p.add_(0.05)
    tuned.eval()
    expected = tuned(BATCH.input_ids).logits
    tuned.save_pretrained(tmp_path / "adapter")
    base.chat.tokenizer.save_pretrained(tmp_path / "adapter")

    loaded = load_base(str(tmp_path / "adapter"), device=DEVICE)
    assert loaded.changed
    torch.testing.assert_close(loaded.model(BATCH.input_ids).logits, expected, atol=1e-4, rtol=1e-4)
    policy = agent(loaded, 4)
    assert (policy.reference_logprobs(BATCH) - policy.logprobs(BATCH)[0]).abs().max() < 1e-6
