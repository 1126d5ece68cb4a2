"""Tests of the step reward model, on models with random weights and a few thousand parameters."""

import contextlib
import copy
import json
import random
import statistics
import warnings
from types import SimpleNamespace

import pytest
import torch
from device import DEVICE, LOOSER

pytest.importorskip("transformers")

import transformers

import demo.tiny_model
from batch import pad_rows
from buffer import Group, Step, StopReason, Trajectory
from policy import Policy
from record.reward_fit import area_under_roc, faults_of_fit, fit_report, quality, split_by_task
from record.reward_model_files import load_reward_model, save_reward_model
from reward_model import StepRewardModel, step_text

torch.set_num_threads(1)  # small models are slower with two threads

WORDS = ("put", "mug", "on", "desk", "go", "to", "shelf", "take", "look", "magic", "bed", "lamp")
SHORT = [("look", "take mug"), ("mug", "go to desk")]
LONG = [("look look look look go to shelf", "go to bed"), ("bed", "look"), ("lamp on desk bed mug", "look")]
both_contexts = pytest.mark.parametrize("context", ["window", "full"])


def tiny_base(seed=0, words=WORDS):
    sizes = {"d_model": 16, "layers": 2, "heads": 2, "intermediate": 32}
    return demo.tiny_model.tiny_base(words, ("on",), **sizes, seed=seed, device=DEVICE)


def make_reward_model(base=None, random_head=False, **settings):
    """Make a step reward model. The scores of a new head are all 0, those of a random one are not."""
    model = StepRewardModel.from_base(base or tiny_base(), **settings)
    if random_head:
        last = model.head[2].weight
        last.copy_(0.2 * torch.randn(last.shape, generator=torch.Generator().manual_seed(1)))
    return model


def episode(chat, turns, outcome, context="window", task_id="toy/0"):
    """Make an episode from (observation, action) pairs. In the full context a prompt extends the last one."""
    steps = []
    for observation, action in turns:
        if context == "window" or not steps:
            prompt = chat.first(observation)
        else:
            last = steps[-1]
            prompt = last.prompt_ids + last.action_ids + chat.extend(last.action_ids, observation)
        ids = chat.reply(action)
        steps.append(Step(prompt, ids, [0.0] * len(ids), observation, action, valid=True))
    return Trajectory(task_id, "put mug on desk", "Pick", steps, outcome, outcome == 1, StopReason.FINISHED)


def by_chance(words, rng):
    return rng.random() < 0.4


def by_magic(words, rng):
    return "magic" in words


def random_episodes(chat, n, seed=0, wins=by_chance, turns=3):
    """Make episodes of different tasks with random words. wins(words of all actions, rng) is the outcome."""
    rng = random.Random(seed)
    episodes = []
    for i in range(n):
        pairs = []
        for _ in range(turns):
            observation = " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))
            pairs.append((observation, " ".join(rng.choices(WORDS, k=2))))
        words = " ".join(action for _, action in pairs).split()
        episodes.append(episode(chat, pairs, float(wins(words, rng)), task_id=f"toy/{i}"))
    return episodes


@contextlib.contextmanager
def without_warnings():
    """Ignore the warning that a short fit has learned too little."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- scores -------------------------------------------------------------------------------------------------


@both_contexts
def test_scores_do_not_depend_on_padding_or_on_other_rows_of_the_batch(context):
    model = make_reward_model(random_head=True)
    short, long = (episode(model.chat, turns, 1.0, context) for turns in (SHORT, LONG))
    alone = model.step_scores([short])[0]
    assert len({round(score, 4) for score in alone}) == 2  # two different scores
    together = model.step_scores([long, short, long])[1]
    padded = []
    for row in model.rows(short):
        pad = model.chat.stop_ids[0]  # the padding is also the end-of-turn token
        batch = pad_rows([row], pad, DEVICE)
        batch.input_ids = torch.nn.functional.pad(batch.input_ids, (0, 5), value=pad)
        padded += model(batch).tolist()
    assert together == pytest.approx(alone, abs=1e-5)
    assert padded == pytest.approx(alone, abs=1e-5)


@both_contexts
def test_equal_episodes_are_read_once_and_have_exactly_equal_sums(context):
    model = make_reward_model(random_head=True, tokens_per_micro_batch=40)
    rows_read = []
    model.register_forward_pre_hook(lambda module, inputs: rows_read.append(len(inputs[0].rows)))
    one, other = (episode(model.chat, turns, 1.0, context) for turns in (SHORT, LONG))
    copies = [Trajectory.from_dict(one.to_dict()) for _ in range(7)]
    model.score([Group("", [one, *copies[:3], other, *copies[3:]])])
    assert {copy.reward("dense") for copy in copies} == {one.reward("dense")} != {other.reward("dense")}
    assert sum(rows_read) <= len(model.rows(one)) + len(model.rows(other))


def test_three_turns_are_three_rows_in_the_window_context_and_one_in_the_full():
    model = make_reward_model(random_head=True)
    window, full = (episode(model.chat, LONG, 1.0, context) for context in ("window", "full"))
    assert [len(model.rows(window)), len(model.rows(full))] == [3, 1]
    # The first step has the same prompt in both contexts, later steps do not
    scores, scores_full = model.step_scores([window, full])
    assert len(scores) == len(scores_full) == 3
    assert scores[0] == pytest.approx(scores_full[0], abs=1e-5)
    assert abs(scores[1] - scores_full[1]) > 1e-4


@both_contexts
def test_a_score_is_read_at_the_last_token_of_its_action(context):
    model = make_reward_model(random_head=True)
    scores = model.step_scores([episode(model.chat, LONG, 1.0, context)])[0]

    later = [LONG[0], LONG[1], ("magic", "put lamp")]  # only what comes after actions 0 and 1 is changed
    changed = model.step_scores([episode(model.chat, later, 1.0, context)])[0]
    assert changed[:2] == pytest.approx(scores[:2], abs=1e-5)
    assert abs(changed[2] - scores[2]) > 1e-4

    last_token = episode(model.chat, LONG, 1.0, context)
    last_token.steps[2].action_ids[-1] = model.chat.encode("magic")[0]
    changed = model.step_scores([last_token])[0]
    assert changed[:2] == pytest.approx(scores[:2], abs=1e-5)
    assert abs(changed[2] - scores[2]) > 1e-4


def test_a_score_is_tanh_of_the_head_on_the_last_hidden_state():
    base = tiny_base()
    model = make_reward_model(base, random_head=True)
    trajectory = episode(model.chat, SHORT, 1.0)
    ids = torch.tensor([trajectory.steps[1].prompt_ids + trajectory.steps[1].action_ids], device=DEVICE)
    with torch.no_grad():
        hidden = base.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1]
        x = model.head[0].weight @ hidden + model.head[0].bias
        x = model.head[2].weight @ torch.nn.functional.gelu(x) + model.head[2].bias
    assert model.step_scores([trajectory])[0][1] == pytest.approx(float(torch.tanh(x)), abs=1e-5)


def test_dropout_is_off_even_after_a_switch_to_training_mode():
    base = tiny_base()
    config = copy.deepcopy(base.model.config)
    config.attention_dropout = 0.5
    backbone = transformers.AutoModel.from_config(config)
    model = StepRewardModel(backbone, base.chat, device=DEVICE)
    torch.nn.init.ones_(model.head[2].weight)
    model.train()
    first, second = (model.step_scores([episode(base.chat, LONG, 1.0)]) for _ in range(2))
    assert first == second


def test_a_new_model_scores_every_step_0():
    model = make_reward_model()
    assert model.step_scores([episode(model.chat, LONG, 1.0)]) == [[0.0, 0.0, 0.0]]


def test_score_sets_dense_scores_of_usable_episodes_and_no_outcomes():
    model = make_reward_model(random_head=True)
    good, crashed = (episode(model.chat, LONG, 1.0) for _ in range(2))
    crashed.stop_reason = StopReason.CRASHED
    good.steps[0].dense_score = 17.0  # an older score
    model.score([Group("toy/0", [good, crashed])])
    expected = model.step_scores([good])[0]
    assert [step.dense_score for step in good.steps] == expected
    assert good.reward("dense") == pytest.approx(expected[0] + expected[1] + expected[2])
    assert good.reward("outcome") == 1.0
    assert [step.dense_score for step in crashed.steps] == [None, None, None]
    model.score([])  # no group is no error


def test_noise_has_the_given_standard_deviation_and_repeats_with_its_generator():
    model = make_reward_model(random_head=True)
    trajectories = random_episodes(model.chat, 300, turns=4)
    groups = [Group(trajectory.task_id, [trajectory]) for trajectory in trajectories]

    def scores(**noise):
        model.score(groups, **noise)
        return [step.dense_score for trajectory in trajectories for step in trajectory.steps]

    clean = scores()
    noisy = scores(noise=0.3, rng=random.Random(5))
    differences = [a - b for a, b in zip(noisy, clean, strict=True)]
    # 1,200 draws: standard errors of 0.3 / sqrt(1200) = 0.009 (mean) and 0.3 / sqrt(2400) = 0.006 (deviation)
    assert statistics.stdev(differences) == pytest.approx(0.3, abs=0.025)
    assert statistics.mean(differences) == pytest.approx(0.0, abs=0.035)
    assert scores(noise=0.3, rng=random.Random(5)) == noisy
    assert scores() == clean
    with pytest.raises(ValueError, match="random.Random"):
        model.score(groups, noise=0.3)


def test_a_score_that_is_not_a_number_is_an_error_and_is_not_stored():
    model = make_reward_model(random_head=True)
    trajectory = episode(model.chat, SHORT, 1.0)
    model.head[2].bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not a number"):
        model.score([Group("toy/0", [trajectory])])
    assert trajectory.steps[0].dense_score is None


# --- the fit ------------------------------------------------------------------------------------------------


@both_contexts
def test_the_gradient_does_not_depend_on_the_size_of_micro_batches(context):
    turns_and_outcomes = ((SHORT, 1.0), (LONG, 0.25))

    def episodes_of(model):
        return [model.rows(episode(model.chat, *given, context)) for given in turns_and_outcomes]

    def gradient_of(model):
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    reference = make_reward_model(random_head=True).requires_grad_(True)  # autograd on the definition
    sums = [reference(pad_rows(rows, 0, DEVICE)).sum() for rows in episodes_of(reference)]
    loss = ((sums[0] - 1.0) ** 2 + (sums[1] - 0.25) ** 2) / 2
    loss.backward()
    gradient = gradient_of(reference)
    assert gradient.abs().max() > 0.1
    for tokens in (100_000, 40, 1):  # all at once; one episode at a time; two passes, one row at a time
        model = make_reward_model(random_head=True, tokens_per_micro_batch=tokens).requires_grad_(True)
        assert model.backward(episodes_of(model)) == pytest.approx(loss.item(), rel=1e-6 * LOOSER)
        torch.testing.assert_close(gradient_of(model), gradient, atol=1e-6 * LOOSER, rtol=1e-6 * LOOSER)


def test_it_learns_that_a_magic_word_brings_success():
    model = make_reward_model()
    episodes = random_episodes(model.chat, 300, wins=by_magic)
    calls = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the step reward model")  # it must not warn of a bad fit
        report = model.fit(episodes, epochs=8, learning_rate=1e-2, progress=lambda *call: calls.append(call))
    assert report["learned"] and report["auc"] > 0.95
    assert report["mse"] < 0.5 * report["mse_of_mean"]
    assert report["correlation"] > 0.7
    assert (report["episodes"], report["held_out_episodes"]) == (270, 30)
    assert model.report is report
    # 8 epochs of 270 episodes in batches of 32: 8 x 9 updates
    assert [(update, updates) for update, updates, _ in calls] == [(i, 72) for i in range(1, 73)]
    assert calls[-1][2] < calls[0][2]  # the loss
    # The step with the word has the highest score
    trajectory = episode(model.chat, [("look", "go bed"), ("look", "magic mug"), ("look", "go bed")], 1.0)
    scores = model.step_scores([trajectory])[0]
    assert scores[1] > scores[0] + 0.3


def test_after_the_fit_it_is_frozen_and_in_eval_mode():
    for checkpointing in (False, True):
        model = make_reward_model(gradient_checkpointing=checkpointing)
        with without_warnings():
            model.fit(random_episodes(model.chat, 12), epochs=1)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert not any(module.training for module in model.modules())


def test_gradient_checkpointing_does_not_change_the_fit():
    reports = []
    for checkpointing in (False, True):
        model = make_reward_model(gradient_checkpointing=checkpointing)
        with without_warnings():
            reports.append(model.fit(random_episodes(model.chat, 12), epochs=2, learning_rate=1e-2)["mse"])
    assert reports[0] == pytest.approx(reports[1], rel=1e-5 * LOOSER)


def test_chance_outcomes_bring_a_warning_that_names_the_remedies():
    model = make_reward_model()
    match = "learned too little.*--reward_model_episodes.*--reward_model_source"
    with pytest.warns(UserWarning, match=match):
        report = model.fit(random_episodes(model.chat, 100, seed=3), epochs=2, learning_rate=1e-3)
    assert not report["learned"]


def test_without_a_success_it_warns_and_has_no_auc():
    model = make_reward_model()
    episodes = random_episodes(model.chat, 40, wins=lambda words, rng: False)
    with pytest.warns(UserWarning, match="MSE of 0 is not below the 0 of.*AUC is not known.*0 successes"):
        report = model.fit(episodes, epochs=1)
    assert report["auc"] is None and report["correlation"] is None and not report["learned"]


def test_a_fit_is_reproducible_and_does_not_change_the_policy():
    base = tiny_base()
    before = copy.deepcopy(base.model.state_dict())
    episodes = random_episodes(base.chat, 40, wins=by_magic)
    scores = []
    for _ in range(2):
        model = make_reward_model(base)
        torch.rand(3)  # the global generator has no influence
        with without_warnings():
            model.fit(episodes, epochs=1, seed=7)
        scores.append(model.step_scores(episodes))
    assert scores[0] == scores[1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.model.state_dict().items())


def test_a_fit_that_diverges_is_an_error():
    model = make_reward_model()
    episodes = random_episodes(model.chat, 40)
    with torch.no_grad():
        next(model.backbone.parameters())[:] = float("nan")
    with pytest.raises(FloatingPointError, match="lower its learning rate"):
        model.fit(episodes, epochs=1)


def test_a_fit_needs_usable_episodes_of_two_tasks():
    model = make_reward_model()
    episodes = random_episodes(model.chat, 3)
    episodes[0].stop_reason = StopReason.CRASHED
    episodes[1].outcome = float("nan")
    with pytest.raises(ValueError, match="two tasks.*1 usable"):
        model.fit(episodes)


def test_a_bf16_model_is_fitted_in_fp32_and_ends_in_bf16():
    model = make_reward_model(dtype=torch.bfloat16)
    with without_warnings():
        report = model.fit(random_episodes(model.chat, 60, wins=by_magic), epochs=2, learning_rate=1e-2)
    assert {parameter.dtype for parameter in model.backbone.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.head.parameters()} == {torch.float32}
    # Rotary frequencies are buffers; they need fp32
    assert {buffer.dtype for buffer in model.backbone.buffers()} == {torch.float32}
    assert report["mse"] == report["mse"]  # not NaN


@pytest.mark.parametrize(
    ("dtype", "autocast", "computed"),
    [
        (torch.float32, None, torch.float32),
        (torch.float32, True, torch.bfloat16),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, False, torch.float32),
    ],
)
def test_autocast_decides_the_precision_of_the_fit_and_defaults_to_the_dtype(dtype, autocast, computed):
    model = make_reward_model(dtype=dtype, autocast=autocast)
    dtypes = set()

    def record(module, inputs, output):
        if torch.is_grad_enabled():  # the fit; the report is computed without gradients
            dtypes.add(output.dtype)

    projection = next(module for name, module in model.backbone.named_modules() if name.endswith("up_proj"))
    projection.register_forward_hook(record)
    with without_warnings():
        model.fit(random_episodes(model.chat, 12), epochs=1)
    assert dtypes == {computed}


# --- how good a fit is --------------------------------------------------------------------------------------


def test_no_task_is_in_both_parts_and_both_have_successes():
    tasks = [f"toy/{i}" for i in range(20)]
    chat = tiny_base().chat
    episodes = []
    for task in tasks:
        for n in range(4):  # the first ten tasks have one success each
            episodes.append(episode(chat, SHORT, float(task in tasks[:10] and n == 0), task_id=task))
    training, held_out = split_by_task(episodes, 0.2, random.Random(0))
    assert (len(training), len(held_out)) == (64, 16)
    assert not {t.task_id for t in training} & {t.task_id for t in held_out}
    assert (sum(t.success for t in training), sum(t.success for t in held_out)) == (8, 2)


def test_auc_is_the_share_of_pairs_in_order():
    # Pairs (positive, negative): (.9, .1) (.9, .5) (.5, .1) are in order, (.5, .5) is a tie: 3.5 of 4
    assert area_under_roc([0.9, 0.5, 0.5, 0.1], [True, True, False, False]) == 3.5 / 4
    assert area_under_roc([0.1, 0.2], [True, False]) == 0.0
    assert area_under_roc([0.3, 0.3, 0.3], [True, False, False]) == 0.5
    assert area_under_roc([0.1, 0.2], [True, True]) is None


def test_quality_of_a_prediction():
    chat = tiny_base().chat
    episodes = [episode(chat, SHORT, outcome) for outcome in (0.0, 1.0, 1.0)]
    found = quality([0.0, 1.0, 0.5], episodes)
    assert found["mse"] == pytest.approx(0.25 / 3)
    # Deviations (-.5, .5, 0) and (-2/3, 1/3, 1/3): .5 / sqrt(.5 * 2/3) = .866
    assert found["correlation"] == pytest.approx(0.8660254)
    assert found["auc"] == 1.0


# --- files --------------------------------------------------------------------------------------------------


def test_a_saved_model_gives_the_same_scores_bit_by_bit(tmp_path):
    model = make_reward_model(random_head=True)
    model.report = {"auc": 0.75}
    episodes = random_episodes(model.chat, 20, seed=9)
    save_reward_model(model, tmp_path)
    loaded = load_reward_model(tmp_path, tiny_base(seed=4).chat, device=DEVICE)
    assert loaded.step_scores(episodes) == model.step_scores(episodes)
    assert loaded.report == {"auc": 0.75}
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model.safetensors", "config.json", "reward_model.json"}
    about = json.loads((tmp_path / "reward_model.json").read_text())
    assert about.keys() == {"own_tokenizer", "vocabulary", "report"}  # models of older runs have the same


def test_a_missing_damaged_or_foreign_model_is_an_error(tmp_path):
    base = tiny_base()
    with pytest.raises(ValueError, match="contains no step reward model"):
        load_reward_model(tmp_path, base.chat)
    save_reward_model(make_reward_model(base), tmp_path)
    other = tiny_base(words=(*WORDS, "more"))
    with pytest.raises(ValueError, match="another vocabulary"):
        load_reward_model(tmp_path, other.chat)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="damaged"):
        load_reward_model(tmp_path, base.chat)
    (tmp_path / "model.safetensors").write_bytes(weights)
    about = json.loads((tmp_path / "reward_model.json").read_text())
    del about["vocabulary"]
    (tmp_path / "reward_model.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="damaged"):
        load_reward_model(tmp_path, base.chat)


# --- the backbone and what it reads -------------------------------------------------------------------------


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_backbone_is_the_starting_model_even_if_the_policy_was_trained(lora_rank):
    expected = make_reward_model(random_head=True)
    base = tiny_base()
    policy = Policy(base, lora_rank=lora_rank)
    policy.activate()
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter += 0.1
    trajectory = episode(base.chat, LONG, 1.0)
    model = make_reward_model(base, random_head=True)
    assert model.step_scores([trajectory]) == expected.step_scores([trajectory])


def test_the_text_of_a_step_has_the_task_two_turns_and_the_observation():
    trajectory = episode(tiny_base().chat, [("a", "b"), ("c", "d"), ("e", ""), ("g", "h")], 1.0)
    assert step_text(trajectory, 3) == (
        "Task: put mug on desk\n"
        "Observation: c\nAction: d\nObservation: e\nAction: invalid reply\nObservation: g"
    )
    assert step_text(trajectory, 0) == "Task: put mug on desk\nObservation: a"


LLAMA_TEMPLATE = (
    "<s>{% if date_string %}{{ date_string }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with a small Llama. Both its tokenizer and its template add <s>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    control = ["<unk>", "<s>", "</s>", "<user>", "<assistant>", "<system>"]
    words = [*control, *WORDS, "Task", "Observation", "Action", ":", "invalid", "reply", "26", "Jul", "2024"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=control[3:],
        chat_template=LLAMA_TEMPLATE,
    )
    assert fast("mug")["input_ids"][0] == 1
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def test_the_fit_and_the_scores_read_the_same_text_with_one_bos(llama):
    model = StepRewardModel.from_pretrained(str(llama), device=DEVICE)
    rows_read = set()

    def record(module, inputs):
        rows_read.update(tuple(row.input_ids) for row in inputs[0].rows)

    model.register_forward_pre_hook(record)
    episodes = random_episodes(tiny_base().chat, 12, turns=2)
    with without_warnings():
        model.fit(episodes, epochs=1)
    rows_of_fit = set(rows_read)
    rows_read.clear()
    model.score([Group("toy", episodes)])
    assert rows_read == rows_of_fit
    for row in rows_of_fit:
        assert row[0] == 1 and row.count(1) == 1
        assert 0 not in row  # no word is unknown
    # The score is read at the end-of-turn token of the action
    row = model.rows(episodes[0])[1]
    assert row.spans == [(1, len(row.input_ids) - 3, len(row.input_ids))] and row.input_ids[-1] == 2


def test_a_model_with_its_own_tokenizer_is_saved_and_loaded_with_it(llama, tmp_path):
    model = StepRewardModel.from_pretrained(str(llama), device=DEVICE)
    torch.nn.init.ones_(model.head[2].weight)
    chat = tiny_base().chat  # the policy's vocabulary is a different one
    episodes = random_episodes(chat, 6, turns=2)
    save_reward_model(model, tmp_path)
    loaded = load_reward_model(tmp_path, chat, device=DEVICE)
    assert loaded.step_scores(episodes) == model.step_scores(episodes) != [[0.0, 0.0]] * 6
    assert (tmp_path / "tokenizer").is_dir()


def test_a_text_that_is_too_long_for_the_backbone_is_an_error(llama):
    model = StepRewardModel.from_pretrained(str(llama), device=DEVICE)
    with pytest.raises(ValueError, match="toy/0 is 3.. tokens long.*reads 256.*longer context"):
        model.step_scores([episode(tiny_base().chat, [("mug " * 300, "look")], 1.0)])


@pytest.mark.slow
def test_a_backbone_with_its_own_tokenizer_learns_too(llama):
    model = StepRewardModel.from_pretrained(str(llama), device=DEVICE)
    episodes = random_episodes(tiny_base().chat, 200, wins=by_magic)
    report = model.fit(episodes, epochs=12, learning_rate=5e-3)
    assert report["auc"] > 0.9


def test_a_warning_names_the_test_that_a_fit_has_failed():
    report = {"auc": 0.55, "mse": 0.2, "mse_of_mean": 0.25}
    assert faults_of_fit(report) == ["its AUC of success is 0.55, below 0.6 (chance: 0.5)"]
    report = {"auc": 0.7, "mse": 0.3, "mse_of_mean": 0.25}
    assert faults_of_fit(report) == ["its MSE of 0.3 is not below the 0.25 of the mean"]
    assert faults_of_fit({"auc": 0.6, "mse": 0.2, "mse_of_mean": 0.25}) == []


@pytest.mark.parametrize(
    "predicted, fault, remedy",
    [
        # AUC 0 and MSE (1^2 + 1^2) / 2 = 1; the mean of 0.5 has an MSE of 0.25
        ([0.0, 1.0], "AUC of success is 0.00, below 0.6 .* and its MSE of 1 is", "--reward_model_source"),
        # AUC 1 and MSE ((0.1 - 1)^2 + 0^2) / 2 = 0.405
        ([0.1, 0.0], "episodes its MSE of 0.405 is not below the 0.25 of the mean", "--reward_model_epochs"),
    ],
)
def test_the_remedy_fits_the_test_that_has_failed(predicted, fault, remedy):
    episodes = [SimpleNamespace(outcome=1.0, success=True), SimpleNamespace(outcome=0.0, success=False)]
    with pytest.warns(UserWarning, match=f"on 2 held-out .*{fault}.*1 successes in 2 episodes.*{remedy}$"):
        fit_report(episodes, episodes, predicted)
