"""Charts as SVG inside a page, drawn by matplotlib.

Text stays text, and colours become CSS variables, so that one drawing serves light and dark pages.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field

from markupsafe import Markup

SMOOTH = 9  # values of a moving mean
FEW = 3 * SMOOTH  # so few values are drawn as they are
SIZE = (4.6, 2.7)  # inches; the page scales it
COLOURS = {  # CSS variable of page.css: the colour that stands for it in the drawing
    "ink": "#010101",
    "grid": "#010102",
    "a": "#010103",
    "b": "#010104",
    "replayed": "#010105",
    "buffer": "#010106",
    **{f"group{i}": f"#01020{i}" for i in range(8)},
}


@dataclass
class Curve:
    """A line of a chart. `colour` is a key of COLOURS."""

    label: str
    colour: str
    x: list[float]
    y: list[float]
    kind: str = "line"  # line; noisy: thin, with a thick moving mean; marks; thin: without a legend
    band: tuple[list[float], list[float]] | None = None  # lower and upper end
    dashed: bool = False


@dataclass
class Chart:
    """A chart: its curves, and the sentence that is shown if there are none."""

    title: str
    x_label: str
    curves: list[Curve]
    note: str = ""
    unit: str = ""  # "share": the axis begins at 0
    svg: Markup = field(default=Markup(""), repr=False)

    @property
    def legend(self) -> list[Curve]:
        """List the curves that are named below the title."""
        return [curve for curve in self.curves if curve.kind != "thin"]


def moving_mean(values: list[float], width: int = SMOOTH) -> list[float]:
    """Return the mean of each value and its neighbours: up to `width` values, fewer at both ends."""
    half, means = width // 2, []
    for i in range(len(values)):
        near = values[max(0, i - half) : i + half + 1]
        means.append(sum(near) / len(near))
    return means


def draw(charts: list[Chart]) -> list[Chart]:
    """Set the SVG of every chart with curves, and return the charts."""
    for place, chart in enumerate(charts):
        chart.curves = [curve for curve in chart.curves if curve.y]
        if chart.curves:
            chart.svg = Markup(svg(chart, f"chart{place}-{re.sub('[^a-z]', '', chart.title.lower())}"))
    return charts


def svg(chart: Chart, name: str) -> str:
    """Return a chart as an <svg> element. `name` begins its ids, which must differ within a page."""
    import matplotlib
    from matplotlib.figure import Figure

    ink, grid = COLOURS["ink"], COLOURS["grid"]
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": grid,
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": grid,
        "path.simplify": True,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=SIZE, layout="constrained")
        ax = figure.subplots()
        for curve in chart.curves:
            draw_curve(ax, curve)
        ax.set(xlabel=chart.x_label)
        if chart.unit == "share":
            ax.set_ylim(bottom=0)
        ax.grid(lw=0.6)
        ax.tick_params(length=0)
        ax.spines[["top", "right", "left"]].set_visible(False)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    for variable, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{variable})")
    return text.replace("<svg ", '<svg role="img" ', 1)


def draw_curve(ax, curve: Curve) -> None:
    """Draw one curve."""
    colour, dash = COLOURS[curve.colour], "--" if curve.dashed else "-"
    if curve.band:
        ax.fill_between(curve.x, *curve.band, color=colour, alpha=0.15, lw=0)
    if curve.kind == "noisy" and len(curve.y) > FEW:
        ax.plot(curve.x, curve.y, dash, color=colour, lw=0.7, alpha=0.35)
        ax.plot(curve.x, moving_mean(curve.y), dash, color=colour, lw=1.7)
    elif curve.kind == "thin":
        ax.plot(curve.x, curve.y, dash, color=colour, lw=0.7, alpha=0.5)
    else:
        marker = "o" if curve.kind == "marks" or len(curve.y) == 1 else ""
        ax.plot(curve.x, curve.y, dash, marker=marker, ms=3.5, color=colour, lw=1.7)
