"""Whole runs of the toy world (demo/toy.py): checkpoints, kills, resumption, damaged files and endings."""

import dataclasses
import errno
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
import rspo
import train
from config import Config
from demo.toy import CountingScorer, ToyChat, ToyPolicy, toy_world
from record import checkpoint
from record.log import Log, read_lines
from record.recorder import causes_of_divergence, phase_after
from scale import distributed
from scale.distributed import RankLost
from scale.vllm_sampler import EngineError

SMALL = {"k": 2, "tasks_per_update": 4, "group_size": 2, "off_policy_fraction": 0.25, "buffer_tasks": 2}
SHORT = {"warm_start": 0, "eval_games": 4, "eval_every": 4, "threads": 1}
FLAGS = [f"--{name}={value}" for name, value in (SMALL | SHORT).items()]


class SavedToy(ToyPolicy):
    """A toy policy with the methods that checkpoints need: all its numbers, flat."""

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


TOY = train.Pieces(
    load_start=lambda args, folder: SimpleNamespace(
        chat=ToyChat(), device="cpu", changed=False, max_length=10**6
    ),
    make_world=lambda args, chat, seed: toy_world(args.episodes_per_task, args.context, seed=seed),
    make_policy=lambda args, base: SavedToy(),
    load_reward_model=lambda args, base: None,
    make_reward_model=lambda *_: CountingScorer(),
    of_base=lambda base: dict.fromkeys(["model weights", "tokenizer", "chat template"], "toy"),
    of_reward_model=lambda model: {"step reward model": "toy"},
    draw_curves=lambda lines, path, title: None,
    write_page=lambda folder: None,
)


def start(folder, updates, *more, pieces=TOY):
    train.main([*FLAGS, "--total_updates", str(updates), "--out", str(folder), *more], pieces=pieces)


def resume(folder, updates, *more):
    train.main(["--resume", "--out", str(folder), "--total_updates", str(updates), *more], pieces=TOY)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    start(folder, 4)
    return folder


@pytest.fixture
def run_folder(finished, tmp_path):
    """A copy of the run folder of a finished run of four updates."""
    return shutil.copytree(finished, tmp_path / "run")


def story(folder):
    """Return all that a run did, except times: its log, transcripts, trained numbers and state."""
    lines = read_lines(folder / "metrics.jsonl")
    lines = [{key: value for key, value in line.items() if not key.startswith("seconds")} for line in lines]
    newest = checkpoint.read(checkpoint.listed(folder)[-1])
    tensors = {file: {key: t.tolist() for key, t in part.items()} for file, part in newest.tensors.items()}
    state = {
        key: value for key, value in newest.state.items() if key not in ("seconds", "sizes", "metrics_sha256")
    }
    return lines, read_lines(folder / "transcripts.jsonl"), tensors, state


# --- resuming -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        "--method rspo",
        "--method rspo --algo ppo",
        "--method rspo_h --algo gigpo",
        "--method rspo --replay_unit group --replay_strategy random --context full",
        "--method rspo --buffer_source both --buffer_keep 8 --replay_strategy positive --algo gigpo",
        "--method dense --reward_noise 0.3",
        "--method spear --spear_buffer 8 --algo gigpo",
        "--dense_reward novelty --reward_noise 0.3",
    ],
)
def test_two_loops_and_two_resumed_loops_equal_four_loops(tmp_path, options):
    start(tmp_path / "straight", 8, *options.split())
    start(tmp_path / "parts", 4, *options.split())
    resume(tmp_path / "parts", 8)
    assert story(tmp_path / "parts") == story(tmp_path / "straight")
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("parts", "straight")]
    assert summaries[0] | {"seconds": 0} == summaries[1] | {"seconds": 0}
    assert json.loads((tmp_path / "parts/config.json").read_text())["total_updates"] == 8
    resumed = json.loads((tmp_path / "parts/run.json").read_text())["resumed"]
    assert [entry["argv"][0] for entry in resumed] == ["--resume"]


class Killed(BaseException):
    pass


def kill_at(monkeypatch, moment):
    """Raise Killed at that file operation, counted from now, with text half written. Return the counter."""
    counter = itertools.count()

    def deadly(call, dying=lambda *args: None):
        def maybe(*args, **kwargs):
            if next(counter) == moment:
                dying(*args)
                raise Killed
            return call(*args, **kwargs)

        return maybe

    def half_a_line(log, line):
        with open(log.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line)[:40])

    def half_a_text(path, text, *_):
        with open(path, "w") as file:
            file.write(text[: len(text) // 2])

    for name in ("fsync", "rename", "replace", "unlink"):
        monkeypatch.setattr(os, name, deadly(getattr(os, name)))
    monkeypatch.setattr(Path, "write_text", deadly(Path.write_text, half_a_text))
    monkeypatch.setattr(Log, "write", deadly(Log.write, half_a_line))
    return counter


def start_or_resume(folder, updates, *more):
    """Resume the run if there is one, else start it with the same command again."""
    if (folder / "config.json").exists():
        resume(folder, updates)
    else:
        start(folder, updates, *more)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_a_run_that_is_killed_four_times_equals_a_straight_one(tmp_path, monkeypatch, seed):
    algo = ("--algo", ["grpo", "ppo"][seed % 2])
    with monkeypatch.context() as patch:
        counter = kill_at(patch, -1)
        start(tmp_path / "straight", 6, *algo)
    moments = next(counter)
    assert moments > 60
    rng, folder = random.Random(seed), tmp_path / "killed"
    for _ in range(4):
        with monkeypatch.context() as patch:
            kill_at(patch, rng.randrange(moments))
            try:
                start_or_resume(folder, 6, *algo)
            except Killed:
                continue
    start_or_resume(folder, 6, *algo)
    assert story(folder) == story(tmp_path / "straight")
    names = [path.name for path in folder.rglob("*")]
    assert not [name for name in names if name.startswith(checkpoint.ASIDE)]


def test_a_kill_at_any_moment_of_writing_leaves_a_complete_checkpoint(tmp_path, monkeypatch):
    one = checkpoint.Checkpoint({"policy": {"w": torch.ones(3)}}, {"updates": 1})
    two = checkpoint.Checkpoint({"policy": {"w": torch.zeros(3)}}, {"updates": 2})
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
                assert next(counter) == moment  # not interrupted: all moments have been tried
                break
        checkpoint.sweep(folder)
        newest = checkpoint.listed(folder)[-1]
        assert checkpoint.damage(newest) is None
        assert checkpoint.read(newest).state["updates"] in (1, 2)
    assert moment > 8


def test_only_the_newest_checkpoints_are_kept_and_no_file_is_a_pickle(tmp_path):
    start(tmp_path, 8, "--keep_checkpoints", "3", "--algo", "ppo")
    names = [path.name for path in checkpoint.listed(tmp_path)]
    assert names == ["update_000004", "update_000006", "update_000008"]
    files = sorted(path.name for path in checkpoint.listed(tmp_path)[-1].iterdir())
    models = ["critic.safetensors", "explorer_critic.safetensors", "policy.safetensors"]
    assert files == sorted([*models, "manifest.json", "state.json"])
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert suffixes <= {"", ".json", ".jsonl", ".safetensors"}


# --- refusals -----------------------------------------------------------------------------------------------


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def refused(*argv):
    with pytest.raises(flags.UsageError) as caught:
        train.read_flags(list(argv))
    return str(caught.value)


@pytest.mark.parametrize("name", ["policy.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_previous_one_is_offered(run_folder, name):
    straight = story(run_folder)
    if name == "manifest.json":
        (run_folder / "checkpoints/update_000004" / name).write_text("{")
    else:
        flip_a_byte(run_folder / "checkpoints/update_000004" / name)
    message = refused("--resume", "--out", str(run_folder))
    assert "update_000004 is damaged" in message and name in message
    assert message.endswith("--resume_from update_000002 takes the checkpoint before it")
    resume(run_folder, 4, "--resume_from", "update_000002")
    assert story(run_folder) == straight


def test_without_a_complete_checkpoint_the_remedy_is_a_new_run(run_folder):
    for path in checkpoint.listed(run_folder):
        (path / "policy.safetensors").unlink()
    assert refused("--resume", "--out", str(run_folder)).endswith(
        "checkpoint update_000004 is damaged (policy.safetensors is missing); "
        "no undamaged checkpoint is left before it: start a new run"
    )


def test_checkpoints_of_an_older_version_are_refused(run_folder):
    for path in checkpoint.listed(run_folder):
        path.rename(path.with_name(path.name.replace("update", "step")))
    for mode in ("--resume", "--eval_only"):
        assert refused(mode, "--out", str(run_folder)) == (
            f"--out {run_folder}: its checkpoints (step_000004) were written by an older version and cannot "
            "be read; start a new run; a new run can take its policy/ with --model and its reward_model/ as "
            "--reward_model"
        )


def test_a_resumed_run_may_become_longer_and_not_another(run_folder):
    here = ["--resume", "--out", str(run_folder)]
    assert refused(*here, "--group_size", "4").startswith(
        f"--group_size 4: the run in {run_folder} has 2; leave it out"
    )
    assert refused(*here, "--learning_rate", "0.1").startswith("--learning_rate 0.1: the run in")
    assert refused(*here, "--total_updates", "2") == (
        "--total_updates 2: update_000004 has 4 updates; give 4 or more"
    )
    assert "there are: update_000002, update_000004" in refused(*here, "--resume_from", "update_000003")
    args, newest = train.read_flags([*here, "--total_updates", "6", "--threads", "2", "--group_size", "2"])
    assert (args.total_updates, args.threads, newest.name) == (6, 2, "update_000004")


def test_a_log_that_lost_lines_is_not_continued(run_folder, capsys):
    os.truncate(run_folder / "metrics.jsonl", 100)
    with pytest.raises(SystemExit) as exit:
        resume(run_folder, 6)
    assert exit.value.code == 2
    assert "metrics.jsonl has 100 bytes where the checkpoint saw" in capsys.readouterr().err


def garbled(path):
    """Replace a file's content by as many other bytes."""
    path.write_bytes(
        bytes(reversed(range(256))) * (path.stat().st_size // 256) + b"x" * (path.stat().st_size % 256)
    )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (garbled, "metrics.jsonl was changed since the checkpoint; put the file back, or start a new run"),
        (
            lambda path: path.write_text(path.read_text().replace('"update": 1', '"update": 7', 1)),
            "was changed",
        ),
        (Path.unlink, "metrics.jsonl has 0 bytes where the checkpoint saw"),
    ],
)
def test_a_changed_log_is_refused_before_the_model_is_loaded(run_folder, damage, words):
    damage(run_folder / "metrics.jsonl")
    message = refused("--resume", "--out", str(run_folder))
    assert message.startswith(f"--out {run_folder}: ") and words in message


def test_a_log_without_its_checkpoints_is_not_overwritten(run_folder):
    shutil.rmtree(run_folder / "checkpoints")
    assert refused("--resume", "--out", str(run_folder)) == (
        f"--out {run_folder}: {run_folder / 'metrics.jsonl'} has a second loop, but its checkpoints have "
        "gone; put them back, or start a new run"
    )


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 1000)])
def test_lost_transcripts_are_reported_and_the_run_goes_on(finished, run_folder, damage, capsys):
    damage(run_folder / "transcripts.jsonl")
    resume(run_folder, 6)
    assert "bytes of transcripts.jsonl are lost; the run goes on without them" in capsys.readouterr().out
    assert {line["update"] for line in read_lines(run_folder / "transcripts.jsonl")} >= {4, 6}
    straight = run_folder.parent / "straight"
    shutil.copytree(finished, straight)
    resume(straight, 6)
    assert story(run_folder)[0] == story(straight)[0]


@pytest.mark.parametrize("text", ["{", "[]", '{"resumed": 3}'])
def test_a_broken_run_json_is_kept_aside_and_the_run_goes_on(run_folder, text):
    (run_folder / "run.json").write_text(text)
    resume(run_folder, 6)
    assert (run_folder / "run.json.damaged").read_text() == text
    assert json.loads((run_folder / "run.json").read_text())["argv"][0] == "--resume"


def edited(folder, removed=(), **changes):
    """Change values of a config.json and remove keys."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if name not in removed}))


@pytest.mark.parametrize("mode", ["--resume", "--eval_only"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"clip_eps": 0.3},
            "config.json was changed: clip_eps is 0.3 and was 0.2; write the old values back",
        ),
        ({"removed": ["group_size"]}, "config.json was changed: group_size is missing and was 2; "),
        ({"seed": 1, "k": 4, "algo": "ppo"}, 'algo is "ppo" and was "grpo", k is 4 and was 2 (and 1 more); '),
    ],
)
def test_a_changed_config_is_refused_by_key(run_folder, mode, changes, words):
    edited(run_folder, **changes)
    message = refused(mode, "--out", str(run_folder))
    assert message.startswith(f"--out {run_folder}: ") and words in message


def test_an_emptied_config_is_refused_by_key(run_folder):
    (run_folder / "config.json").write_text("{}")
    message = refused("--resume", "--out", str(run_folder))
    assert (
        "config.json was changed: k is missing and was 2, tasks_per_update is missing and was 4 (and"
        in message
    )


def test_flags_that_may_change_may_also_change_in_the_config(run_folder):
    edited(run_folder, total_updates=8, keep_checkpoints=3)
    args, newest = train.read_flags(["--resume", "--out", str(run_folder)])
    assert (args.total_updates, newest.name) == (8, "update_000004")


@pytest.mark.parametrize("part", ["model weights", "tokenizer", "chat template", "step reward model"])
def test_another_model_is_refused_by_name_and_nothing_is_written(run_folder, part, capsys):
    files = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    other = dataclasses.replace(
        TOY,
        of_base=lambda base: {part: "another"},
        load_reward_model=lambda args, base: CountingScorer(),
        of_reward_model=lambda model: {part: "another"},
    )
    with pytest.raises(SystemExit) as exit:
        train.main(["--resume", "--out", str(run_folder), "--total_updates", "6"], pieces=other)
    assert exit.value.code == 2
    assert capsys.readouterr().err == (
        f"error: --model tiny: the {part} there changed since the run was trained; put the old files back, "
        "or start a new run\n"
    )
    assert files == {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["critic", "explorer_critic"])
def test_a_checkpoint_that_lacks_a_critic_is_refused(tmp_path, capsys, name):
    start(tmp_path / "run", 2, "--algo", "ppo")
    path = tmp_path / "run" / "checkpoints" / "update_000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"][f"{name}.safetensors"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(SystemExit):
        resume(tmp_path / "run", 4)
    assert f"update_000002 has no {name}.safetensors; start a new run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda manifest: manifest["sha256"].pop("policy.safetensors"), "does not list policy.safetensors"),
        (lambda manifest: manifest.update(sha256="x"), "is missing or unreadable"),
        (lambda manifest: manifest.update(updates=3), "is of another checkpoint, after 3 updates"),
    ],
)
def test_a_changed_manifest_is_refused(run_folder, change, words):
    path = run_folder / "checkpoints" / "update_000004" / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    assert f"update_000004 is damaged (manifest.json {words})" in refused(
        "--resume", "--out", str(run_folder)
    )


def test_a_folder_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    run_folder, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "run"
    assert refused("--out", str(inside)) == f"--out {inside}: not a directory; give another path"
    for name in ("transcripts.jsonl", "summary.json"):
        (run_folder / name).unlink()
        (run_folder / name).mkdir()
        message = refused("--resume", "--out", str(run_folder))
        assert message == f"--out {run_folder}: {run_folder / name} is a folder; remove it"
        (run_folder / name).rmdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    assert refused("--out", str(tmp_path / "new")) == (
        f"--out {tmp_path / 'new'}: {tmp_path} cannot be written (Permission denied); give another folder"
    )


@pytest.mark.parametrize("name", ["start", "reward_model", "checkpoints", "policy"])
def test_a_file_in_place_of_a_folder_of_the_run_is_refused(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=f"{tmp_path / name} is a file; remove it"):
        checkpoint.check_contents(tmp_path)


def test_a_pipe_in_place_of_a_file_of_the_run_is_refused(run_folder):
    (run_folder / ".lock").unlink()
    os.mkfifo(run_folder / ".lock")  # opening it would wait for ever
    message = refused("--resume", "--out", str(run_folder))
    assert message == f"--out {run_folder}: {run_folder / '.lock'} is not a regular file; remove it"


def test_a_read_only_disk_is_named_as_the_cause(run_folder, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checkpoint.tempfile, "TemporaryDirectory", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # as on such a disk
    message = refused("--resume", "--out", str(run_folder))
    assert f"{run_folder} cannot be written (Read-only file system); change its" in message


def test_the_evaluation_of_a_run_that_cannot_be_written_has_a_remedy(run_folder, monkeypatch):
    edited(run_folder, model="some/model")
    (run_folder / "policy").mkdir(exist_ok=True)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert refused("--eval_only", "--out", str(run_folder)) == (
        f"--out {run_folder}: {run_folder} cannot be written (Permission denied); change its permissions, or "
        f"work on a copy, or give --model {run_folder / 'policy'} without --out"
    )


def test_an_evaluation_needs_only_the_run_folder_itself_to_be_writable(run_folder, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) == run_folder)
    _, chosen = train.read_flags(["--eval_only", "--out", str(run_folder), "--eval_games", "2"])
    assert chosen.name == "update_000004"


def test_a_lock_that_is_a_folder_is_refused_before_the_model_is_loaded(run_folder):
    (run_folder / ".lock").unlink()
    (run_folder / ".lock").mkdir()
    message = refused("--resume", "--out", str(run_folder))
    assert message == f"--out {run_folder}: {run_folder / '.lock'} is a folder; remove it"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="there is no /proc")
def test_a_folder_that_only_the_system_can_make_is_refused_before_the_model_is_loaded():
    message = refused("--out", "/proc/run")
    assert message.startswith("--out /proc/run: /proc cannot be written (")


@pytest.mark.parametrize("inside", ["policy", "checkpoints/update_000004"])
def test_folders_inside_a_run_are_checked_before_the_model_is_loaded(run_folder, monkeypatch, inside):
    (run_folder / "policy").mkdir(exist_ok=True)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != run_folder / inside)
    message = refused("--resume", "--out", str(run_folder))
    assert f"{run_folder / inside} cannot be written; change its permissions" in message


@pytest.mark.parametrize("call", ["rename", "rmdir"])
def test_an_old_checkpoint_that_cannot_be_removed_is_reported_and_the_run_goes_on(
    run_folder, monkeypatch, call
):
    def refuse(*arguments, **options):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.warns(UserWarning, match=r"cannot be removed \(Operation not permitted\)"):
            checkpoint.remove(run_folder / "checkpoints" / "update_000002")
    assert [path.name for path in checkpoint.listed(run_folder)][-1] == "update_000004"


def test_an_old_policy_that_cannot_be_removed_stays_and_the_next_ones_are_written(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    checkpoint.write_folder(tmp_path / "policy", lambda folder: (folder / "weights").write_text("1"))
    for number in "23":
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", refuse)
            with pytest.warns(UserWarning, match="cannot be removed"):
                checkpoint.write_folder(
                    tmp_path / "policy", lambda folder, number=number: (folder / "weights").write_text(number)
                )
        assert (tmp_path / "policy" / "weights").read_text() == number
    kept = sorted(path.read_text() for path in tmp_path.glob(".unfinished-old-*/policy/weights"))
    assert kept == ["1", "2"]


def test_a_policy_that_is_a_link_is_replaced_and_the_folder_it_names_is_left(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "weights").write_text("1")
    for target in ("elsewhere", "nowhere"):
        (tmp_path / "policy").symlink_to(target)
        checkpoint.write_folder(tmp_path / "policy", lambda folder: (folder / "weights").write_text("2"))
        assert not (tmp_path / "policy").is_symlink()
        assert (tmp_path / "policy" / "weights").read_text() == "2"
        assert (tmp_path / "elsewhere" / "weights").read_text() == "1"
        assert not list(tmp_path.glob(".unfinished-*"))
        shutil.rmtree(tmp_path / "policy")


@pytest.mark.parametrize("name", [".lock", "policy", "summary.json"])
def test_a_link_to_nothing_is_refused_before_the_model_is_loaded(run_folder, name):
    path = run_folder / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to("nowhere/at/all")
    message = refused("--resume", "--out", str(run_folder))
    assert message == f"--out {run_folder}: {path} is a link to nothing; remove it"


def test_a_config_with_old_names_or_without_flags_at_their_defaults_is_resumed(run_folder):
    path = run_folder / "config.json"
    config = json.loads(path.read_text())
    config["tasks_per_step"] = config.pop("tasks_per_update")
    del config["total_updates"], config["threads"], config["clip_eps"]
    path.write_text(json.dumps(config))
    args, newest = train.read_flags(["--resume", "--out", str(run_folder)])
    assert args.tasks_per_update == 4 and args.total_updates == flags.Args.total_updates
    assert args.clip_eps == 0.2  # the default, and the value that the run was trained with
    assert newest.name == "update_000004"


def test_a_run_without_the_start_that_it_made_is_refused_before_the_model_is_loaded(tmp_path):
    (tmp_path / "start").mkdir()
    with pytest.raises(ValueError, match="is missing; copy it again"):
        checkpoint.check_start(tmp_path, {"warm_start": 450})
    (tmp_path / "start" / "model.safetensors").touch()
    checkpoint.check_start(tmp_path, {"warm_start": 450})
    checkpoint.check_start(tmp_path / "other", {"warm_start": 0})
    with pytest.raises(ValueError, match="start, the model after the warm start, is missing; copy it again"):
        checkpoint.check_start(tmp_path / "other", {"warm_start": 450})


def test_an_older_checkpoint_can_be_evaluated(run_folder):
    name = "update_000002"
    _, chosen = train.read_flags(["--eval_only", "--out", str(run_folder), "--resume_from", name])
    assert chosen.name == name


def test_another_number_of_ranks_is_reported(run_folder, capsys):
    path = run_folder / "checkpoints" / "update_000004"
    saved = checkpoint.read(path)
    checkpoint.write(run_folder, 4, checkpoint.Checkpoint(saved.tensors, saved.state | {"ranks": 8}), keep=2)
    resume(run_folder, 6)
    assert "resumed with 1 ranks in place of 8: results differ by rounding" in capsys.readouterr().out
    resume(run_folder, 8)
    assert "in place of" not in capsys.readouterr().out


def test_the_weights_of_all_agents_are_compared_between_ranks(tmp_path, monkeypatch):
    compared = []
    monkeypatch.setattr(distributed, "check_alike", lambda parameters: compared.append(parameters))
    start(tmp_path, 2, "--algo", "ppo")
    (parameters,) = compared
    shapes = sorted(tuple(p.shape) for p in parameters)
    words = len(ToyPolicy().critic.table)
    assert shapes == [(words,), (words,), (words, words), (words, words)]  # two critics, A and B
    assert len({id(p) for p in parameters}) == 4


def test_two_processes_do_not_work_in_one_folder(run_folder, capsys):
    with checkpoint.lock(run_folder), pytest.raises(SystemExit) as exit:
        resume(run_folder, 6)
    assert exit.value.code == 2
    assert f"--out {run_folder}: another process works in this folder" in capsys.readouterr().err
    resume(run_folder, 6)


# --- endings ------------------------------------------------------------------------------------------------


def test_a_full_disk_ends_the_run_with_a_message_and_the_run_can_be_resumed(tmp_path, monkeypatch, capsys):
    start(tmp_path / "straight", 6)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit:
        usage = [10**9, 10**9, 0, 0]  # room at the first checkpoint, none after it
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=usage.pop(0)))
        start(tmp_path / "full", 6)
    assert exit.value.code == 1
    said = capsys.readouterr().err
    command = f"python train.py --resume --out {tmp_path / 'full'}"
    assert "No space left on device" in said and f"free some disk space; resume with: {command}\n" in said
    resume(tmp_path / "full", 6)
    assert story(tmp_path / "full") == story(tmp_path / "straight")


def test_ctrl_c_prints_the_command_that_resumes_the_run(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit:
        written = checkpoint.write

        def interrupted(folder, updates, *rest):
            if updates == 4:
                raise KeyboardInterrupt
            return written(folder, updates, *rest)

        patch.setattr(checkpoint, "write", interrupted)
        start(tmp_path / "a run", 6)
    assert exit.value.code == 130
    command = f"python train.py --resume --out '{tmp_path / 'a run'}'"  # quoted: the path has a space
    assert capsys.readouterr().err.endswith(f"\nstopped; resume with: {command}\n")
    resume(tmp_path / "a run", 6)
    lines = read_lines(tmp_path / "a run/metrics.jsonl")
    assert [line["update"] for line in lines if line["agent"] == "policy"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (FloatingPointError("it diverged"), 1, "error: it diverged\n"),
        (rspo.NothingToTrainOn([]), 1, "error: no episode of this update"),
        (flags.UsageError("--k 0: too few"), 2, "error: --k 0: too few"),
        (EngineError("no memory"), 1, "error: --sampler vllm: no memory; if nothing else helps, give kv"),
        (RankLost("rank 1 ended"), 1, "error: rank 1 ended; resume with: python train.py --resume --out "),
    ],
)
def test_a_known_error_ends_the_run_with_one_line(tmp_path, capsys, error, status, message):
    def fail(args, base):
        raise error

    with pytest.raises(SystemExit) as exit:
        start(tmp_path / "run", 2, pieces=dataclasses.replace(TOY, make_policy=fail))
    said = capsys.readouterr().err
    assert exit.value.code == status
    assert said.startswith(message) and said.count("\n") == 1
    assert ("resume with" in said) == isinstance(error, RankLost)  # elsewhere the same would happen again


@pytest.mark.parametrize(
    ("given", "causes"),
    [
        ("", ""),
        ("--kl_coef 1000", ", or bring closer to its default: --kl_coef 1000 (default 0.01)"),
        (
            "--entropy_coef 0 --reward_scale 1e6",
            ", or bring closer to its default: --reward_scale 1e+06 (default 10), "
            "--entropy_coef 0 (default 0.001)",
        ),
    ],
)
def test_a_run_that_diverges_names_the_coefficients_that_are_not_at_their_defaults(given, causes):
    with pytest.raises(FloatingPointError) as caught, causes_of_divergence(flags.Args(**flags.read(given))):
        raise FloatingPointError("norm nan: lower its learning rate")
    assert str(caught.value) == "norm nan: lower its learning rate" + causes


def test_a_disk_that_can_no_longer_be_written_is_a_known_error(tmp_path, capsys):
    def fail(args, base):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "the file")

    with pytest.raises(SystemExit) as exit:
        start(tmp_path / "run", 2, pieces=dataclasses.replace(TOY, make_policy=fail))
    said = capsys.readouterr().err
    assert exit.value.code == 1 and said.startswith(
        "error: [Errno 30] Read-only file system: 'the file'; resume"
    )


def test_an_unknown_error_is_raised(tmp_path):
    def fail(args, base):
        raise PermissionError("an OSError, but the disk is not full")

    with pytest.raises(PermissionError):
        start(tmp_path / "run", 2, pieces=dataclasses.replace(TOY, make_policy=fail))


# --- what a run records -------------------------------------------------------------------------------------


def test_a_panel_is_played_at_the_end_of_the_loop_in_which_it_is_due(tmp_path):
    start(tmp_path, 8, "--eval_every", "3")  # due at 3 and 6, in loops that end at 4 and 6; and at the end
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["update"] for line in lines if line["agent"] == "evaluation"] == [0, 4, 6, 8]


def test_a_page_that_cannot_be_made_is_a_warning(tmp_path, capsys):
    def broken(folder):
        raise OSError("no space\nis left")

    start(tmp_path / "run", 2, pieces=dataclasses.replace(TOY, write_page=broken))
    command = f"python -m record.report {tmp_path / 'run'} makes it"
    warning = f"warning: report.html was not made (OSError: no space); {command}\n"
    assert warning in capsys.readouterr().out and (tmp_path / "run" / "summary.json").is_file()


def test_an_empty_replay_buffer_is_reported(tmp_path, capsys):
    start(tmp_path, 2, "--method", "rspo_h")
    assert "update 1: the replay buffer is empty, so alpha is 0 for this update" in capsys.readouterr().out
    line = next(line for line in read_lines(tmp_path / "metrics.jsonl") if line["agent"] == "policy")
    assert (line["alpha"], line["replayed_episodes"]) == (0.0, 0)


def test_the_log_counts_updates_episodes_and_turns(run_folder):
    resume(run_folder, 8)
    lines = read_lines(run_folder / "metrics.jsonl")
    of = {agent: [line for line in lines if line["agent"] == agent] for agent in ("policy", "explorer")}
    assert [line["update"] for line in of["policy"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [line["explorer_update"] for line in of["explorer"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [line["update"] for line in of["explorer"]] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert [line["loop"] for line in of["policy"]] == [1, 1, 2, 2, 3, 3, 4, 4]
    # A loop: B plays 2 x 3 tasks x 2 episodes and 2 x 2 for the buffer, A 2 x 3 x 2: 28 episodes
    assert [line["environment_episodes"] for line in of["policy"]] == [22, 28, 50, 56, 78, 84, 106, 112]
    assert all(line["environment_turns"] == 3 * line["environment_episodes"] for line in lines)
    assert [line["update"] for line in lines if line["agent"] == "evaluation"] == [0, 4, 8]
    summary = json.loads((run_folder / "summary.json").read_text())
    assert (summary["updates"], summary["explorer_updates"], summary["episodes"]) == (8, 8, 112)


def test_only_folders_of_decimal_numbers_are_checkpoints(tmp_path):
    for name in ("update_000003", "update_³", "update_x", "step_000003"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in checkpoint.listed(tmp_path)] == ["update_000003"]


def test_an_unfinished_link_is_removed_and_its_target_stays(tmp_path):
    target = tmp_path / "elsewhere"
    target.mkdir()
    run = tmp_path / "run"
    run.mkdir()
    (run / f"{checkpoint.ASIDE}policy").symlink_to(target)
    checkpoint.sweep(run)
    assert list(run.iterdir()) == [] and target.is_dir()


def test_the_progress_bar_names_the_phase_that_begins():
    config = Config(k=3, total_updates=6)
    lines = [{"loop": 1, "agent": "explorer", "update": 0, "explorer_update": n} for n in (1, 2, 3)]
    lines += [{"loop": 1, "agent": "buffer", "update": 0}]
    lines += [{"loop": 1, "agent": "policy", "update": n} for n in (1, 2, 3)]
    assert [phase_after(line, config) for line in lines] == [
        *("loop 1, B 2/3", "loop 1, B 3/3", "loop 1, filling the buffer", "loop 1, A 1/3"),
        *("loop 1, A 2/3", "loop 1, A 3/3", "loop 2, B 1/3"),
    ]
    cheap = Config(k=3, total_updates=6, buffer_source="phase1")
    assert phase_after(lines[2], cheap) == "loop 1, A 1/3"
    assert phase_after(lines[-1], Config(method="outcome", k=3, total_updates=6)) == "loop 2, A 1/3"
