"""Several runs side by side, grouped by their settings apart from the seed: mean and spread over seeds."""

from __future__ import annotations

import bisect
import os
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from flags import OF_THE_MACHINE
from record.charts import COLOURS, FEW, SMOOTH, Chart, Curve, draw, moving_mean
from record.metrics import types_of
from record.page import percent, status_of
from record.run_charts import axis_of
from record.run_logs import Run, counted, number, points

AXES = {"update": "updates of A", "environment_episodes": "training episodes of A and B"}
FREE = {flag.removeprefix("--") for flag in OF_THE_MACHINE.split()}  # flags that make no other group
FREE |= {"seed", "keep_checkpoints", "tensorboard", "wandb_project", "eval_every"}
PATHS = ("model", "reward_model", "reward_model_backbone")
GROUPS = sum(name.startswith("group") for name in COLOURS)


@dataclass
class Group:
    """Runs whose settings differ only in the seed, and what sets them apart from the other groups."""

    label: str
    settings: dict
    runs: list[Run]


def comparison_of(runs: list[Run], page: Path) -> dict:
    """Return everything that the page of several runs shows. page: where it will be written."""
    groups = groups_of(runs)
    splits = list(dict.fromkeys(split for run in runs for split in run.panels()))
    return {
        "title": f"{counted(len(runs), 'run')} in {counted(len(groups), 'group')}",
        "status": "; ".join(f"{group.label}: {counted(len(group.runs), 'run')}" for group in groups),
        "tables": [table_of(groups, split) for split in splits],
        "note": NOTE,
        "charts": draw(charts_of(groups, splits)),
        "smooth": SMOOTH,
        "runs": [row_of(group, run, page) for group in groups for run in group.runs],
    }


def row_of(group: Group, run: Run, page: Path) -> dict:
    """Return the line of a run, with a link to its own page if it has one."""
    own, link = run.folder / "report.html", ""
    if own.is_file() and own.resolve() != page.resolve():
        link = Path(os.path.relpath(own.resolve(), page.resolve().parent)).as_posix()
    about = {"settings": group.label, "seed": run.config.get("seed", "?"), "status": status_of(run)}
    return {"name": run.folder.resolve().name, "link": link, **about}


# --- groups -------------------------------------------------------------------------------------------------


def settings_of(run: Run) -> dict:
    """Return the settings that make a group. In the path of a model, the run's seed counts as any seed."""
    settings = {name: value for name, value in run.config.items() if name not in FREE}
    seed = re.escape(str(run.config.get("seed", "")))
    for name in PATHS:
        if isinstance(settings.get(name), str) and seed:
            settings[name] = re.sub(rf"(?<![0-9]){seed}(?![0-9])", "SEED", settings[name])
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def groups_of(runs: list[Run]) -> list[Group]:
    """Group the runs, in the order of the first run of each group. Runs of a group are sorted by seed."""
    groups: list[Group] = []
    for run in runs:
        settings = settings_of(run)
        group = next((group for group in groups if group.settings == settings), None)
        if group is None:
            groups.append(group := Group("", settings, []))
        group.runs.append(run)
    missing = object()
    names = list(dict.fromkeys(name for group in groups for name in group.settings))
    different = [name for name in names if len({str(g.settings.get(name, missing)) for g in groups}) > 1]
    for group in groups:
        group.runs.sort(key=lambda run: number(run.config.get("seed")) or 0)
        parts = [f"{name} {group.settings[name]}" for name in different if name in group.settings]
        title = group.runs[0].title.partition(", seed")[0]
        group.label = ", ".join(parts[:4]) + (", ..." if len(parts) > 4 else "") or title
    return groups


# --- the table ----------------------------------------------------------------------------------------------

NOTE = (
    "Success in %. The spread is the sample standard deviation over seeds. 'At N' is the success at equal "
    "updates or equal training episodes, where the shortest run ends, interpolated between two panels."
)


def curve_of(run: Run, split: str, x: str) -> tuple[list[float], list[float]]:
    return points(run.panels().get(split, []), x, "success")


def at(curve: tuple[list[float], list[float]], x: float) -> float | None:
    """Return a curve's value at x, interpolated between two points; None outside the curve."""
    xs, ys = curve
    if not xs or not xs[0] <= x <= xs[-1]:
        return None
    right = bisect.bisect_left(xs, x)
    if xs[right] == x:
        return ys[right]
    left = right - 1
    return ys[left] + (ys[right] - ys[left]) * (x - xs[left]) / (xs[right] - xs[left])


def mean_and_spread(values: list[float | None]) -> str:
    """Return shares as "41.0 +- 2.1" in percent; one value has no spread."""
    values = [value for value in values if value is not None]
    if not values:
        return ""
    text = percent(statistics.fmean(values))
    return f"{text} \u00b1 {percent(statistics.stdev(values))}" if len(values) > 1 else text


def table_of(groups: list[Group], split: str) -> dict:
    """Return the table of a split: a row for each group."""
    ends = {}
    for x in AXES:
        curves = [curve_of(run, split, x) for group in groups for run in group.runs]
        ends[x] = min((curve[0][-1] for curve in curves if curve[0]), default=0)
    types = types_of([panels[-1] for panels in last_panels(groups, split) if panels[-1].get("by_type")])
    header = ["settings", "seeds", "updates", "episodes", "start", "end"]
    header += [f"at {ends['update']:,.0f} updates", f"at {ends['environment_episodes']:,.0f} episodes"]
    rows = [row_of_group(group, split, ends, types) for group in groups]
    return {"split": split, "header": [*header, "end of each seed", *types], "rows": rows}


def last_panels(groups: list[Group], split: str) -> list[list[dict]]:
    """Return the panels of every run that has played the split."""
    panels = [run.panels().get(split) for group in groups for run in group.runs]
    return [played for played in panels if played]


def row_of_group(group: Group, split: str, ends: dict[str, float], types: list[str]) -> list[str]:
    """Return the row of a group."""
    panels = [run.panels().get(split, []) for run in group.runs]
    played = [panels_of_run for panels_of_run in panels if panels_of_run]
    newest = [panels_of_run[-1] for panels_of_run in played]
    row = [group.label, str(len(group.runs))]
    for x in AXES:
        reached = sorted({int(number(panel.get(x)) or 0) for panel in newest})
        row.append(" to ".join(f"{value:,}" for value in dict.fromkeys([*reached[:1], *reached[-1:]])))
    row.append(mean_and_spread([panels_of_run[0]["success"] for panels_of_run in played]))
    row.append(mean_and_spread([panel["success"] for panel in newest]))
    for x in AXES:
        row.append(mean_and_spread([at(curve_of(run, split, x), ends[x]) for run in group.runs]))
    seeds = []
    for run, panels_of_run in zip(group.runs, panels, strict=True):
        end = percent(panels_of_run[-1]["success"]) if panels_of_run else "no panel"
        seeds.append(f"s{run.config.get('seed', '?')}: {end}")
    row.append(", ".join(seeds))
    for task_type in types:
        results = [(panel.get("by_type") or {}).get(task_type, {}) for panel in newest]
        row.append(mean_and_spread([result.get("success") for result in results if result.get("games")]))
    return row


def markdown(table: dict) -> str:
    """Return a table as Markdown."""
    cells = [table["header"], ["---"] * len(table["header"]), *table["rows"]]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


# --- charts -------------------------------------------------------------------------------------------------


def charts_of(groups: list[Group], splits: list[str]) -> list[Chart]:
    """Return the curves of all groups: panels and training success on both axes, and some over updates."""
    charts = []
    for split in splits:
        for x, label in AXES.items():
            curves = [[curve_of(run, split, x) for run in group.runs] for group in groups]
            charts.append(
                Chart(f"Held-out success {split}", label, drawn(groups, curves, marks=True), "", "share")
            )
    for x, label in AXES.items():
        curves = [[training(run, "policy", x, "success") for run in group.runs] for group in groups]
        charts.append(Chart("Training success of A", label, drawn(groups, curves), "", "share"))
    for title, agent, key in (
        ("Training success of B", "explorer", "success"),
        ("Dense reward of B's episodes", "explorer", "dense_reward"),
        ("A's groups without spread", "policy", "zero_spread_groups"),
        ("KL of A to the start", "policy", "kl_on"),
        ("Entropy of A", "policy", "entropy_on"),
        ("Distance of the centre from 1", "policy", "centre_log_mean_abs"),
    ):
        curves = [[training(run, agent, "update", key) for run in group.runs] for group in groups]
        charts.append(
            Chart(title, "updates of B" if agent == "explorer" else AXES["update"], drawn(groups, curves))
        )
    return charts


def training(run: Run, agent: str, x: str, key: str) -> tuple[list[float], list[float]]:
    """Return a curve of the log, smoothed if it has more than a few values."""
    xs, ys = points(run.of(agent), axis_of(agent, x), key)
    return xs, moving_mean(ys) if len(ys) > FEW else ys


def drawn(groups: list[Group], curves: list[list[tuple[list, list]]], marks: bool = False) -> list[Curve]:
    """Return the curves of a chart: for each group its runs, and their mean with a band."""
    found = []
    for place, (group, of_runs) in enumerate(zip(groups, curves, strict=True)):
        colour, of_runs = f"group{place % GROUPS}", [curve for curve in of_runs if curve[0]]
        if not of_runs:
            continue
        dashed = place >= GROUPS
        if len(of_runs) > 1:
            found += [Curve("", colour, *curve, kind="thin", dashed=dashed) for curve in of_runs]
        kind = "marks" if marks else "line"
        found.append(mean_curve(of_runs, Curve(group.label, colour, [], [], kind, dashed=dashed)))
    return found


def mean_curve(of_runs: list[tuple[list, list]], curve: Curve) -> Curve:
    """Fill a curve with the mean of several curves where all have a point, and a band of one deviation."""
    values = [dict(zip(*one, strict=True)) for one in of_runs]
    curve.x = sorted(set.intersection(*(set(one) for one in values)))
    columns = [[one[x] for one in values] for x in curve.x]
    curve.y = [statistics.fmean(column) for column in columns]
    if len(values) > 1:
        spread = [statistics.stdev(column) for column in columns]
        low = [y - s for y, s in zip(curve.y, spread, strict=True)]
        high = [y + s for y, s in zip(curve.y, spread, strict=True)]
        curve.band = (low, high)
    return curve
