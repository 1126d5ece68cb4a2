"""Flags and their refusals; small real runs of the tiny model, and what they leave behind."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flags
import train
from envs import Household, env_class, make_env
from flags import Args, UsageError
from games import alfworld_engine
from record import checkpoint, report

ROOT = Path(__file__).parent.parent


def refused(*argv):
    with pytest.raises(UsageError) as caught:
        flags.prepare(list(argv))
    return str(caught.value)


# --- flags --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "flag", "remedy"),
    [
        ("--k 0", "--k 0", "above 0"),
        ("--k 7", "--total_updates", "multiple of --k 7, for example"),
        ("--group_size 1", "--group_size 1 with --algo grpo", "2 or more"),
        ("--off_policy_fraction 0.1", "--off_policy_fraction 0.1", "--off_policy_fraction 0.125"),
        ("--off_policy_fraction 1", "--off_policy_fraction 1.0", "1)"),
        ("--algo ppo --replay_strategy variance", "--replay_strategy variance", "reward or random"),
        ("--clip_eps nan", "--clip_eps nan", "finite"),
        ("--kl_coef inf", "--kl_coef inf", "finite"),
        ("--learning_rate nan", "--learning_rate nan", "finite"),
        ("--learning_rate 0", "--learning_rate 0.0", "above 0"),
        ("--temperature 0", "--temperature 0.0", "above 0"),
        ("--seed -1", "--seed -1", "between 0 and 9223372036854775807"),
        ("--eval_temperature -0.1", "--eval_temperature -0.1", "at least 0"),
        ("--lora_rank -1", "--lora_rank -1", "at least 0"),
        ("--reward_model_episodes 1", "--reward_model_episodes 1", "at least 2"),
        ("--expert_share 1.5", "--expert_share 1.5", "between 0 and 1"),
        ("--adam_beta2 1", "--adam_beta2 1.0", "between 0 and 0.9999"),
        ("--keep_checkpoints 0", "--keep_checkpoints 0", "above 0"),
        ("--env alf", "--env alf", "household"),
        ("--model /no/such/folder", "--model /no/such/folder", "give one, a hub id"),
        ("--model .", "--model .", "save_pretrained"),
        ("--reward_model_backbone /no/such", "--reward_model_backbone /no/such", "give one"),
        ("--reward_model_backbone tiny", "--reward_model_backbone tiny", "leave it out"),
        ("--reward_model tests", "--reward_model tests", "leave it out to fit one"),
        ("--tiny_width 36 --tiny_heads 4", "--tiny_width 36", "multiple of twice --tiny_heads 4"),
        ("--eval_splits eval test", "--eval_splits ('eval', 'test')", "it has eval"),
        ("--style think", "--style think", "leave it out, or give a language model"),
        ("--plan --model x/y --env alf", "--env alf", "household"),
        ("--eval_splits eval eval", "--eval_splits ('eval', 'eval')", "name each split once"),
        ("--preset paper-alfworld --config x.json", "--config x.json", "give another"),
        ("--env alfworld --alfworld_data tests", "--alfworld_data tests", "alfworld-download"),
        ("--sampler vllm", "--lora_rank 0", "give --lora_rank 8, or kv"),
        ("--sampler vllm --lora_rank 513", "--lora_rank 513", "give no more, or kv"),
        ("--sampler vllm --lora_rank 8", "--tiny_heads 4", "give 2, or kv"),
        ("--sampler vllm --lora_rank 8 --tiny_heads 2 --temperature 0.001", "--temperature 0.001", "at 0"),
        ("--sampler vllm --lora_rank 8 --tiny_heads 2 --temperature 3", "--temperature 3.0", "to 2, or"),
        ("--vllm_memory 1", "--vllm_memory 1.0", "between 0.01 and 0.99"),
        ("--device nonsense", "--device nonsense", "give auto, cpu"),
        ("--device meta", "--device meta", "give auto, cpu"),
        ("--out tests", "--out tests", "give a new folder"),
        ("--out train.py", "--out train.py", "give a folder"),
        ("--out=", "--out ", "leave the flag out"),
        ("--resume", "--resume", "give its folder with --out"),
        ("--resume --out tests", "--out tests", "start a run without --resume"),
        ("--resume --eval_only --out tests", "--eval_only with --resume", "leave one out"),
        ("--resume --out tests --config x.json", "--config x.json with --resume", "leave it out"),
        ("--resume_from update_000003", "--resume_from update_000003", "goes with --resume"),
        ("--config pyproject.toml", "--config pyproject.toml", "give another"),
        ("--eval_only", "--eval_only", "give a run with --out, or a --model"),
        ("--eval_only --out tests", "--out tests", "holds no run"),
        ("--wandb_project p", "--wandb_project p", "pip install wandb"),
    ],
)
def test_bad_flags_name_the_value_and_the_remedy(argv, flag, remedy, monkeypatch):
    monkeypatch.setattr(alfworld_engine, "check_installed", lambda: None)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(flags, "find_spec", lambda name: None if name == "wandb" else True)
    message = refused(*argv.split())
    assert message.startswith(flag) and remedy in message, message


def test_a_gpu_that_is_not_there_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert refused("--device", "cuda:1") == (
        "--device cuda:1: torch finds no GPU here; leave it out, or give cpu"
    )


def test_what_is_asked_for_and_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(flags, "find_spec", lambda name: None)
    assert refused() == "the package matplotlib is not installed; pip install matplotlib"
    monkeypatch.setattr(flags, "find_spec", lambda name: True if name == "matplotlib" else None)
    assert refused("--tensorboard") == (
        "--tensorboard: the package tensorboard is not installed; pip install tensorboard"
    )
    assert refused("--sampler", "vllm", "--lora_rank", "8", "--tiny_heads", "2").startswith(
        "--sampler vllm: the package vllm"
    )


def test_an_environment_without_an_expert_cannot_warm_start(monkeypatch):
    class Mute:
        name, step_limit, vocabulary, task_types = "mute", 5, ("go",), ("Go",)
        eval_splits = ("eval",)

        def size(self, split):
            return 1000

    monkeypatch.setattr(flags, "make_env", lambda name: Mute())
    assert refused() == "--warm_start 450: --env household has no expert to learn from; give 0"
    assert refused("--warm_start=0", "--reward_model_source=expert") == (
        "--reward_model_source expert: --env household has no expert; give policy"
    )
    args, _ = flags.prepare(["--warm_start=0"])
    assert args.reward_model_source == "policy" and args.max_turns == 5


def test_a_usage_error_is_one_line_with_status_2_and_leaves_no_folder(tmp_path):
    command = [sys.executable, "train.py", "--k", "0", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: --k 0: must be above 0\n")
    assert not (tmp_path / "run").exists()


def test_flags_that_are_no_numbers_or_no_flags_exit_with_2(capsys):
    for argv in (["--k", "three"], ["--no_such_flag"], ["--method", "sft"]):
        with pytest.raises(SystemExit) as exit:
            train.main(argv)
        assert exit.value.code == 2
        assert argv[0] in capsys.readouterr().err


def test_gigpo_std_can_be_switched_both_ways():
    assert flags.parse(["--gigpo_std"]).gigpo_std
    for off in ("--no-gigpo_std", "--no_gigpo_std", "--no-gigpo-std"):
        assert not flags.parse([off]).gigpo_std


def test_help_begins_with_the_symbol_of_the_paper(capsys):
    with pytest.raises(SystemExit) as exit:
        flags.parse(["--help"])
    assert exit.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for flag, symbol in {
        "--k INT": "k:",
        "--group_size INT": "N:",
        "--tasks_per_update INT": "B:",
        "--off_policy_fraction FLOAT": "alpha:",
        "--clip_eps FLOAT": "epsilon:",
        "--kl_coef FLOAT": "beta:",
        "--reward_noise FLOAT": "sigma:",
    }.items():
        assert f"{flag} {symbol}" in text


def test_what_is_left_open_is_resolved_by_model():
    env = make_env("household")
    tiny, lora, full = (
        flags.resolve(Args(**given), env)
        for given in ({}, {"model": "some/model"}, {"model": "some/model", "lora_rank": 0})
    )
    assert (tiny.lora_rank, lora.lora_rank, full.lora_rank) == (0, 64, 0)
    assert (tiny.learning_rate, lora.learning_rate, full.learning_rate) == (4e-4, 3e-6, 1e-6)
    assert (tiny.adam_beta2, lora.adam_beta2) == (0.99, 0.999)
    assert (tiny.style, lora.style) == ("short", "think")
    assert (tiny.warm_start > 0, lora.warm_start) == (True, 0)
    assert flags.resolve(tiny, env) == tiny
    assert flags.resolve(Args(learning_rate=1.0, lora_rank=8), env).learning_rate == 1.0


def test_bf16_arithmetic_is_on_where_the_weights_and_the_device_have_it(monkeypatch):
    def resolved(able, **given):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(able, True))
        return flags.resolve(Args(device="cpu", **given), make_env("household")).autocast

    assert resolved(["avx512_bf16"], model="some/model") is True
    assert resolved(["avx2"], model="some/model") is False  # emulated there
    assert resolved(["avx512_bf16"], model="some/model", dtype="float32") is False
    assert resolved(["avx512_bf16"]) is False  # the tiny model is fp32
    assert resolved(["avx2"], autocast=True) is True  # as one likes
    assert resolved(["avx2"], model="some/model", plan=True) is True  # planned for a GPU


def test_config_json_holds_every_value_and_gives_the_run_again(tmp_path):
    env = make_env("household")
    args = flags.resolve(Args(method="outcome", seed=7, gigpo_std=False, learning_rate=2e-3), env)
    path = tmp_path / "config.json"
    path.write_text(flags.config_text(args))
    assert (
        None
        not in [
            v
            for k, v in json.loads(path.read_text()).items()
            if k in flags.AUTO and k not in flags.OF_THE_MACHINE
        ][:9]
    )
    again, _ = flags.prepare(["--config", str(path)])
    assert dataclasses.replace(again, config=None) == args
    other, _ = flags.prepare(["--config", str(path), "--seed", "8", "--model", "some/model"])
    # flags win; what was given stays; the tiny model's defaults become the other's
    assert (other.seed, other.method, other.learning_rate) == (8, "outcome", 2e-3)
    assert (other.lora_rank, other.style, other.warm_start) == (64, "think", 0)
    for value in (
        '"method": "sft"',
        '"gigpo_std": "no"',
        '"k": 3.0',
        '"lora_rank": "8"',
        '"group_size": true',
    ):
        path.write_text("{" + value + "}")
        name, _, given = value.replace('"', "").partition(": ")
        assert refused("--config", str(path)).startswith(f"--config {path}: its {name} cannot be"), given
    path.write_text('{"learning_rate": 1, "reward_model": null}')
    assert flags.prepare(["--config", str(path)])[0].learning_rate == 1
    path.write_text('{"k": 3, "momentum": 1}')
    assert refused("--config", str(path)) == f"--config {path}: holds what is no flag (momentum); remove it"


PAPER = {  # the values of both environments
    **{"model": "Qwen/Qwen2.5-1.5B-Instruct", "reward_model_backbone": "meta-llama/Llama-3.2-3B-Instruct"},
    **{"lora_rank": 64, "lora_alpha": 64, "learning_rate": 3e-6, "critic_learning_rate": 1e-5},
    **{"weight_decay": 0.01, "max_grad_norm": 1.0, "epochs": 1, "entropy_coef": 0.001, "warm_start": 0},
    **{"total_updates": 150, "k": 3, "tasks_per_update": 16, "group_size": 8, "buffer_tasks": 28},
    **{"off_policy_fraction": 0.125, "off_policy_episodes": 16, "on_policy_tasks": 14},
    **{"clip_eps": 0.2, "kl_coef": 0.01, "reward_scale": 10, "invalid_penalty": 0.1, "value_clip": 0.5},
    **{"gigpo_gamma": 0.95, "gigpo_omega": 1, "gamma": 1, "gae_lambda": 1, "method": "rspo"},
    **{"replay_strategy": "reward", "replay_unit": "episode", "style": "think", "context": "window"},
    **{"history": 2, "max_new_tokens": 512, "temperature": 1.0, "eval_temperature": 0.4},
}


@pytest.mark.parametrize(
    ("name", "own"),
    [
        (
            "alfworld",
            {"max_turns": 50, "max_prompt_tokens": 2048, "minibatch_turns": 256, "gigpo_std": True}
            | {"eval_splits": ("valid_seen", "valid_unseen")},
        ),
        (
            "webshop",
            {"max_turns": 15, "max_prompt_tokens": 4096, "minibatch_turns": 64, "gigpo_std": False}
            | {"eval_splits": ("validation", "test"), "webshop_reward": "success"},
        ),
    ],
)
def test_presets_hold_the_papers_values(name, own):
    args = flags.resolve(flags.parse(["--preset", f"paper-{name}"]), env_class(name))
    assert args.env == name
    for flag, value in (PAPER | own).items():
        assert getattr(args, flag) == value, flag


def test_a_preset_for_ppo_plays_single_episodes():
    args = flags.parse(["--preset", "paper-webshop", "--algo", "ppo"])
    # 128 episodes an update, 112 and 16 replayed, 224 for the buffer
    counts = (args.on_policy_tasks, args.off_policy_episodes, args.episodes_per_task)
    assert (*counts, args.buffer_groups) == (112, 16, 1, 224)


def test_a_flag_beside_a_preset_wins_wherever_it_stands():
    for argv in (
        ["--seed=200", "--preset=paper-webshop", "--learning_rate=1e-6", "--no-gigpo_std", "--k=5"],
        ["--k", "5", "--learning_rate", "1e-6", "--seed", "200", "--preset", "paper-webshop"],
    ):
        args = flags.parse(argv)
        assert (args.seed, args.learning_rate, args.k) == (200, 1e-6, 5)
        assert (args.max_prompt_tokens, args.clip_eps, args.env) == (4096, 0.2, "webshop")
    args = flags.parse(["--preset=paper-alfworld", "--model=some/model", "--eval_splits", "valid_unseen"])
    assert (args.model, args.eval_splits, args.max_turns) == ("some/model", ("valid_unseen",), 50)


def saved(folder, **values):
    """A run's folder that holds no more than its config.json."""
    args = flags.resolve(Args(**values), env_class(values.get("env", "household")))
    folder.mkdir()
    (folder / "config.json").write_text(flags.config_text(args))
    return str(folder)


def test_a_preset_goes_with_neither_a_config_nor_a_run(tmp_path):
    run = saved(tmp_path / "run")
    remedy = (
        "--preset paper-webshop: goes with neither --config nor a run that is there already; leave one out"
    )
    assert refused("--preset", "paper-webshop", "--config", f"{run}/config.json") == remedy
    assert refused("--preset", "paper-webshop", "--resume", "--out", run) == remedy
    assert refused("--preset", "paper-webshop", "--eval_only", "--out", run) == remedy


def test_the_preset_itself_is_no_part_of_a_config():
    assert "preset" not in json.loads(flags.config_text(flags.parse(["--preset", "paper-alfworld"])))


def test_what_belongs_to_the_machine_may_change_when_a_run_is_resumed(tmp_path):
    run = saved(tmp_path / "run", webshop_data="/old/place")
    moved = ["--env_workers=2", "--alfworld_data=/new", "--webshop_data=/place", "--threads=3"]
    args, path = flags.prepare(["--resume", "--out", run, *moved, "--device=cpu", "--parallel_episodes=7"])
    assert path is None
    assert (args.env_workers, args.alfworld_data, args.webshop_data) == (2, "/new", "/place")
    assert (args.threads, args.device, args.parallel_episodes, args.seed) == (3, "cpu", 7, 0)
    for flag, value in (
        *(("seed", "1"), ("webshop_reward", "score"), ("webshop_goals", "human"), ("max_turns", "9")),
        *(("env", "alfworld"), ("eval_games", "5"), ("warm_start_episodes", "5")),
    ):
        said = refused("--resume", "--out", run, f"--{flag}={value}")
        assert said.startswith(f"--{flag} {value}: the run in {run} has ") and "leave it out" in said


def test_a_config_of_another_place_is_read_without_its_data(tmp_path, monkeypatch):
    monkeypatch.setattr(alfworld_engine, "check_installed", lambda: None)
    run = saved(tmp_path / "run", env="alfworld", alfworld_data="/gone", seed=3)
    args = flags.parse(["--config", f"{run}/config.json", "--env=household"])
    args = flags.resolve(args, env_class("household"))
    assert (args.seed, args.max_turns, args.eval_splits) == (3, 14, ("eval",))
    with pytest.raises(UsageError, match="^--alfworld_data /new: no ALFWorld games in /new/json_2.1.1/train"):
        flags.prepare(["--config", f"{run}/config.json", "--alfworld_data=/new"])
    (tmp_path / "config.json").write_text('{"env": "nowhere"}')
    said = refused("--config", str(tmp_path / "config.json"))
    assert "environment 'nowhere' is unknown" in said and said.endswith("give another")


# --- panels -------------------------------------------------------------------------------------------------


def a_panel(success, outcome, pick, look, **cost):
    by_type = {"Pick": {"games": 4, "success": pick}, "Look": {"games": 2, "success": look}}
    by_type |= {"Heat": {"games": 0, "success": 0.0}}  # no game of it, no column
    about = {"games": 6, "success": success, "outcome": outcome, "crashed_episodes": 0}
    return {**about, "by_type": by_type, **cost}


def test_the_table_has_a_column_of_scores_where_they_are_another_number():
    start = a_panel(0.5, 0.55, 0.75, 0.0, update=0, environment_episodes=0, seconds_elapsed=2.4)
    end = a_panel(1.0, 1.0, 1.0, 1.0, update=3, environment_episodes=2688, seconds_elapsed=61.6)
    assert report.panel_table({"start": start, "end": end}) == (
        "         Pick    Look    all  score  updates  episodes  seconds\n"
        "games       4       2      6\n"
        "start    75.0     0.0   50.0   55.0        0         0        2\n"
        "end     100.0   100.0  100.0  100.0        3     2,688       62\n"
        "change  +25.0  +100.0  +50.0  +45.0"
    )


def test_the_table_has_none_where_the_outcome_is_the_success():
    assert report.panel_table({"policy": a_panel(0.5, 0.5, 0.75, 0.0)}) == (
        "        Pick  Look   all\n"  #
        "games      4     2     6\n"
        "policy  75.0   0.0  50.0"
    )


def test_start_and_end_are_each_splits_own():
    lines = [
        {"agent": agent, "split": split, "update": update}
        for update in (0, 9, 12)
        for agent, split in (("evaluation", "seen"), ("policy", None), ("evaluation", "unseen"))
    ]
    ends = report.start_and_end(lines)
    assert {split: (start["update"], end["update"]) for split, (start, end) in ends.items()} == {
        **{"seen": (0, 12), "unseen": (0, 12)}
    }
    assert all(end["split"] == split for split, (_, end) in ends.items())
    start, end = a_panel(0.5, 0.6, 0.75, 0.0), a_panel(1.0, 0.9, 1.0, 1.0, crashed_episodes=2)
    part = report.progress(start, end)
    assert part == {
        **{"games": 6, "success_start": 0.5, "success_end": 1.0, "outcome_start": 0.6, "outcome_end": 0.9},
        **{"crashed_episodes_start": 0, "crashed_episodes_end": 2},
        "by_type": {
            "Pick": {"games": 4, "start": 0.75, "end": 1.0},
            "Look": {"games": 2, "start": 0.0, "end": 1.0},
            "Heat": {"games": 0, "start": 0.0, "end": 0.0},
        },
    }


# --- runs of the tiny model ---------------------------------------------------------------------------------

MINUTE = {
    **{"k": 1, "tasks_per_update": 4, "group_size": 2, "off_policy_fraction": 0.25, "buffer_tasks": 2},
    **{"eval_games": 6, "eval_every": 2, "max_turns": 5, "threads": 1, "max_prompt_tokens": 128},
    **{"tiny_width": 16, "tiny_layers": 1, "tiny_heads": 2, "learning_rate": 0.01},
}
PREPARE = {
    **{"warm_start": 40, "warm_start_episodes": 60, "warm_start_turns": 32, "warm_start_lr": 0.01},
    **{"reward_model_episodes": 40, "reward_model_epochs": 1},
}


def argv(folder, **options):
    return [f"--{name}={value}" for name, value in {**MINUTE, "out": folder, **options}.items()]


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """Only the first run, which is of the whole module, draws one."""
    monkeypatch.setattr(report, "draw_curves", lambda lines, path, title: None)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """Two loops with everything: warm start, reward model, curves. Others begin with its start/."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    train.main(argv(folder, total_updates=2, **PREPARE) + ["--tensorboard"])
    return folder


def on(first_run, **options):
    """Flags that begin a run where the first one began, without its preparations."""
    start, scorer = first_run / "start", first_run / "reward_model"
    return {"model": start, "style": "short", "lora_rank": 0, "dtype": "float32", "reward_model": scorer} | {
        "max_new_tokens": 8,
        **options,
    }


def story(folder):
    lines = report.read_lines(folder / "metrics.jsonl")
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


def test_a_run_leaves_its_folder(first_run):
    left = {path.name for path in first_run.iterdir()} - {".lock"}
    assert left == {
        *{"config.json", "run.json", "metrics.jsonl", "transcripts.jsonl", "summary.json", "curves.png"},
        *{"start", "reward_model", "checkpoints", "policy", "tensorboard"},
    }
    assert (first_run / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert not [path for path in first_run.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl")]
    about = json.loads((first_run / "run.json").read_text())
    assert f"--out={first_run}" in about["argv"] and about["versions"]["torch"] == torch.__version__
    assert "1 torch threads" in about["machine"]


def test_summary_and_log_agree(first_run):
    summary = json.loads((first_run / "summary.json").read_text())
    lines = report.read_lines(first_run / "metrics.jsonl")
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
            assert {"repeated_states", "seconds_rollout", "seconds_update", "grad_norm"} <= set(line)
        if line["agent"] == "explorer":
            assert {"dense_reward", "seconds_score"} <= set(line)


def test_transcripts_can_be_read(first_run):
    records = report.read_lines(first_run / "transcripts.jsonl")
    assert {record["agent"] for record in records} == {"policy", "explorer", "buffer", "evaluation"}
    explored = next(record for record in records if record["agent"] == "explorer")
    assert all(-1 < step["dense_score"] < 1 for step in explored["steps"])
    text = report.transcript_text(explored)
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


def test_an_adapter_loads_with_peft_and_weighs_little(first_run, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    train.main(argv(tmp_path / "run", total_updates=1, **on(first_run, method="outcome", lora_rank=2)))
    start = AutoModelForCausalLM.from_pretrained(first_run / "start")
    model = PeftModel.from_pretrained(start, tmp_path / "run" / "policy")
    saved = checkpoint.read(checkpoint.listed(tmp_path / "run")[-1]).tensors["policy"]
    assert all(".lora_" in key for key in saved)  # never the frozen base
    moved = [weight for name, weight in model.named_parameters() if ".lora_B" in name]
    assert moved and all(weight.abs().sum() > 0 for weight in moved)
    assert not (tmp_path / "run" / "start").exists()  # it is the --model that was given


@pytest.mark.parametrize(
    "options",
    [
        {"method": "rspo", "algo": "ppo", "lora_rank": 2},
        {"method": "rspo_h", "algo": "gigpo", "context": "full"},
    ],
)
def test_four_loops_are_two_loops_a_resumption_and_two_more(first_run, tmp_path, options):
    options = on(first_run, **options)
    train.main(argv(tmp_path / "straight", total_updates=4, **options))
    train.main(argv(tmp_path / "parts", total_updates=2, **options))
    train.main(["--resume", "--total_updates=4", f"--out={tmp_path / 'parts'}"])
    assert_same_story(tmp_path / "parts", tmp_path / "straight")


def test_what_was_prepared_before_the_kill_is_not_made_again(first_run, tmp_path, monkeypatch, capsys):
    import policy
    import reward_model

    train.main(argv(tmp_path, total_updates=1, **PREPARE))
    straight = story(tmp_path)
    for path in checkpoint.listed(tmp_path):
        checkpoint.remove(path)
    (tmp_path / f"{checkpoint.ASIDE}policy").mkdir()
    monkeypatch.setattr(policy, "warm_start", None)
    monkeypatch.setattr(reward_model.StepRewardModel, "fit", None)
    train.main(["--resume", f"--out={tmp_path}"])
    assert story(tmp_path)[0] == straight[0]
    assert not (tmp_path / f"{checkpoint.ASIDE}policy").exists()


def test_the_warm_start_is_said_plainly(tmp_path, capsys):
    train.main(argv(tmp_path, total_updates=1, method="outcome", **PREPARE))
    said = capsys.readouterr().out
    assert (
        "the tiny model cannot act yet, so it first has 40 supervised updates on 60 games played by" in said
    )
    assert "an expert that searches (50% of the turns), hesitates (45%) and errs (5%)" in said
    assert "success in % on 6 games of eval" in said and "episodes  seconds" in said


def test_an_empty_replay_buffer_is_said(first_run, tmp_path, capsys):
    train.main(argv(tmp_path, total_updates=1, **on(first_run, method="rspo_h")))
    assert "update 1: the replay buffer is empty, so alpha is 0 for this update" in capsys.readouterr().out
    line = next(line for line in report.read_lines(tmp_path / "metrics.jsonl") if line["agent"] == "policy")
    assert (line["alpha"], line["replayed_episodes"]) == (0.0, 0)


def test_eval_only_plays_the_panel_of_a_run_and_of_a_model(first_run, tmp_path, monkeypatch, capsys):
    train.main(["--eval_only", f"--out={first_run}"])
    found = json.loads((first_run / "eval.json").read_text())
    panels = [line for line in report.read_lines(first_run / "metrics.jsonl") if "by_type" in line]
    assert (found["policy"], *_panel(found["panels"]["eval"])) == ("update_000002", *_panel(panels[-1]))
    assert len(report.read_lines(first_run / "metrics.jsonl")) == 8  # nothing was added
    (first_run / "eval.json").unlink()
    monkeypatch.chdir(tmp_path)
    options = on(first_run) | {"eval_games": 3}
    train.main(["--eval_only", *[flag for flag in argv("", **options) if not flag.startswith("--out")]])
    (written,) = tmp_path.glob("runs/eval-*/eval.json")
    assert json.loads(written.read_text())["panels"]["eval"]["games"] == 3
    assert "success in % on 3 games of eval" in capsys.readouterr().out


class TwoSplits(Household):
    """Household with a second held-out split, of four games."""

    eval_splits = ("eval", "hard")

    def size(self, split):
        return 4 if split == "hard" else super().size(split)

    def reset(self, split, index):
        return super().reset("train" if split == "hard" else split, index)


def test_each_split_has_its_panel_in_the_log_the_summary_and_the_tables(
    first_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(flags, "make_env", lambda name: TwoSplits())
    splits = ["--eval_splits", "hard", "eval"]
    train.main(argv(tmp_path, total_updates=1, **on(first_run, method="outcome")) + splits)
    panels = [line for line in report.read_lines(tmp_path / "metrics.jsonl") if line["agent"] == "evaluation"]
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
    records = [r for r in report.read_lines(tmp_path / "transcripts.jsonl") if r["agent"] == "evaluation"]
    assert {record["task_id"].split("/")[1] for record in records} == {"hard", "eval"}

    train.main(["--eval_only", f"--out={tmp_path}", "--eval_splits", "eval"])
    found = json.loads((tmp_path / "eval.json").read_text())["panels"]
    assert list(found) == ["eval"] and found["eval"]["success"] == panels[3]["success"]
    assert refused("--resume", f"--out={tmp_path}", "--total_updates=2", "--eval_splits", "eval").startswith(
        f"--eval_splits ('eval',): the run in {tmp_path} has ('hard', 'eval')"
    )

    monkeypatch.setattr(TwoSplits, "fingerprint", "of other games")
    capsys.readouterr()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit):
        train.main(["--resume", f"--out={tmp_path}", "--total_updates=2"])
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert capsys.readouterr().err == (
        "error: --env household: these are not the games that the run was trained on; give the data that the "
        "run began with\n"
    )
    train.main(["--eval_only", f"--out={tmp_path}", "--eval_splits", "eval"])
    assert "warning: these are not the games that the run was trained on" in capsys.readouterr().out


def _panel(line):
    return line["success"], line["turns_per_episode"]


def test_listeners_hear_every_agent_over_its_own_updates(tmp_path, monkeypatch):
    heard, defined = [], {}

    class FakeRun:
        def define_metric(self, name, step_metric):
            defined[name] = step_metric

        log = staticmethod(heard.append)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: FakeRun()))
    listen = report.wandb("project", tmp_path, {"eval_splits": ("seen",)})
    listen({"agent": "explorer", "update": 3, "explorer_update": 5, "success": 0.5})
    by_type = {"Pick": {"games": 9, "success": 0.25}}
    listen({"agent": "evaluation", "split": "seen", "update": 6, "by_type": by_type})
    assert heard == [
        {"explorer/update": 3, "explorer/explorer_update": 5, "explorer/success": 0.5},
        {"evaluation/seen/update": 6, "evaluation/seen/success/Pick": 0.25},
    ]
    assert defined["explorer/*"] == "explorer/explorer_update"
    assert defined["policy/*"] == "policy/update" and defined["evaluation/seen/*"] == "evaluation/seen/update"


def test_too_long_prompts_for_the_model_are_refused_before_there_is_a_folder(first_run, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        train.main(argv(tmp_path / "run", **on(first_run, max_prompt_tokens=5000)))
    assert exit.value.code == 2 and not (tmp_path / "run").exists()
    assert "--max_prompt_tokens 5000 with --max_new_tokens 8: the model reads" in capsys.readouterr().err


def test_models_and_prompts_that_cannot_serve_are_refused_before_there_is_a_folder(
    first_run, tmp_path, capsys
):
    def refused_run(**options):
        with pytest.raises(SystemExit) as exit:
            train.main(argv(tmp_path / "run", **options))
        assert exit.value.code == 2 and not (tmp_path / "run").exists()
        return capsys.readouterr().err.strip()

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
    assert said.endswith("give a folder, or a hub id that can be fetched")
    said = refused_run(**on(first_run, max_prompt_tokens=5))
    assert said.startswith("error: --max_prompt_tokens 5: the first prompt of a game has ")


def test_a_log_that_was_cut_is_read_as_far_as_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": ')
    assert report.read_lines(path) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl is damaged: Expecting value"):
        report.read_lines(path)


def test_a_run_that_diverges_says_so(first_run, tmp_path, capsys):
    options = on(first_run, method="outcome", learning_rate=1e30, minibatch_turns=4)
    with pytest.raises(SystemExit) as exit:
        train.main(argv(tmp_path / "run", total_updates=2, **options))
    assert exit.value.code == 1
    assert (
        "error: the gradient of agent 'policy' has norm nan: lower its learning rate"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_run_killed_with_sigkill_ends_as_a_straight_one(tmp_path):
    command = [sys.executable, "train.py"]
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
