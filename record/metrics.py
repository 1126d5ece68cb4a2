"""Numbers that describe episodes: the metrics of an update's episodes, a panel's results, a run's progress.

docs/METRICS.md defines every name. Shares and success are in 0-1.
"""

from __future__ import annotations

import math

from buffer import Group, StopReason, Trajectory

UNKNOWN = "unknown"  # the task type of a game that crashed at its start


def mean(values: list[float]) -> float:
    """Average the values; 0 if there are none."""
    return sum(values) / len(values) if values else 0.0


def episode_metrics(groups: list[Group], reward: str) -> dict[str, float]:
    """Describe the episodes of one update. Crashed episodes are counted, but enter no mean.

    reward: the training reward of the agent, "outcome" or "dense".
    """
    members = [member for group in groups for member in group.trajectories]
    episodes = [member for member in members if member.usable]
    rewards = []  # by group
    for group in groups:
        rewards.append([member.reward(reward) for member in group.trajectories if member.usable])
    rewards = [group for group in rewards if group]
    turns = sum(len(episode.steps) for episode in episodes)
    truncated = sum(step.truncated for episode in episodes for step in episode.steps)
    trainable = sum(len(group.usable_episodes(reward)) for group in groups)
    metrics = {
        "success": mean([episode.success for episode in episodes]),
        "outcome": mean([episode.outcome for episode in episodes]),
        "turns_per_episode": mean([len(episode.steps) for episode in episodes]),
        "invalid_actions": sum(episode.invalid_actions for episode in episodes) / max(turns, 1),
        "truncated_replies": truncated / max(turns, 1),
        "repeated_states": sum(episode.repeated_states for episode in episodes),
        "repeated_states_per_episode": mean([episode.repeated_states for episode in episodes]),
        "zero_spread_groups": mean([max(group) == min(group) for group in rewards]),
        "step_limit_episodes": sum(episode.stop_reason is StopReason.STEP_LIMIT for episode in episodes),
        "token_limit_episodes": sum(member.stop_reason is StopReason.TOKEN_LIMIT for member in members),
        "crashed_episodes": sum(member.stop_reason is StopReason.CRASHED for member in members),
        "left_out_episodes": len(members) - trainable,
        "sampled_episodes": len(members),
        "sampled_turns": sum(len(member.steps) for member in members),
    }
    if reward == "dense":
        metrics["dense_reward"] = mean([total for group in rewards for total in group])
    return metrics


def wilson_interval(successes: int, games: int) -> list[float]:
    """Return the 95 % interval of a success rate: the lower and the upper end   (Wilson 1927)

    [0, 1] without games.
    """
    if not games:
        return [0.0, 1.0]
    z, share = 1.959964, successes / games  # z: 97.5 % quantile of the normal distribution
    middle = share + z**2 / (2 * games)
    half = z * math.sqrt(share * (1 - share) / games + z**2 / (4 * games**2))
    scale = 1 + z**2 / games
    return [max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)]


def success_of(games: list[Trajectory]) -> dict:
    """Return the number of games, the number and share of solved ones, and the share's 95 % interval."""
    successes = sum(game.success for game in games)
    return {
        "games": len(games),
        "successes": successes,
        "success": mean([game.success for game in games]),
        "success_interval": wilson_interval(successes, len(games)),
    }


def panel(trajectories: list[Trajectory], task_types: tuple[str, ...]) -> dict:
    """Return a panel's results, of all games and by task type. A crashed game counts as not solved.

    A game that crashed at its start counts under the type "unknown". So the types add up to all games.
    """
    games_of_type: dict[str, list[Trajectory]] = {task_type: [] for task_type in task_types}
    for trajectory in trajectories:
        task_type = trajectory.task_type if trajectory.task_type in task_types else UNKNOWN
        games_of_type.setdefault(task_type, []).append(trajectory)
    return {
        **success_of(trajectories),
        "outcome": mean([game.outcome for game in trajectories]),
        "turns_per_episode": mean([len(game.steps) for game in trajectories]),
        "crashed_episodes": sum(game.stop_reason is StopReason.CRASHED for game in trajectories),
        "by_type": {task_type: success_of(games) for task_type, games in games_of_type.items()},
    }


def result_of_type(line: dict, task_type: str) -> dict:
    """Return the result of a task type in a panel; no games if the panel lacks the type."""
    return line["by_type"].get(task_type, {"games": 0, "success": 0.0})


def types_of(lines: list[dict]) -> list[str]:
    """List the task types of several panels, each once. "unknown" is in some panels only."""
    return list(dict.fromkeys(task_type for line in lines for task_type in line["by_type"]))


def start_and_end(lines: list[dict]) -> dict[str, tuple[dict, dict]]:
    """Return the first and the last line of each split's panel."""
    first, last = {}, {}
    for line in lines:
        if line["agent"] == "evaluation":
            first.setdefault(line["split"], line)
            last[line["split"]] = line
    return {split: (first[split], last[split]) for split in first}


def progress(start: dict, end: dict) -> dict:
    """Return a split's part of summary.json."""
    result = {"games": end["games"]}
    for key in ("success", "outcome", "crashed_episodes"):
        result |= {f"{key}_start": start[key], f"{key}_end": end[key]}
    result["by_type"] = {}
    for task_type in types_of([start, end]):
        first, last = result_of_type(start, task_type), result_of_type(end, task_type)
        result["by_type"][task_type] = {
            "games": last["games"],
            "start": first["success"],
            "end": last["success"],
        }
    return result
