"""An experiment's report as Markdown: tables of arms, task types and claims, and when the swap pays."""

from __future__ import annotations

from reproduce.tables import FIFTHS, FIRST, MEASURES, rule_for_users


def number(found: dict | None, digits: int = 1) -> str:
    """Return the text "mean ± std", without "± std" for one seed and empty without runs."""
    if not found or found["mean"] is None:
        return ""
    if found["std"] is None:
        return f"{found['mean']:.{digits}f}"
    return f"{found['mean']:.{digits}f} ± {found['std']:.{digits}f}"


def difference_text(found: dict, digits: int = 1) -> str:
    """Return a difference, its interval and the verdict."""
    if found["mean"] is None:
        return found["verdict"]
    text = f"{found['mean']:+.{digits}f}"
    if found["interval"]:
        low, high = found["interval"]
        text += f" [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"{text} {found['verdict']}"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines] + [""]


def markdown(report: dict) -> str:
    """Return the tables of a report."""
    lines = [f"# {report['name']}: {report['question']}", "", f"`{report['command']}`", ""]
    if report["missing"]:
        lines += [f"**Missing runs: {', '.join(report['missing'])}.**", ""]
    if report["paper_says"]:
        lines += [f"The paper: {report['paper_says']}.", ""]
    lines += [report["rule"], ""]
    for section in report["sections"]:
        lines += section_lines(section, report["papers"])
    if "leads" in report:
        lines += lead_lines(report["leads"])
    lines += [f"Code: {', '.join(report['commits'])}; torch {', '.join(report['torch'])}.", ""]
    lines += [f"Machine: {machine}." for machine in report["machines"]]
    return "\n".join(lines) + "\n"


def section_lines(section: dict, papers: dict) -> list[str]:
    """Return the tables of one start and split."""
    flags = f" (`{section['start_flags']}`)" if section["start_flags"] else ""
    lines = [f"## Start: {section['start']}{flags}, games of {section['split']}", ""]
    lines += arm_lines(section, papers) + type_lines(section) + claim_lines(section)
    if "fifths" in section:
        lines += fifth_lines(section["fifths"])
    if "repeated" in section:
        lines += repeated_lines(section["repeated"])
    return lines


def arm_lines(section: dict, papers: dict) -> list[str]:
    common = section["common_updates"]
    header = ["success in %", "updates of A", "episodes", "optimizer steps, A and B", "start", "end"]
    header += ["last 3 panels", "area over episodes", f"at {common} updates", f"last 3 to {common} updates"]
    header += [f"area to {common} updates", "end, each seed", *(f"paper: {where}" for where in papers)]
    rows = []
    for name, arm in section["arms"].items():
        if not arm["seeds"]:
            continue
        row = [arm["title"], str(arm["updates"]), f"{arm['episodes']:,}", f"{arm['optimizer_steps']:,}"]
        row += [number(arm["start"])] + [number(arm[measure]) for measure in MEASURES]
        row += [number(arm[f"{measure} at equal updates"]) for measure in MEASURES]
        row.append(", ".join(f"{seed['curve'][-1][2]:.1f}" for seed in arm["seeds"].values()))
        for success in papers.values():
            average, deviation = success.get(name, (None, None))
            row.append("" if average is None else number({"mean": average, "std": deviation}))
        rows.append(row)
    return table(header, rows)


def type_lines(section: dict) -> list[str]:
    arms = [arm for arm in section["arms"].values() if arm["seeds"]]
    if not arms:
        return []
    types = list(arms[0]["by_type"])
    rows = [[arm["title"], *(number(arm["by_type"].get(name)) for name in types)] for arm in arms]
    return table(["end, by task type", *types], rows)


def claim_lines(section: dict) -> list[str]:
    if not section["claims"]:
        return []
    rows = []
    for claim in section["claims"]:
        paper = ", ".join(f"{value:+.1f} ({where})" for where, value in claim["paper"].items())
        for axis, found in claim["axes"].items():
            measures = [difference_text(found[measure]) for measure in MEASURES]
            rows.append([claim["claim"], f"equal {axis}", *measures, paper])
    return table(["claim", "axis", *MEASURES, "paper"], rows)


def fifth_lines(fifths: dict) -> list[str]:
    header = ["dense only, in training", *(f"fifth {i + 1}" for i in range(FIFTHS))]
    rows = [
        ["dense reward of an episode", *(number(part, 2) for part in fifths["dense_reward"])],
        ["success in %", *(number(part) for part in fifths["success"])],
    ]
    claims = [[text, difference_text(found, 2)] for text, found in fifths.get("claims", {}).items()]
    return table(header, rows) + table(["claim", "difference"], claims)


def repeated_lines(repeated: dict) -> list[str]:
    rows = []
    for point, found in repeated.items():
        if found["claim"]["differences"]:
            claim = difference_text(found["claim"], 2)
            rows.append([point, number(found["GRPO"], 2), number(found["RSPO"], 2), claim])
    return table(["repeated states per episode", "GRPO", "RSPO", "claim: RSPO repeats fewer"], rows)


def lead_lines(rows: list[dict]) -> list[str]:
    lines = ["## When does the swap pay?", ""]
    lines += [
        f"Read `zero_spread_groups` in the first {FIRST} updates of the arm without the swap. It is the "
        "share of groups whose episodes all have the same outcome. The lead is the difference of the areas "
        "at equal episodes, in points.",
        "",
    ]
    header = ["claim", "start", "success at the start, %", f"groups without spread, first {FIRST} updates, %"]
    header += ["lead", "each seed: groups without spread, lead"]
    cells = []
    for row in rows:
        points = ", ".join(f"{share:.0f}: {lead:+.1f}" for share, lead in row["points"])
        shares = [number(row["success_at_start"]), number(row["groups_without_spread"], 0)]
        cells.append([row["claim"], row["start"], *shares, difference_text(row["lead"]), points])
    lines += table(header, cells)
    return lines + [f"* {sentence}" for sentence in rule_for_users(rows)] + [""]
