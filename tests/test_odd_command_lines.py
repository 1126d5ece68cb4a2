"""Odd command lines: `python train.py` answers each in one line that names the value and the remedy.

All lines of the tables run through train.py's own start in one process, in which torch cannot be imported. So
an answer never waits for torch, and no model can load. A few run as real processes (slow).
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import flags
from envs import env_class
from record import checks

ROOT = Path(__file__).parent.parent

# --- folders that the lines name ----------------------------------------------------------------------------

MODEL = {  # what a model's folder holds
    "config.json": '{"model_type": "qwen2"}',
    "model.safetensors": "weights",
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
ADAPTER = {**MODEL, "adapter_model.safetensors": "weights"}
ADAPTER.pop("config.json")
ADAPTER.pop("model.safetensors")
MODELS = {  # by folder, the files that differ from MODEL; None: missing
    "whole": {},
    "no_config": {"config.json": None},
    "no_weights": {"model.safetensors": None},
    "no_tokenizer": {"tokenizer.json": None},
    "no_template": {"chat_template.jinja": None},
    "lfs_weights": {"model.safetensors": LFS},
    "lfs_tokenizer": {"tokenizer.json": LFS},
    "lfs_config": {"config.json": LFS},
    "broken_config": {"config.json": "{"},
    "list_config": {"config.json": "[]"},
    "broken_tokenizer": {"tokenizer.json": "{"},
    "broken_tokenizer_config": {"tokenizer_config.json": "{", "chat_template.jinja": None},
    "list_tokenizer_config": {"tokenizer_config.json": "[]", "chat_template.jinja": None},
}
ADAPTERS = {  # by folder, the text of adapter_config.json
    "broken": "{",
    "baseless": "{}",
    "null_base": '{"base_model_name_or_path": null}',
    "chained": '{"base_model_name_or_path": "adapters/gone_base"}',
    "gone_base": '{"base_model_name_or_path": "/gone/model"}',
}
CONFIGS = {
    "empty.json": "",
    "broken.json": '{"k": 3',
    "list.json": "[3]",
    "deep.json": "[" * 100_000,
    "unknown.json": '{"momentum": 0.9}',
    "type.json": '{"k": "3"}',
    "list_k.json": '{"k": [3]}',
    "switch.json": '{"gigpo_std": 1}',
    "splits.json": '{"eval_splits": ["--resume"]}',
    "no_splits.json": '{"eval_splits": []}',
    "model.json": '{"reward_model_backbone": "/gone"}',
    "action.json": '{"resume": true}',
    "nan.json": '{"clip_eps": NaN}',
    "nul.json": '{"model": "a\\u0000b"}',
    "range.json": '{"k": 0}',
    "method.json": '{"method": "sft"}',
}


def write_files(folder, files):
    folder.mkdir(parents=True)
    for name, text in files.items():
        if text is not None:
            (folder / name).write_text(text)


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def write_run(folder, checkpoint="{}"):
    """Write a run with a policy, a reward model and one checkpoint, whose state.json should be "{}"."""
    args = flags.resolve(flags.Args(), env_class("household"))
    write_files(folder, {"config.json": flags.config_text(args), "run.json": "[]"})
    write_files(folder / "policy", MODEL)
    write_files(folder / "reward_model", {**MODEL, "reward_model.json": "{}"})
    sums = {"state.json": sha256("{}"), "policy.safetensors": sha256("weights")}
    manifest = json.dumps({"updates": 3, "sha256": sums})
    files = {"state.json": checkpoint, "policy.safetensors": "weights", "manifest.json": manifest}
    write_files(folder / "checkpoints" / "update_000003", files)


def write_places(folder):
    """Write everything that the lines of the tables name, in the folder that they run in."""
    for name, changed in MODELS.items():
        write_files(folder / "models" / name, {**MODEL, **changed})
    for name, text in ADAPTERS.items():
        write_files(folder / "adapters" / name, {**ADAPTER, "adapter_config.json": text})
    write_files(folder / "configs", CONFIGS)
    os.mkfifo(folder / "fifo")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):  # opening a FIFO waits for ever
        write_files(folder / "fifos" / name, {**MODEL, name: None})
        os.mkfifo(folder / "fifos" / name / name)
    write_files(folder / "fifos" / "scorer", {**MODEL, "reward_model.json": "{}"})
    write_files(folder / "fifos" / "scorer" / "tokenizer", {})
    os.mkfifo(folder / "fifos" / "scorer" / "tokenizer" / "tokenizer.json")
    write_run(folder / "fifos" / "run")
    (folder / "fifos" / "run" / "checkpoints" / "update_000003" / "manifest.json").unlink()
    os.mkfifo(folder / "fifos" / "run" / "checkpoints" / "update_000003" / "manifest.json")
    (folder / "configs" / "binary.json").write_bytes(b"\xff\xfe\x00")
    write_run(folder / "run")
    write_run(folder / "damaged", checkpoint='{"updates": 3}')
    write_files(
        folder / "young", {"config.json": (folder / "run" / "config.json").read_text(), "run.json": ""}
    )
    write_files(folder / "moved", {"config.json": CONFIGS["model.json"], "run.json": ""})
    write_files(folder / "full", {"thesis.tex": ""})
    write_files(folder / "empty", {})
    write_files(folder / "scorer", {**MODEL, "reward_model.json": "{}"})
    write_files(folder / "small_shop", {"items_shuffle_1000.json": "[]"})
    both = ("items_shuffle_1000.json", "items_ins_v2_1000.json", "items_shuffle.json", "items_ins_v2.json")
    write_files(folder / "both_shops", dict.fromkeys(both, "[]"))
    (folder / "games" / "json_2.1.1").mkdir(parents=True)
    (folder / "file").write_text("text")


# --- the lines ----------------------------------------------------------------------------------------------

LONG = "x" * 300
TORCHRUN = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=localhost MASTER_PORT=29500"
REFUSED = [  # a command line, the start of the answer, and words of its remedy
    # names
    ("--nosuch 3", "--nosuch", "there is no such flag; see --help"),
    ("--lr 3", "--lr", "there is no such flag; see --help"),
    ("--", "--", "there is no such flag; see --help"),
    ("---k 3", "---k", "did you mean --k?"),
    ("-k 3", "-k", "did you mean --k?"),
    ("—k 3", "—k", "did you mean --k?"),
    ("−−seed=3", "−−seed", "did you mean --seed?"),
    ("--K 3", "--K", "did you mean --k?"),
    ("--SEED=3", "--SEED", "did you mean --seed?"),
    ("--total_up 9", "--total_up", "did you mean --total_updates?"),
    ("--total-update 9", "--total-update", "did you mean --total_updates?"),
    ("--lora 8", "--lora", "did you mean --lora_rank or --lora_alpha?"),
    ("--learningrate 1", "--learningrate", "did you mean --learning_rate?"),
    ("--off_policy_fracton 1/8", "--off_policy_fracton", "did you mean --off_policy_fraction?"),
    ("--total_step 9", "--total_step", "did you mean --total_updates?"),
    ("--no_k", "--no_k", "did you mean --k?"),
    ("--no_resume", "--no_resume", "did you mean --resume?"),
    ("--no-plan", "--no-plan", "did you mean --plan?"),
    # stray and missing values
    ("household", "household", "write --flag value"),
    ("''", "''", "write --flag value"),
    ("k=3", "k=3", "write --flag value"),
    ("--resume run", "run", "--resume takes no value"),
    ("--gigpo_std False", "False", "--gigpo_std takes no value"),
    ("--out my run", "run", "quote a value that contains blanks"),
    ("--k 3 4", "4", "--k takes one value"),
    ("--k --seed 3", "--k", "needs a value; give --k INT"),
    ("--method", "--method", "give one of rspo, outcome"),
    ("--eval_splits --k 3", "--eval_splits", "needs a value"),
    ("--out", "--out", "give --out TEXT"),
    ("--resume=yes", "--resume=yes", "takes no value; give --resume"),
    ("--gigpo_std=False", "--gigpo_std=False", "give --gigpo_std or --no_gigpo_std"),
    ("--no_gigpo_std=1", "--no_gigpo_std=1", "give --gigpo_std or --no_gigpo_std"),
    ("--k=", "--k ''", "leave the flag out"),
    ("--out=", "--out ''", "leave the flag out"),
    ("--model ' '", "--model ' '", "leave the flag out"),
    ("--eval_splits=", "--eval_splits ''", "leave the flag out"),
    ("--config=", "--config ''", "leave the flag out"),
    ("--method ''", "--method ''", "leave the flag out"),
    # values
    ("--k = 3", "--k =", "must be a whole number"),
    ("--k three", "--k three", "must be a whole number"),
    ("--k 3.0", "--k 3.0", "must be a whole number"),
    ("--seed 1e3", "--seed 1e3", "must be a whole number"),
    ("--seed 0x10", "--seed 0x10", "must be a whole number"),
    ("--clip_eps 0,2", "--clip_eps 0,2", "must be a number"),
    ("--clip_eps 20%", "--clip_eps 20%", "must be a number"),
    ("--kl_coef −0.1", "--kl_coef −0.1", "must be a number"),
    ("--off_policy_fraction 1/8/2", "--off_policy_fraction 1/8/2", "must be a number"),
    ("--off_policy_fraction 1/0", "--off_policy_fraction 1/0", "must be a number"),
    (f"--learning_rate 1{'0' * 400}/1", "--learning_rate 100", "must be a number"),
    (f"--k {'9' * 5000}", "--k 999", "must be a whole number"),
    ("--k 9999999999", "--k 9999999999", "must be between 1 and 1000000"),
    ("--total_updates 3000000000000", "--total_updates 3000000000000", "must be between 1 and 999999"),
    ("--warm_start 9999999999", "--warm_start 9999999999", "must be between 0 and 1000000"),
    ("--seed 9223372036854775808", "--seed 9223372036854775808", "between 0 and 9223372036854775807"),
    ("--threads 100000", "--threads 100000", "between 1 and 1024"),
    ("--env_workers 100000", "--env_workers 100000", "between 0 and 1024"),
    ("--tiny_layers 100000000", "--tiny_layers 100000000", "between 1 and 64"),
    ("--tiny_width 100000000", "--tiny_width 100000000", "between 1 and 8192"),
    ("--tiny_heads 99", "--tiny_width 64 with --tiny_heads 99", "change one of them"),
    ("--lora_rank 100000", "--lora_rank 100000", "between 0 and 8192"),
    ("--k -1", "--k -1", "must be between 1 and 1000000"),
    ("--gigpo_omega 1e300", "--gigpo_omega 1e+300", "must be between 0 and 1000"),
    ("--reward_noise 1e300", "--reward_noise 1e+300", "must be between 0 and 100"),
    ("--invalid_penalty 1e300", "--invalid_penalty 1e+300", "must be between 0 and 1000"),
    ("--lora_alpha 1e30", "--lora_alpha 1e+30", "must be between 0.001 and 1000000"),
    ("--weight_decay 1e9", "--weight_decay 1000000000.0", "must be between 0 and 100"),
    ("--max_centre 1e30", "--max_centre 1e+30", "must be between 1.001 and 1000000"),
    ("--rank_timeout 0.0001", "--rank_timeout 0.0001", "must be between 0.05 and 10080"),
    ("--rank_timeout 1e9", "--rank_timeout 1000000000.0", "must be between 0.05 and 10080"),
    ("--learning_rate 1e-300", "--learning_rate 1e-300", "must be between 1e-10 and 1"),
    ("--critic_learning_rate 2", "--critic_learning_rate 2.0", "must be between 1e-10 and 1"),
    ("--warm_start_lr 1e-11", "--warm_start_lr 1e-11", "must be between 1e-10 and 1"),
    ("--reward_model_lr 1e-11", "--reward_model_lr 1e-11", "must be between 1e-10 and 1"),
    ("--max_grad_norm 1e-300", "--max_grad_norm 1e-300", "must be between 0.0001 and 1000000000"),
    ("--reward_scale 1e-300", "--reward_scale 1e-300", "must be between 0.001 and 1000000"),
    ("--clip_eps 1e-300", "--clip_eps 1e-300", "must be between 1e-06 and 1000000"),
    ("--value_clip 1e-300", "--value_clip 1e-300", "must be between 1e-06 and 1000000"),
    ("--lora_alpha 1e-300", "--lora_alpha 1e-300", "must be between 0.001 and 1000000"),
    ("--gpu_memory_gb 1e-300 --plan", "--gpu_memory_gb 1e-300", "must be between 0.1 and 1000000"),
    (
        "--tiny_width 8192 --tiny_layers 64",
        "--tiny_width 8192 with --tiny_layers 64",
        "would have 42.9 billion weights, and the limit is 1 billion; lower one",  # 10 * 64 * 8192^2
    ),
    ("--max_centre 1", "--max_centre 1.0", "must be between 1.001 and 1000000"),
    ("--kl_coef -1e-3", "--kl_coef -0.001", "must be between 0 and 1000"),
    ("--kl_coef -inf", "--kl_coef -inf", "must be a finite number"),
    ("--learning_rate 1e400", "--learning_rate inf", "must be a finite number"),
    ("--clip_eps nan", "--clip_eps nan", "must be a finite number"),
    ("--temperature 1e-300", "--temperature 1e-300", "between 0.001 and 1000"),
    ("--eval_temperature 1e-300", "--eval_temperature 1e-300", "give 0 for greedy"),
    ("--max_new_tokens 1", "--max_new_tokens 1", "must be between 2 and 1000000"),
    ("--method RSPO", "--method RSPO", "must be one of rspo, outcome"),
    ("--method 'rspo '", "--method 'rspo '", "must be one of rspo, outcome"),
    ("--algo gae", "--algo gae", "must be one of grpo, gigpo, ppo"),
    ("--autocast true", "--autocast true", "must be one of True, False"),
    ("--env Household", "--env Household", "household, alfworld, webshop"),
    ("--eval_splits eval,eval", "--eval_splits eval,eval", "it has eval"),
    ("--eval_splits train", "--eval_splits train", "it has eval"),
    ("--eval_splits eval eval", "--eval_splits eval eval", "name each split once"),
    ("--device gpu", "--device gpu", "give auto, cpu, cuda or cuda:1"),
    ("--device cuda:", "--device cuda:", "give auto, cpu, cuda or cuda:1"),
    ("--device 'cuda 1'", "--device 'cuda 1'".replace("'", ""), "give auto, cpu, cuda or cuda:1"),
    ("--style think", "--style think", "leave it out, or give a language model"),
    # combinations
    ("--k 7", "--total_updates 180", "must be a multiple of --k 7, for example 175 or 182"),
    ("--off_policy_fraction 1e-20", "--off_policy_fraction 1e-20 with --method rspo", "give for example 1/8"),
    ("--off_policy_fraction 0.99999999999", "--off_policy_fraction 0.99999999999", "give for example 1/8"),
    ("--off_policy_fraction 0", "--off_policy_fraction 0.0 with --method rspo", "give for example 1/8"),
    ("--method rspo_h --off_policy_fraction 0", "--off_policy_fraction 0.0 with", "or --method outcome"),
    ("--off_policy_fraction 1", "--off_policy_fraction 1.0", "[0, 1)"),
    ("--off_policy_fraction 0.1", "--off_policy_fraction 0.1 of", "--off_policy_fraction 0.125"),
    ("--tasks_per_update 1", "--tasks_per_update 1 with --method rspo", "give 2 or more"),
    ("--group_size 1", "--group_size 1 with --algo grpo", "or --algo ppo"),
    ("--algo ppo --replay_unit group", "--replay_unit group with --algo ppo", "give episode"),
    ("--algo ppo --replay_strategy variance", "--replay_strategy variance with", "reward or random"),
    ("--preset cheap-swap --algo ppo", "--replay_strategy positive with --algo ppo", "reward or random"),
    ("--preset cheap-swap --method rspo_h", "--buffer_source phase1 with --method rspo_h", "give history"),
    ("--buffer_keep 3", "--buffer_keep 3", "give 14 or more"),
    ("--method spear --algo ppo", "--algo ppo with --method spear", "give grpo or gigpo"),
    ("--spear_cov_low 60", "--spear_cov_low 60.0 with --spear_cov_high 60.0", "give a lower value"),
    ("--spear_warmup 0", "--spear_warmup 0", "must be between 1 and 1000000"),
    ("--spear_cov_share 2", "--spear_cov_share 2", "must be between 0 and 1"),
    ("--hesitation_share 0.1", "--expert_share 0.95 with --hesitation_share 0.1", "lower one of them"),
    ("--sampler vllm", "--lora_rank 0", "give --lora_rank 8, or kv"),
    ("--plan --eval_only --model a/b", "--plan with --eval_only", "leave one out"),
    ("--eval_only --model run/policy", "--model run/policy", "evaluate it with --eval_only --out run"),
    ("--plan --env alf", "--env alf", "household, alfworld, webshop"),
    ("--plan --k 7", "--total_updates 180", "must be a multiple"),
    ("--plan --gpu_memory_gb 0", "--gpu_memory_gb 0.0", "must be between 0.1 and 1000000"),
    ("--plan --model /nope", "--model /nope", "give one, a hub id, or tiny"),
    ("--plan --model run", "--model run", "give run/policy"),
    ("--plan --model models/broken_config", "--model models/broken_config", "config.json is damaged"),
    ("--plan --model adapters/baseless", "--model adapters/baseless", "set base_model_name_or_path in it"),
    ("--plan --resume", "--resume", "give it with --out"),
    # run folders
    ("--out file", "--out file", "give a folder"),
    ("--out file/run", "--out file/run", "not a directory; give another path"),
    ("--out full", "--out full", "give a new folder"),
    ("--out run", "--out run", "add --resume to continue it"),
    (f"--out {LONG}", "--out xxx", "file name too long; give another path"),
    ("--out $'a\\nb'", "--out 'a\\nb'", "contains a control character"),
    ("--out ' run'", "--out ' run'", "begins or ends with a blank"),
    ("--resume", "--resume", "give it with --out"),
    ("--resume --out nowhere", "--out nowhere", "check its name, or start a run without --resume"),
    ("--resume --out empty", "--out empty", "check its name, or start a run without --resume"),
    ("--resume --out file", "--out file", "check its name"),
    ("--resume --out run/config.json", "--out run/config.json", "give run"),
    ("--resume --out run/checkpoints", "--out run/checkpoints", "give run"),
    ("--resume --out models/whole", "--out models/whole/config.json", "it describes a model"),
    ("--resume --out run --seed 5", "--seed 5", "leave it out, or start another run with --config"),
    ("--resume --out run --no_gigpo_std", "--gigpo_std False", "leave it out"),
    ("--resume --out run --config configs/range.json", "--config configs/range.json with", "leave it out"),
    ("--resume --out run --preset paper-alfworld", "--preset paper-alfworld", "leave one out"),
    ("--resume --out run --eval_only", "--eval_only with --resume", "leave one out"),
    ("--resume --out run --resume_from update_3", "--out run", "there are: update_000003"),
    ("--resume --out run --resume_from run", "--out run", "there are: update_000003"),
    ("--resume --out damaged", "--out damaged", "state.json does not match its checksum"),
    ("--out -x", "--out -x", "looks like a flag; write ./-x for a path of that name"),
    ("--model=--resume", "--model --resume", "looks like a flag"),
    ("--out 'a\u200bb'", "--out 'a\\u200bb'", "contains an invisible character; remove it"),
    ("--out ~nosuch/x", "--out ~nosuch/x", "begins with ~, which is not expanded; give the full path"),
    ("--config fifo", "--config fifo", "is not a regular file; give the config.json of a run"),
    ("--resume_from update_000003", "--resume_from update_000003", "needs --resume, or --eval_only"),
    ("--eval_only", "--eval_only", "give a run with --out, or a --model"),
    ("--eval_only --out run --resume_from update_1", "--out run", "there are: update_000003"),
    ("--eval_only --out empty", "--out empty", "or start a run without --eval_only"),
    ("--eval_only --out new --model a/b", "--out new", "leave it out"),
    ("--eval_only --out young", "--eval_only --out young", "train it first, with --resume"),
    ("--eval_only --out run --lora_rank 8", "--lora_rank 8", "leave it out"),
    # config files and presets
    ("--config nowhere.json", "--config nowhere.json", "No such file or directory); give another"),
    ("--config run", "--config run", "give run/config.json"),
    ("--config empty", "--config empty", "Is a directory); give another"),
    ("--config configs/empty.json", "--config configs/empty.json", "give another"),
    ("--config configs/broken.json", "--config configs/broken.json", "give another"),
    ("--config configs/binary.json", "--config configs/binary.json", "give another"),
    ("--config configs/list.json", "--config configs/list.json", "it is not a JSON object); give another"),
    ("--config configs/deep.json", "--config configs/deep.json", "nested too deeply); give another"),
    ("--config configs/unknown.json", "--config configs/unknown.json: momentum", "remove it"),
    ("--config configs/action.json", "--config configs/action.json: resume", "remove it"),
    ("--config configs/type.json", "--config configs/type.json: --k '3'", "has the wrong type"),
    ("--config configs/list_k.json", "--config configs/list_k.json: --k [3]", "has the wrong type"),
    ("--config configs/switch.json", "--config configs/switch.json: --gigpo_std 1", "has the wrong type"),
    ("--config configs/no_splits.json", "--config configs/no_splits.json: --eval_splits []", "wrong type"),
    ("--config configs/nan.json", "--config configs/nan.json: --clip_eps nan", "see --help"),
    ("--config configs/nul.json", "--config configs/nul.json: --model", "contains a control character"),
    ("--config configs/range.json", "--config configs/range.json: --k 0", "must be between 1 and 1000000"),
    ("--config configs/method.json", "--config configs/method.json: --method sft", "must be one of rspo"),
    ("--config models/whole/config.json", "--config models/whole/config.json", "it describes a model"),
    ("--preset paper", "--preset paper", "must be one of paper-alfworld, paper-webshop"),
    ("--preset paper-alfworld --config run/config.json", "--preset paper-alfworld", "leave one out"),
    (
        "--preset paper-alfworld --env household --model a/b --dtype float32",
        "--eval_splits valid_seen valid_unseen of --preset paper-alfworld",
        "it has eval",
    ),
    (
        "--config configs/model.json",
        "--reward_model_backbone /gone of --config configs/model.json",
        "give one, a hub id",
    ),
    ("--config configs/splits.json", "--eval_splits --resume of --config configs/splits.json", "it has eval"),
    ("--resume --out moved", "--reward_model_backbone /gone of --out moved", "give one, a hub id"),
    # models
    ("--model /nope", "--model /nope", "give one, a hub id, or tiny"),
    ("--model ./nope", "--model ./nope", "give one, a hub id, or tiny"),
    ("--model '/nope nope'", "--model /nope nope", "give one, a hub id, or tiny"),
    ("--model 'Qwen 2.5'", "--model Qwen 2.5", "is neither a folder nor a hub id"),
    ("--model ünï/code", "--model ünï/code", "is neither a folder nor a hub id"),
    ("--model 'tiny '", "--model 'tiny '", "begins or ends with a blank"),
    (f"--model {LONG}", "--model xxx", "file name too long; give another path"),
    ("--model file", "--model file", "give the folder that holds it"),
    ("--model models/whole/model.safetensors", "--model models/whole/model.safetensors", "give the folder"),
    ("--model empty", "--model empty", "give a folder written by save_pretrained"),
    ("--model run", "--model run", "is a run, not a model; give run/policy"),
    ("--model run/reward_model", "--model run/reward_model", "give run/policy"),
    ("--model run/checkpoints/update_000003", "--model run/checkpoints/update_000003", "give run/policy"),
    ("--model young", "--model young", "has no policy yet; give another model"),
    ("--model scorer", "--model scorer", "give it with --reward_model"),
    ("--model models/no_config", "--model models/no_config", "give a folder written by save_pretrained"),
    ("--model models/no_weights", "--model models/no_weights", "copy its *.safetensors files"),
    ("--model models/no_tokenizer", "--model models/no_tokenizer", "copy the tokenizer files"),
    ("--model models/no_template", "--model models/no_template", "use an instruct model"),
    (
        "--model models/lfs_weights",
        "--model models/lfs_weights",
        "models/lfs_weights/model.safetensors is a git-lfs pointer",
    ),
    ("--model models/lfs_tokenizer", "--model models/lfs_tokenizer", "run git lfs pull"),
    ("--model models/lfs_config", "--model models/lfs_config", "/config.json is a git-lfs pointer"),
    ("--model models/broken_config", "--model models/broken_config", "config.json is damaged"),
    ("--model models/list_config", "--model models/list_config", "config.json is damaged"),
    ("--model models/broken_tokenizer", "--model models/broken_tokenizer", "tokenizer.json is damaged"),
    (
        "--model models/broken_tokenizer_config",
        "--model models/broken_tok",
        "tokenizer_config.json is damaged",
    ),
    (
        "--model models/list_tokenizer_config",
        "--model models/list_tok",
        "tokenizer_config.json is damaged",
    ),
    ("--model adapters/broken", "--model adapters/broken", "adapter_config.json is damaged"),
    ("--model adapters/baseless", "--model adapters/baseless", "set base_model_name_or_path in it"),
    ("--model adapters/null_base", "--model adapters/null_base", "set base_model_name_or_path in it"),
    ("--model adapters/chained", "--model adapters/chained", "its base adapters/gone_base is an adapter too"),
    ("--model adapters/gone_base", "--model adapters/gone_base", "its base /gone/model is not there"),
    ("--reward_model_backbone empty", "--reward_model_backbone empty", "save_pretrained"),
    ("--reward_model_backbone tiny", "--reward_model_backbone tiny", "leave it out"),
    ("--reward_model_backbone run", "--reward_model_backbone run", "give run/policy"),
    ("--model fifos/config.json", "--model fifos/config.json", "config.json is not a regular file; copy it"),
    ("--model fifos/tokenizer.json", "--model fifos/tokenizer.json", "tokenizer.json is not a regular file"),
    ("--model fifos/model.safetensors", "--model fifos/model.safetensors", "is not a regular file; copy it"),
    ("--reward_model fifos/scorer", "--reward_model fifos/scorer", "tokenizer.json is not a regular file"),
    ("--resume --out fifos/run", "--out fifos/run", "manifest.json is missing or unreadable); no undamaged"),
    (
        "--dense_reward oracle",
        "--dense_reward oracle",
        "must be one of step_model, shaped, implicit, novelty",
    ),
    ("--dense_reward", "--dense_reward", "needs a value"),
    ("--implicit_beta 0", "--implicit_beta 0.0", "must be between 0.0001 and 1000"),
    ("--implicit_lr nan", "--implicit_lr nan", "must be a finite number"),
    ("--resume --out run --dense_reward novelty", "--dense_reward novelty", "the run in run has step_model"),
    ("--reward_model nowhere", "--reward_model nowhere", "leave it out to fit one"),
    ("--reward_model file", "--reward_model file", "leave it out to fit one"),
    ("--reward_model run", "--reward_model run", "give run/reward_model"),
    ("--reward_model run/policy", "--reward_model run/policy", "give run/reward_model"),
    # data of environments that are not used are not looked at, but a path must be one
    (f"--alfworld_data {LONG}", "--alfworld_data xxx", "file name too long; give another path"),
    ("--webshop_data file/x", "--webshop_data file/x", "not a directory; give another path"),
    # torchrun's environment variables
    ("RANK=0", "torchrun's environment variables RANK=0 are set, but not WORLD_SIZE, LOCAL_RANK", "unset"),
    (f"{TORCHRUN} RANK=x", "environment variable RANK=x: is not a number", "or unset these variables"),
    (f"{TORCHRUN} RANK=3", "environment variable RANK=3: must be below WORLD_SIZE=2", "unset"),
    (f"{TORCHRUN} WORLD_SIZE=-2", "environment variable WORLD_SIZE=-2: is not a number", "unset"),
    (f"{TORCHRUN} WORLD_SIZE=0", "environment variable RANK=1: must be below WORLD_SIZE=0", "unset"),
    (f"{TORCHRUN} LOCAL_RANK=5", "environment variable LOCAL_RANK=5: must be below LOCAL_WORLD_SIZE=2", "un"),
    (f"{TORCHRUN} LOCAL_WORLD_SIZE=two", "environment variable LOCAL_WORLD_SIZE=two: is not a", "unset"),
    (f"{TORCHRUN} MASTER_PORT=http", "environment variable MASTER_PORT=http: is not a number", "unset"),
    (f"{TORCHRUN} MASTER_PORT=65536", "environment variable MASTER_PORT=65536: must be between 1", "unset"),
]
ALFWORLD = [
    ("--env alfworld", "--env alfworld", "give the folder that holds json_2.1.1 with --alfworld_data"),
    ("--env alfworld --alfworld_data nowhere", "--alfworld_data nowhere", "alfworld-download"),
    ("--env alfworld --alfworld_data file", "--alfworld_data file", "alfworld-download"),
    ("--env alfworld --alfworld_data games", "--alfworld_data games", "alfworld-download"),
    ("--preset paper-alfworld", "--env alfworld of --preset paper-alfworld", "alfworld-download"),
    ("--preset paper-alfworld --alfworld_data empty", "--alfworld_data empty", "alfworld-download"),
]
WEBSHOP = [
    ("--env webshop", "--env webshop", "with --webshop_data, or in $WEBSHOP_DATA"),
    (
        "--env webshop --webshop_data '/nope nope'",
        "--webshop_data /nope nope",
        "there is no folder /nope nope",
    ),
    ("--env webshop --webshop_data file", "--webshop_data file", "there is no folder file"),
    (
        "--env webshop --webshop_data small_shop",
        "--webshop_data small_shop",
        "lacks items_ins_v2_1000.json, color_set.json",
    ),
    ("--env webshop --webshop_data both_shops", "--webshop_data both_shops", "with --webshop_products"),
    ("--preset paper-webshop", "--env webshop of --preset paper-webshop", "setup.sh downloads it"),
]
WARNED = [  # a command line that is accepted, and the warning about it; "" for none
    ("", ""),
    ("--off_policy_fraction 1/4", ""),
    ("--k 5 --k 9 --total_updates 9", ""),
    ("--total-steps 9 --tasks_per_step=16", ""),
    ("--out=~/new", ""),
    ("--out ./-run", ""),
    ("--out 'my run'", ""),
    ("--out läuft", ""),
    ("--resume --out run --total_updates 90", ""),
    ("--resume --out run --seed 0 --reward_noise 0", ""),
    ("--eval_only --out run --eval_games 5", ""),
    ("--model models/whole --dtype float32", ""),
    ("--plan --model models/no_weights", ""),
    ("--model run/policy --dtype float32", ""),
    ("--method outcome --reward_noise 0.1", "--reward_noise (read with --method rspo or dense)"),
    ("--method outcome --reward_model_epochs 3", "--reward_model_epochs (read with --method rspo or dense"),
    ("--dense_reward novelty --reward_noise 0.1", ""),
    ("--dense_reward shaped", ""),
    ("--method outcome --dense_reward novelty", "--dense_reward (read with --method rspo or dense)"),
    ("--implicit_beta 0.1", "--implicit_beta (read with --dense_reward implicit)"),
    ("--dense_reward implicit --implicit_lr 1", ""),
    (
        "--dense_reward novelty --reward_model_lr 1 --reward_model scorer",
        "--reward_model (read with --dense_reward step_model), --reward_model_lr (read with --dense_reward",
    ),
    (
        "--dense_reward implicit --reward_model_source expert",
        "--reward_model_source (read with --dense_reward step_model)",
    ),
    ("--method outcome --buffer_tasks 3", "--buffer_tasks (read with --method rspo, rspo_h or rspo_o)"),
    ("--method outcome --buffer_keep 99", "--buffer_keep (read with --method rspo, rspo_h or rspo_o)"),
    ("--method outcome --buffer_source both", "--buffer_source (read with --method rspo, rspo_h or rspo_o)"),
    ("--preset cheap-swap --method outcome", ""),
    ("--preset cheap-swap --buffer_tasks 3", "--buffer_tasks (read with --buffer_source collect, or history"),
    ("--method outcome --max_centre 4", "--max_centre (read with --method rspo, rspo_h or rspo_o)"),
    ("--gigpo_omega 2", "--gigpo_omega (read with --algo gigpo)"),
    ("--spear_age 9", "--spear_age (read with --method spear)"),
    ("--method spear --spear_age 9 --spear_cov_high 5", ""),
    ("--method spear --spear_cov_share 0 --spear_cov_low 1", "--spear_cov_low (read with --spear_cov_share"),
    ("--method spear --off_policy_fraction 1/4", "--off_policy_fraction (read with --method rspo, rspo_h or"),
    ("--method spear --clip_centre one", "--clip_centre (read with --method rspo, rspo_h or rspo_o)"),
    ("--method spear --reward_noise 0.1", "--reward_noise (read with --method rspo or dense)"),
    ("--no_gigpo_std", "--gigpo_std (read with --algo gigpo)"),
    ("--gamma 0.9", "--gamma (read with --algo ppo)"),
    ("--algo gigpo --gamma 0.9", "--gamma (read with --algo ppo)"),
    ("--warm_start 0 --warm_start_episodes 9", "--warm_start_episodes (read with --warm_start above 0)"),
    ("--model models/whole --dtype float32 --tiny_width 8", "--tiny_width (read with --model tiny)"),
    ("--lora_alpha 8", "--lora_alpha (read with --lora_rank above 0)"),
    ("--vllm_memory 0.5", "--vllm_memory (read with --sampler vllm)"),
    ("--alfworld_data games", "--alfworld_data (read with --env alfworld)"),
    ("--webshop_reward score", "--webshop_reward (read with --env webshop)"),
    ("--context full --history 2", "--history (read with --context window)"),
    ("--gpu_memory_gb 80", "--gpu_memory_gb (read with --plan)"),
    ("--reward_model scorer --reward_model_lr 1", "--reward_model_lr (read with --method rspo or dense and"),
    ("--eval_only --model models/whole --dtype float32 --k 3", "--k (read without --eval_only)"),
    ("--gamma 1 --gigpo_omega 1", "--gigpo_omega (read with --algo gigpo), --gamma (read with --algo ppo);"),
    ("--off_policy_fraction 0.875 --buffer_tasks 1 --group_size 2", "the buffer holds 2 episodes and an"),
    ("--learning_rate 1e-8 --max_grad_norm 1e9", ""),
    ("--tiny_width 2048 --tiny_layers 23", ""),  # 0.96 billion weights
    ("--max_centre 1e6 --rank_timeout 0.05", ""),
    ("--eval_games 1000000000 --keep_checkpoints 1000000", ""),
    ("--clip_eps 20", "a falling ratio is never clipped; the paper has 0.2"),
]

START = """
import contextlib, io, json, os, re, sys, traceback
sys.modules["torch"] = None  # importing it raises ImportError
root, lines = sys.argv[1], json.load(sys.stdin)
sys.path.insert(0, root)
from scale import launch
launch.start = lambda args: None  # it would replace this process by the launcher of the ranks
with open(f"{root}/train.py") as file:
    code = compile(file.read(), "train.py", "exec")
answers = []
environment = dict(os.environ)
for line in lines:
    variables = [word.split("=", 1) for word in line if re.match("[A-Z_]+=", word)]
    line = line[len(variables):]
    os.environ.clear()
    os.environ.update(environment, **dict(variables))
    sys.argv, status, out, err = ["train.py", *line], "accepted", io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exec(code, {"__name__": "__main__"})
        except SystemExit as end:
            status = end.code
        except ImportError as error:  # the import of torch in train.py, after the flags
            if error.__traceback__.tb_next.tb_next:
                traceback.print_exc()
        except BaseException:
            traceback.print_exc()
    answers.append([status, err.getvalue()])
json.dump(answers, sys.stdout)
"""


def split(line):
    return shlex.split(line.replace("$'a\\nb'", "'a\nb'"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    write_places(folder)
    return folder


def environment_of(place, **variables):
    """Return the environment of a process that finds no data and no other ranks."""
    hidden = ("ALFWORLD_DATA", "WEBSHOP_DATA", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "HOME": str(place), "PYTHONIOENCODING": "utf-8", **variables}


@pytest.fixture(scope="module")
def answers(place):
    """Return (exit status, stderr) by command line, of every line of the tables."""
    lines = [line for line, *_ in REFUSED + ALFWORLD + WEBSHOP + WARNED]
    command = [sys.executable, "-c", START, str(ROOT)]
    text = json.dumps([split(line) for line in lines])
    done = subprocess.run(
        command, cwd=place, input=text, capture_output=True, text=True, env=environment_of(place)
    )
    assert done.returncode == 0, done.stderr
    return {line: tuple(answer) for line, answer in zip(lines, json.loads(done.stdout), strict=True)}


def check_refusal(answer, start, remedy):
    status, message = answer
    assert status == 2, message
    assert message.startswith((f"error: {start}", f"error: {start}:")), message
    assert remedy in message and message.count("\n") == 1 and len(message) < 450, message


@pytest.mark.parametrize(("line", "start", "remedy"), REFUSED)
def test_an_odd_line_is_answered_by_one_line_with_value_and_remedy(line, start, remedy, answers):
    check_refusal(answers[line], start, remedy)


def missing(packages):
    return not all(importlib.util.find_spec(name) for name in packages)


@pytest.mark.skipif(missing(["alfworld", "textworld"]), reason="ALFWorld is not installed")
@pytest.mark.parametrize(("line", "start", "remedy"), ALFWORLD)
def test_missing_games_are_answered_by_the_way_to_get_them(line, start, remedy, answers):
    check_refusal(answers[line], start, remedy)


@pytest.mark.skipif(missing(["nltk", "rapidfuzz", "regex"]), reason="WebShop's packages are not installed")
@pytest.mark.parametrize(("line", "start", "remedy"), WEBSHOP)
def test_a_missing_shop_is_answered_by_the_way_to_get_it(line, start, remedy, answers):
    check_refusal(answers[line], start, remedy)


@pytest.mark.parametrize(("line", "warning"), WARNED)
def test_a_possible_line_is_accepted_with_one_warning_at_most(line, warning, answers):
    status, message = answers[line]
    assert status == "accepted", message
    assert warning in message and message.count("\n") == bool(warning), message
    assert message.startswith("warning: ") or not warning


def test_the_tables_have_a_hundred_lines():
    lines = [line for line, *_ in REFUSED + ALFWORLD + WEBSHOP + WARNED]
    assert len(lines) > 200 and len(set(lines)) == len(lines)


def test_a_preset_or_a_config_holds_flags_that_are_not_read_without_a_warning(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"method": "outcome", "reward_noise": 0.1, "gigpo_omega": 2}')
    flags.prepare(["--config", str(tmp_path / "config.json")])
    flags.prepare(["--preset", "paper-alfworld", "--plan"])
    assert capsys.readouterr().err == ""


def test_every_name_in_the_table_of_unread_flags_is_a_flag():
    names = [name for flags_, *_ in checks.READ_IF for name in flags_.split()]
    assert set(names) <= {field.name for field in dataclasses.fields(flags.Args)}


def test_a_tilde_is_the_home_folder_although_shells_leave_it_after_an_equals_sign():
    assert flags.parse(["--out=~/run"]).out == os.path.expanduser("~/run") != "~/run"


def test_a_path_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checks.os, "access", lambda path, mode: False)
    with pytest.raises(flags.UsageError, match=f"^--out {tmp_path}: cannot be read; give another path"):
        flags.parse(["--out", str(tmp_path)])


# --- real processes -----------------------------------------------------------------------------------------


def run_train(place, line, **variables):
    """Return (status, stderr, CPU seconds) of `python train.py`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, ROOT / "train.py", *split(line)]
    done = subprocess.run(
        command, cwd=place, capture_output=True, text=True, env=environment_of(place, **variables)
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.returncode, done.stderr, after.ru_utime - before.ru_utime


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "start"),
    [
        ("--k three", "--k three: must be a whole number"),
        ("--model run", "--model run: is a run, not a model; give run/policy"),
        ("--config configs/deep.json", "--config configs/deep.json: is no config.json"),
        (f"--out {LONG}", "--out xxx"),
        ("--out läuft --kl_coef −1", "--kl_coef −1: must be a number"),
    ],
)
def test_a_process_answers_before_torch_is_imported(line, start, place):
    status, message, seconds = run_train(place, line)
    assert status == 2 and message.startswith(f"error: {start}") and message.count("\n") == 1, message
    assert seconds < 1  # importing torch takes longer


RANKS = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "line", "start"),
    [
        ({**RANKS, "MASTER_PORT": "http"}, "", "environment variable MASTER_PORT=http: is not a number"),
        (RANKS, "--k three", "--k three: must be a whole number"),
        ({"LOCAL_WORLD_SIZE": "two"}, "--k three", "--k three: must be a whole number"),
    ],
)
def test_malformed_variables_of_torchrun_are_answered_in_one_line(variables, line, start, place):
    status, message, _ = run_train(place, line, **variables)
    assert status == 2 and message.startswith(f"error: {start}") and message.count("\n") == 1, message


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_answered_in_one_line(place):
    status, message, _ = run_train(place, "--plan --gpu_memory_gb 0.000001")
    assert status == 2 and message.startswith("error: --gpu_memory_gb 1e-06: ") and message.count("\n") == 1
