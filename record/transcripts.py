"""The episodes that a run keeps as text in transcripts.jsonl: which ones, and how much of each.

The sample is bounded. `is_kept` thins out the loops and panels: their number grows with the logarithm of the
length of the run. A loop keeps at most ten episodes:

    B         its first update: the first solved and the first unsolved episode. Its last update: the solved
              one with the lowest dense reward and the unsolved one with the highest. There the dense reward
              and the outcome disagree most.
    buffer    the first solved and the first unsolved episode
    A         its first update: the first solved and the first unsolved episode
    replayed  the last update of A: the first solved and the first unsolved episode that it drew

A panel keeps the first episode of each task type, and a solved and an unsolved one. An episode keeps at most
`TEXT_LIMIT` characters.
"""

from __future__ import annotations

from collections.abc import Callable

from buffer import Trajectory

KEPT_LOOPS = 16
TEXT_LIMIT = 100_000  # characters of an episode's observations and replies together
LONGEST_TEXT = 4_000  # characters of one observation or reply
TURNS = 100  # turns at the start, and as many at the end, of an episode
CUT = " [... {} characters are left out ...] "


def is_kept(number: int) -> bool:
    """Return True for the loops and panels whose episodes are kept.

    These are all up to 16, every 2nd up to 32, every 4th up to 64, and so on. The total number of loops plays
    no part, so a run that is resumed for longer keeps the same episodes.
    """
    distance = 1
    while number > KEPT_LOOPS * distance:
        distance *= 2
    return number % distance == 0


def one_of_each(episodes: list[Trajectory]) -> list[Trajectory]:
    """Return the first solved and the first unsolved episode, if there are any."""
    first = {}
    for episode in episodes:
        first.setdefault(episode.success, episode)
    return list(first.values())


def misjudged(episodes: list[Trajectory]) -> list[Trajectory]:
    """Return the solved episode with the lowest dense reward, and the unsolved one with the highest."""
    scored = [e for e in episodes if e.usable and all(step.dense_score is not None for step in e.steps)]
    solved = [episode for episode in scored if episode.success]
    unsolved = [episode for episode in scored if not episode.success]
    found = []
    if solved:
        found.append(min(solved, key=lambda episode: episode.reward("dense")))
    if unsolved:
        found.append(max(unsolved, key=lambda episode: episode.reward("dense")))
    return found


def of_panel(episodes: list[Trajectory]) -> list[Trajectory]:
    """Return the first episode of each task type, and the first solved and unsolved ones."""
    first = {}
    for episode in episodes:
        first.setdefault(episode.task_type, episode)
    return distinct([*first.values(), *one_of_each(episodes)])


def distinct(episodes: list[Trajectory]) -> list[Trajectory]:
    """Return the episodes without repetitions of the same object."""
    return list({id(episode): episode for episode in episodes}.values())


def transcript(trajectory: Trajectory, decode: Callable[[list[int]], str], **about) -> dict:
    """Return an episode as a line of transcripts.jsonl. `decode` turns reply tokens into text."""
    steps = []
    for step in trajectory.steps:
        line = {
            "observation": step.observation,
            "reply": decode(step.action_ids),
            "action": step.action,
            "valid": step.valid,
            "dense_score": step.dense_score,
        }
        for name in ("advantage", "log_centre", "log_ratio"):
            value = getattr(step, name)
            if value is not None and (name == "advantage" or about.get("agent") == "replayed"):
                line[name] = round(value, 4)
        steps.append(line)
    return shortened(
        {
            **about,
            "task_id": trajectory.task_id,
            "task_type": trajectory.task_type,
            "task": trajectory.task,
            "outcome": trajectory.outcome,
            "success": trajectory.success,
            "stop_reason": trajectory.stop_reason.value,
            "steps": steps,
        }
    )


def shortened(episode: dict, text_limit: int = TEXT_LIMIT) -> dict:
    """Return a transcript with at most `text_limit` characters in its turns, and at most 2 * TURNS turns.

    "dense_reward" is then the sum over all turns, and "turns" their number. Long texts lose their middle.
    """
    steps = episode["steps"]
    if len(steps) > 2 * TURNS:
        scores = [step["dense_score"] for step in steps]
        episode = {**episode, "turns": len(steps), "steps": steps[:TURNS] + steps[-TURNS:]}
        if None not in scores:
            episode["dense_reward"] = sum(scores)
    limit = LONGEST_TEXT
    while sum(min(limit, len(text)) for text in texts_of(episode)) > text_limit:
        limit //= 2
    if all(len(text) <= limit for text in texts_of(episode)):
        return episode
    short = [{key: cut(value, limit) for key, value in step.items()} for step in episode["steps"]]
    return {**episode, "task": cut(episode["task"], limit), "steps": short}


def texts_of(episode: dict) -> list[str]:
    """List the texts of a transcript that may be long."""
    texts = [episode["task"]]
    for step in episode["steps"]:
        texts += [step["observation"], step["reply"], step["action"]]
    return texts


def cut(value, limit: int):
    """Return a text without its middle if it is longer than `limit`; another value as it is."""
    if not isinstance(value, str) or len(value) <= limit:
        return value
    return value[: limit * 2 // 3] + CUT.format(f"{len(value) - limit:,}") + value[len(value) - limit // 3 :]


def dense_reward_of(episode: dict) -> float | None:
    """Return the sum of the dense scores of a transcript; None if it has none."""
    if "dense_reward" in episode:
        return episode["dense_reward"]
    scores = [step.get("dense_score") for step in episode["steps"]]
    return None if None in scores or not scores else sum(scores)


def transcript_text(episode: dict) -> str:
    """Return a line of transcripts.jsonl as text: observations, "> " actions, and their dense scores."""
    result = "solved" if episode["success"] else f"not solved ({episode['stop_reason']})"
    lines = [f"{episode['task']}  [{episode['task_type']}, {episode['task_id']}]: {result}"]
    for step in episode["steps"]:
        score = "" if step["dense_score"] is None else f"   [score {step['dense_score']:+.2f}]"
        action = step["action"] if step["valid"] else f"(invalid reply) {step['reply']!r}"
        lines += [f"  {step['observation']}", f"  > {action}{score}"]
    return "\n".join(lines)
