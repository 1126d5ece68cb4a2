"""The log and its listeners, the table of panels, transcripts, curves and the report of a run."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from buffer import Step, StopReason, Trajectory
from demo.toy import ToyPolicy
from flags import Args
from record import curves, transcripts
from record.log import Log, eval_file, numbers_of, read_lines, wandb_listener
from record.metrics import panel, progress, start_and_end, wilson_interval
from record.panels import panel_table, solved_text
from record.recorder import Recorder, progress_bar

ROOT = Path(__file__).parent.parent.parent

# --- the log ------------------------------------------------------------------------------------------------


def test_an_unfinished_last_line_is_skipped_and_a_damaged_line_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": ')
    assert read_lines(path) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl is damaged: Expecting value"):
        read_lines(path)
    path.write_text('{"a": 1}\n5\n')
    with pytest.raises(ValueError, match="metrics.jsonl is damaged: line 2 is not a JSON object"):
        read_lines(path)


def test_a_log_is_truncated_to_its_sizes_and_continued(tmp_path):
    log = Log(tmp_path)
    log.write({"agent": "policy", "update": 1})
    sizes = log.sizes()
    log.write({"agent": "policy", "update": 2})
    log.write_transcript({"agent": "policy"})
    log.close()
    assert sizes == {"metrics.jsonl": len('{"agent": "policy", "update": 1}\n'), "transcripts.jsonl": 0}

    log, heard = Log(tmp_path, sizes), []
    log.listeners.append(heard.append)
    log.write({"agent": "evaluation", "update": 1})
    assert log.lines == read_lines(tmp_path / "metrics.jsonl")
    assert log.lines == [{"agent": "policy", "update": 1}, {"agent": "evaluation", "update": 1}]
    assert log.of("policy") == log.lines[:1] and heard == log.lines[1:]
    log.close()
    with pytest.raises(ValueError, match="bytes where the checkpoint saw 700"):
        Log(tmp_path, {"metrics.jsonl": 700})


def test_wandb_draws_every_agent_over_its_own_updates(tmp_path, monkeypatch):
    heard, defined = [], {}

    class FakeRun:
        def define_metric(self, name, step_metric):
            defined[name] = step_metric

        log = staticmethod(heard.append)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: FakeRun()))
    listen = wandb_listener("project", tmp_path, {"eval_splits": ("seen",)})
    listen({"agent": "explorer", "update": 3, "explorer_update": 5, "success": 0.5})
    by_type = {"Pick": {"games": 9, "success": 0.25}}
    listen({"agent": "evaluation", "split": "seen", "update": 6, "by_type": by_type})
    assert heard == [
        {"explorer/update": 3, "explorer/explorer_update": 5, "explorer/success": 0.5},
        {"evaluation/seen/update": 6, "evaluation/seen/success/Pick": 0.25},
    ]
    assert defined == {
        "policy/*": "policy/update",
        "explorer/*": "explorer/explorer_update",
        "buffer/*": "buffer/update",
        "evaluation/seen/*": "evaluation/seen/update",
    }


def test_an_evaluation_gets_a_file_of_its_own(tmp_path):
    for name in ("eval.json", "eval-2.json", "eval-3.json"):
        path = eval_file(tmp_path)
        assert path == tmp_path / name
        path.touch()


@pytest.mark.parametrize("max_centre", [None, 5.0])
def test_a_large_centre_is_mentioned_once(tmp_path, capsys, max_centre):
    args = Args(max_centre=max_centre)
    world = SimpleNamespace(episodes=0, turns=0)
    recorder = Recorder(args, tmp_path, ToyPolicy(), world, None, Log(tmp_path), started=0.0, identity={})
    recorder.bar = progress_bar(args.total_updates, "updates")
    for update, centre_max in enumerate((9.9, 12.34, 15.0), start=1):
        metrics = {"replayed_episodes": 1, "clip_fraction_on": 0.0, "centre_max": centre_max}
        recorder.log_update("policy", [], metrics, update)
    recorder.bar.close()
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    if max_centre:
        assert warned == []
    else:
        (line,) = warned
        assert line.startswith("warning: update 2: a replayed token has c = pi_old / pi_B = 12.3 and may ")
        assert "--max_centre 10 leaves such tokens out" in line


# --- panels -------------------------------------------------------------------------------------------------


def a_panel(success, outcome, pick, look, **cost):
    by_type = {
        "Pick": {"games": 4, "success": pick},
        "Look": {"games": 2, "success": look},
        "Heat": {"games": 0, "success": 0.0},  # has no column: the panel has no such game
    }
    about = {"games": 6, "success": success, "outcome": outcome, "crashed_episodes": 0}
    return {**about, "by_type": by_type, **cost}


def test_the_table_has_a_column_of_scores_if_they_differ_from_success():
    start = a_panel(0.5, 0.55, 0.75, 0.0, update=0, environment_episodes=0, seconds_elapsed=2.4)
    end = a_panel(1.0, 1.0, 1.0, 1.0, update=3, environment_episodes=2688, seconds_elapsed=61.6)
    assert panel_table({"start": start, "end": end}) == (
        "         Pick    Look    all  score  updates  episodes  seconds\n"
        "games       4       2      6\n"
        "start    75.0     0.0   50.0   55.0        0         0        2\n"
        "end     100.0   100.0  100.0  100.0        3     2,688       62\n"
        "change  +25.0  +100.0  +50.0  +45.0"
    )


def test_the_table_has_no_scores_if_the_outcome_is_the_success():
    assert panel_table({"policy": a_panel(0.5, 0.5, 0.75, 0.0)}) == (
        "        Pick  Look   all\n"  #
        "games      4     2     6\n"
        "policy  75.0   0.0  50.0"
    )


def test_every_split_has_its_own_start_and_end():
    lines = [
        {"agent": agent, "split": split, "update": update}
        for update in (0, 9, 12)
        for agent, split in (("evaluation", "seen"), ("policy", None), ("evaluation", "unseen"))
    ]
    ends = start_and_end(lines)
    updates = {split: (start["update"], end["update"]) for split, (start, end) in ends.items()}
    assert updates == {"seen": (0, 12), "unseen": (0, 12)}
    assert all(end["split"] == split for split, (_, end) in ends.items())


def test_the_progress_of_a_split():
    start, end = a_panel(0.5, 0.6, 0.75, 0.0), a_panel(1.0, 0.9, 1.0, 1.0, crashed_episodes=2)
    assert progress(start, end) == {
        "games": 6,
        "success_start": 0.5,
        "success_end": 1.0,
        "outcome_start": 0.6,
        "outcome_end": 0.9,
        "crashed_episodes_start": 0,
        "crashed_episodes_end": 2,
        "by_type": {
            "Pick": {"games": 4, "start": 0.75, "end": 1.0},
            "Look": {"games": 2, "start": 0.0, "end": 1.0},
            "Heat": {"games": 0, "start": 0.0, "end": 0.0},
        },
    }


def games_of(task_type, solved, unsolved):
    """Played games, or games that crashed at their start if the task type is ""."""
    stop = StopReason.FINISHED if task_type else StopReason.CRASHED
    outcomes = [1.0] * solved + [0.0] * unsolved
    return [Trajectory("t", "", task_type, [], outcome, outcome == 1, stop) for outcome in outcomes]


def test_a_game_that_crashed_at_its_start_has_the_type_unknown():
    types = ("Pick", "Look", "Heat")
    found = panel(games_of("Pick", 3, 2) + games_of("", 0, 1) + games_of("Look", 1, 3), types)
    counts = {name: (result["games"], result["successes"]) for name, result in found["by_type"].items()}
    assert counts == {"Pick": (5, 3), "Look": (4, 1), "Heat": (0, 0), "unknown": (1, 0)}
    assert (found["games"], found["successes"], found["crashed_episodes"]) == (10, 4, 1)
    assert (found["success"], found["by_type"]["Pick"]["success"]) == (0.4, 0.6)
    whole = panel(games_of("Pick", 4, 2) + games_of("Look", 1, 3), types)
    assert tuple(whole["by_type"]) == types

    for start, end, unknown in ((found, whole, (0, 0.0, 0.0)), (whole, found, (1, 0.0, 0.0))):
        by_type = progress(start, end)["by_type"]
        assert tuple(by_type["unknown"].values()) == unknown
        assert sum(result["games"] for result in by_type.values()) == 10
    assert panel_table({"start": found, "end": whole}) == (
        "        Pick  Look  unknown    all\n"
        "games    5/6     4      1/0     10\n"
        "start   60.0  25.0      0.0   40.0\n"
        "end     66.7  25.0      0.0   50.0\n"
        "change  +6.7  +0.0     +0.0  +10.0"
    )


@pytest.mark.parametrize(
    "successes, games, ends",
    [
        # share .1, z^2 = 3.8415: middle .1 + 3.8415 / 20 = .29207, half width
        # 1.96 sqrt(.009 + 3.8415 / 400) = .26733, (.29207 -+ .26733) / 1.38415
        (1, 10, [0.01788, 0.40415]),
        (0, 10, [0.0, 0.27753]),  # 3.8415 / (10 + 3.8415)
        (10, 10, [0.72247, 1.0]),
        (0, 0, [0.0, 1.0]),
    ],
)
def test_the_interval_of_a_success_rate(successes, games, ends):
    assert wilson_interval(successes, games) == pytest.approx(ends, abs=1e-4)
    low, high = wilson_interval(successes, games)
    assert 0 <= low <= high <= 1


def test_a_panel_says_how_many_games_are_solved():
    found = panel(games_of("Pick", 1, 9), ("Pick",))
    assert found["success_interval"] == found["by_type"]["Pick"]["success_interval"]
    assert solved_text(found) == "solved: 1 of 10 games, 10.0% (95 % interval 1.8% to 40.4%)"
    line = {"agent": "evaluation", "split": "seen", **found}
    assert numbers_of(line) == {
        "evaluation/seen/games": 10,
        "evaluation/seen/successes": 1,
        "evaluation/seen/success": 0.1,
        "evaluation/seen/outcome": 0.1,
        "evaluation/seen/turns_per_episode": 0.0,
        "evaluation/seen/crashed_episodes": 0,
        "evaluation/seen/success/Pick": 0.1,
    }


# --- episodes -----------------------------------------------------------------------------------------------


def an_episode(success, valid=True, dense_score=None):
    step = Step(
        prompt_ids=[1],
        action_ids=[7],
        sampler_logprobs=[0.0],
        observation="a room",
        action="look" if valid else "",
        valid=valid,
        truncated=False,
    )
    step.dense_score = dense_score
    stop = StopReason.FINISHED if success else StopReason.STEP_LIMIT
    return Trajectory("env/train/3", "find it", "Pick", [step], float(success), success, stop)


def test_a_transcript_is_readable_as_text():
    def text_of(episode):
        return transcripts.transcript_text(
            transcripts.transcript(episode, lambda ids: f"reply {ids}", agent="policy")
        )

    assert text_of(an_episode(True, dense_score=0.25)) == (
        "find it  [Pick, env/train/3]: solved\n  a room\n  > look   [score +0.25]"
    )
    assert text_of(an_episode(False, valid=False)) == (
        "find it  [Pick, env/train/3]: not solved (step limit)\n  a room\n  > (invalid reply) 'reply [7]'"
    )


def test_one_solved_and_one_unsolved_episode_are_shown():
    solved, failed, other = an_episode(True), an_episode(False), an_episode(True)
    assert transcripts.one_of_each([solved, other, failed]) == [solved, failed]
    assert transcripts.one_of_each([failed]) == [failed]


# --- curves -------------------------------------------------------------------------------------------------

LINES = [
    {"agent": "evaluation", "split": "eval", "update": 0, "environment_episodes": 0, "success": 0.1},
    {"agent": "explorer", "update": 0, "explorer_update": 1, "environment_episodes": 8, "success": 0.2},
    {"agent": "buffer", "update": 0, "environment_episodes": 12, "success": 0.3},
    {"agent": "policy", "update": 1, "environment_episodes": 16, "success": 0.4, "kl_on": 0.0, "kl_off": 1.0},
    {"agent": "policy", "update": 2, "environment_episodes": 24, "success": 0.5, "kl_on": 0.2},
    {"agent": "evaluation", "split": "eval", "update": 2, "environment_episodes": 24, "success": 0.6},
    {"agent": "evaluation", "split": "hard", "update": 2, "environment_episodes": 24, "success": 0.0},
]


def test_points_are_those_of_one_agent_over_its_own_updates():
    assert curves.points(LINES, "update", "success", agent="policy") == ([1, 2], [0.4, 0.5])
    assert curves.points(LINES, "update", "success", agent="explorer") == ([1], [0.2])
    assert curves.points(LINES, "environment_episodes", "success", agent="explorer") == ([8], [0.2])
    assert curves.points(LINES, "update", "success", agent="evaluation", split="eval") == ([0, 2], [0.1, 0.6])
    assert curves.points(LINES, "update", "kl_off", agent="policy") == ([1], [1.0])  # only lines that have it


def test_curves_have_a_legend_for_what_is_drawn():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, (success, kl, clipped) = pyplot.subplots(1, 3)
    curves.draw_success(success, LINES, "update")
    curves.draw_metric(kl, LINES, "kl_on", "kl_off")
    curves.draw_metric(clipped, LINES, "clip_fraction_on", "clip_fraction_off")  # no line has it
    labels = [line.get_label() for line in success.lines]
    assert labels == ["B, training games", "A, training games", "A, held-out (eval)", "A, held-out (hard)"]
    assert [text.get_text() for text in kl.get_legend().get_texts()] == ["A", "A, replayed"]
    assert not clipped.lines and clipped.get_legend() is None
    pyplot.close(figure)


@pytest.mark.slow
def test_the_report_of_a_run_folder_draws_its_curves(tmp_path):
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for line in LINES:
            panel = a_panel(0.5, 0.5, 0.5, 0.5) if line["agent"] == "evaluation" else {}
            file.write(json.dumps({**line, **panel}) + "\n")
    episode = transcripts.transcript(an_episode(True), str, agent="evaluation")
    (tmp_path / "transcripts.jsonl").write_text(json.dumps(episode) + "\n")
    (tmp_path / "config.json").write_text('{"method": "rspo", "algo": "grpo", "env": "household", "seed": 0}')
    done = subprocess.run(
        [sys.executable, "-m", "record.report", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "success in % on eval" in done.stdout and "success in % on hard" in done.stdout
    assert "find it  [Pick, env/train/3]: solved" in done.stdout
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_a_folder_without_a_run_is_refused(tmp_path):
    command = [sys.executable, "-m", "record.report"]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and f"error: {tmp_path} is not a run folder" in done.stderr
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: give a run folder: ")
