"""A made-up run folder of four updates of A in two loops of k = 2, for the tests of its page."""

import json

CONFIG = {"method": "rspo", "algo": "grpo", "env": "household", "seed": 0, "total_updates": 4, "k": 2}


def metrics(seed=0, explores=True, updates=4):
    """Return the lines of a log. Success rises by 0.1 per update, and by 0.01 with the seed."""
    lines, episodes, seconds = [panel(0, 0, 10.0, seed)], 0, 10.0
    for loop in (1, 2):
        for number in (2 * loop - 1, 2 * loop):
            if explores:
                episodes, seconds = episodes + 8, seconds + 5
                line = {"agent": "explorer", "update": 2 * loop - 2, "explorer_update": number}
                more = {"dense_reward": 0.2 * number, "seconds_rollout": 2.0, "seconds_update": 3.0}
                lines.append(line | counts(loop, episodes, seconds) | {"success": 0.05 * number} | more)
        for update in (2 * loop - 1, 2 * loop):
            if update > updates:
                return lines
            episodes, seconds = episodes + 8, seconds + 5
            more = {"success": 0.1 * update, "kl_on": 0.01, "replayed_episodes": 2, "seconds_update": 5.0}
            line = {"agent": "policy", "update": update} | counts(loop, episodes, seconds) | more
            lines.append(line | ({"centre_log_mean_abs": 0.1} if explores else {}))
        lines.append(panel(2 * loop, episodes, seconds, seed))
    return lines


def counts(loop, episodes, seconds):
    return {"loop": loop, "environment_episodes": episodes, "seconds_elapsed": seconds}


def panel(update, episodes, seconds, seed):
    success = 0.1 * update + 0.01 * seed
    by_type = {"Pick": {"games": 10, "success": success, "success_interval": [0.0, 0.5]}}
    about = {"agent": "evaluation", "split": "eval", "update": update, "games": 10, "outcome": success}
    return about | counts(update // 2, episodes, seconds) | {"success": success, "by_type": by_type}


def episode(agent, update, success=True, scores=(0.5, 0.25), **more):
    steps = []
    for turn, score in enumerate(scores):
        step = {"observation": f"room {turn}", "reply": f"go {turn}", "action": f"go {turn}", "valid": True}
        steps.append({**step, "dense_score": score})
    about = {"update": update, "agent": agent, "task_id": "t/1", "task_type": "Pick", "task": "find it"}
    about |= {"outcome": float(success), "success": success, "stop_reason": "finished"}
    return {**about, "steps": steps, **more}


def episodes():
    """Return twelve episodes: eight of B, and some of the others."""
    found = []
    for update in (0, 2):
        for score in (0.8, 0.2):  # the dense reward is twice this
            found.append(episode("explorer", update, True, (score, score), loop=update // 2 + 1))
            found.append(episode("explorer", update, False, (score, score), loop=update // 2 + 1))
    found.append(episode("policy", 1, False, (None, None)))
    found.append(episode("replayed", 2, True, (None, None), age=1))
    for step in found[-1]["steps"]:
        step |= {"log_centre": 0.0, "log_ratio": 0.693147, "advantage": 1.5}  # log 2
    found.append(episode("evaluation", 0, False, (None,)))
    found.append(episode("evaluation", 4, True, (None,)))
    return found


def make_run(folder, lines=None, transcripts=None, ended=True, **config):
    """Write the folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **config}
    lines = metrics(config["seed"]) if lines is None else lines
    transcripts = episodes() if transcripts is None else transcripts
    (folder / "config.json").write_text(json.dumps(config))
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "transcripts.jsonl", transcripts)
    if ended:
        (folder / "summary.json").write_text('{"updates": 4}')
    return folder


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
