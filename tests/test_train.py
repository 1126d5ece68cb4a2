"""Runs of the tiny model from start to end, and what they leave behind. tests/record has the toy's runs."""

import contextlib
import dataclasses
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import config
import flags
import train
from envs import Household, make_env
from record import artifacts, checkpoint, identity
from record.log import read_lines
from record.transcripts import transcript_text

ROOT = Path(__file__).parent.parent

SMALL = {"k": 1, "tasks_per_update": 4, "group_size": 2, "off_policy_fraction": 0.25, "buffer_tasks": 2}
SHORT = {"eval_games": 6, "eval_every": 2, "max_turns": 5, "threads": 1, "max_prompt_tokens": 128}
TINY = {"tiny_width": 16, "tiny_layers": 1, "tiny_heads": 2, "learning_rate": 0.01}
PREPARE = {
    "warm_start": 40,
    "warm_start_episodes": 60,
    "warm_start_turns": 32,
    "warm_start_lr": 0.01,
    "reward_model_episodes": 40,
    "reward_model_epochs": 1,
}
WITHOUT_CURVES = dataclasses.replace(
    train.PIECES, draw_curves=lambda lines, path, title: None, write_page=lambda folder: None
)


def argv(folder, **options):
    options = {**SMALL, **SHORT, **TINY, "out": folder, **options}
    return [f"--{name}={value}" for name, value in options.items()]


def train_main(argv):
    train.main(argv, pieces=WITHOUT_CURVES)


@pytest.fixture(scope="module")
def first_output(tmp_path_factory):
    """(run folder, printed text) of two loops with warm start, reward model and TensorBoard."""
    folder, text = tmp_path_factory.mktemp("runs") / "first", io.StringIO()
    with contextlib.redirect_stdout(text):
        train_main([*argv(folder, total_updates=2, **PREPARE), "--tensorboard"])
    return folder, text.getvalue()


@pytest.fixture
def first_run(first_output):
    return first_output[0]


def on(first_run, **options):
    """Options of a run that begins with the first run's start/ and reward_model/."""
    start, scorer = first_run / "start", first_run / "reward_model"
    model = {"model": start, "style": "short", "lora_rank": 0, "dtype": "float32", "reward_model": scorer}
    return {**model, "max_new_tokens": 8, **options}


def story(folder):
    lines = read_lines(folder / "metrics.jsonl")
    lines = [{key: value for key, value in line.items() if not key.startswith("seconds")} for line in lines]
    return lines, checkpoint.read(checkpoint.listed(folder)[-1]).tensors


def assert_same_story(one, other):
    (lines, tensors), (other_lines, other_tensors) = story(one), story(other)
    assert lines == other_lines
    assert {file: sorted(part) for file, part in tensors.items()} == {
        file: sorted(part) for file, part in other_tensors.items()
    }
    for file, part in tensors.items():
        for key, tensor in part.items():
            assert torch.equal(tensor, other_tensors[file][key]), (file, key)


# --- what a run leaves --------------------------------------------------------------------------------------


def test_a_run_leaves_its_folder(first_run):
    files = {"config.json", "run.json", "metrics.jsonl", "transcripts.jsonl", "summary.json"}
    folders = {"start", "reward_model", "checkpoints", "policy", "tensorboard"}
    assert {path.name for path in first_run.iterdir()} - {".lock"} == files | folders
    assert not [path for path in first_run.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl")]
    about = json.loads((first_run / "run.json").read_text())
    assert f"--out={first_run}" in about["argv"] and about["versions"]["torch"] == torch.__version__
    assert "1 torch threads" in about["machine"] and about["ranks"] == 1
    assert {"alfworld", "textworld", "rapidfuzz", "spacy", "vllm", "nltk"} <= set(about["versions"])


def test_summary_and_log_agree(first_run):
    summary = json.loads((first_run / "summary.json").read_text())
    lines = read_lines(first_run / "metrics.jsonl")
    panels = [line for line in lines if line["agent"] == "evaluation"]
    assert [line["update"] for line in panels] == [0, 2]
    assert all(line["temperature"] == 0.4 and line["games"] == 6 for line in panels)
    result = summary["splits"]["eval"]
    assert result["success_start"] == panels[0]["success"] and result["success_end"] == panels[1]["success"]
    assert isinstance(result["success_end"], float) and summary["seconds"] > 0
    assert set(result["by_type"]) == set(make_env("household").task_types)
    assert sum(one["games"] for one in result["by_type"].values()) == 6
    # a loop: B plays 3 tasks x 2 episodes and 2 x 2 for the buffer, A 3 x 2
    assert (summary["updates"], summary["explorer_updates"], summary["episodes"]) == (2, 2, 32)
    assert summary["turns"] == panels[1]["environment_turns"] > 32
    assert (summary["method"], summary["algo"], summary["seed"]) == ("rspo", "grpo", 0)
    for line in lines:
        if line["agent"] in ("policy", "explorer"):
            assert {"success", "kl_on", "entropy_on", "clip_fraction_on", "zero_spread_groups"} <= set(line)
            repeated = line["repeated_states_per_episode"] * line["sampled_episodes"]
            assert repeated == pytest.approx(line["repeated_states"])
            assert {"seconds_rollout", "seconds_update", "grad_norm"} <= set(line)
        if line["agent"] == "explorer":
            assert {"dense_reward", "seconds_score"} <= set(line)


def test_transcripts_are_readable(first_run):
    records = read_lines(first_run / "transcripts.jsonl")
    assert {record["agent"] for record in records} == {
        "policy",
        "explorer",
        "buffer",
        "replayed",
        "evaluation",
    }
    explored = next(record for record in records if record["agent"] == "explorer")
    assert all(-1 < step["dense_score"] < 1 for step in explored["steps"])
    text = transcript_text(explored)
    assert explored["task"] in text and explored["steps"][0]["observation"] in text and "[score" in text


def test_the_trained_policy_loads_with_transformers(first_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(first_run / "policy")
    trained = checkpoint.read(checkpoint.listed(first_run)[-1]).tensors["policy"]
    weights = dict(model.named_parameters())
    assert set(weights) == {key.removeprefix("weight/") for key in trained if key.startswith("weight/")}
    for key, weight in weights.items():
        assert torch.equal(weight, trained[f"weight/{key}"])
    start = AutoModelForCausalLM.from_pretrained(first_run / "start").state_dict()
    assert not torch.equal(start["model.embed_tokens.weight"], weights["model.embed_tokens.weight"])
    assert AutoTokenizer.from_pretrained(first_run / "policy").chat_template


def test_a_run_prints_what_it_does(first_output):
    _, printed = first_output
    assert (
        "warm start, not part of RSPO: the tiny model cannot act yet, so it is first trained for 40 "
        in printed
    )
    assert "supervised updates on 60 games played by an expert that searches (95% of the turns)" in printed
    assert "hesitates (0%) and errs (5%); in 85% of the games it plays for another goal than the" in printed
    assert "step reward model: fitted on 40 games" in printed and "held-out episodes" in printed
    assert "success in % on 6 games of eval" in printed and "episodes  seconds" in printed


@pytest.mark.slow
def test_an_adapter_loads_with_peft_and_weighs_little(first_run, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    train.main(argv(tmp_path / "run", total_updates=1, **on(first_run, method="outcome", lora_rank=2)))
    assert (tmp_path / "run" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert "finished: 1 update of A" in (tmp_path / "run" / "report.html").read_text()
    start = AutoModelForCausalLM.from_pretrained(first_run / "start")
    model = PeftModel.from_pretrained(start, tmp_path / "run" / "policy")
    saved = checkpoint.read(checkpoint.listed(tmp_path / "run")[-1]).tensors["policy"]
    assert all(".lora_" in key for key in saved)  # not the frozen base
    moved = [weight for name, weight in model.named_parameters() if ".lora_B" in name]
    assert moved and all(weight.abs().sum() > 0 for weight in moved)
    assert not (tmp_path / "run" / "start").exists()  # the run starts from --model


# --- command line -------------------------------------------------------------------------------------------


def test_bad_flags_end_with_status_2_and_leave_no_folder(tmp_path, capsys):
    for flags_given in (["--k", "three"], ["--no_such_flag"], ["--method", "sft"], ["--k", "0"]):
        with pytest.raises(SystemExit) as exit:
            train.main([*flags_given, "--out", str(tmp_path / "run")])
        assert exit.value.code == 2 and flags_given[0] in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["--k=0", pytest.param("--help", marks=pytest.mark.slow)])
def test_the_script_answers_before_it_imports_torch(flag):
    command = [sys.executable, "-X", "importtime", "train.py", flag]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    timed = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    if flag == "--help":
        assert done.returncode == 0 and "--total_updates" in done.stdout
    else:
        assert (done.returncode, said) == (2, ["error: --k 0: must be between 1 and 1000000"])
    assert timed and not [line for line in timed if line.split("|")[-1].strip() == "torch"]


def test_prompts_longer_than_the_model_reads_are_refused_before_there_is_a_folder(
    first_run, tmp_path, capsys
):
    with pytest.raises(SystemExit) as exit:
        train_main(argv(tmp_path / "run", **on(first_run, max_prompt_tokens=5000)))
    assert exit.value.code == 2 and not (tmp_path / "run").exists()
    assert "--max_prompt_tokens 5000 with --max_new_tokens 8: the model reads" in capsys.readouterr().err


def test_unusable_models_and_prompts_are_refused_before_there_is_a_folder(first_run, tmp_path, capsys):
    def refused_run(**options):
        with pytest.raises(SystemExit) as exit:
            train_main(argv(tmp_path / "run", **options))
        assert exit.value.code == 2 and not (tmp_path / "run").exists()
        return capsys.readouterr().err.strip().splitlines()[-1]

    scorer = tmp_path / "scorer"
    shutil.copytree(first_run / "reward_model", scorer)
    (scorer / "model.safetensors").write_text("cut")
    said = refused_run(**on(first_run, reward_model=scorer))
    assert said.startswith(f"error: --reward_model {scorer}: the step reward model in {scorer} is damaged")
    unknown = {"reward_model_backbone": "no-org/no-model"}
    said = refused_run(
        **{key: value for key, value in on(first_run).items() if key != "reward_model"}, **unknown
    )
    assert said.startswith("error: --reward_model_backbone no-org/no-model: cannot load no-org/no-model")
    assert said.endswith("or a hub id that can be fetched")
    said = refused_run(**on(first_run, max_prompt_tokens=5))
    assert said.startswith("error: --max_prompt_tokens 5: the first prompt of a game has ")


@pytest.mark.slow
def test_a_run_that_diverges_ends_with_a_message(first_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(config.RANGES, "learning_rate", (0, 1e9))
    options = on(first_run, method="outcome", learning_rate=1e9, minibatch_turns=4)
    with pytest.raises(SystemExit) as exit:
        train_main(argv(tmp_path / "run", total_updates=2, **options))
    assert exit.value.code == 1
    assert (
        "error: the gradient of agent 'policy' has norm nan: lower its learning rate"
        in capsys.readouterr().err
    )


# --- resuming -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"method": "rspo", "algo": "ppo", "lora_rank": 2},
        {"method": "rspo_h", "algo": "gigpo", "context": "full"},
        {"method": "spear", "algo": "gigpo", "context": "full", "lora_rank": 2, "spear_buffer": 4},
        {"dense_reward": "implicit", "lora_rank": 2},
        {"dense_reward": "implicit", "algo": "ppo", "method": "dense"},
        {"dense_reward": "shaped", "buffer_source": "both", "buffer_keep": 9, "env_workers": 1},
    ],
)
def test_two_loops_and_two_resumed_loops_equal_four_loops(first_run, tmp_path, options):
    options = on(first_run, **options)
    train_main(argv(tmp_path / "straight", total_updates=4, **options))
    train_main(argv(tmp_path / "parts", total_updates=2, **options))
    train_main(["--resume", "--total_updates=4", f"--out={tmp_path / 'parts'}"])
    assert_same_story(tmp_path / "parts", tmp_path / "straight")


@pytest.mark.slow
def test_a_resumed_run_does_not_make_start_and_reward_model_again(tmp_path, monkeypatch):
    train_main(argv(tmp_path, total_updates=1, **PREPARE))
    straight = story(tmp_path)
    for path in checkpoint.listed(tmp_path):
        checkpoint.remove(path)
    (tmp_path / f"{checkpoint.ASIDE}policy").mkdir()
    monkeypatch.setattr(artifacts, "warm_start", None)
    monkeypatch.setattr(artifacts.StepRewardModel, "fit", None)
    train_main(["--resume", f"--out={tmp_path}"])
    assert story(tmp_path)[0] == straight[0]
    assert not (tmp_path / f"{checkpoint.ASIDE}policy").exists()


def changed_weights(folder):
    """Change one weight of a model folder by a little."""
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def changed_word(folder):
    """Give two words of a word-level tokenizer each other's ids."""
    path = folder / "tokenizer.json"
    settings = json.loads(path.read_text())
    words = settings["model"]["vocab"]
    one, other = list(words)[-2:]
    words[one], words[other] = words[other], words[one]
    path.write_text(json.dumps(settings))


def changed_template(folder):
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("<user>", "<user> "))


def changed_epsilon(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.1}))


def cut_weights(folder):
    os.truncate(folder / "model.safetensors", 1000)


CHANGES = [
    (changed_weights, "the model weights in the run folder changed since the run was trained"),
    (changed_word, "the tokenizer in the run folder changed since the run was trained"),
    (changed_template, "the chat template in the run folder changed since the run was trained"),
    (changed_epsilon, "the model config (rms_norm_eps) in the run folder changed since the run was"),
    (cut_weights, "start/ cannot be loaded ("),
    (shutil.rmtree, "start, the model after the warm start, is missing; copy it again"),
]


@pytest.mark.parametrize("mode", ["--resume", "--eval_only"])
@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_changed_start_is_refused_by_name(first_run, tmp_path, capsys, mode, change, words):
    folder = shutil.copytree(first_run, tmp_path / "run")
    change(folder / "start")
    with pytest.raises(SystemExit) as exit:
        train_main([mode, f"--out={folder}"])
    said = capsys.readouterr().err
    assert exit.value.code == 2 and said.startswith(f"error: --out {folder}: ") and words in said
    assert said.count("\n") == 1


def test_a_changed_step_reward_model_is_refused(first_run, tmp_path, capsys):
    folder = shutil.copytree(first_run, tmp_path / "run")
    weights = load_file(folder / "reward_model" / "model.safetensors")
    weights["head.2.weight"][0, 1] += 1e-3
    save_file(weights, folder / "reward_model" / "model.safetensors")
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit):
        train_main(["--resume", f"--out={folder}", "--total_updates=3"])
    assert "the step reward model in the run folder changed since the run was" in capsys.readouterr().err
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_changed_model_of_another_folder_is_refused_by_name(first_run, tmp_path, capsys):
    model = shutil.copytree(first_run / "start", tmp_path / "model")
    options = on(first_run, model=model, method="outcome", lora_rank=2)
    train_main(argv(tmp_path / "run", total_updates=1, **options))
    changed_weights(model)
    capsys.readouterr()
    for mode in ("--resume", "--eval_only"):
        with pytest.raises(SystemExit):
            train_main([mode, f"--out={tmp_path / 'run'}"])
        assert capsys.readouterr().err == (
            f"error: --model {model}: the model weights there changed since the run was trained; put the old "
            "files back, or start a new run\n"
        )


def test_fingerprints_depend_on_names_values_and_order_but_not_on_layout():
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    known = identity.of_tensors(weights)
    assert known == identity.of_tensors({"b": weights["b"], "a": weights["a"].T.contiguous().T})
    swapped = weights["a"].clone()
    swapped[0, 0], swapped[1, 2] = 5.0, 0.0  # the same sum
    for other in (swapped, weights["a"] + 1e-6, weights["a"].reshape(3, 2), weights["a"].double()):
        assert known != identity.of_tensors(weights | {"a": other})
    assert known != identity.of_tensors({"a": weights["a"], "c": weights["b"]})


def test_a_model_config_is_compared_by_the_keys_that_both_sides_have():
    saved = {"tokenizer": "x", "model config": {"rope": 1, "layers": 2, "old": 3}}
    assert identity.changed_parts(saved, {"tokenizer": "x", "model config": {"rope": 1, "new": 4}}) == []
    found = {"tokenizer": "y", "model config": {"rope": 5, "layers": 2}}
    assert identity.changed_parts(saved, found) == ["tokenizer", "model config (rope)"]
    assert identity.changed_parts(saved, {"step reward model": "z"}) == []


@pytest.mark.slow
def test_a_run_folder_can_be_moved(first_run, tmp_path, monkeypatch):
    from peft import AutoPeftModelForCausalLM

    from model import load_base

    begun = {"method": "outcome", "lora_rank": 2, "warm_start": 2, "warm_start_episodes": 10}
    train_main(argv(tmp_path / "old", total_updates=1, **begun))
    named = json.loads((tmp_path / "old/policy/adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(tmp_path / "old/start")
    (tmp_path / "old").rename(tmp_path / "new")
    for path in (tmp_path / "new").rglob("*.json"):
        if path.name not in ("run.json", "adapter_config.json"):
            assert str(tmp_path / "old") not in path.read_text(), path
    assert load_base(str(tmp_path / "new/policy")).changed  # merged with start/ beside it
    train_main(["--eval_only", f"--out={tmp_path / 'new'}"])
    monkeypatch.chdir("/")
    AutoPeftModelForCausalLM.from_pretrained(tmp_path / "new/policy")
    train_main(["--resume", f"--out={tmp_path / 'new'}", "--total_updates=2"])
    named = json.loads((tmp_path / "new/policy/adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(tmp_path / "new/start")


class Saved:
    """Something that is saved as a file of one word."""

    def __init__(self, word):
        self.word = word

    def save(self, folder):
        (folder / "word").write_text(self.word)


def test_make_once_plays_and_saves_only_if_the_folder_is_missing(tmp_path):
    played = []

    def play():
        played.append("a game")
        return ["an episode"]

    def make(episodes):
        assert episodes == ["an episode"]
        return Saved("made")

    assert artifacts.make_once(tmp_path / "start", play, make, Saved.save)
    assert not artifacts.make_once(tmp_path / "start", play, make, Saved.save)
    assert played == ["a game"] and (tmp_path / "start" / "word").read_text() == "made"


@pytest.mark.slow
def test_a_run_killed_with_sigkill_ends_as_a_straight_one(tmp_path):
    command = [sys.executable, "train.py", "--ranks=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"total_updates": 6, **PREPARE}

    def go(flags, seconds=None):
        process = subprocess.Popen(
            [*command, *flags],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            return False
        assert process.returncode == 0, errors
        return True

    began = time.perf_counter()
    assert go(argv(tmp_path / "straight", **options))
    whole = time.perf_counter() - began
    rng, folder = random.Random(0), tmp_path / "killed"
    for _ in range(6):
        started = (folder / "config.json").exists()
        flags_now = ["--resume", f"--out={folder}"] if started else argv(folder, **options)
        go(flags_now, rng.uniform(0.2, 1.0) * whole)
    assert go(["--resume", f"--out={folder}"])
    assert_same_story(folder, tmp_path / "straight")


# --- evaluation ---------------------------------------------------------------------------------------------


def _panel(line):
    return line["success"], line["turns_per_episode"]


def test_eval_only_plays_the_panel_of_a_run_and_keeps_earlier_results(first_run, capsys):
    train.main(["--eval_only", f"--out={first_run}"])
    found = json.loads((first_run / "eval.json").read_text())
    panels = [line for line in read_lines(first_run / "metrics.jsonl") if "by_type" in line]
    assert (found["policy"], *_panel(found["panels"]["eval"])) == ("update_000002", *_panel(panels[-1]))
    assert len(read_lines(first_run / "metrics.jsonl")) == 8  # as before
    newest = checkpoint.read(checkpoint.listed(first_run)[-1])
    weights = identity.of_tensors(newest.tensors["policy"])
    base = {part: newest.state["identity"][part] for part in found["identity"] if part != "checkpoint"}
    assert "model weights" in base and found["identity"] == base | {"checkpoint": weights}
    panel = found["panels"]["eval"]
    assert panel["successes"] == panel["success"] * 6 == panels[-1]["successes"]
    low, high = panel["success_interval"]
    assert f"solved: {panel['successes']} of 6 games, {panel['success']:.1%} (95 % interval {low:.1%} to" in (
        capsys.readouterr().out
    )
    train.main(["--eval_only", f"--out={first_run}", "--eval_games=2"])
    assert json.loads((first_run / "eval.json").read_text()) == found
    other = json.loads((first_run / "eval-2.json").read_text())
    assert other["panels"]["eval"]["games"] == other["config"]["eval_games"] == 2
    for path in first_run.glob("eval*.json"):
        path.unlink()


def test_an_evaluation_can_be_repeated_from_its_file(first_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = on(first_run) | {"eval_games": 3, "seed": 5, "history": 0}
    flags_given = [flag for flag in argv("", **options) if not flag.startswith("--out")]
    train.main(["--eval_only", *flags_given])
    (written,) = tmp_path.glob("runs/eval-*/eval.json")
    found = json.loads(written.read_text())
    assert found["argv"] == ["--eval_only", *flags_given] and found["ranks"] == 1
    assert found["games"] == Household.fingerprint and found["versions"]["torch"] == torch.__version__
    protocol = {"max_turns": 5, "seed": 5, "sampler": "kv", "max_prompt_tokens": 128, "max_new_tokens": 8}
    protocol |= {
        "context": "window",
        "history": 0,
        "style": "short",
        "eval_temperature": 0.4,
        "env": "household",
    }
    assert protocol.items() <= found["config"].items()
    assert "success in % on 3 games of eval" in capsys.readouterr().out

    (tmp_path / "flags.json").write_text(json.dumps(found["config"]))
    train.main(["--eval_only", "--config", "flags.json"])
    (path,) = set(tmp_path.glob("runs/eval-*/eval.json")) - {written}
    again = json.loads(path.read_text())
    assert again["config"] == found["config"] and again["panels"] == found["panels"]


class TwoSplits(Household):
    """Household with a second held-out split, of four games."""

    eval_splits = ("eval", "hard")

    def size(self, split):
        return 4 if split == "hard" else super().size(split)

    def reset(self, split, index):
        return super().reset("train" if split == "hard" else split, index)


@pytest.mark.slow
def test_each_split_has_its_panel_in_the_log_the_summary_and_the_tables(
    first_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(flags, "make_env", lambda name: TwoSplits())
    splits = ["--eval_splits", "hard", "eval"]
    train_main(argv(tmp_path, total_updates=1, **on(first_run, method="outcome")) + splits)
    panels = [line for line in read_lines(tmp_path / "metrics.jsonl") if line["agent"] == "evaluation"]
    told = [(panel["split"], panel["update"], panel["games"]) for panel in panels]
    assert told == [("hard", 0, 4), ("eval", 0, 6), ("hard", 1, 4), ("eval", 1, 6)]
    parts = json.loads((tmp_path / "summary.json").read_text())["splits"]
    assert list(parts) == ["hard", "eval"]
    assert {split: part["games"] for split, part in parts.items()} == {"hard": 4, "eval": 6}
    assert [panel["success"] for panel in panels] == [
        *(parts["hard"]["success_start"], parts["eval"]["success_start"]),
        *(parts["hard"]["success_end"], parts["eval"]["success_end"]),
    ]
    said = capsys.readouterr().out
    assert "success in % on 4 games of hard, temperature 0.4" in said
    assert "success in % on 6 games of eval, temperature 0.4" in said
    assert "of 4 games of hard" in said and "of 6 games of eval" in said
    records = [r for r in read_lines(tmp_path / "transcripts.jsonl") if r["agent"] == "evaluation"]
    assert {record["task_id"].split("/")[1] for record in records} == {"hard", "eval"}

    train_main(["--eval_only", f"--out={tmp_path}", "--eval_splits", "eval"])
    found = json.loads((tmp_path / "eval.json").read_text())["panels"]
    assert list(found) == ["eval"] and found["eval"]["success"] == panels[3]["success"]

    monkeypatch.setattr(TwoSplits, "fingerprint", "of other games")
    capsys.readouterr()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit):
        train_main(["--resume", f"--out={tmp_path}", "--total_updates=2"])
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert capsys.readouterr().err == (
        "error: --env household: these are not the games that the run was trained on; give the data that the "
        "run began with\n"
    )
    train_main(["--eval_only", f"--out={tmp_path}", "--eval_splits", "eval"])
    assert "warning: these are not the games that the run was trained on" in capsys.readouterr().out
