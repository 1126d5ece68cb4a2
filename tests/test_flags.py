"""Flags: what a command line means, how --help shows it, and which values are refused. No model is loaded."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flags
from config import RANGES, Config
from envs import Household, env_class, make_env
from flags import Args, UsageError
from games import alfworld_engine
from record import checks
from scale import launch

ROOT = Path(__file__).parent.parent
ALL_FLAGS = [flag for section in flags.COMMAND_LINE.sections.values() for flag in section]


def refused(*argv):
    with pytest.raises(UsageError) as caught:
        flags.prepare(list(argv))
    return str(caught.value)


def install(monkeypatch, is_installed):
    monkeypatch.setattr(checks, "find_spec", lambda name: True if is_installed(name) else None)


def saved_run(folder, **values):
    """Write a run folder that contains only config.json. Return its name."""
    args = flags.resolve(Args(**values), env_class(values.get("env", "household")))
    folder.mkdir()
    (folder / "config.json").write_text(flags.config_text(args))
    return str(folder)


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "flag", "remedy"),
    [
        ("--k three", "--k three", "must be a whole number"),
        ("--k 2.5", "--k 2.5", "must be a whole number"),
        ("--k", "--k", "needs a value; give --k INT"),
        ("--clip_eps a", "--clip_eps a", "must be a number"),
        ("--off_policy_fraction 1/0", "--off_policy_fraction 1/0", "must be a number"),
        ("--method sft", "--method sft", "must be one of rspo, outcome, dense, rspo_h, rspo_o, spear"),
        ("--autocast yes", "--autocast yes", "must be one of True, False"),
        ("--eval_splits", "--eval_splits", "needs a value; give --eval_splits TEXT"),
        ("--preset paper", "--preset paper", "must be one of paper-alfworld, paper-webshop"),
        ("--k_coef 0.1", "--k_coef", "there is no such flag; did you mean --kl_coef?"),
        ("--no_resume", "--no_resume", "there is no such flag; did you mean --resume?"),
        ("--xyz=3", "--xyz", "there is no such flag; see --help"),
        ("household", "household", "belongs to no flag; write --flag value"),
        ("--k 0", "--k 0", "between 1 and 1000000"),
        ("--k 7", "--total_updates", "multiple of --k 7, for example"),
        ("--group_size 1", "--group_size 1 with --algo grpo", "2 or more"),
        ("--off_policy_fraction 0.1", "--off_policy_fraction 0.1", "--off_policy_fraction 0.125"),
        ("--off_policy_fraction 1", "--off_policy_fraction 1.0", "1)"),
        ("--algo ppo --replay_strategy variance", "--replay_strategy variance", "reward or random"),
        ("--clip_eps nan", "--clip_eps nan", "finite"),
        ("--kl_coef inf", "--kl_coef inf", "finite"),
        ("--learning_rate nan", "--learning_rate nan", "finite"),
        ("--learning_rate 0", "--learning_rate 0.0", "between 1e-10 and 1"),
        ("--temperature 0", "--temperature 0.0", "between 0.001 and 1000"),
        ("--seed -1", "--seed -1", "between 0 and 9223372036854775807"),
        ("--eval_temperature -0.1", "--eval_temperature -0.1", "between 0 and 1000"),
        ("--lora_rank -1", "--lora_rank -1", "between 0 and 8192"),
        ("--reward_model_episodes 1", "--reward_model_episodes 1", "between 2 and 1000000"),
        ("--max_new_tokens 1", "--max_new_tokens 1", "between 2 and 1000000"),
        ("--tiny_width 100000000", "--tiny_width 100000000", "between 1 and 8192"),
        ("--expert_share 1.5", "--expert_share 1.5", "between 0 and 1"),
        ("--hesitation_share 0.1", "--expert_share 0.95 with --hesitation_share 0.1", "lower one of them"),
        ("--faithful_share 1.5", "--faithful_share 1.5", "between 0 and 1"),
        ("--adam_beta2 1", "--adam_beta2 1.0", "between 0 and 0.9999"),
        ("--keep_checkpoints 0", "--keep_checkpoints 0", "between 1 and 1000000"),
        ("--env alf", "--env alf", "household"),
        ("--model /no/such/folder", "--model /no/such/folder", "give one, a hub id"),
        ("--model .", "--model .", "save_pretrained"),
        ("--reward_model_backbone /no/such", "--reward_model_backbone /no/such", "give one"),
        ("--reward_model_backbone tiny", "--reward_model_backbone tiny", "leave it out"),
        ("--reward_model tests", "--reward_model tests", "leave it out to fit one"),
        (
            "--tiny_width 36 --tiny_heads 4",
            "--tiny_width 36 with --tiny_heads 4",
            "multiple of twice the heads",
        ),
        ("--eval_splits eval test", "--eval_splits eval test", "it has eval"),
        ("--eval_splits eval eval", "--eval_splits eval eval", "name each split once"),
        ("--style think", "--style think", "leave it out, or give a language model"),
        ("--plan --model x/y --env alf", "--env alf", "household"),
        ("--preset paper-alfworld --config x.json", "--config x.json", "give another"),
        ("--env alfworld --alfworld_data tests", "--alfworld_data tests", "alfworld-download"),
        ("--sampler vllm", "--lora_rank 0", "give --lora_rank 8, or kv"),
        ("--sampler vllm --lora_rank 513", "--lora_rank 513", "give at most 512, or --sampler kv"),
        ("--sampler vllm --lora_rank 8", "--tiny_heads 4", "give 2, or kv"),
        ("--sampler vllm --lora_rank 8 --tiny_heads 2 --temperature 0.001", "--temperature 0.001", "at 0"),
        ("--sampler vllm --lora_rank 8 --tiny_heads 2 --temperature 3", "--temperature 3.0", "to 2, or"),
        ("--vllm_memory 1", "--vllm_memory 1.0", "between 0.01 and 0.99"),
        ("--device nonsense", "--device nonsense", "give auto, cpu"),
        ("--device meta", "--device meta", "give auto, cpu"),
        ("--out=", "--out ''", "leave the flag out"),
        ("--resume", "--resume", "give it with --out"),
        ("--resume --out tests", "--out tests", "start a run without --resume"),
        ("--resume --eval_only --out tests", "--eval_only with --resume", "leave one out"),
        ("--resume --out tests --config x.json", "--config x.json with --resume", "leave it out"),
        ("--resume_from update_000003", "--resume_from update_000003", "needs --resume"),
        ("--config pyproject.toml", "--config pyproject.toml", "give another"),
        ("--eval_only", "--eval_only", "give a run with --out, or a --model"),
        ("--eval_only --out tests", "--out tests", "contains no run"),
        ("--wandb_project p", "--wandb_project p", "pip install wandb"),
    ],
)
def test_a_bad_flag_is_answered_by_one_line_with_its_value_and_the_remedy(argv, flag, remedy, monkeypatch):
    monkeypatch.setattr(alfworld_engine, "check_installed", lambda: None)
    monkeypatch.chdir(ROOT)
    install(monkeypatch, lambda name: name != "wandb")
    message = refused(*argv.split())
    assert message.startswith(f"{flag}: ") or message.startswith(f"{flag} "), message
    assert remedy in message and "\n" not in message, message


def test_a_data_error_of_a_preset_names_the_preset(monkeypatch):
    monkeypatch.setattr(alfworld_engine, "check_installed", lambda: None)
    monkeypatch.setenv("ALFWORLD_DATA", "/none")
    message = refused("--preset=paper-alfworld")
    assert message.startswith("--env alfworld of --preset paper-alfworld: no ALFWorld games in /none")


def test_a_missing_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(launch, "gpus", lambda: 0)
    assert refused("--device", "cuda:1") == (
        "--device cuda:1: torch finds no GPU here; leave it out, or give cpu"
    )
    monkeypatch.setattr(launch, "gpus", lambda: 1)
    assert refused("--device", "cuda:1").startswith("--device cuda:1: torch finds only 1 here")
    checks.check_device(Args(device="cuda:0"))


def test_each_rank_needs_its_own_gpu(monkeypatch):
    monkeypatch.setattr(launch, "gpus", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for device, words in (("auto", "2 ranks and 1 GPUs here"), ("cuda:0", "2 ranks cannot share a GPU")):
        with pytest.raises(UsageError, match=f"--device {device}: {words}"):
            checks.check_device(Args(device=device))
    checks.check_device(Args(device="cpu"))


def test_a_missing_package_is_named(monkeypatch):
    install(monkeypatch, lambda name: False)
    assert refused() == "the package matplotlib is not installed; pip install matplotlib"
    install(monkeypatch, lambda name: name == "matplotlib")
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
    args = flags.prepare(["--warm_start=0"])
    assert args.reward_model_source == "policy" and args.max_turns == 5


def test_an_environment_without_progress_has_no_shaped_reward(monkeypatch):
    class Vague(Household):
        progress = None

    monkeypatch.setattr(flags, "make_env", lambda name: Vague())
    assert refused("--dense_reward=shaped") == (
        "--dense_reward shaped: --env household cannot tell its progress; give step_model, implicit or "
        "novelty"
    )
    assert flags.prepare(["--dense_reward=shaped", "--method=outcome"])  # no agent is trained on it


def test_a_config_from_before_dense_rewards_has_the_step_reward_model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"method": "rspo", "seed": 3}')
    args = flags.prepare(["--config", str(path)])
    assert (args.dense_reward, args.dense_kind) == ("step_model", "step_model")


def test_an_expert_without_other_goals_plays_faithfully(monkeypatch):
    class Single(Household):
        wandering_expert = None

    monkeypatch.setattr(flags, "make_env", lambda name: Single())
    assert flags.prepare([]).faithful_share == 1
    why = "--faithful_share 0.5: the expert of --env household has no other goals; give 1"
    assert refused("--faithful_share=0.5") == why
    assert flags.prepare(["--faithful_share=0.5", "--method=outcome", "--warm_start=0"])  # it plays no game


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("config.json", "save_pretrained"),
        ("tokenizer.json", "tokenizer files"),
        ("chat_template.jinja", "use an instruct model"),
        ("model.safetensors", "copy its *.safetensors files"),
    ],
)
def test_an_incomplete_model_folder_is_named_with_the_remedy(tmp_path, missing, remedy):
    for file in {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"} - {missing}:
        (tmp_path / file).write_text("{}")
    message = refused("--model", str(tmp_path))
    assert message.startswith(f"--model {tmp_path}: the folder has no ") and remedy in message
    message = refused("--reward_model_backbone", str(tmp_path))
    assert message.startswith(f"--reward_model_backbone {tmp_path}: the folder has no ")
    (tmp_path / missing).write_text("{}")
    flags.prepare(["--model", str(tmp_path), "--dtype=float32"])


def test_a_chat_template_may_be_part_of_the_tokenizer_config(tmp_path):
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / file).write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    flags.prepare(["--model", str(tmp_path), "--dtype=float32"])
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert "tokenizer_config.json is damaged" in refused("--model", str(tmp_path))


# --- the parser and its help --------------------------------------------------------------------------------


def test_help_and_checks_import_no_torch():
    code = """if True:
        import sys, flags
        flags.prepare([])
        flags.prepare(["--preset=paper-alfworld", "--plan"])
        flags.prepare(["--model=a/b", "--dtype=float32"])
        try:
            flags.prepare(["--model=/no/such/folder"])
        except flags.UsageError as error:
            print(error, "torch" in sys.modules)
        """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("--model /no/such/folder: ") and done.stdout.endswith(" False\n"), done


def test_help_into_a_closed_pipe_prints_no_traceback():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", "import flags; flags.prepare(['--help'])"]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def help_lines():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "1000")  # one line per flag
        return flags.COMMAND_LINE.help().splitlines()


def test_help_begins_with_the_method_and_the_symbols_of_the_paper(help_lines):
    titles = [line for line in help_lines if line and not line.startswith((" ", "usage", "RSPO", "options"))]
    assert titles[0] == "the method, with the paper's symbols:" and titles[-1] == "the run:"
    text = " ".join(" ".join(help_lines).split())
    for flag, symbol in {
        "--k INT": "k:",
        "--group_size INT": "N:",
        "--tasks_per_update INT": "B (batch size; not agent B):",
        "--off_policy_fraction FLOAT": "alpha:",
        "--clip_eps FLOAT": "epsilon:",
        "--kl_coef FLOAT": "beta:",
        "--reward_noise FLOAT": "sigma:",
    }.items():
        assert f"{flag} {symbol}" in text


def test_help_shows_each_flag_once_with_its_true_default(help_lines):
    text = "\n".join(help_lines)
    assert "None" not in text and "(default" not in text
    shown = re.findall(r"^  --(\w+)", text, re.MULTILINE)
    assert shown == [field.name for field in dataclasses.fields(Args)]
    switches = [flag.name for flag in ALL_FLAGS if flag.is_switch]
    assert text.count("[default: ") == len(shown) - len(switches) + 1  # of the switches only gigpo_std is on
    assert re.findall(r"--no_\w+", text) == ["--no_gigpo_std"]
    assert re.search(r"--learning_rate FLOAT.*\[default: tiny 4e-4 .*, LoRA 3e-6, full weights 1e-6\]", text)


@pytest.mark.parametrize("width", [80, 120])
def test_help_fits_the_terminal_and_keeps_a_default_on_one_line(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = flags.COMMAND_LINE.help().splitlines()
    assert max(map(len, lines)) <= width and not [line for line in lines if line.endswith("[default:")]
    assert all(line.isprintable() and line.isascii() for line in lines)


def test_every_open_default_is_described_and_every_number_has_a_range():
    assert [flag.name for flag in ALL_FLAGS if not flag.default or not flag.meaning] == []
    numbers = [field for field in dataclasses.fields(Args) if field.type.split(" |")[0] in ("int", "float")]
    assert set(RANGES) == {field.name for field in numbers}
    assert all(low < high < math.inf for low, high in RANGES.values())
    assert [flag.name for flag in ALL_FLAGS][: len(dataclasses.fields(Config))] == [
        field.name for field in dataclasses.fields(Config)
    ]


def test_the_page_of_flags_is_current():
    page = (ROOT / "docs" / "FLAGS.md").read_text()
    assert page == flags.COMMAND_LINE.page(), "run `python flags.py > docs/FLAGS.md`"


def test_switches_can_be_switched_both_ways():
    assert flags.parse(["--gigpo_std"]).gigpo_std
    for off in ("--no-gigpo_std", "--no_gigpo_std", "--no-gigpo-std"):
        assert not flags.parse([off]).gigpo_std
    assert flags.parse(["--tensorboard"]).tensorboard
    assert not flags.parse(["--tensorboard", "--no_tensorboard"]).tensorboard
    assert [flags.parse([f"--autocast={value}"]).autocast for value in (True, False)] == [True, False]


def test_old_names_and_dashes_are_accepted():
    for argv in ("--total_steps 9 --tasks_per_step=16", "--total-steps=9 --tasks-per-update 16"):
        args = flags.parse(argv.split())
        assert (args.total_updates, args.tasks_per_update) == (9, 16)
    assert flags.parse(["--out=my-run"]).out == "my-run"


def test_a_fraction_is_a_number():
    assert flags.parse(["--off_policy_fraction", "1/4"]).off_policy_fraction == 0.25


def test_the_later_of_two_flags_wins():
    args = flags.parse(["--k=5", "--k=10", "--eval_splits", "a", "b", "--eval_splits", "c"])
    assert (args.k, args.eval_splits) == (10, ("c",))


# --- defaults -----------------------------------------------------------------------------------------------


def test_open_defaults_depend_on_the_model():
    env = env_class("household")
    tiny = flags.resolve(Args(), env)
    lora = flags.resolve(Args(model="some/model", autocast=False), env)
    full = flags.resolve(Args(model="some/model", lora_rank=0, autocast=False), env)
    assert (tiny.lora_rank, lora.lora_rank, full.lora_rank) == (0, 64, 0)
    assert (tiny.learning_rate, lora.learning_rate, full.learning_rate) == (4e-4, 3e-6, 1e-6)
    assert (tiny.adam_beta2, lora.adam_beta2) == (0.99, 0.999)
    assert (tiny.style, lora.style) == ("short", "think")
    assert (tiny.warm_start, lora.warm_start) == (450, 0)
    assert (tiny.max_tokens, lora.max_tokens) == (256 + 16, 2048 + 512)
    assert flags.resolve(tiny, env) == tiny
    assert flags.resolve(Args(learning_rate=1.0, lora_rank=8), env).learning_rate == 1.0
    assert [name for name, value in vars(lora).items() if value is None] == [
        *("buffer_source", "buffer_keep", "max_centre"),
        *("alfworld_data", "webshop_data", "webshop_products", "warm_start_games", "reward_model"),
        *("reward_model_backbone", "out", "preset", "config", "resume_from", "gpu_memory_gb"),
        "wandb_project",
    ]


def test_full_context_has_longer_prompts_and_a_longer_warm_start():
    args = flags.resolve(Args(context="full"), env_class("household"))
    assert (args.max_prompt_tokens, args.warm_start) == (4 * 256, 450 * 8 // 3)


def test_autocast_needs_bf16_weights_and_a_device_with_native_bf16(monkeypatch):
    import torch

    def resolved(able, **given):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(able, True))
        return flags.resolve(Args(device="cpu", **given), make_env("household")).autocast

    assert resolved(["avx512_bf16"], model="some/model") is True
    assert resolved(["avx2"], model="some/model") is False  # emulated
    assert resolved(["avx512_bf16"], model="some/model", dtype="float32") is False
    assert resolved(["avx512_bf16"]) is False  # the tiny model is fp32
    assert resolved(["avx2"], autocast=True) is True  # a given value wins
    assert resolved(["avx2"], model="some/model", plan=True) is True  # a plan is for a GPU


# --- config.json --------------------------------------------------------------------------------------------


def test_config_json_gives_the_same_run_again(tmp_path):
    given = Args(method="outcome", seed=7, gigpo_std=False, learning_rate=2e-3, gradient_checkpointing=True)
    args = flags.resolve(given, env_class("household"))
    path = tmp_path / "config.json"
    path.write_text(flags.config_text(args))
    saved = json.loads(path.read_text())
    assert saved.keys() == {field.name for field in dataclasses.fields(Args)} - set(flags.OF_THE_CALL)
    assert (saved["style"], saved["max_turns"], saved["eval_splits"]) == ("short", 14, ["eval"])
    again = flags.prepare(["--config", str(path)])
    assert dataclasses.replace(again, config=None) == args


def test_another_model_beside_a_config_gets_its_own_defaults(tmp_path):
    run = saved_run(tmp_path / "run", method="outcome", learning_rate=2e-3, dtype="float32")
    argv = ["--config", f"{run}/config.json", "--seed", "8", "--model", "some/model"]
    other = flags.prepare([*argv, "--autocast=False"])
    # given flags win; given values of the file stay; the tiny model's defaults become the other model's
    assert (other.seed, other.method, other.learning_rate) == (8, "outcome", 2e-3)
    assert (other.lora_rank, other.style, other.warm_start) == (64, "think", 0)
    assert other.dtype == "bfloat16"  # float32 was the tiny model's default


def test_a_config_of_another_machine_is_read_without_its_data(tmp_path, monkeypatch):
    monkeypatch.setattr(alfworld_engine, "check_installed", lambda: None)
    run = saved_run(tmp_path / "run", env="alfworld", alfworld_data="/gone", seed=3)
    args = flags.parse(["--config", f"{run}/config.json", "--env=household"])
    args = flags.resolve(args, env_class("household"))
    assert (args.seed, args.max_turns, args.eval_splits) == (3, 14, ("eval",))
    with pytest.raises(UsageError, match="^--alfworld_data /new: no ALFWorld games in /new/json_2.1.1/train"):
        flags.prepare(["--config", f"{run}/config.json", "--alfworld_data=/new"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"method": "sft"}', "--method sft: must be one of rspo, "),
        ('{"gigpo_std": "no"}', "--gigpo_std 'no': has the wrong type"),
        ('{"k": 3.0}', "--k 3.0: must be a whole number"),
        ('{"group_size": true}', "--group_size True: must be a whole number"),
        ('{"lora_rank": "8"}', "--lora_rank '8': has the wrong type"),
        ('{"eval_splits": "eval"}', "--eval_splits 'eval': has the wrong type"),
        ('{"k": 0}', "--k 0: must be between 1 and 1000000"),
        ('{"k": 3, "momentum": 1}', "momentum is no flag of a run; remove it"),
        ('{"momentum": null}', "momentum is no flag of a run; remove it"),
        ('{"resume": true}', "resume is no flag of a run; remove it"),
        ('{"total_updates": 6, "total_steps": 9}', "total_steps and total_updates are one flag; remove"),
        ('{"env": "nowhere"}', "is no config.json of a run (environment 'nowhere' is unknown"),
        ('["k", 3]', "is no config.json of a run (it is not a JSON object); give another"),
    ],
)
def test_a_bad_value_in_config_json_is_named_with_the_file_and_the_key(tmp_path, text, why):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert refused("--config", str(path)).startswith(f"--config {path}: {why}")
    assert refused("--resume", "--out", str(tmp_path)).startswith(f"--out {path}: {why}")


def test_config_json_may_be_short_and_may_have_old_names(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"learning_rate": 1, "reward_model": null, "total_steps": 9, "tasks_per_step": 16}')
    args = flags.prepare(["--config", str(path)])
    assert (args.learning_rate, args.total_updates, args.tasks_per_update) == (1, 9, 16)


def test_a_config_from_before_faithful_share_keeps_its_demonstrations(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"expert_share": 0.5, "hesitation_share": 0.45}')
    args = flags.prepare(["--config", str(path)])
    assert (args.expert_share, args.hesitation_share, args.faithful_share) == (0.5, 0.45, 1.0)


# --- presets ------------------------------------------------------------------------------------------------

PAPER = {  # the values of both environments
    "model": "Qwen/Qwen2.5-1.5B-Instruct",
    "reward_model_backbone": "meta-llama/Llama-3.2-3B-Instruct",
    "method": "rspo",
    "lora_rank": 64,
    "lora_alpha": 64,
    "learning_rate": 3e-6,
    "critic_learning_rate": 1e-5,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "epochs": 1,
    "entropy_coef": 0.001,
    "warm_start": 0,
    "total_updates": 150,
    "k": 3,
    "tasks_per_update": 16,
    "group_size": 8,
    "buffer_tasks": 28,
    "off_policy_fraction": 0.125,
    "off_policy_episodes": 16,
    "on_policy_tasks": 14,
    "clip_eps": 0.2,
    "kl_coef": 0.01,
    "reward_scale": 10,
    "invalid_penalty": 0.1,
    "value_clip": 0.5,
    "gigpo_gamma": 0.95,
    "gigpo_omega": 1,
    "gamma": 1,
    "gae_lambda": 1,
    "replay_strategy": "reward",
    "replay_unit": "episode",
    "style": "think",
    "context": "window",
    "history": 2,
    "max_new_tokens": 512,
    "temperature": 1.0,
    "eval_temperature": 0.4,
    "eval_every": 15,
    "gradient_checkpointing": True,
}
PAPER_ALFWORLD = {
    "max_turns": 50,
    "max_prompt_tokens": 2048,
    "minibatch_turns": 256,
    "gigpo_std": True,
    "eval_splits": ("valid_seen", "valid_unseen"),
}
PAPER_WEBSHOP = {
    "max_turns": 15,
    "max_prompt_tokens": 4096,
    "minibatch_turns": 64,
    "gigpo_std": False,
    "eval_splits": ("validation", "test"),
    "eval_games": 500,
    "webshop_reward": "success",
}


@pytest.mark.parametrize(("name", "own"), [("alfworld", PAPER_ALFWORLD), ("webshop", PAPER_WEBSHOP)])
def test_presets_hold_the_papers_values(name, own):
    args = flags.resolve(flags.parse(["--preset", f"paper-{name}", "--autocast=True"]), env_class(name))
    assert args.env == name
    for flag, value in (PAPER | own).items():
        assert getattr(args, flag) == value, flag


def test_the_cheap_swap_replays_the_batches_of_b():
    args = flags.parse(["--preset", "cheap-swap"])
    # 2 of 8 tasks are replayed; B adds 3 updates of 6 tasks; 84 tasks stay; B collects none
    counts = (args.on_policy_tasks, args.off_policy_episodes, args.kept_groups, args.replay_strategy)
    assert counts == (6, 16, 84, "positive") and args.buffer_sources == ("phase1",)
    assert flags.parse([]).buffer_sources == ("collect",) and flags.parse([]).kept_groups == 0


def test_a_preset_for_ppo_plays_single_episodes():
    args = flags.parse(["--preset", "paper-webshop", "--algo", "ppo"])
    # an update has 128 episodes, 112 fresh and 16 replayed; the buffer has 28 * 8 = 224
    counts = (args.on_policy_tasks, args.off_policy_episodes, args.episodes_per_task, args.buffer_groups)
    assert counts == (112, 16, 1, 224)


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
    assert not flags.parse(["--no_gradient_checkpointing", "--preset=paper-alfworld"]).gradient_checkpointing


def test_a_preset_goes_with_neither_a_config_nor_a_run(tmp_path):
    run = saved_run(tmp_path / "run")
    why = "--preset paper-webshop: excludes --config, --resume and --eval_only with --out; leave one out"
    assert refused("--preset", "paper-webshop", "--config", f"{run}/config.json") == why
    assert refused("--preset", "paper-webshop", "--resume", "--out", run) == why
    assert refused("--preset", "paper-webshop", "--eval_only", "--out", run) == why


# --- runs that are resumed or evaluated ---------------------------------------------------------------------


def test_a_resumed_run_may_use_another_machine_and_be_longer(tmp_path):
    run = saved_run(tmp_path / "run", webshop_data="/old/place", gradient_checkpointing=True, seed=4)
    moved = ["--env_workers=2", "--alfworld_data=/new", "--webshop_data=/place", "--threads=3"]
    longer = ["--total_updates=90", "--no_gradient_checkpointing", "--device=cpu", "--parallel_episodes=7"]
    args = flags.prepare(["--resume", "--out", run, *moved, *longer])
    assert (args.env_workers, args.alfworld_data, args.webshop_data) == (2, "/new", "/place")
    assert (args.threads, args.device, args.parallel_episodes, args.total_updates) == (3, "cpu", 7, 90)
    assert (args.seed, args.gradient_checkpointing) == (4, False)
    assert flags.prepare(["--resume", "--out", run, "--seed=4"]).seed == 4  # the saved value may be repeated


@pytest.mark.parametrize(
    "flag",
    [
        "--seed=1",
        "--webshop_reward=score",
        "--webshop_goals=human",
        "--max_turns=9",
        "--env=alfworld",
        "--eval_games=5",
        "--warm_start_episodes=5",
        "--lora_rank=8",
        "--no_gigpo_std",
    ],
)
def test_a_resumed_run_keeps_its_course(tmp_path, flag):
    run = saved_run(tmp_path / "run")
    name, _, value = flag.removeprefix("--").partition("=")
    named = f"--{name} {value}" if value else "--gigpo_std False"
    said = refused("--resume", "--out", run, flag)
    assert said.startswith(f"{named}: the run in {run} has ")
    assert said.endswith(f"leave it out, or start another run with --config {run}/config.json")


def test_an_evaluation_may_change_the_games_and_nothing_of_the_policy(tmp_path):
    run = saved_run(tmp_path / "run", lora_rank=8)
    args = flags.prepare(["--eval_only", "--out", run, "--eval_games=7", "--eval_temperature=0"])
    assert (args.eval_games, args.eval_temperature, args.lora_rank) == (7, 0, 8)
    assert refused("--eval_only", "--out", run, "--total_updates=45").startswith(
        f"--total_updates 45: the run in {run} has 180; leave it out"
    )
