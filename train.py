"""`python train.py`: run folder, warm start, evaluation, log, checkpoints around rspo.train. Flags: flags.py.

A run, in order: the flags are checked; the starting model is loaded, and warm-started if it cannot act yet;
the step reward model is fitted; the held-out panel is played; Algorithm 1 runs, with a checkpoint at the end
of every loop; the panel is played again. Nothing a reader of the paper needs is in here.

The run folder holds config.json (every flag's value), run.json (how and where it ran), metrics.jsonl and
transcripts.jsonl (see report.py), start/ (the starting model, if it was made here), reward_model/,
checkpoints/, policy/ (the trained A, for transformers or peft), curves.png and summary.json. `--resume`
continues a run exactly: after Ctrl-C, after a kill, or to train for longer.

With `torchrun --nproc_per_node=n train.py` n ranks run this file and share the work (distributed.py). All go
the same way through it; rank 0 alone prints, warm-starts, fits, and writes what the others then read.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

from record.log import Log, how_and_where, tensorboard_listener, wandb_listener

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads slow down a busy machine
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import contextlib
import dataclasses
import errno
import functools
import io
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import rspo
from buffer import ReplayBuffer, Trajectory
from chat import Dialogue
from flags import Args, UsageError, config_text, env_maker, native_bf16, prepare, refuse
from record import checkpoint, report
from record.recorder import Recorder, bar, conclude, play_panel, say, warn_of_crashes
from rollout import World
from sampler import KVSampler, Sampler
from scale import distributed, plan
from scale.vllm_sampler import EngineError, VLLMSampler

OTHER_GAMES = "these are not the games that the run was trained on"


Demonstrated = Callable[[int], list[Trajectory]]  # how many -> the first so many demonstrations


def give_up(text: str, status: int):
    """End with a message for people, printed once: several ranks may have seen the same error."""
    distributed.print_once(text)
    sys.exit(status)


def load_start(args: Args, folder: Path | None):
    """The starting model: the run's own start/ if it was made already, else --model. Raises UsageError."""
    from demo.tiny_model import tiny_base
    from model import load_base

    settings = {
        "dtype": args.dtype,
        "device": device_of(args),
        "gradient_checkpointing": args.gradient_checkpointing,
        "autocast": args.autocast,
    }
    start = folder / "start" if folder else None
    made = start is not None and start.is_dir()
    try:
        if args.model == "tiny" and not made:
            base = tiny_base(
                env_maker(args)().vocabulary,
                d_model=args.tiny_width,
                layers=args.tiny_layers,
                heads=args.tiny_heads,
                intermediate=2 * args.tiny_width,
                max_length=args.max_prompt_tokens + args.max_new_tokens,
                seed=args.seed,
                **settings,
            )
        else:
            base = load_base(str(start.resolve()) if made else args.model, **settings)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if args.max_prompt_tokens + args.max_new_tokens > base.max_length:
        both = f"--max_prompt_tokens {args.max_prompt_tokens} with --max_new_tokens {args.max_new_tokens}"
        raise UsageError(f"{both}: the model reads {base.max_length} tokens; lower one of them")
    opening = make_world(dataclasses.replace(args, env_workers=0), base.chat, args.seed).opening_tokens()
    if opening > args.max_prompt_tokens:
        why = f"the first prompt of a game has {opening} tokens; give twice as many or more"
        raise UsageError(f"--max_prompt_tokens {args.max_prompt_tokens}: {why}")
    return base


def device_of(args: Args) -> str:
    """Each rank has a GPU of its own."""
    if args.device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    if distributed.world_size() > 1:
        return f"cuda:{distributed.local_rank()}"
    return "cuda" if args.device == "auto" else args.device


def make_sampler(args: Args) -> Sampler:
    if args.sampler == "vllm":
        return VLLMSampler(args.max_prompt_tokens + args.max_new_tokens, args.vllm_memory)
    return KVSampler()


def make_world(args: Args, chat, seed: int | str) -> World:
    dialogue = Dialogue(
        chat, args.style, args.context, args.history, args.max_prompt_tokens, args.max_new_tokens
    )
    return World(
        env_maker(args),
        make_sampler(args),
        dialogue,
        group_size=args.episodes_per_task,
        step_limit=args.max_turns,
        temperature=args.temperature,
        parallel=args.parallel_episodes,
        workers=args.env_workers,
        seed=seed,
    )


def demonstrator(args: Args) -> str:
    left = 1 - args.expert_share - args.hesitation_share
    return (
        f"an expert that searches ({args.expert_share:.0%} of the turns), hesitates "
        f"({args.hesitation_share:.0%}) and errs ({left:.0%})"
    )


def warm_started(args: Args, folder: Path, base, demonstrated: Demonstrated):
    """The starting model, taught to act if --warm_start asks for it; saved in start/ if it was made here."""
    if distributed.on_rank_0((folder / "start").is_dir) or not (args.warm_start or base.changed):
        return base
    demonstrations = []
    if args.warm_start:
        who = "the tiny model" if args.model == "tiny" else args.model
        say(
            f"warm start, not part of RSPO: {who} cannot act yet, so it first has {args.warm_start} "
            f"supervised updates on {args.warm_start_episodes:,} games played by {demonstrator(args)}"
        )
        demonstrations = demonstrated(args.warm_start_episodes)
    distributed.on_rank_0(lambda: make_start(args, folder, base, demonstrations))
    return load_start(args, folder)  # as a resumed run will


def make_start(args: Args, folder: Path, base, demonstrations: list[Trajectory]) -> None:
    from demo.warm_start import warm_start

    if demonstrations:
        solved = sum(episode.success for episode in demonstrations) / len(demonstrations)
        with bar(args.warm_start, "warm start", leave=False) as progress:

            def show(update: int, loss: float) -> None:
                progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
                progress.update()

            try:
                losses = warm_start(
                    base,
                    demonstrations,
                    updates=args.warm_start,
                    turns_per_update=args.warm_start_turns,
                    learning_rate=args.warm_start_lr,
                    seed=args.seed,
                    tokens_per_micro_batch=args.tokens_per_micro_batch,
                    progress=show,
                )
            except ValueError as error:
                raise UsageError(f"--warm_start {args.warm_start}: {error}") from None
        say(f"warm start: done, loss {losses[-1]:.3f}; {solved:.1%} of its demonstrations solved their task")
    checkpoint.write_folder(folder / "start", base.save)


def make_policy(args: Args, base):
    from policy import Policy

    return Policy(
        base,
        lora_rank=args.lora_rank,
        lora_alpha=args.lora_alpha,
        learning_rate=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        weight_decay=args.weight_decay,
        critic_learning_rate=args.critic_learning_rate if args.algo == "ppo" else None,
        temperature=args.temperature,
        seed=args.seed,
    )


def about_reward_model(args: Args, base) -> dict:
    return {
        **{"dtype": getattr(torch, args.dtype), "autocast": args.autocast, "device": base.device},
        **{name: getattr(args, name) for name in ("tokens_per_micro_batch", "gradient_checkpointing")},
    }


def named_reward_model(args: Args, base):
    """The model of --reward_model, or one to be fitted, made of --reward_model_backbone; None without either.
    Loaded before there is a run folder. Raises UsageError."""
    from reward_model import StepRewardModel

    flag = "reward_model" if args.reward_model else "reward_model_backbone"
    name, about = getattr(args, flag), about_reward_model(args, base)
    fitted = args.resume and Path(args.out, "reward_model").is_dir()
    if distributed.rank() > 0 and not args.reward_model:
        return None  # rank 0 fits it
    try:
        if args.reward_model:
            return StepRewardModel.load(name, base.chat, **about)
        return StepRewardModel.from_pretrained(name, seed=args.seed, **about) if name and not fitted else None
    except ValueError as error:
        raise UsageError(f"--{flag} {name}: {str(error).removeprefix(f'--model {name}: ')}") from None


def reward_model_of(args: Args, folder: Path, base, policy, world: World, demonstrated: Demonstrated, model):
    """The step reward model: the `model` named by a flag, fitted if need be, or one made of the start."""
    from reward_model import StepRewardModel

    made = folder / "reward_model"
    if not args.reward_model and not distributed.on_rank_0(made.is_dir):
        count = f"step reward model: fitted on {args.reward_model_episodes:,} games played by"
        if args.reward_model_source == "expert":
            say(f"{count} {demonstrator(args)}")
            episodes = demonstrated(args.reward_model_episodes)
        else:
            say(f"{count} the starting policy")
            episodes = world.practice(policy, args.reward_model_episodes, args.warm_start_games)
            warn_of_crashes(episodes, "games")
        distributed.on_rank_0(lambda: make_reward_model(args, made, base, episodes, model))
    if not args.reward_model:
        try:
            model = StepRewardModel.load(made, base.chat, **about_reward_model(args, base))  # as when resumed
        except ValueError as error:
            raise UsageError(f"--out {folder}: {error}; remove {made} to fit it again") from None
    fit = {key: "n/a" if value is None else value for key, value in model.report.items()}
    say(
        "step reward model: on {held_out_episodes:,} held-out episodes ({held_out_successes} solved) AUC "
        "{auc:.3}, correlation {correlation:.3}, MSE {mse:.3} (of the mean: {mse_of_mean:.3})".format(**fit)
    )
    return model


def make_reward_model(args: Args, made: Path, base, episodes: list[Trajectory], model) -> None:
    from reward_model import StepRewardModel

    model = model or StepRewardModel.from_base(base, seed=args.seed, **about_reward_model(args, base))
    try:
        fit_reward_model(args, model, episodes)
    except ValueError as error:  # too few episodes, or too long for the backbone
        raise UsageError(str(error)) from None
    checkpoint.write_folder(made, model.save)
    model.to("cpu")  # whoever still holds it: what scores is loaded from there


def fit_reward_model(args: Args, model, episodes: list[Trajectory]) -> None:
    with bar(0, "step reward model", leave=False) as progress, warnings.catch_warnings(record=True) as caught:

        def show(done: int, total: int, loss: float) -> None:
            progress.total = total
            progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
            progress.update()

        about = {"epochs": args.reward_model_epochs, "learning_rate": args.reward_model_lr, "seed": args.seed}
        model.fit(episodes, progress=show, **about)
    for warning in caught:
        say(f"warning: {warning.message}")


def folder_of(args: Args) -> Path:
    """The run folder, made if it is not there. Raises UsageError."""
    if args.out:
        folder = Path(args.out)
    else:
        what = "eval" if args.eval_only else f"{args.env}-{args.method}-{args.algo}-s{args.seed}"
        stem = f"{what}-{time.strftime('%Y%m%d-%H%M%S')}"
        names = (Path("runs") / (stem + (f"-{i}" if i else "")) for i in range(1000))
        folder = next(name for name in names if not name.exists())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: cannot be made ({error.strerror}); give another folder") from None
    return folder


def describe(args: Args, folder: Path, argv: list[str]) -> None:
    """Write run.json, to which every resumption adds a part, and config.json."""
    path = folder / "run.json"
    facts = json.loads(path.read_text()) if path.exists() else {}
    now = how_and_where(argv, args.threads) | {"ranks": distributed.world_size()}
    if facts:
        facts.setdefault("resumed", []).append(now)
    else:
        facts = now
    checkpoint.write_text(path, json.dumps(facts, indent=2) + "\n")
    checkpoint.write_text(folder / "config.json", config_text(args))


def run(args: Args, newest: Path | None, argv: list[str]) -> None:
    """Train, from the start or from the checkpoint `newest`; the folder is this process's alone meanwhile."""
    started = time.perf_counter()
    set_up(args)
    base = load_start(args, Path(args.out) if args.resume else None)
    saved = checkpoint.read(newest) if newest else None
    if saved and other_games(args, base, saved):
        raise UsageError(f"--env {args.env}: {OTHER_GAMES}; give the data that the run began with")
    scorer = named_reward_model(args, base) if args.uses_dense_reward else None
    folder = distributed.on_rank_0(lambda: folder_of(args))
    ranks = distributed.world_size()
    start = f"torchrun --nproc_per_node={ranks}" if ranks > 1 else "python"
    go_on = f"{start} train.py --resume --out {folder}"
    try:
        with checkpoint.lock(folder) if distributed.rank() == 0 else contextlib.nullcontext():
            if distributed.rank() == 0:
                checkpoint.sweep(folder)
                describe(args, folder, argv)
            train_in(folder, args, saved, base, scorer, started)
    except BlockingIOError:
        raise UsageError(f"--out {folder}: another process works in it; wait for it, or stop it") from None
    except (FloatingPointError, rspo.NothingToTrainOn) as error:
        give_up(f"error: {error}", 1)
    except KeyboardInterrupt:
        give_up(f"\nstopped; from its last whole loop it goes on with: {go_on}", 130)
    except distributed.RankLost as error:
        give_up(f"error: {error}; go on with: {go_on}", 1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        give_up(f"error: {error}; free some space, then go on with: {go_on}", 1)


def other_games(args: Args, base, saved: checkpoint.Checkpoint) -> bool:
    world = make_world(dataclasses.replace(args, env_workers=0), base.chat, args.seed)
    return saved.state["games"] != world.pool.env.fingerprint


def set_up(args: Args) -> None:
    if args.dtype == "bfloat16" and not native_bf16(args.device):
        say(
            "this device has no native bf16 and emulates it, many times slower: "
            + ("--autocast True was asked for" if args.autocast else "trained weights are computed in fp32")
            + "; --dtype float32 is faster here"
        )
    torch.set_num_threads(max(1, args.threads // distributed.local_world_size()))
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length, so for every token sampled
    if (device := torch.device(device_of(args))).index is not None:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)  # whatever is random has a seed of its own; this is for what we overlook


def start_log(folder: Path, state: dict) -> Log:
    """The log as it was at the checkpoint of that state; what came later is removed. Raises UsageError."""
    for later in checkpoint.listed(folder):
        if checkpoint.updates_of(later) > state.get("step", math.inf):
            checkpoint.remove(later)
    try:
        return Log(folder, state.get("sizes"))
    except ValueError as error:
        raise UsageError(f"--out {folder}: {error}; put the file back, or start a new run") from None


def train_in(folder: Path, args: Args, saved, base, scorer, started: float) -> None:
    """saved: the checkpoint.Checkpoint to go on from, or None."""
    state = saved.state if saved else {}
    started -= state.get("seconds", 0.0)  # as if the run had never been interrupted
    log = start_log(folder, state) if distributed.rank() == 0 else None
    say(f"run folder: {folder}" + (f", continued after update {state['step']}" if saved else ""))

    world = make_world(args, base.chat, args.seed)

    from demo.warm_start import demonstrations

    @functools.cache  # the step reward model may be fitted on those of the warm start
    def demonstrated(count: int) -> list[Trajectory]:
        shares = (args.expert_share, args.hesitation_share)
        episodes = demonstrations(world, count, *shares, args.warm_start_games)
        warn_of_crashes(episodes, "demonstrations")
        return episodes

    base = warm_started(args, folder, base, demonstrated)
    policy = make_policy(args, base)
    dense_reward = None
    if args.uses_dense_reward:
        dense_reward = reward_model_of(args, folder, base, policy, world, demonstrated, scorer)
    demonstrated.cache_clear()
    replay = ReplayBuffer(args.replay_strategy, args.replay_unit, seed=args.seed)
    if saved:
        policy.load_state_dicts(saved.tensors)
        world.load_state_dict(state["world"])
        replay.load_state_dict(state["replay"])
    if log and args.tensorboard:
        log.listeners.append(tensorboard_listener(folder, log.lines))
    if log and args.wandb_project:
        log.listeners.append(wandb_listener(args.wandb_project, folder, dataclasses.asdict(args)))

    record = Recorder(args, folder, policy, world, dense_reward, log, started)
    done = state.get("step", 0)
    if not saved:
        record.evaluate(0)
    with bar(args.total_updates, "updates of A", initial=done) as record.bar:
        rspo.train(policy, record, record, args, record.log_update, record.end_loop, done, replay)
    if distributed.on_rank_0(lambda: log.of("evaluation")[-1]["update"] != args.total_updates):
        record.evaluate(args.total_updates)
    world.close()
    if log:
        checkpoint.write_folder(folder / "policy", policy.save)
        conclude(args, folder, log, time.perf_counter() - started)
        log.close()


def evaluate_only(args: Args, newest: Path | None) -> None:
    """Play the panels with a run's newest policy, or with --model as it is; the tables, and eval.json."""
    set_up(args)
    base = load_start(args, Path(args.out) if newest else None)
    folder = distributed.on_rank_0(lambda: folder_of(args))
    if base.changed and args.sampler == "vllm":  # merged from an adapter; vLLM loads it from a folder
        distributed.on_rank_0(lambda: checkpoint.write_folder(folder / "start", base.save))
        base = load_start(args, folder)
    policy = make_policy(args, base)
    if newest:
        saved = checkpoint.read(newest)
        policy.load_state_dicts(saved.tensors)
        if other_games(args, base, saved):
            say(f"warning: {OTHER_GAMES}")
    started, who, panels = time.perf_counter(), newest.name if newest else args.model, {}
    with contextlib.closing(make_world(args, base.chat, args.seed)) as world:
        for split in args.eval_splits:
            _, panels[split] = play_panel(args, world, policy, split)
            say(f"success in % on {panels[split]['games']} games of {split}")
            say(report.panel_table({who: panels[split]}))
    facts = {"policy": who, "panels": panels, "seconds": time.perf_counter() - started}
    if distributed.rank() == 0:
        checkpoint.write_text(folder / "eval.json", json.dumps(facts, indent=2) + "\n")
    say(f"written to {folder / 'eval.json'}")


def join() -> None:
    try:
        distributed.start()
    except ValueError as error:
        raise UsageError(str(error)) from None


def checkpoint_of(args: Args) -> Path | None:
    """Return the checkpoint that the run resumes from or evaluates, if any. Raises UsageError."""
    if not args.out or args.plan:
        return None
    try:
        if not (args.resume or args.eval_only):
            checkpoint.check_new_folder(Path(args.out))
            return None
        path = checkpoint.choose(Path(args.out), args.resume_from)
    except ValueError as error:
        raise UsageError(f"--out {args.out}: {error}") from None
    if args.eval_only and path is None:
        raise UsageError(
            f"--eval_only --out {args.out}: has no checkpoint yet; train it first, with --resume"
        )
    if args.resume and path and args.total_updates < (done := checkpoint.updates_of(path)):
        refuse(args, "total_updates", f"{path.name} has had {done} updates; give {done} or more")
    return path


def flags_of(argv: list[str]) -> Args:
    """`prepare` on every rank; the help, and what is said of misspelled flags, is printed by rank 0 alone."""
    if distributed.rank() == 0:
        return prepare(argv)
    nowhere = io.StringIO()
    try:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            return prepare(argv)
    except SystemExit:
        with contextlib.suppress(distributed.RankLost):
            distributed.wait()  # until rank 0 has ended: torchrun ends all ranks as soon as one has
        raise


def show_plan(args: Args) -> None:
    """Print the memory and the episodes that these flags ask for. Raises UsageError if it cannot fit."""

    def shape(flag: str, model: str) -> plan.Shape:
        try:
            return plan.shape_of(model)
        except ValueError as error:
            raise UsageError(f"--{flag} {model}: {error}") from None

    if args.model == "tiny":
        from demo.tiny_model import tiny_tokenizer

        words, heads = len(tiny_tokenizer(env_maker(args)().vocabulary)), args.tiny_heads
        model = plan.qwen(args.tiny_width, 2 * args.tiny_width, args.tiny_layers, heads, heads, words)
    else:
        model = shape("model", args.model)
    backbone = None
    if args.uses_dense_reward:
        flag = "reward_model" if args.reward_model else "reward_model_backbone"
        backbone = shape(flag, getattr(args, flag)) if getattr(args, flag) else model
    if not args.gpu_memory_gb:
        here = torch.cuda.is_available()
        size = torch.cuda.get_device_properties(0).total_memory / plan.GB if here else 80
        args = dataclasses.replace(args, gpu_memory_gb=size)
    say(plan.text(args, model, backbone))
    if why := plan.refusal(args, model, backbone):
        raise UsageError(why)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    try:
        join()
        args = flags_of(argv)
        newest = checkpoint_of(args)
        distributed.wait()  # nobody makes a folder while others still look whether it is there
        if args.plan:
            show_plan(args)
        elif args.eval_only:
            evaluate_only(args, newest)
        else:
            run(args, newest, argv)
        distributed.stop()
    except UsageError as error:
        give_up(f"error: {error}", 2)
    except EngineError as error:
        give_up(f"error: --sampler vllm: {error}; where nothing else helps, give kv", 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except distributed.RankLost as error:
        give_up(f"error: {error}", 1)


if __name__ == "__main__":
    main()
