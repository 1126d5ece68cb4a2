"""Numbers that describe episodes: the metrics of an update's episodes, a panel's results, a run's progress.

docs/METRICS.md defines every name. Shares and success are in 0-1.
"""

from __future__ import annotations

from buffer import Group, StopReason, Trajectory


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
    trainable = sum(len(group.usable(reward)) for group in groups)
    metrics = {
        "success": mean([episode.success for episode in episodes]),
        "outcome": mean([episode.outcome for episode in episodes]),
        "turns_per_episode": mean([len(episode.steps) for episode in episodes]),
        "invalid_actions": sum(episode.invalid_actions for episode in episodes) / max(turns, 1),
        "truncated_replies": truncated / max(turns, 1),
        "repeated_states": sum(episode.repeated_states for episode in episodes),
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


def panel(trajectories: list[Trajectory], task_types: tuple[str, ...]) -> dict:
    """Return the results of a panel, overall and per task type. A crashed game counts as not solved."""
    by_type = {}
    for task_type in task_types:
        games = [trajectory for trajectory in trajectories if trajectory.task_type == task_type]
        by_type[task_type] = {"games": len(games), "success": mean([game.success for game in games])}
    return {
        "games": len(trajectories),
        "success": mean([game.success for game in trajectories]),
        "outcome": mean([game.outcome for game in trajectories]),
        "turns_per_episode": mean([len(game.steps) for game in trajectories]),
        "crashed_episodes": sum(game.stop_reason is StopReason.CRASHED for game in trajectories),
        "by_type": by_type,
    }


def start_and_end(lines: list[dict]) -> dict[str, tuple[dict, dict]]:
    """Return the first and the last panel line of each split."""
    first, last = {}, {}
    for line in lines:
        if line["agent"] == "evaluation":
            first.setdefault(line["split"], line)
            last[line["split"]] = line
    return {split: (first[split], last[split]) for split in first}


def progress(start: dict, end: dict) -> dict:
    """Return a split's entry of summary.json, from its first and its last panel line."""
    ends = {"start": start, "end": end}
    return {
        "games": end["games"],
        **{
            f"{key}_{when}": line[key]
            for key in ("success", "outcome", "crashed_episodes")
            for when, line in ends.items()
        },
        "by_type": {
            kind: {"games": result["games"]}
            | {when: line["by_type"][kind]["success"] for when, line in ends.items()}
            for kind, result in start["by_type"].items()
        },
    }
