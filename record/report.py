"""`python -m record.report RUN [RUN ...]`: a run as a page and as text, or several runs side by side.

One run: writes RUN/report.html (record/page.py), draws curves.png again, prints the tables of the panels and
the newest episodes. Several runs: writes a page that compares them (record/compare.py) and prints its table.
Nothing else in a run folder is changed, so the runs may still be going on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

from record.compare import comparison_of, markdown
from record.curves import draw_curves
from record.metrics import start_and_end
from record.page import NAME, status_of, write_html, write_page
from record.panels import panel_table
from record.run_logs import Run, read_run, readable_lines
from record.transcripts import transcript_text

FOR_TABLE = ("success", "outcome", "games")  # a panel's keys, beside those by task type


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m record.report", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folder: the --out of a run")
    parser.add_argument(
        "--out", metavar="FILE", help="page of several runs; default: report.html beside them"
    )
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        type=int,
        help="write the page again every so many seconds until the run has ended; an open browser follows",
    )
    return parser


def print_run(run: Run) -> None:
    """Print the tables and the newest episodes of a run. Lines that lack what they need are left out."""
    panels = [line for line in run.of("evaluation") if {"split", "by_type", *FOR_TABLE} <= line.keys()]
    for split, (start, end) in start_and_end(panels).items():
        print(f"success in % on {split}\n{panel_table({'start': start, 'end': end})}\n")
    newest: list[str] = []
    for _, episode in readable_lines(run.folder / "transcripts.jsonl", {}):
        if episode.get("agent") == "evaluation":
            with contextlib.suppress(KeyError, TypeError):
                newest = [*newest[-1:], transcript_text(episode)]
    if newest:
        print("the newest episodes of the panel:\n")
    for text in newest:
        print(text + "\n")


def draw_image(run: Run) -> None:
    """Draw curves.png again. A log that lacks what it needs gets a warning."""
    try:
        draw_curves(run.lines, run.folder / "curves.png", run.title)
    except (KeyError, TypeError, ValueError) as error:
        print(f"warning: curves.png was not drawn: {error!r}", file=sys.stderr)


def one_run(folder: Path, refresh: int = 0) -> bool:
    """Write the page of a run. Return True if the run has ended."""
    write_page(folder, refresh)
    return read_run(folder).finished


def page_beside(folders: list[Path]) -> Path:
    """Return where the page of several runs goes by default: the folder that holds them all."""
    common = Path(os.path.commonpath([folder.resolve() for folder in folders]))
    if (common / "config.json").exists():  # one run lies in another
        common = common.parent
    return common / NAME


def several_runs(folders: list[Path], page: Path, refresh: int = 0) -> tuple[dict, bool]:
    """Write the page of several runs. Return what it shows, and True if all runs have ended."""
    runs = [read_run(folder) for folder in folders]
    ended = all(run.finished for run in runs)
    comparison = comparison_of(runs, page)
    write_html(page, comparison=comparison, refresh=0 if ended else refresh)
    return comparison, ended


def main(argv: list[str] | None = None) -> None:
    args = flags().parse_args(argv)
    if not args.runs:
        raise ValueError("give a run folder: python -m record.report runs/household-rspo-grpo-s0")
    if args.watch is not None and args.watch < 1:
        raise ValueError(f"--watch {args.watch}: must be 1 second or more")
    folders = list({Path(run).resolve(): Path(run) for run in args.runs}.values())
    refresh, several = args.watch or 0, len(folders) > 1
    if args.out and not several:
        raise ValueError(f"--out {args.out}: the page of one run is RUN/report.html; leave it out")
    if args.out and not args.out.endswith(".html"):
        raise ValueError(f"--out {args.out}: must end in .html, so that no log is overwritten")
    page = Path(args.out or page_beside(folders)) if several else folders[0] / NAME
    if several and not page.resolve().parent.is_dir():
        raise ValueError(f"--out {args.out}: there is no folder {page.parent}; make it, or give another")
    if several:
        comparison, ended = several_runs(folders, page, refresh)
        for table in comparison["tables"]:
            print(f"success in % on {table['split']}\n\n{markdown(table)}\n")
        print(comparison["note"])
    else:
        ended = one_run(folders[0], refresh)
        run = read_run(folders[0])
        draw_image(run)
        print_run(run)
    print(f"page: {page}")
    while refresh and not ended:
        time.sleep(refresh)
        ended = several_runs(folders, page, refresh)[1] if several else one_run(folders[0], refresh)
        states = [status_of(read_run(folder)) for folder in folders]
        print(f"{time.strftime('%H:%M:%S')}  {'; '.join(states)}", flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a log may hold half of a surrogate pair
    try:
        main()
    except BrokenPipeError:  # the reader of what is printed has gone
        os._exit(141)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
