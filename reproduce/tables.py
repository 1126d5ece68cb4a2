"""The tables of an experiment, from the logs of its runs: arms, claims with verdicts, and when the swap pays.

`report_of` reads the logs and returns everything as one dictionary, which is the JSON file. markdown.py and
figure.py read only this dictionary, so all three files hold the same numbers.

Every comparison has two axes: updates of A, and environment episodes. A curve is the success on the panels
over one axis. To compare two arms on an axis, both curves are cut where the shorter one ends. A point between
two panels is interpolated. A cut curve has three measures:

    end      success at the cut
    last 3   mean of the last three points
    area     area under the curve by the trapezoid rule, divided by its length: the mean success of the run

RULE is the rule of the verdicts. Success and differences are in percentage points in this file. The logs have
success in [0, 1].
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass

from flags import config_text
from record.log import read_lines
from record.metrics import mean
from reproduce.arms import ARMS, STARTS, Claim, Experiment
from reproduce.reuse import Known, is_known
from reproduce.runs import Plan, Run

AXES = {"updates": "update", "episodes": "environment_episodes"}  # axis: key of the log
FIRST = 9  # the first updates of A, whose groups without spread are counted
POINTS = {"1/3": 1 / 3, "2/3": 2 / 3, "the end": 1.0}  # of a run, for repeated states
WINDOW = 5  # updates averaged at each of POINTS
FIFTHS = 5  # parts of a dense-only run

RULE = (
    "Verdict: the differences between the two arms are paired by seed. The interval is the 95 % t interval "
    "of their mean. holds: the interval is above 0. fails: it is below 0. within noise: it contains 0. With "
    "one seed there is no interval and no verdict."
)

# 97.5 % quantiles of Student's t distribution, for 1 to 30 degrees of freedom
T_QUANTILES = """12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228 2.201 2.179 2.160 2.145 2.131
    2.120 2.110 2.101 2.093 2.086 2.080 2.074 2.069 2.064 2.060 2.056 2.052 2.048 2.045 2.042"""

Curve = list[tuple[float, float]]  # (updates or episodes so far, success)

# --- curves -------------------------------------------------------------------------------------------------


def curve(panels: list[dict], axis: str) -> Curve:
    """Return the success of evaluation lines over an axis of AXES."""
    return [(line[AXES[axis]], line["success"]) for line in panels]


def cut(points: Curve, limit: float) -> Curve:
    """Return the curve up to the limit. If no panel is there, a point is interpolated.

    Raises ValueError if the curve ends before the limit.
    """
    if points[-1][0] < limit:
        raise ValueError(f"the curve ends at {points[-1][0]}, before {limit}")
    inside = [point for point in points if point[0] <= limit]
    (x, y), outside = inside[-1], points[len(inside) :]
    if x < limit:
        next_x, next_y = outside[0]
        inside.append((limit, y + (next_y - y) * (limit - x) / (next_x - x)))
    return inside


def end(points: Curve) -> float:
    return points[-1][1]


def last_three(points: Curve) -> float:
    """Average the last three points. The start is not one of them unless it is the only point."""
    later = points[1:] or points
    return mean([success for _, success in later[-3:]])


def area(points: Curve) -> float:
    """Return the area under the curve, divided by its length."""
    total = 0.0
    for (x, y), (next_x, next_y) in zip(points, points[1:], strict=False):
        total += (next_x - x) * (y + next_y) / 2
    length = points[-1][0] - points[0][0]
    return total / length if length else end(points)


MEASURES = {"end": end, "last 3": last_three, "area": area}

# --- differences --------------------------------------------------------------------------------------------


def quantile(count: int) -> float:
    """Return the 97.5 % quantile of Student's t for the mean of `count` values, at least 2."""
    quantiles = [float(text) for text in T_QUANTILES.split()]
    return quantiles[min(count - 1, len(quantiles)) - 1]


def difference(values: list[float]) -> dict:
    """Describe paired differences: their mean, its 95 % t interval, and the verdict of RULE."""
    result = {"differences": values, "mean": mean(values), "interval": None, "verdict": "one seed"}
    if not values:
        return result | {"mean": None, "verdict": "no runs"}
    if len(values) > 1:
        half = quantile(len(values)) * statistics.stdev(values) / math.sqrt(len(values))
        low, high = result["mean"] - half, result["mean"] + half
        verdict = "holds" if low > 0 else "fails" if high < 0 else "within noise"
        result |= {"interval": [low, high], "verdict": verdict}
    return result


def spread(values: list[float]) -> dict:
    """Return the mean and the standard deviation, each None if there are too few values."""
    average = mean(values) if values else None
    return {"mean": average, "std": statistics.stdev(values) if len(values) > 1 else None}


# --- one run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The log of a finished run."""

    run: Run
    lines: list[dict]
    facts: dict  # run.json

    def panels(self, split: str) -> list[dict]:
        """Return the evaluation lines of a split."""
        return [line for line in self.of("evaluation") if line["split"] == split]

    def of(self, agent: str) -> list[dict]:
        """Return the lines of one agent."""
        return [line for line in self.lines if line["agent"] == agent]


def results_of(plan: Plan) -> dict[tuple[str, str, int], Result]:
    """Read the finished runs of a plan."""
    results = {}
    for key, run in plan.items():
        if run.finished:
            facts = json.loads((run.folder / "run.json").read_text())
            results[key] = Result(run, read_lines(run.folder / "metrics.jsonl"), facts)
    return results


def of_seed(result: Result, split: str, training: tuple[str, ...]) -> dict:
    """Describe one run for the report: its panels, counts and training curves. Success on panels is in %."""
    panels = result.panels(split)
    updates = result.of("policy")
    first = [line["zero_spread_groups"] for line in updates[:FIRST]]
    return {
        "curve": [[line["update"], line["environment_episodes"], 100 * line["success"]] for line in panels],
        "by_type": {name: 100 * found["success"] for name, found in panels[-1]["by_type"].items()},
        "optimizer_steps": sum(line.get("optimizer_steps", 0) for line in result.lines),
        "groups_without_spread": 100 * mean(first),
        "training": {
            key: [[line["update"], line["environment_episodes"], line[key]] for line in updates]
            for key in training
        },
        "seconds": result.lines[-1]["seconds_elapsed"],
        "folder": str(result.run.folder),
        "commit": str(result.facts["commit"]),
        "machine": result.facts["machine"],
        "torch": str(result.facts["versions"]["torch"]),
    }


def points_of(seed: dict, axis: str) -> Curve:
    """Return the curve over an axis from a run that `of_seed` has described."""
    place = list(AXES).index(axis)
    return [(point[place], point[2]) for point in seed["curve"]]


# --- the report ---------------------------------------------------------------------------------------------


def report_of(
    name: str, experiment: Experiment, plan: Plan, seeds: list[int], command: str, known: Known | None = None
) -> dict:
    """Return the tables of an experiment as a dictionary. Unfinished runs are listed as missing.

    known: runs of earlier calls. A run that has finished in this call's folder comes before a known one.
    """
    known = known or {}
    results = results_of(plan)
    mine = [(start, arm, seed) for start in experiment.starts for arm in experiment.arms for seed in seeds]
    sections = []
    for start in experiment.starts:
        splits = plan[start, experiment.arms[0], seeds[0]].args.eval_splits
        for split in splits:
            sections.append(section_of(experiment, plan, results, known, start, split, seeds))
    described = [
        seed for section in sections for arm in section["arms"].values() for seed in arm["seeds"].values()
    ]
    report = {
        "name": name,
        "question": experiment.question,
        "command": command,
        "seeds": seeds,
        "rule": RULE,
        "paper_says": experiment.paper_says,
        "papers": {paper.where: paper.success for paper in experiment.papers},
        "missing": [plan[key].name for key in mine if key not in results and not is_known(key, plan, known)],
        "commits": sorted({seed["commit"] for seed in described}),
        "machines": sorted({seed["machine"] for seed in described}),
        "torch": sorted({seed["torch"] for seed in described}),
        "sections": sections,
    }
    if experiment.leads:
        report["leads"] = leads_of(experiment.leads, report["sections"])
    return report


def section_of(
    experiment: Experiment, plan: Plan, results, known: Known, start: str, split: str, seeds: list[int]
) -> dict:
    """Return the arms and the claims of one start, on one split of held-out games."""
    arms = {}
    for arm in experiment.arms:
        found = {}
        for seed in seeds:
            if (start, arm, seed) in results:
                found[str(seed)] = of_seed(results[start, arm, seed], split, experiment.training)
            elif (start, arm, seed, split) in known:
                found[str(seed)] = known[start, arm, seed, split]
        args = plan[start, arm, seeds[0]].args
        arms[arm] = {"title": ARMS[arm].title, "flags": ARMS[arm].flags, "seeds": found}
        arms[arm]["config"] = json.loads(config_text(args))
    claims = []
    for claim in experiment.claims:
        ahead, behind = arms[claim.ahead]["seeds"], arms[claim.behind]["seeds"]
        papers = {}
        for paper in experiment.papers:
            if claim.ahead in paper.success and claim.behind in paper.success:
                papers[paper.where] = paper.success[claim.ahead][0] - paper.success[claim.behind][0]
        claims.append({"claim": claim.text, "paper": papers, "axes": compare(ahead, behind)})
    section = {"start": start, "start_flags": STARTS[start], "split": split, "arms": arms, "claims": claims}
    summarise(section)
    if "dense_reward" in experiment.training:
        section["fifths"] = fifths_of(arms["dense"]["seeds"])
    if "repeated_states_per_episode" in experiment.training:
        section["repeated"] = repeated_of(arms["rspo"]["seeds"], arms["grpo"]["seeds"])
    return section


def compare(ahead: dict, behind: dict) -> dict:
    """Compare two arms: for each axis and measure, the differences paired by seed."""
    pairs = [seed for seed in ahead if seed in behind]
    axes = {}
    for axis in AXES:
        values = {measure: [] for measure in MEASURES}
        for seed in pairs:
            a, b = points_of(ahead[seed], axis), points_of(behind[seed], axis)
            limit = min(a[-1][0], b[-1][0])
            for name, measure in MEASURES.items():
                values[name].append(measure(cut(a, limit)) - measure(cut(b, limit)))
        axes[axis] = {name: difference(found) for name, found in values.items()}
    return axes


def summarise(section: dict) -> None:
    """Add to every arm its mean and standard deviation over seeds, at its end and at equal updates.

    "common_updates" of the section is the number of updates that all arms have reached.
    """
    every = [seed for arm in section["arms"].values() for seed in arm["seeds"].values()]
    common = min((seed["curve"][-1][0] for seed in every), default=0)
    section["common_updates"] = common
    for arm in section["arms"].values():
        found = list(arm["seeds"].values())
        if not found:
            continue
        whole = [points_of(seed, "episodes") for seed in found]
        equal = [cut(points_of(seed, "updates"), common) for seed in found]
        arm["updates"], arm["episodes"] = found[0]["curve"][-1][:2]
        arm["optimizer_steps"] = round(mean([seed["optimizer_steps"] for seed in found]))
        arm["start"] = spread([points[0][1] for points in whole])
        for name, measure in MEASURES.items():
            arm[name] = spread([measure(points) for points in whole])
            arm[f"{name} at equal updates"] = spread([measure(points) for points in equal])
        arm["groups_without_spread"] = spread([seed["groups_without_spread"] for seed in found])
        types = list(found[0]["by_type"])
        arm["by_type"] = {name: spread([seed["by_type"][name] for seed in found]) for name in types}


# --- dense rewards only, and repeated states ----------------------------------------------------------------


def fifths_of(seeds: dict) -> dict:
    """Describe a dense-only run in five parts: success and dense reward in training.

    The success of the last fifth is compared with the fifth in which the mean over seeds is highest.
    """
    rows: dict[str, list[list[float]]] = {}  # by key: for each seed the means of the fifths
    for key in ("dense_reward", "success"):
        rows[key] = []
        for seed in seeds.values():
            values = [value for *_, value in seed["training"][key]]
            edges = [round(i * len(values) / FIFTHS) for i in range(FIFTHS + 1)]
            rows[key].append([mean(values[a:b]) for a, b in zip(edges, edges[1:], strict=False)])
    rows["success"] = [[100 * value for value in row] for row in rows["success"]]
    result = {key: [spread(list(column)) for column in zip(*row, strict=True)] for key, row in rows.items()}
    if seeds:
        best = max(range(FIFTHS), key=lambda i: result["success"][i]["mean"])
        result["claims"] = {
            "the dense reward climbs: last fifth minus first": difference(
                [row[-1] - row[0] for row in rows["dense_reward"]]
            ),
            f"success falls: fifth {best + 1}, where it is highest, minus the last (points)": difference(
                [row[best] - row[-1] for row in rows["success"]]
            ),
        }
    return result


def repeated_of(rspo: dict, grpo: dict) -> dict:
    """Return repeated states per episode at POINTS of a run, on both axes, and the claims about them."""
    result = {}
    for place, axis in enumerate(AXES):
        for name, share in POINTS.items():
            found: dict[str, list[float]] = {"RSPO": [], "GRPO": []}
            for seed in rspo:
                if seed not in grpo:
                    continue
                logs = [arm[seed]["training"]["repeated_states_per_episode"] for arm in (rspo, grpo)]
                point = share * min(log[-1][place] for log in logs)
                for arm, log in zip(found, logs, strict=True):
                    before = [line[2] for line in log if line[place] <= point] or [log[0][2]]
                    found[arm].append(mean(before[-WINDOW:]))
            less = [b - a for a, b in zip(found["RSPO"], found["GRPO"], strict=True)]
            averages = {arm: spread(values) for arm, values in found.items()}
            result[f"{name}, equal {axis}"] = averages | {"claim": difference(less)}
    return result


# --- when the swap pays -------------------------------------------------------------------------------------


def leads_of(leads: tuple[Claim, ...], sections: list[dict]) -> list[dict]:
    """Return a row for each lead and each start, with the lead and the baseline's groups without spread.

    The lead is the difference of the areas at equal episodes. A row has one point per seed: (share of groups
    without spread in the baseline's first updates, lead), both in %.
    """
    rows = []
    for lead in leads:
        for section in sections:
            ahead, behind = (section["arms"][arm]["seeds"] for arm in (lead.ahead, lead.behind))
            pairs = [seed for seed in ahead if seed in behind]
            found = compare(ahead, behind)["episodes"]["area"]
            shares = [behind[seed]["groups_without_spread"] for seed in pairs]
            starts = [behind[seed]["curve"][0][2] for seed in pairs]
            rows.append(
                {
                    "claim": lead.text,
                    "start": section["start"],
                    "split": section["split"],
                    "success_at_start": spread(starts),
                    "groups_without_spread": spread(shares),
                    "points": [list(point) for point in zip(shares, found["differences"], strict=True)],
                    "lead": found,
                }
            )
    return rows


def rule_for_users(rows: list[dict]) -> list[str]:
    """Return one sentence for each claim: the shares of groups without spread at which it holds or fails."""
    sentences = []
    for text in dict.fromkeys(row["claim"] for row in rows):
        parts = []
        for verdict in ("holds", "fails", "within noise", "one seed"):
            of_verdict = [row for row in rows if row["claim"] == text and row["lead"]["verdict"] == verdict]
            if not of_verdict:
                continue
            shares = ", ".join(f"{row['groups_without_spread']['mean']:.0f} %" for row in of_verdict)
            parts.append(f"{verdict} at starts with {shares}")
        sentences.append(f"{text}: {'; '.join(parts)}." if parts else f"{text}: no runs.")
    return sentences
