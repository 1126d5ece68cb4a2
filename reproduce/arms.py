"""The experiments as data: the arms with their flags, the claims that compare them, the paper's numbers.

An arm is a set of flags of train.py. Arms that several experiments share are run once. Flags may contain
numbers in braces that follow from the size of an update (`runs.derived`):

    {more_tasks}     tasks per update with which GRPO plays as many episodes per update as RSPO
    {half_turns}     half of --minibatch_turns, so twice as many optimizer steps
    {keep}           groups that a kept buffer holds: 84 at 8 tasks per update

Every arm plays the same number of environment episodes, up to whole loops (`runs.updates_of`).

The paper's numbers are success in %, mean and standard deviation over seeds 0, 200, 400. Not included,
because our sources do not give them: the paper's numbers per task type, and its dense-only curve.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """A set of flags of train.py."""

    title: str  # its name in tables
    flags: str


@dataclass(frozen=True)
class Claim:
    """A statement to check: the arm `ahead` has more success than the arm `behind`."""

    text: str
    ahead: str
    behind: str


@dataclass(frozen=True)
class Paper:
    """Numbers of the paper for the arms of an experiment."""

    where: str  # benchmark and model
    success: dict[str, tuple[float, float | None]]  # by arm: mean and standard deviation, in %


@dataclass(frozen=True)
class Experiment:
    """Arms to run and claims to check.

    starts: names in STARTS; each arm runs from each start.
    training: keys of A's training log that the result keeps for each seed, for tables and figures.
    leads: comparisons of a swap with its baseline, set against the baseline's share of groups without spread.
    """

    question: str
    arms: tuple[str, ...]
    claims: tuple[Claim, ...] = ()
    starts: tuple[str, ...] = ("default",)
    papers: tuple[Paper, ...] = ()
    paper_says: str = ""
    training: tuple[str, ...] = ("zero_spread_groups",)
    leads: tuple[Claim, ...] = ()


STARTS = {  # flags that change the starting model, by name; Household only, other environments have "default"
    "sparse": "--faithful_share 0.05",
    "default": "",  # --faithful_share 0.15
    "easier": "--faithful_share 0.45",
    "hesitating": "--faithful_share 1 --expert_share 0.5 --hesitation_share 0.45",
}

# Only episodes with A_off > 0 are replayed. The buffer keeps its newest groups from loop to loop.
POSITIVE = "--replay_strategy positive --buffer_keep {keep} --off_policy_fraction"
CHEAP = f"--buffer_source phase1 {POSITIVE} 1/4"  # the preset cheap-swap
BOTH = f"--buffer_source both {POSITIVE} 1/2"

ARMS = {
    "grpo": Arm("GRPO", "--method outcome"),
    "gigpo": Arm("GiGPO", "--method outcome --algo gigpo"),
    "ppo": Arm("PPO", "--method outcome --algo ppo"),
    "rspo": Arm("RSPO + GRPO", "--method rspo"),
    "rspo-gigpo": Arm("RSPO + GiGPO", "--method rspo --algo gigpo"),
    "rspo-ppo": Arm("RSPO + PPO", "--method rspo --algo ppo"),
    "spear": Arm("SPEAR + GRPO", "--method spear"),
    "spear-gigpo": Arm("SPEAR + GiGPO", "--method spear --algo gigpo"),
    "random": Arm("RSPO, random sampling", "--replay_strategy random"),
    "variance": Arm("RSPO, variance sampling", "--replay_strategy variance"),
    "rspo_h": Arm("RSPO_H (own history, no B)", "--method rspo_h"),
    "rspo_o": Arm("RSPO_O (B on outcomes)", "--method rspo_o"),
    "dense": Arm("GRPO on dense rewards only", "--method dense"),
    "k-1": Arm("RSPO, k = 1", "--k 1"),
    "k-5": Arm("RSPO, k = 5", "--k 5"),
    "k-10": Arm("RSPO, k = 10", "--k 10"),
    "noise-0.1": Arm("RSPO, σ = 0.1", "--reward_noise 0.1"),
    "noise-0.3": Arm("RSPO, σ = 0.3", "--reward_noise 0.3"),
    # 1/16 of the tasks must be whole, so these have the paper's sizes
    "grpo-16": Arm("GRPO", "--method outcome --tasks_per_update 16"),
    "alpha-1-16": Arm("RSPO, α = 1/16", "--off_policy_fraction 1/16 --tasks_per_update 16 --buffer_tasks 28"),
    "alpha-1-8": Arm("RSPO, α = 1/8", "--off_policy_fraction 1/8 --tasks_per_update 16 --buffer_tasks 28"),
    "alpha-1-4": Arm("RSPO, α = 1/4", "--off_policy_fraction 1/4 --tasks_per_update 16 --buffer_tasks 28"),
    "alpha-1-2": Arm("RSPO, α = 1/2", "--off_policy_fraction 1/2 --tasks_per_update 16 --buffer_tasks 28"),
    "grpo-tasks": Arm("GRPO, more tasks per update", "--method outcome --tasks_per_update {more_tasks}"),
    "grpo-steps": Arm("GRPO, twice the optimizer steps", "--method outcome --minibatch_turns {half_turns}"),
    "cheap": Arm("cheap swap", CHEAP),
    "cheap-o": Arm("cheap swap, B on outcomes", f"--method rspo_o {CHEAP}"),
    "rspo-shaped": Arm("RSPO, shaped reward (oracle)", "--dense_reward shaped"),
    "rspo-implicit": Arm("RSPO, implicit reward", "--dense_reward implicit"),
    "rspo-novelty": Arm("RSPO, novelty", "--dense_reward novelty"),
    "cheap-shaped": Arm("cheap swap, shaped reward (oracle)", f"--dense_reward shaped {CHEAP}"),
    "cheap-implicit": Arm("cheap swap, implicit reward", f"--dense_reward implicit {CHEAP}"),
    "cheap-novelty": Arm("cheap swap, novelty", f"--dense_reward novelty {CHEAP}"),
    "cheap-clip": Arm("cheap swap, clip centred at 1", f"{CHEAP} --clip_centre one"),
    "both": Arm("B's episodes and A's own", BOTH),
    "history": Arm("A's own history, no B", f"--method rspo_h {POSITIVE} 1/2"),
    "cheap-gigpo": Arm("cheap swap + GiGPO", f"--algo gigpo {CHEAP}"),
    "both-gigpo": Arm("B's episodes and A's own + GiGPO", f"--algo gigpo {BOTH}"),
}

TABLE1 = (
    Paper(
        "ALFWorld, 1.5B",
        {
            "grpo": (69.0, 7.1),
            "rspo": (74.7, 1.2),
            "gigpo": (88.8, 1.6),
            "rspo-gigpo": (90.4, 1.2),
            "ppo": (68.0, 7.5),
            "rspo-ppo": (76.6, 2.8),
            "spear": (50.0, 2.1),
            "spear-gigpo": (71.9, 4.3),
        },
    ),
    Paper(
        "WebShop, 1.5B",
        {
            "grpo": (65.1, 5.9),
            "rspo": (70.6, 4.3),
            "gigpo": (67.4, 7.8),
            "rspo-gigpo": (75.3, 3.9),
            "ppo": (57.3, 4.6),
            "rspo-ppo": (69.3, 6.6),
            "spear": (46.1, 5.1),
            "spear-gigpo": (44.5, 9.0),
        },
    ),
    Paper(
        "ALFWorld, 7B",
        {
            "grpo": (78.4, 3.7),
            "rspo": (80.2, 1.8),
            "gigpo": (92.4, 1.2),
            "rspo-gigpo": (95.3, 0.8),
            "ppo": (80.7, 3.7),
            "rspo-ppo": (83.1, 3.2),
            "spear": (68.5, 7.1),
            "spear-gigpo": (78.4, 4.0),
        },
    ),
    Paper(
        "WebShop, 7B",
        {
            "grpo": (68.5, 6.3),
            "rspo": (75.0, 1.6),
            "gigpo": (75.3, 3.0),
            "rspo-gigpo": (77.3, 3.1),
            "ppo": (70.6, 3.3),
            "rspo-ppo": (74.0, 4.4),
            "spear": (61.5, 9.3),
            "spear-gigpo": (67.7, 3.6),
        },
    ),
)
WEBSHOP = "WebShop, 1.5B"

EXPERIMENTS = {
    "table1": Experiment(
        "Does RSPO help each estimator, and is it ahead of SPEAR?",
        ("grpo", "rspo", "spear", "gigpo", "rspo-gigpo", "spear-gigpo", "ppo", "rspo-ppo"),
        (
            Claim("RSPO + GRPO is ahead of GRPO", "rspo", "grpo"),
            Claim("RSPO + GiGPO is ahead of GiGPO", "rspo-gigpo", "gigpo"),
            Claim("RSPO + PPO is ahead of PPO", "rspo-ppo", "ppo"),
            Claim("RSPO + GRPO is ahead of SPEAR + GRPO", "rspo", "spear"),
            Claim("RSPO + GiGPO is ahead of SPEAR + GiGPO", "rspo-gigpo", "spear-gigpo"),
        ),
        papers=TABLE1,
    ),
    "table2": Experiment(
        "Which episodes should be replayed, and is B's dense reward needed?",
        ("rspo", "random", "variance", "rspo_h", "rspo_o", "grpo"),
        (
            Claim("reward sampling is ahead of random sampling", "rspo", "random"),
            Claim("reward sampling is ahead of variance sampling", "rspo", "variance"),
            Claim("RSPO is ahead of RSPO_H", "rspo", "rspo_h"),
            Claim("RSPO is ahead of RSPO_O", "rspo", "rspo_o"),
        ),
        papers=(
            Paper(
                WEBSHOP,
                {
                    "rspo": (70.6, None),
                    "random": (12.8, None),
                    "variance": (63.0, None),
                    "rspo_h": (57.0, None),
                    "rspo_o": (64.1, None),
                },
            ),
        ),
    ),
    "figure3": Experiment(
        "What does an agent learn from dense rewards only?",
        ("dense", "grpo"),
        (Claim("GRPO on outcomes is ahead of GRPO on dense rewards", "grpo", "dense"),),
        paper_says="success rises to about .49 near update 110 of 150 and then falls to about .1, while the "
        "mean dense reward climbs to about .8",
        training=("success", "dense_reward"),
    ),
    "states": Experiment(
        "Does RSPO repeat fewer states than GRPO?",
        ("grpo", "rspo"),
        paper_says="repeated states at update 50, 100, 145 of 150: GRPO 1011, 1084, 1167; RSPO 917, 889, 623 "
        "(counts of an update)",
        training=("repeated_states_per_episode",),
    ),
    "alpha": Experiment(
        "Which share α of an update should be replayed?",
        ("grpo-16", "alpha-1-16", "alpha-1-8", "alpha-1-4", "alpha-1-2"),
        (
            Claim("α = 1/16 is ahead of GRPO", "alpha-1-16", "grpo-16"),
            Claim("α = 1/8 is ahead of GRPO", "alpha-1-8", "grpo-16"),
            Claim("GRPO is ahead of α = 1/4", "grpo-16", "alpha-1-4"),
            Claim("GRPO is ahead of α = 1/2", "grpo-16", "alpha-1-2"),
        ),
        papers=(
            Paper(
                WEBSHOP,
                {
                    "grpo-16": (61.7, None),
                    "alpha-1-16": (67.2, None),
                    "alpha-1-8": (66.4, None),
                    "alpha-1-4": (54.7, None),
                    "alpha-1-2": (60.9, None),
                },
            ),
        ),
    ),
    "k": Experiment(
        "How many updates should a phase have?",
        ("k-1", "rspo", "k-5", "k-10"),
        (
            Claim("k = 3 is ahead of k = 1", "rspo", "k-1"),
            Claim("k = 3 is ahead of k = 5", "rspo", "k-5"),
            Claim("k = 3 is ahead of k = 10", "rspo", "k-10"),
        ),
        papers=(
            Paper(
                WEBSHOP,
                {"k-1": (65.6, None), "rspo": (66.4, None), "k-5": (61.7, None), "k-10": (61.7, None)},
            ),
        ),
    ),
    "noise": Experiment(
        "Is RSPO robust to noise in the dense scores?",
        ("rspo", "noise-0.1", "noise-0.3", "grpo"),
        (
            Claim("σ = 0 is ahead of σ = 0.1", "rspo", "noise-0.1"),
            Claim("σ = 0 is ahead of σ = 0.3", "rspo", "noise-0.3"),
        ),
        papers=(
            Paper(WEBSHOP, {"rspo": (67.2, None), "noise-0.1": (64.1, None), "noise-0.3": (60.9, None)}),
        ),
    ),
    "dense": Experiment(
        "Which dense reward does B need?",
        (
            *("grpo", "rspo_o", "rspo", "rspo-shaped", "rspo-implicit", "rspo-novelty"),
            *("cheap-o", "cheap", "cheap-shaped", "cheap-implicit", "cheap-novelty"),
        ),
        (
            # The shaped reward is an oracle. If B does not gain from it, B needs no dense reward
            Claim("published swap: the shaped reward is ahead of B on outcomes", "rspo-shaped", "rspo_o"),
            Claim("published swap: the step reward model is ahead of B on outcomes", "rspo", "rspo_o"),
            Claim("published swap: the implicit reward is ahead of B on outcomes", "rspo-implicit", "rspo_o"),
            Claim("published swap: novelty is ahead of B on outcomes", "rspo-novelty", "rspo_o"),
            Claim(
                "published swap: the shaped reward is ahead of the step reward model", "rspo-shaped", "rspo"
            ),
            Claim(
                "published swap: the step reward model is ahead of the implicit one", "rspo", "rspo-implicit"
            ),
            Claim("published swap: the step reward model is ahead of novelty", "rspo", "rspo-novelty"),
            Claim("the published swap with the shaped reward is ahead of GRPO", "rspo-shaped", "grpo"),
            Claim("cheap swap: the shaped reward is ahead of B on outcomes", "cheap-shaped", "cheap-o"),
            Claim("cheap swap: the step reward model is ahead of B on outcomes", "cheap", "cheap-o"),
            Claim("cheap swap: the implicit reward is ahead of B on outcomes", "cheap-implicit", "cheap-o"),
            Claim("cheap swap: novelty is ahead of B on outcomes", "cheap-novelty", "cheap-o"),
            Claim("cheap swap: the shaped reward is ahead of the step reward model", "cheap-shaped", "cheap"),
            Claim(
                "cheap swap: the step reward model is ahead of the implicit one", "cheap", "cheap-implicit"
            ),
            Claim("cheap swap: the step reward model is ahead of novelty", "cheap", "cheap-novelty"),
            Claim("the cheap swap with the shaped reward is ahead of GRPO", "cheap-shaped", "grpo"),
        ),
    ),
    "pays": Experiment(
        "When does the swap pay for its episodes?",
        (
            *(
                "grpo",
                "grpo-tasks",
                "grpo-steps",
                "rspo",
                "rspo_o",
                "cheap",
                "cheap-o",
                "both",
                "history",
                "cheap-clip",
            ),
            *("gigpo", "rspo-gigpo", "cheap-gigpo", "both-gigpo"),
        ),
        (
            Claim("the published swap is ahead of GRPO", "rspo", "grpo"),
            Claim("the published swap is ahead of RSPO_O (effect of the dense reward)", "rspo", "rspo_o"),
            Claim("the cheap swap is ahead of GRPO", "cheap", "grpo"),
            Claim("the cheap swap is ahead of the published swap", "cheap", "rspo"),
            Claim(
                "the cheap swap is ahead of the cheap swap with B on outcomes (effect of the dense reward)",
                "cheap",
                "cheap-o",
            ),
            Claim("the cheap swap is ahead of A's own history (effect of B's episodes)", "cheap", "history"),
            Claim("the cheap swap is ahead of GRPO with more tasks (effect of data)", "cheap", "grpo-tasks"),
            Claim("the cheap swap is ahead of GRPO with twice the optimizer steps", "cheap", "grpo-steps"),
            Claim("the cheap swap is ahead of one with the clip centred at 1", "cheap", "cheap-clip"),
            Claim("both sources are ahead of the cheap swap", "both", "cheap"),
            Claim("GiGPO with the published swap is ahead of GiGPO", "rspo-gigpo", "gigpo"),
            Claim("GiGPO with the cheap swap is ahead of GiGPO", "cheap-gigpo", "gigpo"),
            Claim("GiGPO with both sources is ahead of GiGPO", "both-gigpo", "gigpo"),
        ),
        starts=("sparse", "default", "easier", "hesitating"),
        leads=(
            Claim("the published swap is ahead of GRPO", "rspo", "grpo"),
            Claim("the cheap swap is ahead of GRPO", "cheap", "grpo"),
            Claim("both sources are ahead of GRPO", "both", "grpo"),
            Claim("A's own history is ahead of GRPO", "history", "grpo"),
            Claim("GiGPO with the cheap swap is ahead of GiGPO", "cheap-gigpo", "gigpo"),
        ),
    ),
}
