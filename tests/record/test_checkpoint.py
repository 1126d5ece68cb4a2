"""Being killed, going on, and refusing what is damaged, on the toy world of demo/toy.py."""

import itertools
import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flags
import train
from demo.toy import CountingScorer, ToyChat, ToyPolicy, toy_world
from record import checkpoint, report

SMALL = {
    **{"k": 2, "tasks_per_update": 4, "group_size": 2, "off_policy_fraction": 0.25, "buffer_tasks": 2},
    **{"warm_start": 0, "eval_games": 4, "eval_every": 4, "threads": 1},
}
FLAGS = [f"--{name}={value}" for name, value in SMALL.items()]


class SavedToy(ToyPolicy):
    """A toy policy with what checkpoints ask for: all its numbers, flat."""

    def _numbers(self, agent):
        yield from (("weight", agent.table if hasattr(agent, "table") else agent.logits),)
        for state in agent.optimizer.state.values():
            yield from state.items()

    def state_dicts(self):
        states = {"policy": dict(self._numbers(self)), "critic": dict(self._numbers(self.critic))}
        if self.explorer:
            states["explorer_critic"] = dict(self._numbers(self.explorer.critic))
        return states

    def load_state_dicts(self, states):
        self._load(self, states["policy"])
        self._load(self.critic, states["critic"])
        if "explorer_critic" in states:
            self._load(self.fork("explorer").critic, states["explorer_critic"])

    def _load(self, agent, state):
        parameter = agent.table if hasattr(agent, "table") else agent.logits
        parameter.data.copy_(state["weight"])
        moments = {key: value for key, value in state.items() if key != "weight"}
        if moments:
            agent.optimizer.state[parameter] = moments

    def save(self, folder):
        (folder / "weights.json").write_text(json.dumps(self.logits.tolist()))


@pytest.fixture(autouse=True)
def toy_pieces(monkeypatch):
    def make_world(args, chat, seed):
        return toy_world(args.episodes_per_task, args.context, seed=seed)

    base = SimpleNamespace(chat=ToyChat(), device="cpu", changed=False)
    monkeypatch.setattr(train, "load_start", lambda args, folder: base)
    monkeypatch.setattr(train, "make_world", make_world)
    monkeypatch.setattr(train, "make_policy", lambda args, base: SavedToy())
    monkeypatch.setattr(train, "reward_model_of", lambda *_: CountingScorer())
    monkeypatch.setattr(report, "commit", lambda: None)
    monkeypatch.setattr(report, "draw_curves", lambda lines, path, title: None)


def start(folder, steps, *more):
    train.main([*FLAGS, "--total_updates", str(steps), "--out", str(folder), *more])


def resume(folder, steps, *more):
    train.main(["--resume", "--out", str(folder), "--total_updates", str(steps), *more])


def story(folder):
    """All that a run did, times left out: its log, its transcripts, its trained numbers."""
    lines = report.read_lines(folder / "metrics.jsonl")
    lines = [{key: value for key, value in line.items() if not key.startswith("seconds")} for line in lines]
    newest = checkpoint.read(checkpoint.listed(folder)[-1])
    tensors = {file: {key: t.tolist() for key, t in part.items()} for file, part in newest.tensors.items()}
    state = {key: value for key, value in newest.state.items() if key not in ("seconds", "sizes")}
    return lines, report.read_lines(folder / "transcripts.jsonl"), tensors, state


@pytest.mark.parametrize(
    "options",
    [
        ("--method", "rspo"),
        ("--method", "rspo", "--algo", "ppo"),
        ("--method", "rspo_h", "--algo", "gigpo"),
        ("--method", "rspo", "--replay_unit", "group", "--replay_strategy", "random", "--context", "full"),
        ("--method", "dense", "--reward_noise", "0.3"),
    ],
)
def test_four_loops_are_two_loops_a_resumption_and_two_more(tmp_path, options):
    start(tmp_path / "straight", 8, *options)
    start(tmp_path / "parts", 4, *options)
    resume(tmp_path / "parts", 8)
    assert story(tmp_path / "parts") == story(tmp_path / "straight")
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("parts", "straight")]
    assert summaries[0] | {"seconds": 0} == summaries[1] | {"seconds": 0}
    assert json.loads((tmp_path / "parts/config.json").read_text())["total_updates"] == 8


class Killed(BaseException):
    pass


def kill_at(monkeypatch, moment):
    """Die at that file operation, counted from now; text is then half written. Returns the counter."""
    counter = itertools.count()

    def deadly(call, dying=lambda *args: None):
        def maybe(*args, **kwargs):
            if next(counter) == moment:
                dying(*args)
                raise Killed
            return call(*args, **kwargs)

        return maybe

    def half_a_line(log, name, record):
        log._files[name].write(json.dumps(record)[:40])
        log._files[name].flush()

    def half_a_text(path, text, *_):
        with open(path, "w") as file:
            file.write(text[: len(text) // 2])

    for name in ("fsync", "rename", "replace", "unlink"):
        monkeypatch.setattr(os, name, deadly(getattr(os, name)))
    monkeypatch.setattr(Path, "write_text", deadly(Path.write_text, half_a_text))
    monkeypatch.setattr(report.Log, "_append", deadly(report.Log._append, half_a_line))
    return counter


def go_on(folder, steps, *more):
    """What a person would type: --resume if there is a run, else the same command again."""
    if (folder / "config.json").exists():
        resume(folder, steps)
    else:
        start(folder, steps, *more)


@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_anywhere_and_again_goes_on_as_if_nothing_had_happened(tmp_path, monkeypatch, seed):
    algo = ("--algo", ["grpo", "ppo"][seed % 2])
    with monkeypatch.context() as patch:
        counter = kill_at(patch, -1)
        start(tmp_path / "straight", 6, *algo)
    moments = next(counter)
    assert moments > 60  # there is something to be killed in
    rng, folder = random.Random(seed), tmp_path / "killed"
    for _ in range(4):
        with monkeypatch.context() as patch:
            kill_at(patch, rng.randrange(moments))
            try:
                go_on(folder, 6, *algo)
            except Killed:
                continue
    go_on(folder, 6, *algo)
    assert story(folder) == story(tmp_path / "straight")
    names = [path.name for path in folder.rglob("*")]
    assert not [name for name in names if name.startswith(checkpoint.ASIDE)]


def test_every_moment_of_one_checkpoint_leaves_a_whole_one(tmp_path, monkeypatch):
    one = checkpoint.Checkpoint({"policy": {"w": torch.ones(3)}}, {"step": 1})
    two = checkpoint.Checkpoint({"policy": {"w": torch.zeros(3)}}, {"step": 2})
    for moment in range(100):
        folder = tmp_path / str(moment)
        folder.mkdir()
        checkpoint.write(folder, 1, one, keep=1)
        with monkeypatch.context() as patch:
            counter = kill_at(patch, moment)
            try:
                checkpoint.write(folder, 2, two, keep=1)
            except Killed:
                pass
            else:
                assert next(counter) == moment  # it was not interrupted: all moments have been tried
                break
        checkpoint.sweep(folder)
        newest = checkpoint.listed(folder)[-1]
        assert checkpoint.damage(newest) is None
        assert checkpoint.read(newest).state["step"] in (1, 2)
    assert moment > 8


def test_the_newest_checkpoints_are_kept_and_none_holds_a_pickle(tmp_path):
    start(tmp_path, 8, "--keep_checkpoints", "3", "--algo", "ppo")
    assert [path.name for path in checkpoint.listed(tmp_path)] == [
        "update_000004",
        "update_000006",
        "update_000008",
    ]
    files = sorted(path.name for path in checkpoint.listed(tmp_path)[-1].iterdir())
    models = ["critic.safetensors", "explorer_critic.safetensors", "policy.safetensors"]
    assert files == sorted([*models, "manifest.json", "state.json"])
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert suffixes <= {"", ".json", ".jsonl", ".safetensors"}


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def refused(*argv):
    with pytest.raises(flags.UsageError) as caught:
        flags.prepare(list(argv))
    return str(caught.value)


@pytest.mark.parametrize("name", ["policy.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_offered(tmp_path, name):
    start(tmp_path, 6)
    straight = story(tmp_path)
    if name == "manifest.json":
        (tmp_path / "checkpoints/update_000006" / name).write_text("{")
    else:
        flip_a_byte(tmp_path / "checkpoints/update_000006" / name)
    message = refused("--resume", "--out", str(tmp_path))
    assert "update_000006 is damaged" in message and name in message
    assert message.endswith("--resume --resume_from update_000004 continues from the one before it")
    resume(tmp_path, 6, "--resume_from", "update_000004")
    assert story(tmp_path) == straight


def test_with_no_whole_checkpoint_left_the_remedy_is_a_new_run(tmp_path):
    start(tmp_path, 4)
    for path in checkpoint.listed(tmp_path):
        (path / "policy.safetensors").unlink()
    assert refused("--resume", "--out", str(tmp_path)).endswith(
        "checkpoint update_000004 is damaged (policy.safetensors is missing); "
        "no whole one is left before it: start a new run"
    )


def test_a_resumed_run_may_become_longer_and_not_another(tmp_path):
    start(tmp_path, 4)
    here = ["--resume", "--out", str(tmp_path)]
    assert refused(*here, "--group_size", "4").startswith(
        f"--group_size 4: the run in {tmp_path} has 2; leave it out"
    )
    assert refused(*here, "--learning_rate", "0.1").startswith("--learning_rate 0.1: the run in")
    assert refused(*here, "--total_updates", "2") == (
        "--total_updates 2: update_000004 has had 4 updates; give 4 or more"
    )
    assert "there are: update_000002, update_000004" in refused(*here, "--resume_from", "update_000003")
    args, newest = flags.prepare([*here, "--total_updates", "6", "--threads", "2", "--group_size", "2"])
    assert (args.total_updates, args.threads, newest.name) == (6, 2, "update_000004")


def test_a_log_that_lost_lines_is_not_continued(tmp_path, capsys):
    start(tmp_path, 4)
    os.truncate(tmp_path / "metrics.jsonl", 100)
    with pytest.raises(SystemExit) as exit:
        resume(tmp_path, 6)
    assert exit.value.code == 2
    assert "metrics.jsonl has 100 bytes where the checkpoint saw" in capsys.readouterr().err


def test_two_processes_do_not_work_in_one_folder(tmp_path, capsys):
    start(tmp_path, 4)
    with checkpoint.lock(tmp_path), pytest.raises(SystemExit) as exit:
        resume(tmp_path, 6)
    assert exit.value.code == 2
    assert f"--out {tmp_path}: another process works in it" in capsys.readouterr().err
    resume(tmp_path, 6)


def test_a_full_disk_is_said_and_the_run_goes_on_later(tmp_path, monkeypatch, capsys):
    start(tmp_path / "straight", 6)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit:
        usage = [10**9, 10**9, 0, 0]  # room at the first checkpoint, none after it
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=usage.pop(0)))
        start(tmp_path / "full", 6)
    assert exit.value.code == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said and f"python train.py --resume --out {tmp_path / 'full'}" in said
    resume(tmp_path / "full", 6)
    assert story(tmp_path / "full") == story(tmp_path / "straight")


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit:
        written = train.checkpoint.write

        def interrupted(folder, step, *rest):
            if step == 4:
                raise KeyboardInterrupt
            return written(folder, step, *rest)

        patch.setattr(train.checkpoint, "write", interrupted)
        start(tmp_path, 6)
    assert exit.value.code == 130
    assert f"goes on with: python train.py --resume --out {tmp_path}" in capsys.readouterr().err
    resume(tmp_path, 6)
    lines = report.read_lines(tmp_path / "metrics.jsonl")
    assert [line["update"] for line in lines if line["agent"] == "policy"] == [1, 2, 3, 4, 5, 6]


def test_panels_come_at_the_end_of_the_loop_in_which_they_fall_due(tmp_path):
    start(tmp_path, 8, "--eval_every", "3")  # due at 3 and 6, in loops that end at 4 and 6; and at the end
    lines = report.read_lines(tmp_path / "metrics.jsonl")
    assert [line["update"] for line in lines if line["agent"] == "evaluation"] == [0, 4, 6, 8]


def test_updates_are_counted_once_each_and_episodes_are_those_played(tmp_path):
    start(tmp_path, 4)
    resume(tmp_path, 8)
    lines = report.read_lines(tmp_path / "metrics.jsonl")
    of = {agent: [line for line in lines if line["agent"] == agent] for agent in ("policy", "explorer")}
    assert [line["update"] for line in of["policy"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [line["explorer_update"] for line in of["explorer"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [line["update"] for line in of["explorer"]] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert [line["loop"] for line in of["policy"]] == [1, 1, 2, 2, 3, 3, 4, 4]
    # A loop: B plays 2 x 3 tasks x 2 episodes and 2 x 2 for the buffer, A 2 x 3 x 2: 28 episodes
    assert [line["environment_episodes"] for line in of["policy"]] == [22, 28, 50, 56, 78, 84, 106, 112]
    assert all(line["environment_turns"] == 3 * line["environment_episodes"] for line in lines)
    assert [(line["update"]) for line in lines if line["agent"] == "evaluation"] == [0, 4, 8]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["updates"], summary["explorer_updates"], summary["episodes"]) == (8, 8, 112)
