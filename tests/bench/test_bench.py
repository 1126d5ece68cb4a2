"""The pieces of the benchmark: the table's verdicts, equal tokens on both sides, TRL's absence. No times."""

import json
import sys

import pytest
import torch

pytest.importorskip("transformers")
from batch import rows_of
from bench import core as bench_core
from bench.goals import Goal, conclude
from model import load_base
from policy import Policy

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def small():
    sizes = {"d_model": 32, "layers": 2, "intermediate": 64, "max_length": 2048}
    return Policy(load_base("tiny", vocabulary=bench_core.WORDS, **sizes), learning_rate=1e-6)


def test_a_goal_is_met_at_its_limit():
    assert Goal("speed", 4.0, "x", 4, True).met and not Goal("speed", 3.9, "x", 4, True).met
    assert Goal("memory", 0.3, "GB", 0.3, False).met and not Goal("memory", 0.4, "GB", 0.3, False).met


def test_one_missed_goal_fails_the_command_and_a_skipped_one_does_not(capsys):
    met, missed = Goal("speed", 5.0, "x", 4, True), Goal("memory", 1.0, "GB", 0.3, False)
    assert conclude([met]) == 0 and conclude([met, missed]) == 1 and conclude([met], {"TRL": "absent"}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["memory", "1.000", "GB", "goal", "<=", "0.3", "GB", "MISSED"]
    assert lines[-1].split() == ["TRL", "skipped:", "absent"]


def test_a_window_holds_the_system_prompt_and_the_last_turns():
    system = [1] * bench_core.SYSTEM
    texts, replies = [[*system, 10], [11], [12], [13]], [[20], [21], [22]]
    assert bench_core.prompt_of(texts, replies, None) == [*system, 10, 20, 11, 21, 12, 22, 13]
    assert bench_core.prompt_of(texts, replies, 2) == [
        8,
        *system[1:],
        11,
        21,
        12,
        22,
        13,
    ]  # 8: the fourth turn
    assert bench_core.prompt_of(texts, replies[:2], 2) == [7, *system[1:], 10, 20, 11, 21, 12]
    assert bench_core.prompt_of(texts, [], 2) == [5, *system[1:], 10]


def test_both_rollouts_say_the_same(small):
    texts = bench_core.random_texts(small, 2, 3)
    replies = bench_core.ours(small, texts)
    assert [[len(reply) for reply in said] for said in replies] == [[15, 15, 15], [15, 15, 15]]
    assert replies == bench_core.generated(small, texts)


def test_whole_histories_are_a_row_an_episode_and_windows_a_row_a_turn(small):
    texts = bench_core.random_texts(small, 2, 4)
    shapes = {}
    for window in (None, 2):
        (group,) = bench_core.played(small, texts, window)
        rows = [row for episode in group.trajectories for row in rows_of(episode)]
        shapes[window] = [len(row.input_ids) for row in rows], sum(row.action_tokens for row in rows)
        assert bench_core.update(small, [group], 2)["optimizer_steps"] == 2
    # A turn adds 150 + 15 tokens to the 60 of the system; a window shows the last two turns and this one
    assert shapes[None] == ([60 + 4 * 165] * 2, 2 * 4 * 15)
    assert shapes[2] == ([225, 390, 60 + 3 * 165, 60 + 3 * 165] * 2, 2 * 4 * 15)


def test_log_probs_in_chunks_are_those_of_the_plain_formula():
    plain, chunked = (bench_core.logprob_cost(kind, 200, 16, 200_000)[2:] for kind in (True, False))
    assert torch.allclose(torch.tensor(plain), torch.tensor(chunked), atol=1e-5)


def test_absent_trl_is_skipped_with_a_reason(tmp_path):
    assert "requirements/trl.txt" in bench_core.no_trl(None)
    assert "No such file" in bench_core.no_trl(str(tmp_path / "python"))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'trl'\" >&2\nexit 1\n")
    broken.chmod(0o755)
    assert bench_core.no_trl(str(broken)).endswith("No module named 'trl'")


@pytest.mark.parametrize("ends", [False, True])
def test_trl_takes_a_step_when_asked(ends, tmp_path):
    stub = tmp_path / "python"
    step = "print('noise'); print(json.dumps({'seconds': 1.5}), flush=True)"
    stub.write_text(
        f"#!{sys.executable}\nimport json, sys\nassert sys.argv[1].endswith('bench_trl.py')\n"
        f"for line in sys.stdin:\n    {'sys.exit(sys.argv[2])' if ends else step}\n"
    )
    stub.chmod(0o755)
    trl = bench_core.Trl(str(stub), "the reason", {})
    if ends:
        with pytest.raises(RuntimeError, match="the reason"):
            trl.seconds()
    else:
        assert [trl.seconds(), trl.seconds()] == [1.5, 1.5]
    trl.close()
    assert trl.process.returncode == (1 if ends else 0)


def test_our_grpo_step_is_an_update_on_the_replies(small):
    import random

    from sampler import KVSampler

    settings = {"group_size": 4, "new_tokens": 6, "optimizer_steps": 2}
    before = small.version
    metrics = bench_core.grpo_step(small, KVSampler(), ["bab bac", "bad"], settings, random.Random(0))
    assert metrics["optimizer_steps"] == 2 == small.version - before
    assert json.dumps(metrics)
