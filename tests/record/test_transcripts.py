"""Which episodes a run keeps as text, and how much of each."""

from types import SimpleNamespace

from buffer import Group, ReplayBuffer, Step, StopReason, Trajectory
from flags import Args
from record import transcripts
from record.log import Log, read_lines
from record.recorder import Recorder, progress_bar


def played(success, *scores, task_type="Pick"):
    steps = []
    for score in scores:
        step = Step([1], [7], [0.0], "a room", "look", True)
        step.dense_score, step.advantage = score, 0.5
        steps.append(step)
    stop = StopReason.FINISHED if success else StopReason.STEP_LIMIT
    return Trajectory("t", "find it", task_type, steps, float(success), success, stop)


def test_the_kept_loops_thin_out():
    every = list(range(0, 17))
    by_2, by_4, by_8 = [18, 20, 22, 24, 26, 28, 30, 32], [36, 40, 44, 48, 52, 56, 60, 64], [72, 80, 88, 96]
    assert [n for n in range(100) if transcripts.is_kept(n)] == every + by_2 + by_4 + by_8
    # each doubling from 16 on adds 8: 16 + 9 * 8 up to 8,192, then 9,216, a multiple of 1,024
    assert sum(transcripts.is_kept(n) for n in range(1, 10_001)) == 89


def test_the_misjudged_episodes_are_the_extremes_of_the_dense_reward():
    low, high = played(True, 0.1, 0.1), played(True, 0.9)
    bad, good = played(False, 0.2), played(False, 0.5, 0.4)
    assert transcripts.misjudged([high, low, bad, good]) == [low, good]
    assert transcripts.misjudged([high]) == [high]
    assert transcripts.misjudged([played(True, None), played(False, 0.2, None)]) == []


def test_a_panel_keeps_one_episode_of_each_type_and_of_each_outcome():
    games = [played(False), played(False), played(False, task_type="Look"), played(True, task_type="Look")]
    assert list(map(id, transcripts.of_panel(games))) == [id(games[0]), id(games[2]), id(games[3])]


def test_long_texts_lose_their_middle():
    assert transcripts.cut("abcdef" * 3, 12) == "abcdefab [... 6 characters are left out ...] cdef"
    assert transcripts.cut("abcdef", 6) == "abcdef" and transcripts.cut(0.5, 1) == 0.5


def test_an_episode_keeps_a_bounded_text():
    def shortened(turns, characters):
        step = {"observation": "o" * characters, "reply": "r", "action": "a", "dense_score": 0.5}
        return transcripts.shortened({"task": "t", "steps": [dict(step) for _ in range(turns)]})

    whole = shortened(20, 4_000)  # 20 * 4,000 < 100,000
    assert [len(step["observation"]) for step in whole["steps"]] == [4_000] * 20
    half = shortened(40, 4_000)  # 40 * 4,000 > 100,000, 40 * 2,000 < 100,000
    note = len(" [... 2,000 characters are left out ...] ")
    assert [len(step["observation"]) for step in half["steps"]] == [1_333 + note + 666] * 40
    long = shortened(1_000, 10)
    assert (len(long["steps"]), long["turns"], long["dense_reward"]) == (200, 1_000, 500.0)


def test_a_loop_keeps_first_misjudged_and_replayed_episodes(tmp_path):
    world = SimpleNamespace(episodes=0, turns=0)
    replay = ReplayBuffer()
    policy = SimpleNamespace(name="policy", chat=SimpleNamespace(decode=str))
    log = Log(tmp_path)
    recorder = Recorder(Args(k=2, total_updates=4), tmp_path, policy, world, None, log, 0.0, {}, replay)
    recorder.bar = progress_bar(4, "updates")
    for dense in (0.3, 0.4):  # B's updates 1 and 2 of loop 1
        groups = [Group("t", [played(True, 0.9), played(True, dense), played(False, 0.1)])]
        recorder.log_update("explorer", groups, {}, 0)
    solved = played(True, 0.7)
    solved.steps[0].log_centre, solved.steps[0].log_ratio = 0.123456, -0.25
    replay.add([Group("t", [solved])], update=0)
    for update in (1, 2):
        replay.draw_metrics(replay.sample(1), update - 1)
        recorder.log_update("policy", [Group("t", [played(False, None)])], {"replayed_episodes": 1}, update)
    log.close()
    recorder.bar.close()
    kept = read_lines(tmp_path / "transcripts.jsonl")
    scores = [(line["agent"], line["update"], line["steps"][0]["dense_score"]) for line in kept]
    assert scores == [
        ("explorer", 0, 0.9),  # the first update of B: the first solved one
        ("explorer", 0, 0.1),  # and the first unsolved one
        ("explorer", 0, 0.4),  # the last update of B: the solved one with the lowest dense reward
        ("explorer", 0, 0.1),  # and the unsolved one with the highest
        ("policy", 1, None),
        ("replayed", 2, 0.7),  # drawn in the last update of A, played before its first
    ]
    assert all(line["loop"] == 1 for line in kept) and kept[-1]["age"] == 1
    assert kept[-1]["steps"][0]["log_centre"] == 0.1235 and kept[-1]["steps"][0]["log_ratio"] == -0.25
    assert "log_ratio" not in kept[0]["steps"][0] and kept[0]["steps"][0]["advantage"] == 0.5


def test_the_bar_names_the_panel_while_it_is_played(tmp_path, monkeypatch):
    args = Args(k=2, total_updates=4, eval_splits=("eval",))
    recorder = Recorder(args, tmp_path, SimpleNamespace(name="policy"), None, None, None, 0.0, {})
    recorder.bar, names = progress_bar(4, "training"), []
    recorder.name_phase("loop 3, B 1/2")

    def play(*_):
        names.append(recorder.bar.desc)
        return [], {}

    monkeypatch.setattr("record.recorder.play_panel", play)
    recorder.evaluate(4)
    names.append(recorder.bar.desc)
    recorder.bar.close()
    assert names == ["loop 2, panel eval: ", "loop 3, B 1/2: "]
