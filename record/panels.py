"""The table of a run's panels, as text."""

from __future__ import annotations

from record.metrics import result_of_type, types_of

COSTS = {"updates": "update", "episodes": "environment_episodes", "seconds": "seconds_elapsed"}


def title_of(config: dict) -> str:
    return "{method} + {algo} on {env}, seed {seed}".format(**config)


def panel_table(panels: dict[str, dict]) -> str:
    """Return success in percent as a table: a line per panel, a column per task type with games, and "all".

    A column "score" is added if a mean outcome differs from its success. Two panels get a line of changes.
    Panels that are lines of the log also get columns of what it cost to get there. A number of games that
    differs between the panels, because games crashed, is shown as "5/4".
    """
    results = list(panels.values())
    first, types, games = results[0], [], ["games"]
    for task_type in types_of(results):
        counts = [result_of_type(panel, task_type)["games"] for panel in results]
        if any(counts):
            types.append(task_type)
            games.append("/".join(str(count) for count in dict.fromkeys(counts)))
    games.append(str(first["games"]))
    header = ["", *types, "all"]
    shares = {}
    for name, panel in panels.items():
        shares[name] = [result_of_type(panel, task_type)["success"] for task_type in types]
        shares[name].append(panel["success"])
    if any(panel["outcome"] != panel["success"] for panel in panels.values()):
        header.append("score")
        games.append("")
        for name, panel in panels.items():
            shares[name].append(panel["outcome"])
    lines = [header, games] + [[name, *(f"{100 * share:.1f}" for share in shares[name])] for name in shares]
    if len(panels) == 2:
        start, end = shares.values()
        lines.append(["change", *(f"{100 * (b - a):+.1f}" for a, b in zip(start, end, strict=True))])
    for column, key in COSTS.items():
        if key in first:
            header.append(column)
            for line in lines[1:]:
                panel = panels.get(line[0], {})
                line.append(f"{round(panel[key]):,}" if key in panel else "")
    return align(lines)


def solved_text(panel: dict) -> str:
    """Return how many games of a panel are solved, in words, with the 95 % interval."""
    low, high = panel["success_interval"]
    counts = f"{panel['successes']} of {panel['games']} games"
    return f"solved: {counts}, {panel['success']:.1%} (95 % interval {low:.1%} to {high:.1%})"


def align(lines: list[list[str]]) -> str:
    """Join the cells of a table: the first column is flush left, the others flush right."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    texts = []
    for name, *cells in lines:
        cells = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        texts.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(texts)
