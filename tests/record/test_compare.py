"""Runs side by side: groups by settings, the table, mean and spread of curves; the command line."""

import pytest
from made_run import make_run, metrics

from record import compare, report
from record.run_logs import read_run


def runs_of(folder):
    """Make two seeds of RSPO and one of the baseline, without B."""
    made = [make_run(folder / f"rspo-{seed}", metrics(seed), [], seed=seed) for seed in (1, 3)]
    made.append(make_run(folder / "alone", metrics(2, explores=False), [], seed=2, method="outcome"))
    return made


def test_runs_are_grouped_by_their_settings_apart_from_the_seed(tmp_path):
    def run(seed, **more):
        return read_run(
            make_run(tmp_path / f"{seed}{len(more)}{more.get('model')}", [], [], seed=seed, **more)
        )

    group = compare.groups_of([run(3), run(1), run(2, method="outcome"), run(4, threads=2)])
    assert [[run.config["seed"] for run in one.runs] for one in group] == [[1, 3, 4], [2]]
    assert [one.label for one in group] == ["method rspo", "method outcome"]
    starts = [run(seed, model=f"starts/s{seed}/start") for seed in (1, 2)]
    (one,) = compare.groups_of(starts)
    assert one.label == "rspo + grpo on household" and len(one.runs) == 2
    assert len(compare.groups_of([*starts, run(3, model="other/s3/start")])) == 2


def test_a_value_between_two_panels_is_interpolated():
    curve = ([0, 2, 4], [0.0, 0.2, 0.8])
    assert [compare.at(curve, x) for x in (0, 1, 2, 4)] == pytest.approx([0.0, 0.1, 0.2, 0.8])
    assert compare.at(curve, 3) == pytest.approx(0.5)
    assert compare.at(curve, 5) is None and compare.at(([], []), 0) is None


def test_mean_and_spread_are_in_percent():
    # mean 0.3, deviations -0.1, 0, 0.1: variance 0.02 / 2
    assert compare.mean_and_spread([0.2, 0.3, None, 0.4]) == "30.0 \u00b1 10.0"
    assert compare.mean_and_spread([0.2]) == "20.0" and compare.mean_and_spread([None]) == ""


def test_the_table_of_several_runs(tmp_path):
    groups = compare.groups_of([read_run(folder) for folder in runs_of(tmp_path)])
    # seeds add 1 and 3 points to RSPO's 40: mean 42, deviation sqrt(2) = 1.4. The baseline plays half as
    # much, 32 episodes, where RSPO had two of four updates.
    assert compare.markdown(compare.table_of(groups, "eval")) == (
        "| settings | seeds | updates | episodes | start | end | at 4 updates | at 32 episodes |"
        " end of each seed | Pick |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| method rspo | 2 | 4 | 64 | 2.0 \u00b1 1.4 | 42.0 \u00b1 1.4 | 42.0 \u00b1 1.4 | 22.0 \u00b1 1.4 |"
        " s1: 41.0, s3: 43.0 | 42.0 \u00b1 1.4 |\n"
        "| method outcome | 1 | 4 | 32 | 2.0 | 42.0 | 42.0 | 42.0 | s2: 42.0 | 42.0 |"
    )


def test_the_mean_of_curves_ends_where_one_of_them_ends(tmp_path):
    whole = make_run(tmp_path / "whole", metrics(1), [], seed=1)
    part = make_run(tmp_path / "part", metrics(3, updates=2), [], seed=3, ended=False)
    groups = compare.groups_of([read_run(whole), read_run(part)])
    thin, short, mean = compare.charts_of(groups, ["eval"])[0].curves
    assert (thin.x, short.x, mean.x) == ([0, 2, 4], [0, 2], [0, 2])
    assert mean.y == pytest.approx([0.02, 0.22]) and mean.label == "rspo + grpo on household"
    low, high = mean.band
    assert high[0] - low[0] == pytest.approx(2 * 0.02 / 2**0.5)  # two deviations of 0.01 and 0.03


# --- the command line ---------------------------------------------------------------------------------------


def test_several_runs_get_a_page_beside_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "charts_of", lambda groups, splits: [])
    folders = runs_of(tmp_path)
    (folders[0] / "report.html").touch()
    report.main([str(folder) for folder in folders])
    printed = capsys.readouterr().out
    assert "| method rspo | 2 |" in printed and printed.endswith(f"page: {tmp_path / 'report.html'}\n")
    text = (tmp_path / "report.html").read_text()
    assert "3 runs in 2 groups" in text and '<a href="rspo-1/report.html">rspo-1</a>' in text
    report.main([*map(str, folders), "--out", str(tmp_path / "other.html")])
    assert (tmp_path / "other.html").is_file()


def test_a_watched_page_is_written_until_the_run_has_ended(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path, metrics(updates=2)[:1], [], ended=False)
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        assert '<meta http-equiv="refresh" content="9">' in (run / "report.html").read_text()
        make_run(tmp_path, metrics()[:1] + metrics()[-1:], [])

    monkeypatch.setattr(report.time, "sleep", sleep)
    monkeypatch.setattr(report, "draw_curves", lambda lines, path, title: None)
    report.main([str(run), "--watch", "9"])
    assert slept == [9] and "finished: 4 updates of A" in capsys.readouterr().out.splitlines()[-1]
    assert 'http-equiv="refresh"' not in (run / "report.html").read_text()


def test_bad_arguments_are_one_line(tmp_path):
    run = str(make_run(tmp_path / "run", [], []))
    for argv, words in (
        ([], "give a run folder: python -m record.report runs/household-rspo-grpo-s0"),
        ([run, "--watch", "0"], "--watch 0: must be 1 second or more"),
        ([run, str(tmp_path), "--out", "run.json"], "--out run.json: must end in .html, so that no log"),
        ([run, "--out", "x.html"], "--out x.html: the page of one run is RUN/report.html; leave it out"),
        (
            [run, str(tmp_path)],
            f"{tmp_path} is not a run folder: config.json is missing; give the --out of a run",
        ),
    ):
        with pytest.raises(ValueError, match="^" + words.replace("(", r"\(")):
            report.main(argv)
