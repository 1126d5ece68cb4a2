"""What the page of a run shows, of whole, old, unfinished and damaged runs."""

import json
import re

import pytest
from made_run import episode, episodes, make_run, metrics, write_lines

from record.charts import Chart, Curve, draw, moving_mean
from record.episodes import episodes_of, places_of, ranking
from record.page import duration, panel_rows, settings_of, status_of, tiles_of, times_of, write_page
from record.run_charts import charts_of
from record.run_logs import read_run
from record.run_warnings import warnings_of


def shown(path):
    """Return the JSON of the viewer."""
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL
    )
    return json.loads(found[1])


# --- the head -----------------------------------------------------------------------------------------------


def test_a_finished_run(tmp_path):
    run = read_run(make_run(tmp_path))
    assert status_of(run) == "finished: 4 updates of A" and warnings_of(run) == []
    assert tiles_of(run) == [
        ("held-out success, eval", "0.0 \u2192 40.0 %", ""),
        ("updates of A", "4 of 4", "and 4 of B"),
        ("training episodes", "64", "0 turns"),  # 8 updates of 8 episodes
        ("replayed episodes", "8", "draws, of A's updates"),
        ("time", "50 s", ""),  # 10 s before, 8 updates of 5 s
    ]


def test_a_run_that_goes_on_says_how_much_is_left(tmp_path):
    run = read_run(make_run(tmp_path, metrics(updates=2), ended=False))
    # 2 of 4 updates of A took from 10 s to 30 s: 10 s each, so 2 more take 20 s
    assert status_of(run) == "not finished: 2 of 4 updates of A; about 20 s are left if it goes on"
    longer = read_run(make_run(tmp_path / "longer", total_updates=400))  # has a summary of 4 updates
    assert status_of(longer).startswith("not finished: 4 of 400 updates of A; about 66 min are left")


@pytest.mark.parametrize(
    "seconds, words",
    [
        (0, "0 s"),
        (119.4, "119 s"),
        (120, "2 min"),
        (7140, "119 min"),
        (7200, "2 h 0 min"),
        (9000, "2 h 30 min"),
    ],
)
def test_times_in_words(seconds, words):
    assert duration(seconds) == words


def test_times_by_phase_add_up_to_the_run(tmp_path):
    times = {name: seconds for name, seconds, _ in times_of(read_run(make_run(tmp_path)))}
    assert times == {
        "before training: warm start, step reward model": 10.0,
        "A is updated": 20.0,
        "B plays": 8.0,
        "B is updated": 12.0,
    }


def test_warnings_come_from_the_logs(tmp_path):
    lines = metrics()
    lines[3] |= {"crashed_episodes": 1, "centre_max": 12.34, "token_limit_episodes": 2}  # A's first update
    lines[4] |= {"replayed_episodes": 0, "zero_spread_groups": 1.0, "truncated_replies": 0.06}
    run = read_run(make_run(tmp_path, lines))
    (tmp_path / "metrics.jsonl").write_text((tmp_path / "metrics.jsonl").read_text() + "\0\0\0\n[1]\n")
    run = read_run(tmp_path)
    run.reward_fit = {"learned": False}
    assert warnings_of(run) == [
        "2 lines of metrics.jsonl cannot be read: left out.",
        "The step reward model is not clearly better than chance, so dense rewards mean little.",
        "The environment crashed in 1 episode.",
        "The replay buffer gave nothing in 1 update of A; alpha was 0 there.",
        "In 1 update of A a replayed token had c = \u03c0_old/\u03c0_B above 10, at most 12.3 in update 1. "
        "--max_centre leaves such tokens out.",
        "In 1 update of A no group had any spread: no gradient of its own.",
        "Over 5 % of the replies reached --max_new_tokens in 1 update.",
        "2 training episodes ended because of --max_prompt_tokens.",
    ]


# --- tables and curves --------------------------------------------------------------------------------------


def test_the_table_of_panels_has_a_row_for_each_type(tmp_path):
    panels = read_run(make_run(tmp_path)).panels()["eval"]
    table = panel_rows("eval", panels)
    assert table["updates"] == [0, 2, 4] and table["left_out"] == 0
    assert [(row["name"], row["games"], row["cells"]) for row in table["rows"]] == [
        ("Pick", 10, [0.0, 0.2, 0.4]),
        ("all", 10, [0.0, 0.2, 0.4]),
    ]
    many = panel_rows("eval", [{**panels[0], "update": update} for update in range(25)])
    assert many["updates"] == list(range(0, 25, 2)) and many["left_out"] == 12


def test_settings_that_differ_from_the_defaults(tmp_path):
    given = {"tiny_width": 64, "eval_splits": ["eval"], "learning_rate": 0.01, "an_old_flag": 3}
    run = read_run(make_run(tmp_path, **given))
    assert settings_of(run) == [
        ("total_updates", "4", "180"),
        ("k", "2", "3"),
        ("learning_rate", "0.01", "chosen by model and environment"),
        ("an_old_flag", "3", "unknown to this version"),
    ]


def test_every_curve_has_its_values(tmp_path):
    charts = {chart.title: chart for chart in charts_of(read_run(make_run(tmp_path)))}
    held_out, a, b, buffer = charts["Success over updates"].curves
    assert (held_out.x, held_out.y) == ([0, 2, 4], [0.0, 0.2, 0.4]) and a.x == b.x == [1, 2, 3, 4]
    assert b.y == pytest.approx([0.05, 0.1, 0.15, 0.2]) and buffer.y == []
    b = charts["Success over environment episodes"].curves[2]
    assert b.x == [8, 16, 40, 48]  # a loop: B plays 2 x 8, A plays 2 x 8
    assert charts["Dense reward of an episode"].curves[1].y == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert charts["Distance of the centre from 1"].curves[0].y == [0.1] * 4


def test_a_moving_mean_has_fewer_neighbours_at_the_ends():
    assert moving_mean([0, 3, 6, 9], 3) == [1.5, 3, 6, 7.5]


def test_a_drawing_has_text_and_variables_as_colours():
    chart, empty = Chart("A <title>", "updates", [Curve("A", "a", [0, 1], [0.0, 1.0])]), Chart("", "", [])
    draw([chart, empty])
    assert "updates</text>" in chart.svg and "var(--a)" in chart.svg and "var(--ink)" in chart.svg
    assert not re.findall(r"#0101\d\d|<metadata|href=.http", chart.svg) and not empty.svg


# --- episodes -----------------------------------------------------------------------------------------------


def test_the_viewer_has_the_episodes_with_their_numbers(tmp_path):
    found = episodes_of(read_run(make_run(tmp_path)))
    assert len(found) == 12
    explored, replayed = found[3], found[9]
    assert (explored["agent"], explored["success"], explored["stage"]) == ("explorer", False, "start")
    assert (explored["dense"], explored["misjudged"]) == (0.4, 0.4)
    assert (found[0]["dense"], found[0]["misjudged"]) == (1.6, -1.6)  # solved
    assert (replayed["age"], replayed["stage"]) == (1, "middle")
    step = {"observation": "room 0", "action": "go 0", "valid": True, "advantage": 1.5}
    assert replayed["steps"][0] == {**step, "centre": 1.0, "ratio": 2.0}  # exp(0), exp(log 2)


def test_important_episodes_come_first(tmp_path):
    run = read_run(make_run(tmp_path))
    ranked = ranking(places_of(run))
    order = [(place.agent, place.update, place.success) for place in ranked]
    assert order[:4] == [
        ("explorer", 0, True),
        ("explorer", 0, False),
        ("explorer", 2, True),
        ("explorer", 2, False),
    ]
    dense = [abs(place.misjudged) for place in ranked if place.agent == "explorer"]
    # the first turn takes solved ones with 0.4 and unsolved ones with 1.6, the second turn the others
    assert dense == pytest.approx([0.4, 1.6, 0.4, 1.6, 1.6, 0.4, 1.6, 0.4])
    (first,) = episodes_of(run, limit=600)
    assert (first["agent"], first["dense"]) == ("explorer", 0.4)


@pytest.mark.slow
def test_the_page_of_a_run_of_the_papers_size_is_below_3_mb(tmp_path):
    from record.transcripts import shortened

    text, found = "You see <a desk> & 'more' of it. " * 40, []
    for update in range(0, 150, 3):
        for agent in ("explorer", "explorer", "buffer", "policy", "replayed", "evaluation"):
            for success in (True, False):
                played = episode(agent, update, success, [0.1] * 50)
                for step in played["steps"]:
                    step |= {"observation": text, "reply": text}
                found.append(shortened(played))
    path = write_page(make_run(tmp_path, transcripts=found))
    assert (tmp_path / "transcripts.jsonl").stat().st_size > 3e7
    assert 1e6 < path.stat().st_size < 3e6
    assert {(e["agent"], e["stage"], e["success"]) for e in shown(path)} == {
        (agent, stage, success)
        for agent in ("explorer", "buffer", "policy", "replayed", "evaluation")
        for stage in ("start", "middle", "end")
        for success in (True, False)
    }


# --- the file -----------------------------------------------------------------------------------------------

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)> \u4f60\u597d \ud800 'a' & \"b\""


def test_markup_in_texts_is_data(tmp_path):
    evil = episode("policy", 1, task=EVIL, task_type=EVIL, task_id=EVIL)
    evil["steps"][0] |= {"observation": EVIL, "reply": EVIL + ".", "action": EVIL}
    run = make_run(tmp_path, metrics()[:1], [evil], method="<b>bold</b>", env=EVIL)
    path = write_page(run)
    text = path.read_bytes().decode("ascii")
    assert text.count("<script") == 2 and "<img" not in text and "<b>bold" not in text
    assert "&lt;b&gt;bold&lt;/b&gt;" in text
    (found,) = shown(path)
    step = found["steps"][0]
    assert found["task"] == step["observation"] == step["action"] == EVIL and step["reply"] == EVIL + "."


def test_an_old_run_says_what_its_logs_lack(tmp_path):
    old = [{key: line[key] for key in ("agent", "update")} for line in metrics()]
    path = write_page(make_run(tmp_path, old, [], ended=False, method="outcome"))
    text = path.read_text()
    assert text.count("The log of this run has no such values.") == 12
    for sentence in (
        "transcripts.jsonl of this run has no episodes that can be read.",
        "This run has played no panel yet.",
        "The log of this run has no times.",
    ):
        assert text.count(sentence) == 1
    assert "not finished: 4 of 4 updates of A" in text


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    path = write_page(make_run(tmp_path, [], [], ended=False), refresh=7)
    text = path.read_text()
    assert "not finished: 0 of 4 updates of A" in text and '<meta http-equiv="refresh" content="7">' in text


def test_damaged_lines_are_left_out(tmp_path):
    run = make_run(tmp_path)
    with open(run / "transcripts.jsonl", "a") as file:
        file.write(
            '{"agent": "policy", "update": "x"}\n{"agent": "policy", "update": 3, "steps": [1]}\n{"unfini'
        )
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\xfe\n{"agent": "pol')
    read = read_run(run)
    assert len(episodes_of(read)) == len(episodes()) == 12 and len(read.lines) == len(metrics())
    assert read.damaged == {"metrics.jsonl": 1, "transcripts.jsonl": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"by_type": None},
        {"by_type": {"Pick": 3}},
        {"outcome": None},
        {"success": "x"},
        {"environment_episodes": None},
        {"seconds_elapsed": float("nan")},
        {"success_interval": [0.1]},
        {"update": 10**400},
    ],
)
def test_a_line_with_values_of_other_types_counts_as_damaged(changes, tmp_path):
    lines = metrics()
    panel = next(line for line in lines if line["agent"] == "evaluation")
    run = make_run(tmp_path, [*lines, panel | changes])
    read = read_run(run)
    assert len(read.lines) == len(lines) and read.damaged["metrics.jsonl"] == 1
    write_page(run)


@pytest.mark.parametrize("changes", [{"agent": []}, {"task_type": 3}, {"update": 1e308}])
def test_an_episode_with_values_of_other_types_counts_as_damaged(changes, tmp_path):
    run = make_run(tmp_path, None, [*episodes(), episodes()[0] | changes])
    read = read_run(run)
    assert len(episodes_of(read)) == len(episodes()) and read.damaged["transcripts.jsonl"] == 1


def test_facts_of_other_types_are_left_out(tmp_path):
    run = make_run(tmp_path)
    (run / "run.json").write_text('{"argv": null, "versions": ["torch"], "commit": "abc"}')
    (run / "reward_model").mkdir(exist_ok=True)
    (run / "reward_model" / "reward_model.json").write_text('{"report": "x"}')
    assert "abc" in write_page(run).read_text()


def test_numbers_that_are_not_finite_are_unknown(tmp_path):
    lines = metrics()
    lines[3]["kl_on"] = float("nan")
    run = make_run(tmp_path, lines, [episode("explorer", 0, True, (float("inf"), 0.5))])
    curve = next(chart for chart in charts_of(read_run(run)) if chart.title.startswith("KL")).curves[0]
    assert curve.x == [2, 3, 4]
    (found,) = episodes_of(read_run(run))
    assert "dense" not in found and "dense_score" not in found["steps"][0]


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"is not a run folder: config.json is missing; give the --out of a run"
    ):
        write_page(tmp_path)
    make_run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"is not a run folder: metrics.jsonl is missing; give the --out"):
        write_page(tmp_path)
    write_lines(tmp_path / "metrics.jsonl", [])
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json cannot be read; put it back, or give another run"):
        write_page(tmp_path)
