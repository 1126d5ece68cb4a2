"""Facts about the step reward model. Models are of random weights, a few thousand parameters."""

import copy
import json
import random
import statistics
import warnings

import pytest
import torch
from device import DEVICE, LOOSER

pytest.importorskip("transformers")

import transformers

from batch import pad_rows
from buffer import Group, Step, StopReason, Trajectory
from model import load_base
from policy import Policy
from reward_model import StepRewardModel, area_under_roc, quality, split_by_task, step_text

torch.set_num_threads(1)  # models as small as these lose time to a second one

WORDS = ["put", "mug", "on", "desk", "go", "to", "shelf", "take", "look", "magic", "bed", "lamp"]


def tiny_base(seed=0):
    sizes = {"d_model": 16, "layers": 2, "heads": 2, "intermediate": 32}
    return load_base("tiny", vocabulary=WORDS, **sizes, seed=seed, device=DEVICE)


def reward_model_of(base=None, trained=False, **settings):
    """A step reward model; `trained`: with a head whose scores are not all 0."""
    model = StepRewardModel.from_base(base or tiny_base(), **settings)
    if trained:
        last = model.head[2].weight
        last.copy_(0.2 * torch.randn(last.shape, generator=torch.Generator().manual_seed(1)))
    return model


def episode(chat, turns, outcome, context="window", task_id="toy/0"):
    """turns: (observation, action) pairs; in the full context each prompt extends the last one."""
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


SHORT = [("look", "take mug"), ("mug", "go to desk")]
LONG = [("look look look look go to shelf", "go to bed"), ("bed", "look"), ("lamp on desk bed mug", "look")]


def random_episodes(chat, n, seed=0, wins=lambda words, rng: rng.random() < 0.4, turns=3):
    rng = random.Random(seed)
    out = []
    for i in range(n):
        pairs = [
            (" ".join(rng.choices(WORDS, k=rng.randint(1, 4))), " ".join(rng.choices(WORDS, k=2)))
            for _ in range(turns)
        ]
        words = " ".join(action for _, action in pairs).split()
        out.append(episode(chat, pairs, float(wins(words, rng)), task_id=f"toy/{i}"))
    return out


def magic(words, rng):
    return words.count("magic") > 0


def test_gradient_checkpointing_does_not_change_the_fit():
    reports = []
    for checkpointing in (False, True):
        model = reward_model_of(gradient_checkpointing=checkpointing)
        episodes = random_episodes(model.chat, 12)
        loss = {"epochs": 1, "batch_episodes": 6, "learning_rate": 1e-2}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it has learned little
            reports.append(model.fit(episodes, **loss)["mse"])
        assert not any(module.training for module in model.modules())
    assert reports[0] == pytest.approx(reports[1], rel=1e-5 * LOOSER)


# --- the score and where it is read


@pytest.mark.parametrize("context", ["window", "full"])
def test_scores_do_not_depend_on_padding_or_batch_mates(context):
    model = reward_model_of(trained=True)
    short, long = (episode(model.chat, turns, 1.0, context) for turns in (SHORT, LONG))
    alone = model.step_scores([short])[0]
    assert len({round(score, 4) for score in alone}) == 2  # not all alike
    together = model.step_scores([long, short, long])[1]
    padded = []
    for row in model.rows(short):
        pad = model.chat.stop_ids[0]  # padding that is the end-of-turn token too
        batch = pad_rows([row], pad, DEVICE)
        batch.input_ids = torch.nn.functional.pad(batch.input_ids, (0, 5), value=pad)
        padded += model(batch).tolist()
    assert together == pytest.approx(alone, abs=1e-5)
    assert padded == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("context", ["window", "full"])
def test_equal_episodes_have_exactly_equal_sums_wherever_they_stand(context):
    model, read = reward_model_of(trained=True), []
    forward = model.forward
    model.forward = lambda batch: read.append(len(batch.rows)) or forward(batch)
    model.tokens_per_micro_batch = 40
    one, other = (episode(model.chat, turns, 1.0, context) for turns in (SHORT, LONG))
    copies = [Trajectory.from_dict(one.to_dict()) for _ in range(7)]
    model.score([Group("", [one, *copies[:3], other, *copies[3:]])])
    assert {copy.reward("dense") for copy in copies} == {one.reward("dense")} != {other.reward("dense")}
    assert sum(read) <= len(model.rows(one)) + len(model.rows(other))


def test_windows_and_the_full_context_are_one_and_three_rows_with_a_score_per_step():
    model = reward_model_of(trained=True)
    window, full = (episode(model.chat, LONG, 1.0, context) for context in ("window", "full"))
    assert [len(model.rows(window)), len(model.rows(full))] == [3, 1]
    # the first step has the same context in both, the later ones do not
    first, second = (model.step_scores([trajectory])[0] for trajectory in (window, full))
    assert first[0] == pytest.approx(second[0], abs=1e-5)
    assert abs(first[1] - second[1]) > 1e-4


@pytest.mark.parametrize("context", ["window", "full"])
def test_a_score_is_read_at_the_last_token_of_its_action(context):
    model = reward_model_of(trained=True)
    scores = model.step_scores([episode(model.chat, LONG, 1.0, context)])[0]

    later = [LONG[0], LONG[1], ("magic", "put lamp")]  # all that is changed comes after actions 0 and 1
    changed = model.step_scores([episode(model.chat, later, 1.0, context)])[0]
    assert changed[:2] == pytest.approx(scores[:2], abs=1e-5)
    assert abs(changed[2] - scores[2]) > 1e-4

    last_token = episode(model.chat, LONG, 1.0, context)
    last_token.steps[2].action_ids[-1] = model.chat.encode("magic")[0]
    changed = model.step_scores([last_token])[0]
    assert changed[:2] == pytest.approx(scores[:2], abs=1e-5)
    assert abs(changed[2] - scores[2]) > 1e-4


def test_the_score_is_tanh_of_the_head_on_the_last_hidden_layer():
    base = tiny_base()
    model = reward_model_of(base, trained=True)
    trajectory = episode(model.chat, SHORT, 1.0)
    ids = torch.tensor([trajectory.steps[1].prompt_ids + trajectory.steps[1].action_ids], device=DEVICE)
    with torch.no_grad():
        hidden = base.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1]
        x = model.head[0].weight @ hidden + model.head[0].bias
        x = model.head[2].weight @ torch.nn.functional.gelu(x) + model.head[2].bias
    assert model.step_scores([trajectory])[0][1] == pytest.approx(float(torch.tanh(x)), abs=1e-5)


def test_dropout_is_off_even_if_someone_switches_to_training_mode():
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
    model = reward_model_of()
    assert model.step_scores([episode(model.chat, LONG, 1.0)]) == [[0.0, 0.0, 0.0]]


def test_score_sets_the_dense_reward_and_leaves_the_outcome_alone():
    model = reward_model_of(trained=True)
    good, crashed = (episode(model.chat, LONG, 1.0) for _ in range(2))
    crashed.stop_reason = StopReason.CRASHED
    good.steps[0].dense_score = 17.0
    model.score([Group("toy/0", [good, crashed])])
    expected = model.step_scores([good])[0]
    assert [step.dense_score for step in good.steps] == expected
    assert good.reward("dense") == pytest.approx(expected[0] + expected[1] + expected[2])
    assert good.reward("outcome") == 1.0
    assert [step.dense_score for step in crashed.steps] == [None, None, None]
    model.score([])  # nothing to do is no error


def test_noise_has_the_asked_standard_deviation_and_repeats_with_its_generator():
    model = reward_model_of(trained=True)
    trajectories = random_episodes(model.chat, 300, turns=4)
    groups = [Group(trajectory.task_id, [trajectory]) for trajectory in trajectories]

    def scored(**noise):
        model.score(groups, **noise)
        return [step.dense_score for trajectory in trajectories for step in trajectory.steps]

    clean = scored()
    noisy = scored(noise=0.3, rng=random.Random(5))
    differences = [a - b for a, b in zip(noisy, clean, strict=True)]
    # 1,200 draws: the standard error of the mean is 0.3 / 34.6 = 0.009, that of the deviation 0.006
    assert statistics.stdev(differences) == pytest.approx(0.3, abs=0.025)
    assert statistics.mean(differences) == pytest.approx(0.0, abs=0.035)
    assert scored(noise=0.3, rng=random.Random(5)) == noisy
    assert scored() == clean
    with pytest.raises(ValueError, match="random.Random"):
        model.score(groups, noise=0.3)


def test_a_score_that_is_no_number_is_never_written():
    model = reward_model_of(trained=True)
    trajectory = episode(model.chat, SHORT, 1.0)
    model.head[2].bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not a number"):
        model.score([Group("toy/0", [trajectory])])
    assert trajectory.steps[0].dense_score is None


# --- fitting


@pytest.mark.parametrize("context", ["window", "full"])
def test_the_gradient_does_not_depend_on_the_size_of_micro_batches(context):
    def loss_and_gradient(tokens):
        model = reward_model_of(trained=True, tokens_per_micro_batch=tokens)
        model.requires_grad_(True)
        outcomes = ((SHORT, 1.0), (LONG, 0.25))
        episodes = [model.rows(episode(model.chat, turns, outcome, context)) for turns, outcome in outcomes]
        if tokens:
            loss = model.backward(episodes)
        else:  # autograd on the definition
            sums = [model(pad_rows(rows, 0, DEVICE)).sum() for rows in episodes]
            mean = ((sums[0] - 1.0) ** 2 + (sums[1] - 0.25) ** 2) / 2
            mean.backward()
            loss = mean.item()
        return loss, torch.cat([p.grad.flatten() for p in model.parameters()])

    loss, gradient = loss_and_gradient(0)
    assert gradient.abs().max() > 0.1
    for tokens in (100_000, 40, 1):  # everything at once; each episode alone; each row alone, read twice
        other_loss, other = loss_and_gradient(tokens)
        assert other_loss == pytest.approx(loss, rel=1e-6 * LOOSER)
        torch.testing.assert_close(other, gradient, atol=1e-6 * LOOSER, rtol=1e-6 * LOOSER)


@pytest.fixture(scope="module")
def fitted():
    """A model that was fitted on episodes that succeed when an action says "magic", and its report."""
    model = reward_model_of()
    episodes = random_episodes(model.chat, 300, wins=magic)
    seen = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the step reward model")  # none that it has learned too little
        report = model.fit(
            episodes,
            epochs=8,
            learning_rate=1e-2,
            held_out=0.2,
            progress=lambda update, updates, loss: seen.append((update, updates, loss)),
        )
    return model, report, seen


def test_it_learns_that_a_magic_word_brings_success(fitted):
    model, report, seen = fitted
    assert report["learned"] and report["auc"] > 0.95
    assert report["mse"] < 0.5 * report["mse_of_mean"]
    assert report["correlation"] > 0.7
    assert report["episodes"] + report["held_out_episodes"] == 300 and report["held_out_episodes"] == 60
    assert model.report is report
    assert [update for update, _, _ in seen] == list(
        range(1, 65)
    )  # 8 epochs of 240 episodes in batches of 32
    assert seen[-1][1] == 64 and seen[-1][2] < seen[0][2]
    # ... and which step earned it
    trajectory = episode(model.chat, [("look", "go bed"), ("look", "magic mug"), ("look", "go bed")], 1.0)
    scores = model.step_scores([trajectory])[0]
    assert scores[1] > scores[0] + 0.3


def test_it_is_frozen_after_the_fit_and_without_dropout(fitted):
    model, _, _ = fitted
    assert not any(p.requires_grad for p in model.parameters())
    assert not any(module.training for module in model.modules())


def test_chance_outcomes_bring_a_warning_that_names_the_remedy():
    model = reward_model_of()
    with pytest.warns(UserWarning, match="learned too little.*let others play them"):
        report = model.fit(
            random_episodes(model.chat, 100, seed=3), epochs=2, learning_rate=1e-3, held_out=0.3
        )
    assert not report["learned"]


def test_without_a_single_success_it_warns_and_has_no_auc():
    model = reward_model_of()
    episodes = random_episodes(model.chat, 40, wins=lambda words, rng: False)
    with pytest.warns(UserWarning, match="AUC is not known.*0 successes"):
        report = model.fit(episodes, epochs=1)
    assert report["auc"] is None and report["correlation"] is None and not report["learned"]


def test_fitting_is_repeatable_and_leaves_the_policy_alone():
    base = tiny_base()
    before = copy.deepcopy(base.model.state_dict())
    episodes = random_episodes(base.chat, 40, wins=magic)
    scores = []
    for _ in range(2):
        model = reward_model_of(base)
        torch.rand(3)  # the global generator plays no part
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(episodes, epochs=1, seed=7)
        scores.append(model.step_scores(episodes))
    assert scores[0] == scores[1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.model.state_dict().items())


def test_a_fit_that_diverges_says_so():
    model = reward_model_of()
    episodes = random_episodes(model.chat, 40)
    with torch.no_grad():
        next(model.backbone.parameters())[:] = float("nan")
    with pytest.raises(FloatingPointError, match="lower its learning rate"):
        model.fit(episodes, epochs=1)


def test_unusable_episodes_are_not_fitted_on_and_two_tasks_are_needed():
    model = reward_model_of()
    episodes = random_episodes(model.chat, 3)
    episodes[0].stop_reason = StopReason.CRASHED
    episodes[1].outcome = float("nan")
    with pytest.raises(ValueError, match="two tasks.*1 usable"):
        model.fit(episodes)


def test_no_task_is_in_both_parts_and_successes_are_in_each():
    tasks = [f"toy/{i}" for i in range(20)]
    chat = tiny_base().chat
    episodes = [
        episode(chat, SHORT, float(task in tasks[:10] and n == 0), task_id=task)
        for task in tasks
        for n in range(4)
    ]
    training, held = split_by_task(episodes, 0.2, random.Random(0))
    assert (len(training), len(held)) == (64, 16)
    assert not {t.task_id for t in training} & {t.task_id for t in held}
    assert (sum(t.success for t in training), sum(t.success for t in held)) == (8, 2)


def test_bf16_fits_in_fp32_and_ends_in_bf16():
    model = reward_model_of(dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = model.fit(random_episodes(model.chat, 60, wins=magic), epochs=2, learning_rate=1e-2)
    assert {p.dtype for p in model.backbone.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.head.parameters()} == {torch.float32}
    # 16 bits would ruin the positions, which are buffers
    assert {b.dtype for b in model.backbone.buffers()} == {torch.float32}
    assert report["mse"] == report["mse"]


@pytest.mark.parametrize(
    ("dtype", "autocast", "computed"),
    [
        (torch.float32, None, torch.float32),
        (torch.float32, True, torch.bfloat16),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, False, torch.float32),
    ],
)
def test_a_fit_computes_as_it_is_told(dtype, autocast, computed):
    model, seen = reward_model_of(dtype=dtype, autocast=autocast), set()
    up = next(module for name, module in model.backbone.named_modules() if name.endswith("up_proj"))
    hook = up.register_forward_hook(lambda *given: seen.add(given[2].dtype))
    scores = model.step_scores
    model.step_scores = lambda episodes: hook.remove() or scores(episodes)  # what comes after the fit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(random_episodes(model.chat, 12), epochs=1)
    assert seen == {computed}


# --- how good a fit is


def test_auc_is_the_share_of_pairs_in_order():
    # pairs (positive, negative): (.9, .1) (.9, .5) (.5, .1) are in order, (.5, .5) is a tie: 3.5 of 4
    assert area_under_roc([0.9, 0.5, 0.5, 0.1], [True, True, False, False]) == 3.5 / 4
    assert area_under_roc([0.1, 0.2], [True, False]) == 0.0
    assert area_under_roc([0.3, 0.3, 0.3], [True, False, False]) == 0.5
    assert area_under_roc([0.1, 0.2], [True, True]) is None


def test_quality_of_a_prediction():
    chat = tiny_base().chat
    episodes = [episode(chat, SHORT, outcome) for outcome in (0.0, 1.0, 1.0)]
    found = quality([0.0, 1.0, 0.5], episodes)
    assert found["mse"] == pytest.approx(0.25 / 3)
    # deviations (-.5, .5, 0) and (-2/3, 1/3, 1/3): .5 / sqrt(.5 * 2/3) = .866
    assert found["correlation"] == pytest.approx(0.8660254)
    assert found["auc"] == 1.0


# --- files


def test_a_saved_model_gives_the_same_scores_bit_by_bit(fitted, tmp_path):
    model, report, _ = fitted
    episodes = random_episodes(model.chat, 20, seed=9)
    model.save(tmp_path / "saved")
    loaded = StepRewardModel.load(tmp_path / "saved", tiny_base(seed=4).chat, device=DEVICE)
    assert loaded.step_scores(episodes) == model.step_scores(episodes)
    assert loaded.report == report
    assert not any(p.requires_grad for p in loaded.parameters())
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names == {"model.safetensors", "config.json", "reward_model.json"}


def test_a_folder_that_does_not_fit_is_refused(tmp_path):
    base = tiny_base()
    model = reward_model_of(base)
    with pytest.raises(ValueError, match="holds no step reward model"):
        StepRewardModel.load(tmp_path, base.chat)
    model.save(tmp_path)
    other = load_base("tiny", vocabulary=[*WORDS, "more"], d_model=16, layers=1, heads=2, intermediate=32)
    with pytest.raises(ValueError, match="another vocabulary"):
        StepRewardModel.load(tmp_path, other.chat)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged"):
        StepRewardModel.load(tmp_path, base.chat)
    (tmp_path / "model.safetensors").write_bytes(whole)
    about = json.loads((tmp_path / "reward_model.json").read_text())
    del about["vocabulary"]
    (tmp_path / "reward_model.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="damaged"):
        StepRewardModel.load(tmp_path, base.chat)


# --- where the backbone comes from


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_backbone_is_the_starting_model_whatever_was_trained_since(lora_rank):
    expected = reward_model_of(trained=True)
    base = tiny_base()
    policy = Policy(base, lora_rank=lora_rank)
    policy.activate()
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter += 0.1
    trajectory = episode(base.chat, LONG, 1.0)
    assert reward_model_of(base, trained=True).step_scores([trajectory]) == expected.step_scores([trajectory])


LLAMA_TEMPLATE = (
    "<s>{% if date_string %}{{ date_string }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with a small Llama whose tokenizer adds <s> on its own, as its template does too."""
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


def test_the_text_of_a_step_holds_the_task_two_past_turns_and_the_observation():
    trajectory = episode(tiny_base().chat, [("a", "b"), ("c", "d"), ("e", ""), ("g", "h")], 1.0)
    assert step_text(trajectory, 3) == (
        "Task: put mug on desk\n"
        "Observation: c\nAction: d\nObservation: e\nAction: invalid reply\nObservation: g"
    )
    assert step_text(trajectory, 0) == "Task: put mug on desk\nObservation: a"


def test_another_tokenizer_gives_one_bos_and_the_same_ids_for_fit_and_score(llama, tmp_path, monkeypatch):
    model = StepRewardModel.from_pretrained(str(llama), device=DEVICE)
    seen = []
    forward = StepRewardModel.forward
    monkeypatch.setattr(
        StepRewardModel, "forward", lambda self, batch: seen.append(batch) or forward(self, batch)
    )
    episodes = random_episodes(tiny_base().chat, 12, turns=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(episodes, epochs=1, held_out=0.5)

    def ids():
        found = {tuple(row.input_ids) for batch in seen for row in batch.rows}
        seen.clear()
        return found

    fitted_on = ids()
    model.score([Group("toy", episodes)])
    assert ids() == fitted_on
    for row in fitted_on:
        assert row[0] == 1 and row.count(1) == 1
        assert 0 not in row  # no word is unknown
    # the score is read at the end-of-turn token of the action
    row = model.rows(episodes[0])[1]
    assert row.spans == [(1, len(row.input_ids) - 3, len(row.input_ids))] and row.input_ids[-1] == 2

    model.save(tmp_path)
    # the policy's vocabulary does not matter here
    loaded = StepRewardModel.load(tmp_path, tiny_base().chat, device=DEVICE)
    assert loaded.step_scores(episodes) == model.step_scores(episodes)
    assert (tmp_path / "tokenizer").is_dir()


def test_text_that_is_too_long_for_the_backbone_is_refused_not_cut(llama):
    model = StepRewardModel.from_pretrained(str(llama), device=DEVICE)
    with pytest.raises(ValueError, match="toy/0 is 3.. tokens long.*reads 256.*longer context"):
        model.step_scores([episode(tiny_base().chat, [("mug " * 300, "look")], 1.0)])


@pytest.mark.slow
def test_a_backbone_with_another_tokenizer_learns_too(llama):
    model = StepRewardModel.from_pretrained(str(llama), device=DEVICE)
    episodes = random_episodes(tiny_base().chat, 200, wins=magic)
    report = model.fit(episodes, epochs=12, learning_rate=5e-3, held_out=0.2)
    assert report["auc"] > 0.9
