"""The page of a run, report.html: what it shows as plain data, and the file itself.

The page is one file that needs no network. page.html.j2 is its template, page.css its style, page.js the
viewer of episodes. Texts of environments and models are data: jinja2 escapes them, and the viewer shows them
only as text.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from flags import Args, without_defaults
from record import checkpoint
from record.charts import SMOOTH, draw
from record.command_line import UsageError
from record.episodes import AGENTS, STAGES, episodes_of
from record.metrics import types_of
from record.run_charts import charts_of
from record.run_logs import Run, counted, number, read_run
from record.run_warnings import warnings_of

NAME = "report.html"
MOST_PANELS = 13  # columns of the table of panels
SHOWN = {"run": None, "comparison": None, "refresh": 0}


def write_page(folder: Path, refresh: int = 0) -> Path:
    """Write report.html of a run folder and return its path.

    refresh: seconds after which a browser reads the page again; 0: never. Raises ValueError if the folder is
    no run.
    """
    run = read_run(Path(folder))
    path = run.folder / NAME
    write_html(path, run=page_of(run), refresh=0 if run.finished else refresh)
    return path


def write_html(path: Path, **data) -> None:
    """Write a page. It is pure ASCII: other characters become references such as &#945;."""
    folder = Path(__file__).parent
    loader = Environment(
        loader=FileSystemLoader(folder), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    text = loader.get_template("page.html.j2").render(SHOWN | data)
    checkpoint.write_text(path, text.encode("ascii", "xmlcharrefreplace").decode("ascii"))


def page_of(run: Run) -> dict:
    """Return everything that the page of a run shows."""
    episodes = episodes_of(run)
    present = {episode["agent"] for episode in episodes}
    return {
        "title": run.title,
        "folder": str(run.folder.resolve()),
        "status": status_of(run),
        "tiles": tiles_of(run),
        "warnings": warnings_of(run),
        "charts": draw(charts_of(run)),
        "smooth": SMOOTH,
        "panels": [panel_rows(split, panels) for split, panels in run.panels().items()],
        "settings": settings_of(run),
        "times": times_of(run),
        "facts": facts_of(run),
        "episodes": episodes,
        "agents": {name: title for name, title in AGENTS.items() if name in present},
        "stages": STAGES,
        "types": sorted({episode["task_type"] for episode in episodes if episode.get("task_type")}),
    }


# --- the head of the page -----------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Return a time in words: "42 s", "9 min", "3 h 20 min"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def elapsed(lines: list[dict]) -> float:
    """Return the time of the run at its newest line."""
    return max((number(line.get("seconds_elapsed")) or 0.0 for line in lines), default=0.0)


def status_of(run: Run) -> str:
    """Say whether the run is finished, and else how long the rest will take."""
    done, total = run.updates, run.total_updates
    if run.finished:
        return f"finished: {counted(done, 'update')} of A"
    text = f"not finished: {done:,} of {counted(total, 'update')} of A"
    start = elapsed([line for line in run.lines if line["update"] == 0 and line["agent"] == "evaluation"])
    end = elapsed([line for line in run.of("policy") if line["update"] == done])
    if 0 < done < total and end > start > 0:
        text += f"; about {duration((end - start) / done * (total - done))} are left if it goes on"
    return text


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def tiles_of(run: Run) -> list[tuple[str, str, str]]:
    """Return the numbers at the top of the page: (name, value, detail)."""
    tiles = []
    for split, panels in run.panels().items():
        first, last = panels[0], panels[-1]
        name = f"held-out success, {split}" if split else "held-out success"
        low, high = last.get("success_interval") or (None, None)
        detail = f"95 % interval {percent(low)} to {percent(high)}" if low is not None else ""
        tiles.append((name, f"{percent(first['success'])} \u2192 {percent(last['success'])} %", detail))
    count = f"{run.updates:,} of {run.total_updates:,}"
    explored = len(run.of("explorer"))
    tiles.append(("updates of A", count, f"and {explored:,} of B" if explored else "no B in this method"))
    episodes = max((number(line.get("environment_episodes")) or 0 for line in run.lines), default=0)
    turns = max((number(line.get("environment_turns")) or 0 for line in run.lines), default=0)
    tiles.append(("training episodes", f"{episodes:,}", f"{turns:,} turns"))
    replayed = sum(number(line.get("replayed_episodes")) or 0 for line in run.of("policy"))
    if replayed:
        tiles.append(("replayed episodes", f"{replayed:,}", "draws, of A's updates"))
    tiles.append(("time", duration(elapsed(run.lines)), ""))
    return tiles


# --- tables -------------------------------------------------------------------------------------------------


def spread_out(items: list, most: int) -> list:
    """Return at most `most` of the items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def panel_rows(split: str, panels: list[dict]) -> dict:
    """Return the table of a split: a row for each task type, a column for each panel. Success in 0-1."""
    shown = spread_out(panels, MOST_PANELS)
    rows = []
    for task_type in types_of([{"by_type": panel.get("by_type") or {}} for panel in shown]):
        results = [(panel.get("by_type") or {}).get(task_type, {}) for panel in shown]
        games = max(number(result.get("games")) or 0 for result in results)
        if games:
            cells = [number(result.get("success")) if result.get("games") else None for result in results]
            interval = results[-1].get("success_interval")
            rows.append({"name": task_type, "games": games, "cells": cells, "interval": interval})
    everything = {
        "name": "all",
        "games": shown[-1].get("games", ""),
        "interval": shown[-1].get("success_interval"),
    }
    rows.append({**everything, "cells": [number(panel["success"]) for panel in shown]})
    left_out = len(panels) - len(shown)
    return {
        "split": split,
        "updates": [panel["update"] for panel in shown],
        "rows": rows,
        "left_out": left_out,
    }


def settings_of(run: Run) -> list[tuple[str, str, str]]:
    """Return the settings that differ from the defaults: (name, value, default).

    A default that depends on the model or the environment is that of this run's model and environment.
    """
    config = {name: tuple(value) if isinstance(value, list) else value for name, value in run.config.items()}
    known = {field.name: field.default for field in dataclasses.fields(Args)}
    try:
        given = without_defaults({name: value for name, value in config.items() if name in known})
    except (UsageError, ValueError, TypeError, KeyError, ImportError, AttributeError):
        given = {name: config[name] for name in config if known.get(name) is not None}
    rows = []
    for name, value in config.items():
        if name not in known:
            rows.append((name, as_text(value), "unknown to this version"))
        elif name in given and value not in (None, known[name]):
            default = "chosen by model and environment" if known[name] is None else as_text(known[name])
            rows.append((name, as_text(value), default))
    return rows


def as_text(value) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value)


def times_of(run: Run) -> list[tuple[str, float, str]]:
    """Return the time by phase: (name, seconds, seconds in words)."""
    whole = elapsed(run.lines)
    if not whole:
        return []

    def total(key: str, *agents: str) -> float:
        lines = [line for line in run.lines if not agents or line["agent"] in agents]
        return sum(number(line.get(f"seconds_{key}")) or 0.0 for line in lines)

    first = run.lines[0]
    before = (number(first.get("seconds_elapsed")) or 0.0) - (number(first.get("seconds_eval")) or 0.0)
    phases = {
        "before training: warm start, step reward model": before if first["agent"] == "evaluation" else 0.0,
        "A plays": total("rollout", "policy"),
        "A is updated": total("update", "policy"),
        "B plays": total("rollout", "explorer"),
        "dense scores": total("score"),
        "B is updated": total("update", "explorer"),
        "B fills the buffer": total("rollout", "buffer"),
        "panels": total("eval"),
    }
    phases["the rest: log \u03c0_B, checkpoints"] = max(0.0, whole - sum(phases.values()))
    return [(name, seconds, duration(seconds)) for name, seconds in phases.items() if seconds > 0.05]


def facts_of(run: Run) -> list[tuple[str, str]]:
    """Return what run.json says about the start of the run."""
    facts = run.facts
    argv, versions = facts.get("argv"), facts.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    rows = {
        "command": "python train.py " + " ".join(map(str, argv)) if isinstance(argv, list) else "",
        "started": facts.get("started") or "",
        "resumed": ", ".join(str(again.get("started")) for again in facts.get("resumed") or []),
        "machine": facts.get("machine") or "",
        "ranks": str(facts.get("ranks") or ""),
        "commit": facts.get("commit") or "",
        "versions": ", ".join(f"{name} {versions[name]}" for name in versions if versions[name]),
    }
    return [(name, text) for name, text in rows.items() if text]
