"""Small real runs of the tiny model, and what they leave behind."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flags
import train
from envs import Household, make_env
from flags import UsageError
from record import checkpoint, report

ROOT = Path(__file__).parent.parent


def refused(*argv):
    with pytest.raises(UsageError) as caught:
        flags.prepare(list(argv))
    return str(caught.value)


# --- panels -------------------------------------------------------------------------------------------------


def a_panel(success, outcome, pick, look, **cost):
    by_type = {"Pick": {"games": 4, "success": pick}, "Look": {"games": 2, "success": look}}
    by_type |= {"Heat": {"games": 0, "success": 0.0}}  # no game of it, no column
    about = {"games": 6, "success": success, "outcome": outcome, "crashed_episodes": 0}
    return {**about, "by_type": by_type, **cost}


def test_the_table_has_a_column_of_scores_where_they_are_another_number():
    start = a_panel(0.5, 0.55, 0.75, 0.0, update=0, environment_episodes=0, seconds_elapsed=2.4)
    end = a_panel(1.0, 1.0, 1.0, 1.0, update=3, environment_episodes=2688, seconds_elapsed=61.6)
    assert report.panel_table({"start": start, "end": end}) == (
        "         Pick    Look    all  score  updates  episodes  seconds\n"
        "games       4       2      6\n"
        "start    75.0     0.0   50.0   55.0        0         0        2\n"
        "end     100.0   100.0  100.0  100.0        3     2,688       62\n"
        "change  +25.0  +100.0  +50.0  +45.0"
    )


def test_the_table_has_none_where_the_outcome_is_the_success():
    assert report.panel_table({"policy": a_panel(0.5, 0.5, 0.75, 0.0)}) == (
        "        Pick  Look   all\n"  #
        "games      4     2     6\n"
        "policy  75.0   0.0  50.0"
    )


def test_start_and_end_are_each_splits_own():
    lines = [
        {"agent": agent, "split": split, "update": update}
        for update in (0, 9, 12)
        for agent, split in (("evaluation", "seen"), ("policy", None), ("evaluation", "unseen"))
    ]
    ends = report.start_and_end(lines)
    assert {split: (start["update"], end["update"]) for split, (start, end) in ends.items()} == {
        **{"seen": (0, 12), "unseen": (0, 12)}
    }
    assert all(end["split"] == split for split, (_, end) in ends.items())
    start, end = a_panel(0.5, 0.6, 0.75, 0.0), a_panel(1.0, 0.9, 1.0, 1.0, crashed_episodes=2)
    part = report.progress(start, end)
    assert part == {
        **{"games": 6, "success_start": 0.5, "success_end": 1.0, "outcome_start": 0.6, "outcome_end": 0.9},
        **{"crashed_episodes_start": 0, "crashed_episodes_end": 2},
        "by_type": {
            "Pick": {"games": 4, "start": 0.75, "end": 1.0},
            "Look": {"games": 2, "start": 0.0, "end": 1.0},
            "Heat": {"games": 0, "start": 0.0, "end": 0.0},
        },
    }


# --- runs of the tiny model ---------------------------------------------------------------------------------

MINUTE = {
    **{"k": 1, "tasks_per_update": 4, "group_size": 2, "off_policy_fraction": 0.25, "buffer_tasks": 2},
    **{"eval_games": 6, "eval_every": 2, "max_turns": 5, "threads": 1, "max_prompt_tokens": 128},
    **{"tiny_width": 16, "tiny_layers": 1, "tiny_heads": 2, "learning_rate": 0.01},
}
PREPARE = {
    **{"warm_start": 40, "warm_start_episodes": 60, "warm_start_turns": 32, "warm_start_lr": 0.01},
    **{"reward_model_episodes": 40, "reward_model_epochs": 1},
}


def argv(folder, **options):
    return [f"--{name}={value}" for name, value in {**MINUTE, "out": folder, **options}.items()]


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """Only the first run, which is of the whole module, draws one."""
    monkeypatch.setattr(report, "draw_curves", lambda lines, path, title: None)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """Two loops with everything: warm start, reward model, curves. Others begin with its start/."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    train.main(argv(folder, total_updates=2, **PREPARE) + ["--tensorboard"])
    return folder


def on(first_run, **options):
    """Flags that begin a run where the first one began, without its preparations."""
    start, scorer = first_run / "start", first_run / "reward_model"
    return {"model": start, "style": "short", "lora_rank": 0, "dtype": "float32", "reward_model": scorer} | {
        "max_new_tokens": 8,
        **options,
    }


def story(folder):
    lines = report.read_lines(folder / "metrics.jsonl")
    lines = [{key: value for key, value in line.items() if not key.startswith("seconds")} for line in lines]
    return lines, checkpoint.read(checkpoint.listed(folder)[-1]).tensors


def assert_same_story(one, other):
    (lines, tensors), (other_lines, other_tensors) = story(one), story(other)
    assert lines == other_lines
    assert {file: sorted(part) for file, part in tensors.items()} == {
        file: sorted(part) for file, part in other_tensors.items()
    }
    for file, part in tensors.items():
        for key, tensor in part.items():
            assert torch.equal(tensor, other_tensors[file][key]), (file, key)


def test_a_run_leaves_its_folder(first_run):
    left = {path.name for path in first_run.iterdir()} - {".lock"}
    assert left == {
        *{"config.json", "run.json", "metrics.jsonl", "transcripts.jsonl", "summary.json", "curves.png"},
        *{"start", "reward_model", "checkpoints", "policy", "tensorboard"},
    }
    assert (first_run / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert not [path for path in first_run.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl")]
    about = json.loads((first_run / "run.json").read_text())
    assert f"--out={first_run}" in about["argv"] and about["versions"]["torch"] == torch.__version__
    assert "1 torch threads" in about["machine"]


def test_summary_and_log_agree(first_run):
    summary = json.loads((first_run / "summary.json").read_text())
    lines = report.read_lines(first_run / "metrics.jsonl")
    panels = [line for line in lines if line["agent"] == "evaluation"]
    assert [line["update"] for line in panels] == [0, 2]
    assert all(line["temperature"] == 0.4 and line["games"] == 6 for line in panels)
    result = summary["splits"]["eval"]
    assert result["success_start"] == panels[0]["success"] and result["success_end"] == panels[1]["success"]
    assert isinstance(result["success_end"], float) and summary["seconds"] > 0
    assert set(result["by_type"]) == set(make_env("household").task_types)
    assert sum(one["games"] for one in result["by_type"].values()) == 6
    # a loop: B plays 3 tasks x 2 episodes and 2 x 2 for the buffer, A 3 x 2
    assert (summary["updates"], summary["explorer_updates"], summary["episodes"]) == (2, 2, 32)
    assert summary["turns"] == panels[1]["environment_turns"] > 32
    assert (summary["method"], summary["algo"], summary["seed"]) == ("rspo", "grpo", 0)
    for line in lines:
        if line["agent"] in ("policy", "explorer"):
            assert {"success", "kl_on", "entropy_on", "clip_fraction_on", "zero_spread_groups"} <= set(line)
            assert {"repeated_states", "seconds_rollout", "seconds_update", "grad_norm"} <= set(line)
        if line["agent"] == "explorer":
            assert {"dense_reward", "seconds_score"} <= set(line)


def test_transcripts_can_be_read(first_run):
    records = report.read_lines(first_run / "transcripts.jsonl")
    assert {record["agent"] for record in records} == {"policy", "explorer", "buffer", "evaluation"}
    explored = next(record for record in records if record["agent"] == "explorer")
    assert all(-1 < step["dense_score"] < 1 for step in explored["steps"])
    text = report.transcript_text(explored)
    assert explored["task"] in text and explored["steps"][0]["observation"] in text and "[score" in text


def test_the_trained_policy_loads_with_transformers(first_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(first_run / "policy")
    trained = checkpoint.read(checkpoint.listed(first_run)[-1]).tensors["policy"]
    weights = dict(model.named_parameters())
    assert set(weights) == {key.removeprefix("weight/") for key in trained if key.startswith("weight/")}
    for key, weight in weights.items():
        assert torch.equal(weight, trained[f"weight/{key}"])
    start = AutoModelForCausalLM.from_pretrained(first_run / "start").state_dict()
    assert not torch.equal(start["model.embed_tokens.weight"], weights["model.embed_tokens.weight"])
    assert AutoTokenizer.from_pretrained(first_run / "policy").chat_template


def test_an_adapter_loads_with_peft_and_weighs_little(first_run, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    train.main(argv(tmp_path / "run", total_updates=1, **on(first_run, method="outcome", lora_rank=2)))
    start = AutoModelForCausalLM.from_pretrained(first_run / "start")
    model = PeftModel.from_pretrained(start, tmp_path / "run" / "policy")
    saved = checkpoint.read(checkpoint.listed(tmp_path / "run")[-1]).tensors["policy"]
    assert all(".lora_" in key for key in saved)  # never the frozen base
    moved = [weight for name, weight in model.named_parameters() if ".lora_B" in name]
    assert moved and all(weight.abs().sum() > 0 for weight in moved)
    assert not (tmp_path / "run" / "start").exists()  # it is the --model that was given


@pytest.mark.parametrize(
    "options",
    [
        {"method": "rspo", "algo": "ppo", "lora_rank": 2},
        {"method": "rspo_h", "algo": "gigpo", "context": "full"},
    ],
)
def test_four_loops_are_two_loops_a_resumption_and_two_more(first_run, tmp_path, options):
    options = on(first_run, **options)
    train.main(argv(tmp_path / "straight", total_updates=4, **options))
    train.main(argv(tmp_path / "parts", total_updates=2, **options))
    train.main(["--resume", "--total_updates=4", f"--out={tmp_path / 'parts'}"])
    assert_same_story(tmp_path / "parts", tmp_path / "straight")


def test_what_was_prepared_before_the_kill_is_not_made_again(first_run, tmp_path, monkeypatch, capsys):
    import policy
    import reward_model

    train.main(argv(tmp_path, total_updates=1, **PREPARE))
    straight = story(tmp_path)
    for path in checkpoint.listed(tmp_path):
        checkpoint.remove(path)
    (tmp_path / f"{checkpoint.ASIDE}policy").mkdir()
    monkeypatch.setattr(policy, "warm_start", None)
    monkeypatch.setattr(reward_model.StepRewardModel, "fit", None)
    train.main(["--resume", f"--out={tmp_path}"])
    assert story(tmp_path)[0] == straight[0]
    assert not (tmp_path / f"{checkpoint.ASIDE}policy").exists()


def test_the_warm_start_is_said_plainly(tmp_path, capsys):
    train.main(argv(tmp_path, total_updates=1, method="outcome", **PREPARE))
    said = capsys.readouterr().out
    assert (
        "the tiny model cannot act yet, so it first has 40 supervised updates on 60 games played by" in said
    )
    assert "an expert that searches (50% of the turns), hesitates (45%) and errs (5%)" in said
    assert "success in % on 6 games of eval" in said and "episodes  seconds" in said


def test_an_empty_replay_buffer_is_said(first_run, tmp_path, capsys):
    train.main(argv(tmp_path, total_updates=1, **on(first_run, method="rspo_h")))
    assert "update 1: the replay buffer is empty, so alpha is 0 for this update" in capsys.readouterr().out
    line = next(line for line in report.read_lines(tmp_path / "metrics.jsonl") if line["agent"] == "policy")
    assert (line["alpha"], line["replayed_episodes"]) == (0.0, 0)


def test_eval_only_plays_the_panel_of_a_run_and_of_a_model(first_run, tmp_path, monkeypatch, capsys):
    train.main(["--eval_only", f"--out={first_run}"])
    found = json.loads((first_run / "eval.json").read_text())
    panels = [line for line in report.read_lines(first_run / "metrics.jsonl") if "by_type" in line]
    assert (found["policy"], *_panel(found["panels"]["eval"])) == ("update_000002", *_panel(panels[-1]))
    assert len(report.read_lines(first_run / "metrics.jsonl")) == 8  # nothing was added
    (first_run / "eval.json").unlink()
    monkeypatch.chdir(tmp_path)
    options = on(first_run) | {"eval_games": 3}
    train.main(["--eval_only", *[flag for flag in argv("", **options) if not flag.startswith("--out")]])
    (written,) = tmp_path.glob("runs/eval-*/eval.json")
    assert json.loads(written.read_text())["panels"]["eval"]["games"] == 3
    assert "success in % on 3 games of eval" in capsys.readouterr().out


class TwoSplits(Household):
    """Household with a second held-out split, of four games."""

    eval_splits = ("eval", "hard")

    def size(self, split):
        return 4 if split == "hard" else super().size(split)

    def reset(self, split, index):
        return super().reset("train" if split == "hard" else split, index)


def test_each_split_has_its_panel_in_the_log_the_summary_and_the_tables(
    first_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(flags, "make_env", lambda name: TwoSplits())
    splits = ["--eval_splits", "hard", "eval"]
    train.main(argv(tmp_path, total_updates=1, **on(first_run, method="outcome")) + splits)
    panels = [line for line in report.read_lines(tmp_path / "metrics.jsonl") if line["agent"] == "evaluation"]
    told = [(panel["split"], panel["update"], panel["games"]) for panel in panels]
    assert told == [("hard", 0, 4), ("eval", 0, 6), ("hard", 1, 4), ("eval", 1, 6)]
    parts = json.loads((tmp_path / "summary.json").read_text())["splits"]
    assert list(parts) == ["hard", "eval"]
    assert {split: part["games"] for split, part in parts.items()} == {"hard": 4, "eval": 6}
    assert [panel["success"] for panel in panels] == [
        *(parts["hard"]["success_start"], parts["eval"]["success_start"]),
        *(parts["hard"]["success_end"], parts["eval"]["success_end"]),
    ]
    said = capsys.readouterr().out
    assert "success in % on 4 games of hard, temperature 0.4" in said
    assert "success in % on 6 games of eval, temperature 0.4" in said
    assert "of 4 games of hard" in said and "of 6 games of eval" in said
    records = [r for r in report.read_lines(tmp_path / "transcripts.jsonl") if r["agent"] == "evaluation"]
    assert {record["task_id"].split("/")[1] for record in records} == {"hard", "eval"}

    train.main(["--eval_only", f"--out={tmp_path}", "--eval_splits", "eval"])
    found = json.loads((tmp_path / "eval.json").read_text())["panels"]
    assert list(found) == ["eval"] and found["eval"]["success"] == panels[3]["success"]
    assert refused("--resume", f"--out={tmp_path}", "--total_updates=2", "--eval_splits", "eval").startswith(
        f"--eval_splits ('eval',): the run in {tmp_path} has ('hard', 'eval')"
    )

    monkeypatch.setattr(TwoSplits, "fingerprint", "of other games")
    capsys.readouterr()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit):
        train.main(["--resume", f"--out={tmp_path}", "--total_updates=2"])
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert capsys.readouterr().err == (
        "error: --env household: these are not the games that the run was trained on; give the data that the "
        "run began with\n"
    )
    train.main(["--eval_only", f"--out={tmp_path}", "--eval_splits", "eval"])
    assert "warning: these are not the games that the run was trained on" in capsys.readouterr().out


def _panel(line):
    return line["success"], line["turns_per_episode"]


def test_listeners_hear_every_agent_over_its_own_updates(tmp_path, monkeypatch):
    heard, defined = [], {}

    class FakeRun:
        def define_metric(self, name, step_metric):
            defined[name] = step_metric

        log = staticmethod(heard.append)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: FakeRun()))
    listen = report.wandb("project", tmp_path, {"eval_splits": ("seen",)})
    listen({"agent": "explorer", "update": 3, "explorer_update": 5, "success": 0.5})
    by_type = {"Pick": {"games": 9, "success": 0.25}}
    listen({"agent": "evaluation", "split": "seen", "update": 6, "by_type": by_type})
    assert heard == [
        {"explorer/update": 3, "explorer/explorer_update": 5, "explorer/success": 0.5},
        {"evaluation/seen/update": 6, "evaluation/seen/success/Pick": 0.25},
    ]
    assert defined["explorer/*"] == "explorer/explorer_update"
    assert defined["policy/*"] == "policy/update" and defined["evaluation/seen/*"] == "evaluation/seen/update"


def test_too_long_prompts_for_the_model_are_refused_before_there_is_a_folder(first_run, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        train.main(argv(tmp_path / "run", **on(first_run, max_prompt_tokens=5000)))
    assert exit.value.code == 2 and not (tmp_path / "run").exists()
    assert "--max_prompt_tokens 5000 with --max_new_tokens 8: the model reads" in capsys.readouterr().err


def test_models_and_prompts_that_cannot_serve_are_refused_before_there_is_a_folder(
    first_run, tmp_path, capsys
):
    def refused_run(**options):
        with pytest.raises(SystemExit) as exit:
            train.main(argv(tmp_path / "run", **options))
        assert exit.value.code == 2 and not (tmp_path / "run").exists()
        return capsys.readouterr().err.strip()

    scorer = tmp_path / "scorer"
    shutil.copytree(first_run / "reward_model", scorer)
    (scorer / "model.safetensors").write_text("cut")
    said = refused_run(**on(first_run, reward_model=scorer))
    assert said.startswith(f"error: --reward_model {scorer}: the step reward model in {scorer} is damaged")
    unknown = {"reward_model_backbone": "no-org/no-model"}
    said = refused_run(
        **{key: value for key, value in on(first_run).items() if key != "reward_model"}, **unknown
    )
    assert said.startswith("error: --reward_model_backbone no-org/no-model: cannot load no-org/no-model")
    assert said.endswith("give a folder, or a hub id that can be fetched")
    said = refused_run(**on(first_run, max_prompt_tokens=5))
    assert said.startswith("error: --max_prompt_tokens 5: the first prompt of a game has ")


def test_a_log_that_was_cut_is_read_as_far_as_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": ')
    assert report.read_lines(path) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl is damaged: Expecting value"):
        report.read_lines(path)


def test_a_run_that_diverges_says_so(first_run, tmp_path, capsys):
    options = on(first_run, method="outcome", learning_rate=1e30, minibatch_turns=4)
    with pytest.raises(SystemExit) as exit:
        train.main(argv(tmp_path / "run", total_updates=2, **options))
    assert exit.value.code == 1
    assert (
        "error: the gradient of agent 'policy' has norm nan: lower its learning rate"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_run_killed_with_sigkill_ends_as_a_straight_one(tmp_path):
    command = [sys.executable, "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"total_updates": 6, **PREPARE}

    def go(flags, seconds=None):
        process = subprocess.Popen(
            [*command, *flags],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            return False
        assert process.returncode == 0, errors
        return True

    began = time.perf_counter()
    assert go(argv(tmp_path / "straight", **options))
    whole = time.perf_counter() - began
    rng, folder = random.Random(0), tmp_path / "killed"
    for _ in range(6):
        started = (folder / "config.json").exists()
        flags_now = ["--resume", f"--out={folder}"] if started else argv(folder, **options)
        go(flags_now, rng.uniform(0.2, 1.0) * whole)
    assert go(["--resume", f"--out={folder}"])
    assert_same_story(folder, tmp_path / "straight")
