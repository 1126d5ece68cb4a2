"""Test the benchmarks' parts: the verdicts of the table, equal tokens on both sides, a missing TRL."""

import json
import random
import sys

import pytest
import torch

pytest.importorskip("transformers")
from batch import rows_of
from bench import core as bench_core
from bench.goals import Goal, PeakMemory, conclude
from demo.tiny_model import tiny_base
from policy import Policy
from sampler import KVSampler

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def small():
    sizes = {"d_model": 32, "layers": 2, "intermediate": 64, "max_length": 2048}
    return Policy(tiny_base(bench_core.WORDS, **sizes), learning_rate=1e-6)


def test_a_goal_is_met_at_its_bound():
    assert Goal("speed", 4.0, "x", at_least=4).met and not Goal("speed", 3.9, "x", at_least=4).met
    assert Goal("memory", 0.3, "GB", at_most=0.3).met and not Goal("memory", 0.4, "GB", at_most=0.3).met


def test_a_missed_goal_fails_the_command_and_a_skipped_one_does_not(capsys):
    met, missed = Goal("speed", 5.0, "x", at_least=4), Goal("memory", 1.0, "GB", at_most=0.3)
    assert conclude([met]) == 0 and conclude([met, missed]) == 1 and conclude([met], {"TRL": "absent"}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["memory", "1.000", "GB", "goal", "<=", "0.3", "GB", "MISSED"]
    assert lines[-1].split() == ["TRL", "skipped:", "absent"]


def test_a_window_has_the_system_prompt_and_the_last_turns():
    system = [1] * bench_core.SYSTEM
    texts, replies = [[*system, 10], [11], [12], [13]], [[20], [21], [22]]
    assert bench_core.prompt_of(texts, replies, None) == [*system, 10, 20, 11, 21, 12, 22, 13]
    fourth_turn = [8, *system[1:], 11, 21, 12, 22, 13]  # its first token is 5 + 3
    assert bench_core.prompt_of(texts, replies, 2) == fourth_turn
    assert bench_core.prompt_of(texts, replies[:2], 2) == [7, *system[1:], 10, 20, 11, 21, 12]
    assert bench_core.prompt_of(texts, [], 2) == [5, *system[1:], 10]


def test_both_rollouts_give_the_same_replies(small):
    texts = bench_core.random_texts(small, 2, 3)
    replies = bench_core.play_with_sampler(small, texts)
    assert [[len(reply) for reply in episode] for episode in replies] == [[15, 15, 15], [15, 15, 15]]
    assert replies == bench_core.play_with_generate(small, texts)


def test_the_whole_history_is_one_row_and_windows_are_one_row_per_turn(small):
    texts = bench_core.random_texts(small, 2, 4)
    shapes = {}
    for window in (None, 2):
        (group,) = bench_core.random_group(small, texts, window)
        rows = [row for episode in group.trajectories for row in rows_of(episode)]
        shapes[window] = [len(row.input_ids) for row in rows], sum(row.action_tokens for row in rows)
        assert bench_core.grpo_update(small, [group], 2)["optimizer_steps"] == 2
    # 60 tokens of the system prompt; each turn adds 150 + 15. A window has the last two turns and this one
    assert shapes[None] == ([60 + 4 * 165] * 2, 2 * 4 * 15)
    assert shapes[2] == ([225, 390, 60 + 3 * 165, 60 + 3 * 165] * 2, 2 * 4 * 15)


def test_log_probs_in_chunks_equal_the_plain_formula():
    plain, chunked = (bench_core.logprob_cost(kind, 60, 16, 200_000)[2:] for kind in (True, False))
    assert torch.allclose(torch.tensor(plain), torch.tensor(chunked), atol=1e-5)


def test_a_missing_trl_has_a_reason(tmp_path):
    assert "requirements/trl.txt" in bench_core.missing_trl(None)
    assert "No such file" in bench_core.missing_trl(str(tmp_path / "python"))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'trl'\" >&2\nexit 1\n")
    broken.chmod(0o755)
    assert bench_core.missing_trl(str(broken)).endswith("No module named 'trl'")


def test_the_peak_counts_memory_that_is_freed_again_but_none_from_before():
    torch.ones(50_000_000)  # 0.2 GB
    memory = PeakMemory()
    assert memory.gigabytes() < 0.01
    torch.ones(25_000_000)
    assert 0.09 < memory.gigabytes() < 0.12


@pytest.mark.parametrize("ends", [False, True])
def test_trl_takes_one_step_per_request(ends, tmp_path):
    stub = tmp_path / "python"
    step = "print('noise'); print(json.dumps({'seconds': 1.5, 'gigabytes': 0.25}), flush=True)"
    stub.write_text(
        f"#!{sys.executable}\nimport json, sys\nassert sys.argv[1] == '-m' and 'trl' in sys.argv[2]\n"
        f"for line in sys.stdin:\n    {'sys.exit(sys.argv[3])' if ends else step}\n"
    )
    stub.chmod(0o755)
    trl = bench_core.Trl(str(stub), "the reason", {})
    if ends:
        with pytest.raises(RuntimeError, match="the reason"):
            trl.step()
    else:
        assert [trl.step(), trl.step()] == [(1.5, 0.25)] * 2
    trl.close()
    assert trl.process.returncode == (1 if ends else 0)


def test_our_grpo_step_is_an_update_on_the_replies(small):
    settings = {"group_size": 4, "new_tokens": 6, "optimizer_steps": 2}
    before = small.version
    metrics = bench_core.grpo_step(small, KVSampler(), ["bab bac", "bad"], settings, random.Random(0))
    assert metrics["optimizer_steps"] == 2 == small.version - before
    assert json.dumps(metrics)
