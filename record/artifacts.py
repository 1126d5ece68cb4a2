"""The models that a run makes once and every rank loads: start/ and reward_model/ of the run folder.

The ranks make them together, and rank 0 writes them to the run folder. All ranks then load them from there,
as a resumed run does, so that a run and its resumption continue with the same numbers. A folder that exists
is not made again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError

from buffer import Trajectory
from chat import Chat
from demo.tiny_model import check_actions, silent_words_of, tiny_base
from demo.warm_start import warm_start
from dense.implicit import ImplicitReward
from dense.novelty import NoveltyReward
from dense.shaped import ShapedReward
from flags import Args, UsageError, env_maker
from model import Base, load_base
from policy import Policy
from record import checkpoint
from record.checkpoint import Checkpoint
from record.metrics import mean
from record.model_checks import rendering_gap
from record.recorder import advance, print_line, progress_bar, warn_of_crashes
from record.reward_model_files import load_reward_model, save_reward_model
from reward_model import DenseReward, StepRewardModel
from rollout import World
from scale import distributed

Demonstrate = Callable[[int], list[Trajectory]]  # number of episodes -> the first demonstrations


@contextlib.contextmanager
def usage_error(flag: str = "", remedy: str = "", instead_of: str = ""):
    """Raise a ValueError as a UsageError, with the flag before its message and a remedy after it.

    A message that begins with `instead_of` loses that part.
    """
    try:
        yield
    except ValueError as error:
        raise UsageError(flag + str(error).removeprefix(instead_of) + remedy) from None


def make_once(
    folder: Path,
    play: Callable[[], list],
    make: Callable[[list], object],
    save: Callable[[object, Path], None],
) -> bool:
    """Save what `make` returns in `folder`, unless the folder exists. Return True if it was made.

    `make` gets the episodes that all ranks have played with `play`. Every rank calls both; rank 0 calls
    `save(made, folder)`.
    """
    if distributed.on_rank_0(folder.is_dir):
        return False
    made = make(play())
    distributed.on_rank_0(lambda: checkpoint.write_folder(folder, functools.partial(save, made)))
    return True


def read_checkpoint(args: Args, newest: Path) -> Checkpoint:
    """Read the checkpoint that the run continues from.

    Raises UsageError if it lacks a critic (PPO) or the weights of the implicit reward.
    """
    with usage_error(f"--out {args.out}: "):
        saved = checkpoint.read(newest)
    needed = ["critic"] if args.algo == "ppo" else []
    if needed and args.explores:
        needed.append("explorer_critic")
    if args.dense_kind == "implicit" and not args.eval_only:
        needed.append("implicit")
    for name in needed:
        if name not in saved.tensors:
            why = f"{newest.name} has no {name}.safetensors; start a new run"
            raise UsageError(f"--out {args.out}: {why}")
    return saved


# --- the starting model -------------------------------------------------------------------------------------


def device_of(args: Args) -> str:
    """Return the device of this rank: each rank has a GPU of its own."""
    if args.device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    if distributed.world_size() > 1:
        return f"cuda:{distributed.local_rank()}"
    return "cuda" if args.device == "auto" else args.device


def load_start(args: Args, folder: Path | None):
    """Load the starting model: the run's own start/ if `folder` has one, else --model. Raises UsageError."""
    settings = {
        "dtype": args.dtype,
        "device": device_of(args),
        "gradient_checkpointing": args.gradient_checkpointing,
        "autocast": args.autocast,
    }
    if folder and (folder / "start").is_dir():
        return load_own_start((folder / "start").resolve(), settings)
    with usage_error():
        if args.model != "tiny":
            base = load_base(args.model, **settings)
            warn_of_rendering("model", args.model, base.chat)
            return base
        env = env_maker(args)()
        base = tiny_base(
            env.vocabulary,
            silent_words_of(env),
            d_model=args.tiny_width,
            layers=args.tiny_layers,
            heads=args.tiny_heads,
            intermediate=2 * args.tiny_width,
            max_length=args.max_tokens,
            seed=args.seed,
            **settings,
        )
        check_actions(base.chat, env)
        return base


def warn_of_rendering(flag: str, name: str, chat: Chat) -> None:
    """Print a warning if prompts have other token ids than the tokenizer's own rendering."""
    if gap := rendering_gap(chat):
        print_line(f"warning: --{flag} {name}: {gap}")


def load_own_start(start: Path, settings: dict):
    """Load the run's start/. Raises UsageError if it is damaged. Update the path to it in policy/."""
    try:
        base = load_base(str(start), **settings)
    except (ValueError, OSError, RuntimeError, KeyError, SafetensorError) as error:
        why = str(error).removeprefix(f"--model {start}: ")
        remedy = "put the old files back, or start a new run"
        raise UsageError(f"--out {start.parent}: start/ cannot be loaded ({why}); {remedy}") from None
    if distributed.rank() == 0:
        update_adapter(start.parent / "policy", start)
    return base


def update_adapter(policy: Path, start: Path) -> None:
    """Let the adapter in policy/ name start/ by its present path, if the run folder was moved.

    peft finds an adapter's base by an absolute path, or by one that is relative to the current directory.
    """
    path = policy / "adapter_config.json"
    if not path.is_file() or not os.access(policy, os.W_OK):
        return
    try:
        settings = json.loads(path.read_text())
        old = settings["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        print_line(
            f"warning: {path} is damaged ({error}); the run does not need it, and writes it at its end"
        )
        return
    if old != str(start):
        settings["base_model_name_or_path"] = str(start)
        checkpoint.write_text(path, json.dumps(settings, indent=2, sort_keys=True))


def demonstrator(args: Args) -> str:
    """Describe the player of the demonstrations."""
    errors = 1 - args.expert_share - args.hesitation_share
    player = (
        f"an expert that searches ({args.expert_share:.0%} of the turns), hesitates "
        f"({args.hesitation_share:.0%}) and errs ({errors:.0%})"
    )
    if args.faithful_share < 1:
        player += f"; in {1 - args.faithful_share:.0%} of the games it plays for another goal than the task"
    return player


def make_start(args: Args, folder: Path, base, demonstrate: Demonstrate):
    """Return the model that the agents start from: `base`, or start/ if the run has to make one.

    A run makes one if --warm_start is above 0, or if an adapter was merged into --model.
    """

    def play() -> list[Trajectory]:
        if not args.warm_start:
            return []
        name = "the tiny model" if args.model == "tiny" else args.model
        print_line(
            f"warm start, not part of RSPO: {name} cannot act yet, so it is first trained for "
            f"{args.warm_start} supervised updates on {args.warm_start_episodes:,} games played by "
            f"{demonstrator(args)}"
        )
        return demonstrate(args.warm_start_episodes)

    def teach(episodes: list[Trajectory]):
        if args.warm_start:
            warm_start_base(args, base, episodes)
        return base

    if (args.warm_start or base.changed) and make_once(folder / "start", play, teach, Base.save):
        base = load_start(args, folder)
    return base


def warm_start_base(args: Args, base, episodes: list[Trajectory]) -> None:
    """Train the starting model on the demonstrations, and print the last loss. Raises UsageError."""
    flag = f"--warm_start {args.warm_start}: "
    with progress_bar(args.warm_start, "warm start", leave=False) as bar, usage_error(flag):
        losses = warm_start(
            base,
            episodes,
            updates=args.warm_start,
            turns_per_update=args.warm_start_turns,
            learning_rate=args.warm_start_lr,
            seed=args.seed,
            tokens_per_micro_batch=args.tokens_per_micro_batch,
            progress=lambda update, loss: advance(bar, loss=loss),
        )
    solved = mean([episode.success for episode in episodes])
    print_line(f"warm start: done, loss {losses[-1]:.3f}; {solved:.1%} of its demonstrations were solved")


# --- dense rewards ------------------------------------------------------------------------------------------


def make_dense_reward(args: Args, policy) -> DenseReward:
    """Return the dense reward of --dense_reward, if it is not the step reward model. `policy` is agent A.

    pi_prm of the implicit reward starts as the starting model, like `policy`, and has A's settings except for
    its learning rate.
    """
    print_line(f"dense reward: {args.dense_reward}")
    if args.dense_reward == "shaped":
        return ShapedReward()
    if args.dense_reward == "novelty":
        return NoveltyReward()
    settings = dataclasses.replace(policy.settings, learning_rate=args.implicit_lr, critic_learning_rate=None)
    return ImplicitReward(Policy(policy.base, "implicit", **vars(settings)), args.implicit_beta, args)


# --- the step reward model ----------------------------------------------------------------------------------


def reward_model_settings(args: Args, base) -> dict:
    return {
        "dtype": getattr(torch, args.dtype),
        "autocast": args.autocast,
        "device": base.device,
        "tokens_per_micro_batch": args.tokens_per_micro_batch,
        "gradient_checkpointing": args.gradient_checkpointing,
    }


def named_reward_model(args: Args, base) -> StepRewardModel | None:
    """Load the step reward model that the flags name, before there is a run folder. None if they name none.

    It is the model of --reward_model, the fitted model of a resumed run, or the model of
    --reward_model_backbone, which is not fitted yet. Raises UsageError.
    """
    if args.reward_model:
        with usage_error(f"--reward_model {args.reward_model}: "):
            return load_reward_model(args.reward_model, base.chat, **reward_model_settings(args, base))
    if args.resume and Path(args.out, "reward_model").is_dir():
        return load_fitted(args, Path(args.out), base)
    name = args.reward_model_backbone
    if not name:
        return None
    with usage_error(f"--reward_model_backbone {name}: ", instead_of=f"--model {name}: "):
        model = StepRewardModel.from_pretrained(name, seed=args.seed, **reward_model_settings(args, base))
        warn_of_rendering("reward_model_backbone", name, model.chat)
        return model


def load_fitted(args: Args, folder: Path, base) -> StepRewardModel:
    """Load the step reward model that the run has fitted. Raises UsageError."""
    made = folder / "reward_model"
    with usage_error(f"--out {folder}: ", f"; remove {made} to fit it again"):
        return load_reward_model(made, base.chat, **reward_model_settings(args, base))


def make_reward_model(
    args: Args, folder: Path, base, policy, world: World, demonstrate: Demonstrate, named
) -> StepRewardModel:
    """Return the step reward model: the one of --reward_model, or the run's own, which is fitted once.

    `named` is the result of `named_reward_model`. Raises UsageError.
    """

    def play() -> list[Trajectory]:
        count = args.reward_model_episodes
        expert = args.reward_model_source == "expert"
        player = demonstrator(args) if expert else "the starting policy"
        print_line(f"step reward model: fitted on {count:,} games played by {player}")
        if expert:
            return demonstrate(count)
        episodes = world.practice(policy, count, args.warm_start_games)
        warn_of_crashes(episodes, "games")
        return episodes

    model = named
    if not args.reward_model and make_once(
        folder / "reward_model",
        play,
        lambda episodes: fit_reward_model(args, base, named, episodes),
        save_reward_model,
    ):
        model = load_fitted(args, folder, base)
    values = {name: "n/a" if value is None else value for name, value in model.report.items()}
    for name in ("held_out_episodes", "held_out_successes", "auc", "correlation", "mse", "mse_of_mean"):
        if name not in values:
            source = args.reward_model or folder / "reward_model"
            raise UsageError(f"--reward_model {source}: its reward_model.json lacks {name}; fit a new one")
    print_line(
        "step reward model: on {held_out_episodes:,} held-out episodes ({held_out_successes} solved) AUC "
        "{auc:.3}, correlation {correlation:.3}, MSE {mse:.3} (of always predicting the mean: "
        "{mse_of_mean:.3})".format(**values)
    )
    return model


def fit_reward_model(args: Args, base, model, episodes: list[Trajectory]) -> StepRewardModel:
    """Fit `model`, by default one made of the starting model, on the episodes. Raises UsageError."""
    model = model or StepRewardModel.from_base(base, seed=args.seed, **reward_model_settings(args, base))
    with (
        progress_bar(0, "step reward model", leave=False) as bar,
        warnings.catch_warnings(record=True) as caught,
        usage_error(),  # too few episodes, or a step too long for the backbone
    ):

        def show(update: int, updates: int, loss: float) -> None:
            bar.total = updates
            advance(bar, loss=loss)

        model.fit(
            episodes,
            epochs=args.reward_model_epochs,
            learning_rate=args.reward_model_lr,
            seed=args.seed,
            progress=show,
        )
    for warning in caught:
        print_line(f"warning: {warning.message}")
    return model.to("cpu")  # the run scores with a copy that is loaded from the saved file
