"""The episodes that the page of a run shows: a sample of transcripts.jsonl with a fixed size.

Both passes over the file read one line at a time, so a large file needs little memory.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from jinja2.utils import htmlsafe_json_dumps

from record.run_logs import Run, number, readable_lines
from record.transcripts import dense_reward_of, shortened

PAGE_BYTES = 1_500_000  # of all episodes on a page
EPISODE_CHARACTERS = 24_000  # of one episode's texts on a page
AGENTS = {  # of transcripts.jsonl, in the order of the page
    "explorer": "B",
    "buffer": "B, for the buffer",
    "policy": "A",
    "replayed": "replayed",
    "evaluation": "A, panel",
}
STAGES = ("start", "middle", "end")
LARGEST_LOG = 20.0  # as in losses.MAX_LOG_RATIO


@dataclass
class Place:
    """Where an episode is in transcripts.jsonl, and what it is ranked by."""

    offset: int
    agent: str
    update: int
    success: bool
    stage: int = 0  # index in STAGES
    misjudged: float | None = None  # dense reward of an unsolved episode; minus that of a solved one


def episodes_of(run: Run, limit: int = PAGE_BYTES) -> list[dict]:
    """Return the episodes of a page, in the order of the file, in at most `limit` bytes of JSON."""
    path, size, chosen = run.folder / "transcripts.jsonl", 0, {}
    ranked = ranking(places_of(run))
    if not ranked:
        return []
    with open(path, "rb") as file:
        for place in ranked:
            file.seek(place.offset)
            episode = for_page(json.loads(file.readline()), place)
            more = len(htmlsafe_json_dumps(episode))
            if size + more <= limit:
                size += more
                chosen[place.offset] = episode
    return [chosen[offset] for offset in sorted(chosen)]


def places_of(run: Run) -> list[Place]:
    """Return the places of the episodes in transcripts.jsonl that a page can show."""
    places = []
    for offset, episode in readable_lines(run.folder / "transcripts.jsonl", run.damaged):
        update, steps, outcome = number(episode.get("update")), episode.get("steps"), episode.get("outcome")
        texts = [episode.get("agent"), episode.get("task_type") or ""]
        known = all(isinstance(text, str) for text in texts) and texts[0] in AGENTS
        whole = known and update is not None and number(outcome) is not None
        if not (whole and isinstance(steps, list) and all(isinstance(step, dict) for step in steps)):
            run.damaged["transcripts.jsonl"] += 1
            continue
        dense = dense_reward_of(episode)
        success = bool(episode.get("success"))
        misjudged = None if dense is None else (-dense if success else dense)
        places.append(Place(offset, episode["agent"], update, success, misjudged=misjudged))
    last = max((place.update for place in places), default=0)
    for place in places:
        place.stage = min(2, int(3 * place.update / max(last, 1)))
    return places


def ranking(places: list[Place]) -> list[Place]:
    """Order the places by importance. If the page is full, the last ones are left out.

    There is a pile of episodes for each agent and stage, and for solved and unsolved ones. The order takes
    one episode from each pile in turn. A pile of B begins with the episodes whose dense reward and outcome
    disagree most: solved with a low reward, or unsolved with a high one. The other piles begin with the
    episodes nearest to the start, the middle or the end of the run.
    """
    last = max((place.update for place in places), default=0)
    piles: dict[tuple, list[Place]] = {}
    for place in places:
        pile = list(AGENTS).index(place.agent), place.stage, not place.success
        piles.setdefault(pile, []).append(place)
    ranked = []
    for pile, members in piles.items():
        middle_of_stage = (0, last / 2, last)[pile[1]]

        def rank(place: Place, target: float = middle_of_stage) -> tuple:
            return (-(place.misjudged or 0.0), abs(place.update - target), place.offset)

        members.sort(key=rank)
        ranked += [(turn, pile, place) for turn, place in enumerate(members)]
    return [place for *_, place in sorted(ranked, key=lambda entry: entry[:2])]


def for_page(episode: dict, place: Place) -> dict:
    """Return what the viewer shows of a transcript. Numbers are rounded. Unknown values are left out."""
    dense = dense_reward_of(episode)
    texts = ("observation", "reply", "action")
    steps = [{**step, **{name: str(step.get(name, "")) for name in texts}} for step in episode["steps"]]
    steps = [{"dense_score": None, **step} for step in steps]
    episode = shortened({**episode, "task": str(episode.get("task", "")), "steps": steps}, EPISODE_CHARACTERS)
    about = {name: episode.get(name) for name in ("agent", "update", "loop", "split", "age", "task")}
    about |= {name: episode.get(name) for name in ("task_id", "task_type", "outcome", "stop_reason")}
    about |= {"success": place.success, "stage": STAGES[place.stage], "turns": episode.get("turns")}
    about |= {"turns": about["turns"] or len(episode["steps"]), "dense": dense, "misjudged": place.misjudged}
    steps = [step_for_page(step) for step in episode["steps"]]
    return {**tidy(about), "steps": steps}


def step_for_page(step: dict) -> dict:
    """Return what the viewer shows of a turn."""
    names = {"observation": "", "action": "", "valid": True, "dense_score": None, "advantage": None}
    shown = {name: step.get(name, default) for name, default in names.items()}
    if step.get("reply") != step.get("action"):
        shown["reply"] = step.get("reply")
    for name in ("centre", "ratio"):
        value = number(step.get(f"log_{name}"))
        if value is not None:
            shown[name] = math.exp(max(-LARGEST_LOG, min(LARGEST_LOG, value)))
    return tidy(shown)


def tidy(values: dict) -> dict:
    """Leave out what is unknown or not finite, and round floats."""
    kept = {}
    for name, value in values.items():
        if isinstance(value, float):
            value = round(value, 4) if math.isfinite(value) else None
        if value is not None:
            kept[name] = value
    return kept
