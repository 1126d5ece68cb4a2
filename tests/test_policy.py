"""Agents that share a base: training, forking, saving and resuming one of them changes no other."""

import json
import math

import pytest
import torch
from device import DEVICE
from tiny import BATCH, RANKS, agent, needs_models, same, snapshot, tiny, train

from model import load_base

pytestmark = needs_models


# --- agents on one base


@pytest.mark.parametrize("rank", RANKS)
def test_training_one_agent_leaves_the_other_bit_identical(rank):
    policy = agent(tiny(), rank)
    train(policy, updates=2)
    before = snapshot(policy)
    explorer = policy.fork("explorer")
    assert torch.equal(explorer.logprobs(BATCH)[0], policy.logprobs(BATCH)[0])
    assert not {id(p) for p in policy.parameters} & {id(p) for p in explorer.parameters}
    train(explorer, updates=3)
    assert same(snapshot(policy), before)
    assert not torch.equal(explorer.logprobs(BATCH)[0], policy.logprobs(BATCH)[0])
    of_explorer = snapshot(explorer)
    train(policy, updates=3)
    assert same(snapshot(explorer), of_explorer) and not same(snapshot(policy), before)


@pytest.mark.parametrize("rank", RANKS)
def test_a_fork_continues_as_its_original_would(rank):
    policy = agent(tiny(), rank, temperature=0.5)
    train(policy, updates=2)
    explorer = policy.fork("explorer")
    assert explorer.temperature == 0.5
    train(explorer)
    train(policy)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters, explorer.parameters, strict=True))


def test_an_adapter_starts_from_its_seed_only():
    starts = []
    for seed, drawn_before in ((0, 1), (0, 2), (1, 1)):
        base = tiny()
        torch.manual_seed(drawn_before)
        starts.append(agent(base, 4, seed=seed).parameters[0])
        assert torch.initial_seed() == drawn_before
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])


def test_a_discarded_explorer_cannot_be_used_until_the_next_fork():
    policy = agent(tiny())
    explorer = policy.fork("explorer")
    train(explorer)
    version = explorer.version
    explorer.discard()
    with pytest.raises(RuntimeError, match="discarded"):
        explorer.logprobs(BATCH)
    again = policy.fork("explorer")
    assert again.version > version  # so a sampler drops what it cached for the old weights
    assert torch.equal(again.logprobs(BATCH)[0], policy.logprobs(BATCH)[0])


def test_exactly_the_adapter_in_use_is_trainable():
    policy = agent(tiny(), 4, critic_learning_rate=1e-2)
    explorer = policy.fork("explorer")
    for user in (policy, explorer, policy.critic, explorer.critic, policy):
        user.activate()
        trainable = [p for p in policy.model.parameters() if p.requires_grad]
        own = [p for key, p in user.named.items() if not key.startswith("head.")]
        assert [id(p) for p in trainable] == [id(p) for p in own]
        assert len(own) == 28  # 2 layers x 7 matrices x (A, B)
        optimised = [p for group in user.optimizer.param_groups for p in group["params"]]
        assert [id(p) for p in optimised] == [id(p) for p in user.parameters]
    policy.reference_logprobs(BATCH)
    assert not any(p.requires_grad for p in policy.model.parameters())


def gradients(rank, one_backward):
    policy = agent(tiny(), rank, critic_learning_rate=1e-2)
    with torch.no_grad():
        policy.critic.head.weight.fill_(0.1)
    if one_backward:
        logprobs, values = policy.logprobs(BATCH)[0], policy.critic.values(BATCH)
        policy.reference_logprobs(BATCH)
        (logprobs.sum() + values.sum()).backward()
    else:
        policy.logprobs(BATCH)[0].sum().backward()
        policy.critic.values(BATCH).sum().backward()
    parameters = policy.parameters + policy.critic.parameters
    return [p.grad for p in parameters if p.grad is not None]


@pytest.mark.parametrize("rank", RANKS)
def test_one_backward_may_cross_agents(rank):
    apart, together = gradients(rank, one_backward=False), gradients(rank, one_backward=True)
    assert len(apart) == len(together) > 28
    torch.testing.assert_close(apart, together)


@pytest.mark.parametrize("rank", RANKS)
def test_the_reference_stays_the_start(rank):
    policy = agent(tiny(), rank)
    start = policy.logprobs(BATCH)[0].detach()
    assert (policy.reference_logprobs(BATCH) - start).abs().max() < 1e-6
    train(policy, updates=2)
    assert (policy.reference_logprobs(BATCH) - start).abs().max() < 1e-6
    assert (policy.logprobs(BATCH)[0] - start).abs().max() > 1e-3


# --- the optimizer step


def test_a_step_without_gradient_or_with_nan_is_an_error():
    policy = agent(tiny())
    with pytest.raises(RuntimeError, match="no gradient"):
        policy.step(1.0)
    before = snapshot(policy)
    (policy.logprobs(BATCH)[0].sum() * float("nan")).backward()
    with pytest.raises(FloatingPointError, match="'policy'"):
        policy.step(1.0)
    assert same(snapshot(policy), before) and policy.version == 0


def test_a_step_returns_the_norm_before_clipping():
    policy = agent(tiny())
    (1000 * policy.logprobs(BATCH)[0].sum()).backward()
    expected = math.sqrt(sum(p.grad.pow(2).sum().item() for p in policy.parameters if p.grad is not None))
    assert policy.step(0.5) == pytest.approx(expected, rel=1e-5) and policy.version == 1


@pytest.mark.parametrize("rank", RANKS)
def test_critic_values_stand_at_the_state_before_each_token(rank):
    policy = agent(tiny(), rank, critic_learning_rate=1e-2)
    critic = policy.critic
    assert critic.values(BATCH).abs().max() == 0  # the head starts at 0
    with torch.no_grad():
        critic.head.weight.fill_(0.1)
        critic.head.bias.fill_(0.5)
    hidden = critic.activate().get_decoder()(BATCH.input_ids).last_hidden_state
    values = critic.values(BATCH)
    for i, j in BATCH.action_mask.nonzero().tolist():
        assert values[i, j].item() == pytest.approx(hidden[i, j - 1].sum().item() * 0.1 + 0.5, abs=1e-4)
    assert (values[~BATCH.action_mask] == 0).all()
    before = snapshot(policy)
    for _ in range(30):
        (critic.values(BATCH)[BATCH.action_mask] - 1).pow(2).mean().backward()
        critic.step(1.0)
    assert (critic.values(BATCH)[BATCH.action_mask] - 1).pow(2).mean() < 0.05
    assert same(snapshot(policy), before)


# --- saving and resuming


@pytest.mark.parametrize("rank", RANKS)
def test_resume_continues_bit_identically(rank, tmp_path):
    from safetensors.torch import load_file, save_file

    def train_all(policy, updates):
        for _ in range(updates):
            train(policy)
            (policy.critic.values(BATCH) - 1).pow(2).sum().backward()
            policy.critic.step(1.0)
        explorer = policy.fork("explorer")
        (explorer.critic.values(BATCH) - 1).pow(2).sum().backward()
        explorer.critic.step(1.0)
        explorer.discard()

    straight = agent(tiny(), rank, critic_learning_rate=1e-2)
    train_all(straight, 2)
    for name, state in straight.state_dicts().items():
        save_file(state, tmp_path / f"{name}.safetensors")
    train_all(straight, 2)
    resumed = agent(tiny(), rank, critic_learning_rate=1e-2, seed=5)
    trainable = len(resumed.parameters)
    resumed.load_state_dicts({f.stem: load_file(f) for f in tmp_path.iterdir()})
    assert len(resumed.parameters) == trainable
    assert set(resumed.state_dicts()) == {"policy", "critic", "explorer_critic"}
    train_all(resumed, 2)
    for name, state in straight.state_dicts().items():
        assert same(state, resumed.state_dicts()[name]), name


def test_weights_of_another_model_are_refused():
    with pytest.raises(ValueError, match="28 missing, 26 unexpected"):
        agent(tiny(), 4).load_state_dict(agent(tiny()).state_dict())


@pytest.mark.parametrize("kind", ["weight", "exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize("rank", RANKS)
def test_saved_tensors_of_another_shape_or_without_a_moment_are_refused(rank, kind):
    policy = agent(tiny(), rank)
    train(policy)
    state = policy.state_dict()
    key = next(key for key in state if key.startswith(f"{kind}/") and "embed" not in key)
    other_shape = state | {key: torch.ones(1, 7)}
    missing = {name: value for name, value in state.items() if name != key}
    for damaged, problem in ((other_shape, "1 of another shape"), (missing, "1 missing|2 unexpected")):
        with pytest.raises(ValueError, match=f"agent 'policy' do not fit the model: {problem}"):
            policy.load_state_dict(damaged)
    assert same(policy.state_dict(), state)


def test_a_row_of_a_weight_is_not_broadcast_to_all():
    policy = agent(tiny(), 4)
    state = policy.state_dict()
    key = next(key for key in state if "lora_A" in key)
    with pytest.raises(ValueError, match="1 of another shape; such as weight/"):
        policy.load_state_dict(state | {key: state[key][:1]})


def test_the_saved_agents_must_be_those_of_the_run():
    with_critic, alone = agent(tiny(), critic_learning_rate=1e-2), agent(tiny())
    states = with_critic.state_dicts()
    assert states.keys() == {"policy", "critic"}
    with pytest.raises(ValueError, match=r"are \['policy'\], but the run has \['critic', 'policy'\]"):
        with_critic.load_state_dicts(alone.state_dicts())
    with pytest.raises(ValueError, match="but the run has .'policy'."):
        alone.load_state_dicts(states)
    with pytest.raises(ValueError, match="the saved agents are .'critic'."):
        with_critic.load_state_dicts({"critic": states["critic"]})


def test_a_saved_adapter_is_loaded_by_peft(tmp_path):
    import peft
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    base = tiny()
    base.save(tmp_path / "base")
    policy = agent(base, 4, critic_learning_rate=1e-2)
    train(policy, updates=2)
    train(policy.fork("explorer"))
    policy.save(tmp_path / "policy")
    weights = load_file(tmp_path / "policy" / "adapter_model.safetensors")
    assert len(weights) == 28 and all(".lora_" in key and "policy" not in key for key in weights)
    config = json.loads((tmp_path / "policy" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")

    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base").to(DEVICE)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "policy").eval()
    torch.testing.assert_close(loaded(BATCH.input_ids).logits, policy.activate()(BATCH.input_ids).logits)
    assert "<assistant>" in (tmp_path / "policy" / "chat_template.jinja").read_text()


def test_saved_full_weights_are_a_model_folder(tmp_path):
    policy = agent(tiny())
    train(policy)
    policy.save(tmp_path)
    loaded = load_base(str(tmp_path), device=DEVICE)
    assert torch.equal(loaded.model(BATCH.input_ids).logits, policy.model(BATCH.input_ids).logits)
