"""The tables: measures of a curve, paired intervals, verdicts, and a whole report of made-up logs."""

import dataclasses
import json
from pathlib import Path

import pytest

from flags import UsageError, prepare
from reproduce import tables
from reproduce.arms import Claim, Experiment, Paper
from reproduce.figure import draw
from reproduce.markdown import difference_text, markdown
from reproduce.reuse import is_known, read_known
from reproduce.runs import Run
from reproduce.tables import area, cut, difference, end, last_three, quantile

CURVE = [(0, 10.0), (100, 30.0), (300, 50.0), (400, 20.0)]


def test_the_area_is_the_mean_success_on_the_way():
    # 100 * (10 + 30) / 2 + 200 * (30 + 50) / 2 + 100 * (50 + 20) / 2 = 2000 + 8000 + 3500; / 400
    assert area(CURVE) == 33.75


def test_a_cut_between_two_panels_is_interpolated():
    assert cut(CURVE, 200) == [(0, 10.0), (100, 30.0), (200, 40.0)]
    assert area(cut(CURVE, 200)) == 27.5  # (100 * 20 + 100 * 35) / 200


def test_a_cut_at_a_panel_adds_no_point():
    assert cut(CURVE, 300) == CURVE[:3]


def test_a_curve_is_not_continued_beyond_its_end():
    with pytest.raises(ValueError, match="ends at 400, before 401"):
        cut(CURVE, 401)


def test_the_last_three_points_leave_out_the_start():
    assert last_three(CURVE) == pytest.approx(100 / 3)  # 30, 50, 20
    assert last_three(CURVE[:3]) == 40.0  # 30, 50
    assert last_three(CURVE[:1]) == 10.0
    assert end(CURVE) == 20.0


def test_the_interval_is_that_of_a_paired_t_test():
    # differences 1, 2, 6: mean 3, variance (4 + 1 + 9) / 2 = 7, standard error sqrt(7 / 3) = 1.527525,
    # t of two degrees of freedom 4.303: 3 -+ 6.5729
    found = difference([1.0, 2.0, 6.0])
    assert found["mean"] == 3.0
    assert found["interval"] == pytest.approx([-3.5729, 9.5729], abs=1e-3)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([4.0, 5.0, 6.0], "holds"),  # 5 -+ 4.303 / sqrt(3) = 2.48
        ([-4.0, -5.0, -6.0], "fails"),
        ([1.0, 2.0, 6.0], "within noise"),
        ([1.0, 2.0, 3.0], "within noise"),  # 2 -+ 2.48
        ([0.0, 0.0, 0.0], "within noise"),
        ([5.0], "one seed"),
        ([], "no runs"),
    ],
)
def test_the_verdict_follows_from_the_interval(differences, verdict):
    assert difference(differences)["verdict"] == verdict


def test_the_quantiles_are_those_of_student():
    assert [quantile(n) for n in (2, 3, 11, 31)] == [12.706, 4.303, 2.228, 2.042]
    assert quantile(100) == 2.042  # slightly too wide


def test_a_difference_is_printed_with_its_interval_and_verdict():
    assert difference_text(difference([4.0, 5.0, 6.0])) == "+5.0 [+2.5, +7.5] holds"
    assert difference_text(difference([-1.25])) == "-1.2 one seed"
    assert difference_text(difference([])) == "no runs"


# --- a report -----------------------------------------------------------------------------------------------

GAMES = {"Pick": 60, "Look": 40}


def write_log(folder: Path, panels, spread_at_start=0.25, dense=()):
    """Write the log of a run: panels of (update, episodes, success), and an update of A before each."""
    lines = []
    for number, (update, episodes, success) in enumerate(panels):
        if update:
            line = {"agent": "policy", "update": update, "environment_episodes": episodes}
            line |= {"zero_spread_groups": spread_at_start, "success": success, "optimizer_steps": 7}
            line |= {"repeated_states_per_episode": 5.0 - success}
            line["dense_reward"] = dense[number] if dense else 0.0
            lines.append(line | {"seconds_elapsed": 1.0})
        by_type = {name: {"games": games, "success": success} for name, games in GAMES.items()}
        lines.append(
            {
                "agent": "evaluation",
                "split": "eval",
                "update": update,
                "environment_episodes": episodes,
                "success": success,
                "by_type": by_type,
                "seconds_elapsed": 1.0,
            }
        )
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = {"commit": "abc", "machine": "a machine", "versions": {"torch": "2.0"}}
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "summary.json").write_text("{}")


ARGS = prepare(["--total_updates", "3"])
SEEDS = [0, 1, 2]
TWO_ARMS = Experiment(
    "Is it better?",
    ("rspo", "grpo"),
    (Claim("RSPO is ahead of GRPO", "rspo", "grpo"),),
    papers=(Paper("WebShop", {"rspo": (70.6, 4.3), "grpo": (65.1, None)}),),
)


def plan_of(folder, experiment=TWO_ARMS, seeds=SEEDS):
    plan = {}
    for start in experiment.starts:
        for arm in experiment.arms:
            for seed in seeds:
                args = dataclasses.replace(ARGS, seed=seed)
                plan[start, arm, seed] = Run(folder / start / f"{arm}-s{seed}", args)
    return plan


def made_up(folder, experiment=TWO_ARMS):
    """RSPO: two updates, 200 episodes. GRPO: four updates, 200 episodes; it is behind at equal updates."""
    plan = plan_of(folder, experiment)
    for seed in SEEDS:
        better = 0.01 * seed
        write_log(plan["default", "rspo", seed].folder, [(0, 0, 0.1), (2, 200, 0.4 + better)])
        panels = [(0, 0, 0.1), (2, 100, 0.2), (4, 200, 0.4)]
        write_log(plan["default", "grpo", seed].folder, panels, 0.75)
    return plan


def report_of(folder, experiment=TWO_ARMS):
    return tables.report_of("table1", experiment, made_up(folder, experiment), SEEDS, "python -m reproduce x")


def test_arms_are_compared_at_equal_updates_and_at_equal_episodes(tmp_path):
    (section,) = report_of(tmp_path)["sections"]
    axes = section["claims"][0]["axes"]
    # at 2 updates: 40, 41, 42 against 20; at 200 episodes against 40
    assert axes["updates"]["end"]["differences"] == pytest.approx([20.0, 21.0, 22.0])
    assert axes["episodes"]["end"]["differences"] == pytest.approx([0.0, 1.0, 2.0])
    assert axes["updates"]["end"]["verdict"] == "holds"  # 21 -+ 2.48
    assert axes["episodes"]["end"]["verdict"] == "within noise"  # 1 -+ 2.48
    # over 200 episodes: (10 + 40) / 2 = 25 against ((10 + 20) / 2 + (20 + 40) / 2) / 2 = 22.5
    assert axes["episodes"]["area"]["differences"] == pytest.approx([2.5, 3.0, 3.5])


def test_an_arm_has_its_mean_deviation_and_cost(tmp_path):
    (section,) = report_of(tmp_path)["sections"]
    rspo, grpo = section["arms"]["rspo"], section["arms"]["grpo"]
    assert rspo["end"] == {"mean": pytest.approx(41.0), "std": pytest.approx(1.0)}
    assert (rspo["updates"], rspo["episodes"], rspo["optimizer_steps"]) == (2, 200, 7)
    assert section["common_updates"] == 2
    assert grpo["end at equal updates"]["mean"] == pytest.approx(20.0)
    assert grpo["groups_without_spread"]["mean"] == 75.0
    assert rspo["by_type"]["Look"]["mean"] == pytest.approx(41.0)


def test_the_markdown_has_the_paper_beside(tmp_path):
    text = markdown(report_of(tmp_path))
    assert "| RSPO + GRPO | 2 | 200 | 7 | 10.0 ± 0.0 | 41.0 ± 1.0 |" in text
    assert "40.0, 41.0, 42.0 | 70.6 ± 4.3 |" in text
    claim = "| RSPO is ahead of GRPO | equal updates | +21.0 [+18.5, +23.5] holds |"
    assert claim in text and "+5.5 (WebShop)" in text  # 70.6 - 65.1
    assert "| RSPO is ahead of GRPO | equal episodes | +1.0 [-1.5, +3.5] within noise |" in text


def test_a_missing_run_is_named_and_its_seed_is_not_compared(tmp_path):
    plan = made_up(tmp_path)
    (tmp_path / "default" / "grpo-s1" / "summary.json").unlink()
    report = tables.report_of("table1", TWO_ARMS, plan, SEEDS, "")
    assert report["missing"] == ["default/grpo-s1"]
    found = report["sections"][0]["claims"][0]["axes"]["updates"]["end"]
    assert found["differences"] == pytest.approx([20.0, 22.0])
    assert "**Missing runs: default/grpo-s1.**" in markdown(report)


def test_a_known_run_counts_like_one_of_this_call(tmp_path):
    report = report_of(tmp_path / "first")
    (tmp_path / "table1.json").write_text(json.dumps(report))
    plan = plan_of(tmp_path / "second")  # has no runs
    known = read_known([tmp_path / "table1.json"], plan, [TWO_ARMS])
    assert len(known) == 6 and all(is_known(key, plan, known) for key in plan)
    again = tables.report_of("table1", TWO_ARMS, plan, SEEDS, report["command"], known)
    assert json.dumps(again) == json.dumps(report)


def test_a_known_run_without_a_needed_training_curve_is_trained(tmp_path):
    (tmp_path / "table1.json").write_text(json.dumps(report_of(tmp_path)))
    experiment = dataclasses.replace(TWO_ARMS, training=("repeated_states_per_episode",))
    assert read_known([tmp_path / "table1.json"], plan_of(tmp_path), [experiment]) == {}


def test_known_runs_with_other_flags_are_refused(tmp_path):
    (tmp_path / "table1.json").write_text(json.dumps(report_of(tmp_path)))
    plan = plan_of(tmp_path)
    run = plan["default", "rspo", 1]
    plan["default", "rspo", 1] = dataclasses.replace(run, args=dataclasses.replace(run.args, clip_eps=0.3))
    with pytest.raises(UsageError, match="holds runs of rspo with clip_eps 0.2, not 0.3; leave it out"):
        read_known([tmp_path / "table1.json"], plan, [TWO_ARMS])


def test_flags_that_a_known_run_of_an_older_version_lacks_had_their_defaults(tmp_path):
    report = json.loads(json.dumps(report_of(tmp_path)))
    for arm in report["sections"][0]["arms"].values():
        del arm["config"]["faithful_share"], arm["config"]["spear_age"]
    (tmp_path / "old.json").write_text(json.dumps(report))
    assert len(read_known([tmp_path / "old.json"], plan_of(tmp_path), [TWO_ARMS])) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory; give a NAME.json"),
        ("{", "is no NAME.json of reproduce"),
        ("[1]", "is no NAME.json of reproduce"),
        ('{"sections": [{"arms": {"rspo": {"seeds": {"0": {}}}}}]}', "or of an old version; leave it out"),
    ],
)
def test_a_file_that_holds_no_results_is_refused(text, message, tmp_path):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_known([path], plan_of(tmp_path), [TWO_ARMS])


def test_without_any_run_there_is_a_report_without_numbers(tmp_path):
    experiment = dataclasses.replace(TWO_ARMS, leads=TWO_ARMS.claims)
    report = tables.report_of("pays", experiment, plan_of(tmp_path), SEEDS, "")
    text = markdown(report)
    assert len(report["missing"]) == 6
    assert "| RSPO is ahead of GRPO | equal updates | no runs |" in text
    assert "* RSPO is ahead of GRPO: no runs." in text


def test_the_report_is_json_and_can_be_drawn(tmp_path):
    report = json.loads(json.dumps(report_of(tmp_path / "runs")))
    draw(report, tmp_path / "table1.png")
    assert (tmp_path / "table1.png").stat().st_size > 10_000


def test_the_lead_is_set_against_the_groups_without_spread(tmp_path):
    report = report_of(tmp_path, dataclasses.replace(TWO_ARMS, leads=TWO_ARMS.claims))
    (row,) = report["leads"]
    # GRPO's groups without spread, and the differences of the areas over 200 episodes
    assert row["points"] == [[75.0, pytest.approx(lead)] for lead in (2.5, 3.0, 3.5)]
    assert row["lead"]["verdict"] == "holds"  # 3 -+ 1.24
    assert "* RSPO is ahead of GRPO: holds at starts with 75 %." in markdown(report)


def row_of(share, verdict, claim="A"):
    lead = {"verdict": verdict}
    return {"claim": claim, "groups_without_spread": {"mean": share, "std": None}, "lead": lead}


def test_the_rule_for_users_names_the_shares_of_each_verdict():
    rows = [row_of(92, "within noise"), row_of(75, "holds"), row_of(60, "holds"), row_of(20, "fails")]
    rows.append(row_of(50, "one seed", "B"))
    assert tables.rule_for_users(rows) == [
        "A: holds at starts with 75 %, 60 %; fails at starts with 20 %; within noise at starts with 92 %.",
        "B: one seed at starts with 50 %.",
    ]


def test_repeated_states_are_compared_at_three_points_on_both_axes(tmp_path):
    experiment = dataclasses.replace(TWO_ARMS, training=("repeated_states_per_episode",))
    repeated = report_of(tmp_path, experiment)["sections"][0]["repeated"]
    assert len(repeated) == 6
    # 5 - success. At 2 updates: RSPO 4.6, 4.59, 4.58, GRPO 4.8
    found = repeated["the end, equal updates"]["claim"]
    assert found["differences"] == pytest.approx([0.2, 0.21, 0.22]) and found["verdict"] == "holds"
    # at 200 episodes: GRPO averages its updates so far, (4.8 + 4.6) / 2 = 4.7
    found = repeated["the end, equal episodes"]["claim"]
    assert found["differences"] == pytest.approx([0.1, 0.11, 0.12])


def test_a_dense_only_run_is_described_in_five_parts(tmp_path):
    success = [0.1, 0.2, 0.4, 0.3, 0.1]
    seeds = {}
    for seed in ("0", "1"):
        training = {
            "success": [[i, i, value] for i, value in enumerate(success)],
            "dense_reward": [[i, i, 0.5 * i] for i in range(5)],
        }
        seeds[seed] = {"training": training}
    fifths = tables.fifths_of(seeds)
    assert [part["mean"] for part in fifths["success"]] == pytest.approx([10, 20, 40, 30, 10])
    climbs, falls = fifths["claims"].values()
    assert climbs["mean"] == 2.0  # 2.0 - 0.0
    assert falls["mean"] == pytest.approx(30.0)  # fifth 3 minus the last
