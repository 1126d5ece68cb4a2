"""`python train.py`: a run from start to end. rspo.train is the method; the flags are in flags.py.

A run, in order:

1. Check the flags and load the starting model. The run writes no file before this has succeeded.
2. Warm-start the model on demonstrations, if it cannot act yet (demo/warm_start.py).
3. Fit the step reward model.
4. Evaluate on held-out games, run Algorithm 1 with a checkpoint after every loop, evaluate again.
5. Write the trained policy, the summary, the curves and the page of the run.

The run folder holds config.json (the value of every flag), run.json (command, versions and machine of each
start), metrics.jsonl and transcripts.jsonl (record/log.py), start/ (the starting model, if the run made it),
reward_model/ (if the run fitted it), checkpoints/ (record/checkpoint.py), policy/ (the trained agent A, for
transformers or peft), curves.png, summary.json and report.html (record/page.py). `--resume` continues a run
exactly: after Ctrl-C, after a kill, or to train for longer.

A run has one or more ranks, processes that share the work (scale/distributed.py). `--ranks` starts them
(scale/launch.py), or torchrun does. All ranks take the same path through this file. Only rank 0 prints and
writes files.
"""

# ruff: noqa: E402
from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import gc
import io
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flags import Args, config_text, env_maker, prepare
from record import checkpoint
from record.checks import native_bf16
from record.command_line import UsageError
from record.run_folder import checkpoint_of, make_run_folder
from scale import launch

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads slow down a busy machine
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

# --- flags --------------------------------------------------------------------------------------------------


def read_flags(argv: list[str]) -> tuple[Args, Path | None]:
    """Return the checked flags, and the checkpoint to resume or evaluate, if any. Raises UsageError."""
    args = prepare(argv)
    return args, checkpoint_of(args)


CHECKED = None
if __name__ == "__main__" and launch.is_launched():
    launch.join()
elif __name__ == "__main__":
    # Importing torch takes seconds. Check the flags before it, so that --help and bad flags answer at once.
    # Ranks check them again in `main`, after they have joined, so that a message is printed once.
    try:
        if launch.by_torchrun():
            launch.rank_of_environment()
        else:
            CHECKED = read_flags(sys.argv[1:])
            launch.start(CHECKED[0])
    except (UsageError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports brings no traceback

import torch

import rspo
from baselines import spear
from buffer import ReplayBuffer, Trajectory
from chat import Dialogue
from demo.warm_start import demonstrations
from model import Base
from policy import Policy
from record import identity
from record.artifacts import (
    device_of,
    load_start,
    make_dense_reward,
    make_once,
    make_reward_model,
    make_start,
    named_reward_model,
    read_checkpoint,
    usage_error,
)
from record.curves import draw_curves
from record.log import (
    eval_file,
    open_log,
    run_facts,
    tensorboard_listener,
    wandb_listener,
    write_run_facts,
)
from record.page import write_page
from record.panels import panel_table, solved_text
from record.recorder import (
    Recorder,
    causes_of_divergence,
    conclude,
    play_panel,
    print_line,
    progress_bar,
    warn_of_crashes,
)
from rollout import World
from sampler import KVSampler
from scale import distributed, plan
from scale.vllm_sampler import EngineError, VLLMSampler

# --- endings ------------------------------------------------------------------------------------------------

ENDINGS = {  # exception: exit status and message. {resume} is filled in if the run can be resumed
    KeyboardInterrupt: (130, "\nstopped{resume}"),
    UsageError: (2, "error: {error}"),
    FloatingPointError: (1, "error: {error}"),
    rspo.NothingToTrainOn: (1, "error: {error}"),
    EngineError: (1, "error: --sampler vllm: {error}; if nothing else helps, give kv"),
    distributed.RankLost: (1, "error: {error}{resume}"),
    OSError: (1, "error: {error}{remedy}{resume}"),  # of the errors below
}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNWRITABLE = (errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ESTALE)


@contextlib.contextmanager
def explained_endings(command: str = ""):
    """End the process with a message and an exit status if an exception of ENDINGS is raised.

    Several ranks may raise the same exception; the message is printed once. `command` resumes the run.
    """
    try:
        yield
    except tuple(ENDINGS) as error:
        if isinstance(error, OSError) and error.errno not in FULL + UNWRITABLE:
            raise
        status, message = next(ENDINGS[kind] for kind in ENDINGS if isinstance(error, kind))
        resume = f"; resume with: {command}" if command else ""
        remedy = "; free some disk space" if getattr(error, "errno", None) in FULL else ""
        distributed.print_once(message.format(error=error, remedy=remedy, resume=resume))
        distributed.leave(status)


def end_hanging_run(why: str, command: str = "") -> None:
    """Print why the run ends, and end this process from a thread. The launcher ends the other ranks."""
    text = f"error: {why}" + (f"; resume with: {command}" if command else "")
    speaker = threading.Thread(target=distributed.print_once, args=[text], daemon=True)
    speaker.start()
    speaker.join(30)
    if speaker.is_alive():  # the rank that hangs hosts the store, where the ranks agree on who prints
        print(text, file=sys.stderr, flush=True)
    os._exit(1)


# --- the parts of a run -------------------------------------------------------------------------------------


def set_up(args: Args) -> None:
    """Set the threads, the device and the seed of torch. Warn if bf16 would be slow."""
    if args.dtype == "bfloat16" and not native_bf16(args.device):
        computed = "--autocast True computes in it" if args.autocast else "trained weights compute in fp32"
        print_line(
            "warning: this device has no native bf16 and emulates it, many times slower "
            f"({computed}); --dtype float32 is faster here"
        )
    torch.set_num_threads(max(1, args.threads // distributed.local_world_size()))
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a new plan for each length, so for each token
    if (device := torch.device(device_of(args))).index is not None:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)  # for any draw that has no seed of its own


def make_world(args: Args, chat, seed: int | str) -> World:
    """Build the world: environments, sampler and dialogue."""
    sampler = KVSampler()
    if args.sampler == "vllm":
        sampler = VLLMSampler(args.max_tokens, args.vllm_memory)
    return World(
        env_maker(args),
        sampler,
        Dialogue(chat, args.style, args.context, args.history, args.max_prompt_tokens, args.max_new_tokens),
        group_size=args.episodes_per_task,
        step_limit=args.max_turns,
        temperature=args.temperature,
        parallel=args.parallel_episodes,
        workers=args.env_workers,
        seed=seed,
    )


def make_policy(args: Args, base) -> Policy:
    """Build agent A on the starting model."""
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


@dataclass(frozen=True)
class Pieces:
    """The functions that make the parts of a run. Tests replace them, to drive a run without a model."""

    load_start: Callable = load_start
    make_world: Callable = make_world
    make_policy: Callable = make_policy
    load_reward_model: Callable = named_reward_model
    make_reward_model: Callable = make_reward_model
    of_base: Callable = identity.of_base
    of_reward_model: Callable = identity.of_reward_model
    draw_curves: Callable = draw_curves
    write_page: Callable = write_page


PIECES = Pieces()

# --- the run ------------------------------------------------------------------------------------------------

OTHER_GAMES = "these are not the games that the run was trained on"


def check_start(args: Args, base, world: World) -> None:
    """Raise UsageError if prompt and reply exceed the model, or if the first prompt of a game is too long."""
    if args.max_tokens > base.max_length:
        both = f"--max_prompt_tokens {args.max_prompt_tokens} with --max_new_tokens {args.max_new_tokens}"
        raise UsageError(f"{both}: the model reads {base.max_length} tokens; lower one of them")
    opening = world.opening_tokens()
    if opening > args.max_prompt_tokens:
        why = f"the first prompt of a game has {opening} tokens; give twice as many or more"
        raise UsageError(f"--max_prompt_tokens {args.max_prompt_tokens}: {why}")


def run(args: Args, newest: Path | None, argv: list[str], pieces: Pieces = PIECES) -> None:
    """Train, from the start or from the checkpoint `newest`. Raises UsageError."""
    started = time.perf_counter()
    set_up(args)
    saved = read_checkpoint(args, newest) if newest else None
    base = pieces.load_start(args, Path(args.out) if args.resume else None)
    identity.check(args, saved, pieces.of_base(base))
    gc.freeze()  # later collections skip the objects of torch and transformers
    world = pieces.make_world(dataclasses.replace(args, env_workers=0), base.chat, args.seed)
    check_start(args, base, world)
    if saved and saved.state["games"] != world.pool.env.fingerprint:
        raise UsageError(f"--env {args.env}: {OTHER_GAMES}; give the data that the run began with")
    named = pieces.load_reward_model(args, base) if args.dense_kind == "step_model" else None
    if saved and named:
        identity.check(args, saved, pieces.of_reward_model(named))
    folder = distributed.on_rank_0(lambda: make_run_folder(args))
    ranks = distributed.world_size()
    launcher = f"torchrun --nproc_per_node={ranks}" if launch.by_torchrun() and ranks > 1 else "python"
    command = f"{launcher} train.py --resume --out {shlex.quote(str(folder))}"
    distributed.watch(args.rank_timeout, functools.partial(end_hanging_run, command=command))
    with explained_endings(command):
        with usage_error(f"--out {folder}: "):
            lock = checkpoint.lock(folder) if distributed.rank() == 0 else contextlib.nullcontext()
        with lock:
            if distributed.rank() == 0:
                checkpoint.sweep(folder)
                write_run_facts(folder, argv, args.threads, ranks)
                checkpoint.write_text(folder / "config.json", config_text(args))
            train_in(folder, args, saved, base, named, started, pieces)
    gc.unfreeze()


def train_in(folder: Path, args: Args, saved, base, named, started: float, pieces: Pieces) -> None:
    """Train in a folder that this run has locked. `saved` is the Checkpoint to resume from, or None."""
    state = saved.state if saved else {}
    done = state.get("updates", 0)
    started -= state.get("seconds", 0.0)  # include the time of earlier starts
    log = open_log(folder, state) if distributed.rank() == 0 else None
    print_line(f"run folder: {folder}" + (f", resumed after update {done}" if saved else ""))
    if log and log.lost > 0:
        print_line(f"warning: {log.lost:,} bytes of transcripts.jsonl are lost; the run goes on without them")
    ranks = distributed.world_size()
    if saved and (before := state.get("ranks", ranks)) != ranks:
        print_line(f"resumed with {ranks} ranks in place of {before}: results differ by rounding")
    world = pieces.make_world(args, base.chat, args.seed)

    @functools.cache  # the warm start and the step reward model may use the same demonstrations
    def demonstrate(count: int) -> list[Trajectory]:
        shares = (args.expert_share, args.hesitation_share, args.faithful_share)
        episodes = demonstrations(world, count, *shares, args.warm_start_games)
        warn_of_crashes(episodes, "demonstrations")
        return episodes

    base = make_start(args, folder, base, demonstrate)
    parts = pieces.of_base(base)
    policy = pieces.make_policy(args, base)
    dense_reward = None
    if args.dense_kind == "step_model":
        dense_reward = pieces.make_reward_model(args, folder, base, policy, world, demonstrate, named)
        parts |= pieces.of_reward_model(dense_reward)
    elif args.dense_kind:
        dense_reward = make_dense_reward(args, policy)
    demonstrate.cache_clear()
    identity.check(args, saved, parts)
    algorithm, replay = rspo.train, ReplayBuffer(args.replay_strategy, args.replay_unit, seed=args.seed)
    if args.method == "spear":
        algorithm, replay = spear.train, spear.TurnBuffer(args)
    if saved:
        with usage_error(f"--out {folder}: "):
            policy.load_state_dicts(saved.of_agents)
            if args.dense_kind == "implicit":
                dense_reward.agent.load_state_dict(saved.tensors["implicit"])
        world.load_state_dict(state["world"])
        replay.load_state_dict(state["replay"])
    if log and args.tensorboard:
        log.listeners.append(tensorboard_listener(folder, log.lines))
    if log and args.wandb_project:
        log.listeners.append(wandb_listener(args.wandb_project, folder, dataclasses.asdict(args)))

    recorder = Recorder(args, folder, policy, world, dense_reward, log, started, parts, replay)
    if not saved:
        recorder.evaluate(0)
    bar = progress_bar(args.total_updates, "training", initial=done)
    with causes_of_divergence(args), bar as recorder.bar:
        # The recorder wraps the world (`collect`) and the dense reward (`score`), to measure their times
        algorithm(policy, recorder, recorder, args, recorder.log_update, recorder.end_loop, done, replay)
    if distributed.on_rank_0(lambda: log.of("evaluation")[-1]["update"] != args.total_updates):
        recorder.evaluate(args.total_updates)
    world.close()
    if log:
        checkpoint.write_folder(folder / "policy", policy.save)
        conclude(args, folder, log, time.perf_counter() - started, pieces.draw_curves, pieces.write_page)
        log.close()


# --- evaluation only ----------------------------------------------------------------------------------------


def evaluate_only(args: Args, newest: Path | None, argv: list[str]) -> None:
    """Evaluate a run's checkpoint, or --model as it is. Print the tables and write eval.json.

    The file holds the results and what a repetition needs: the flags, the games, the versions, the machine.
    """
    facts = run_facts(argv, args.threads, distributed.world_size())
    set_up(args)
    saved = read_checkpoint(args, newest) if newest else None
    base = load_start(args, Path(args.out) if newest else None)
    identity.check(args, saved, parts := identity.of_base(base))  # a checkpoint is loaded into it later
    check_start(args, base, make_world(dataclasses.replace(args, env_workers=0), base.chat, args.seed))
    folder = distributed.on_rank_0(lambda: make_run_folder(args))
    merged = base.changed and args.sampler == "vllm"  # an adapter was merged, and vLLM loads from a folder
    if merged and make_once(folder / "start", list, lambda _: base, Base.save):
        base = load_start(args, folder)
    policy = make_policy(args, base)
    distributed.watch(args.rank_timeout, end_hanging_run)
    started, panels, name = time.perf_counter(), {}, newest.name if newest else args.model
    with contextlib.closing(make_world(args, base.chat, args.seed)) as world:
        if saved:
            with usage_error(f"--out {folder}: "):
                policy.load_state_dicts(saved.of_agents)
            if saved.state["games"] != world.pool.env.fingerprint:
                print_line(f"warning: {OTHER_GAMES}")
        for split in args.eval_splits:
            _, panels[split] = play_panel(args, world, policy, split)
            print_line(f"success in % on {panels[split]['games']} games of {split}")
            print_line(panel_table({name: panels[split]}))
            print_line(solved_text(panels[split]))
        facts["games"] = world.pool.env.fingerprint
    facts |= {"policy": name, "panels": panels, "seconds": time.perf_counter() - started}
    facts |= {"identity": identity.of_evaluated(parts, saved), "config": json.loads(config_text(args))}
    if distributed.rank() == 0:
        path = eval_file(folder)
        checkpoint.write_text(path, json.dumps(facts, indent=2) + "\n")
        print_line(f"written to {path}")


# --- command line -------------------------------------------------------------------------------------------


def read_flags_on_ranks(argv: list[str]) -> tuple[Args, Path | None]:
    """Call `read_flags` on every rank; only rank 0 prints."""
    if distributed.rank() == 0 and not launch.is_launched():  # the launcher has printed the warnings
        return read_flags(argv)
    nowhere = io.StringIO()
    try:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            return read_flags(argv)
    except SystemExit:
        with contextlib.suppress(distributed.RankLost):
            distributed.wait()  # until rank 0 has printed: torchrun ends all ranks as soon as one has ended
        raise


def main(argv: list[str] | None = None, checked=None, pieces: Pieces = PIECES) -> None:
    """Run the command line. `checked` is the result of `read_flags(argv)`, if it was called already."""
    argv = sys.argv[1:] if argv is None else argv
    with explained_endings():
        with usage_error():
            distributed.start()
        args, newest = checked or read_flags_on_ranks(argv)
        distributed.wait()  # no rank may make the run folder while another still checks that it is new
        if args.plan:
            text, refused = plan.plan_of(args)
            print_line(text)
            if refused:
                raise UsageError(refused)
        elif args.eval_only:
            evaluate_only(args, newest, argv)
        else:
            run(args, newest, argv, pieces)
        distributed.stop()


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main(checked=CHECKED)
