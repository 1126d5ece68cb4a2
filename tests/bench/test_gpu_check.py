"""Test the GPU check: its arithmetic by hand, the faults that it finds; slow: its dry run."""

import time

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
from bench import gpu_check
from bench.gpu_check import Call, Costs, Failed, Meter, Work
from scale import plan

# A layer's q, k, v, o, gate, up, down: 16 + 8 + 8 + 16 + 3 * 32 = 144 parameters, 64 for an adapter of rank 1
COSTS = Costs.of(plan.Shape(width=4, mlp=8, layers=2, heads=2, kv_heads=1, vocab=10), rank=1)


def test_flops_of_a_token_by_hand():
    assert Costs(base=2 * 2 * 144, adapter=2 * 2 * 64, output=2 * 10 * 4) == COSTS
    # 10 prompt tokens and 5 sampled ones: 15 * (576 + 256) + 5 * 80
    assert COSTS.rollout(10, 5) == Work({"prompt": 10, "sampled": 5}, 12_880)
    # full weights: 6 per parameter, and 2 for layers that gradient checkpointing repeats
    assert COSTS.fit(100) == Work({"trained": 100}, 6 * 288 * 100, 2 * 288 * 100)


def test_flops_of_an_update_by_hand():
    # 100 tokens, 10 of them action tokens. Old log-probs and the forward pass: 100 * 832 + 10 * 80 = 84,000
    # each. The reference: 100 * 576 + 800 = 58,400. Backward: 57,600 base + 51,200 adapter + 800 output
    assert COSTS.update(100, 10) == Work({"trained": 100}, 2 * 84_000 + 58_400 + 109_600, 84_000)


def test_training_under_an_adapter_takes_about_4_n_flops_per_token():
    costs = Costs.of(plan.KNOWN["Qwen/Qwen2.5-1.5B-Instruct"], rank=64)
    assert costs.base == 2 * (1_543_714_304 - 151_936 * 1536 - 28 * (2 * 1536 + 2048) - 1536)
    trained = costs.update(1000, 0).flops - costs.log_probs(1000, 0).flops - 1000 * costs.base
    assert trained == 1000 * (2 * costs.base + 3 * costs.adapter)


def test_rates_leave_out_the_first_call_and_memory_is_the_largest():
    meter = Meter("cpu")
    for seconds, allocated in ((9.0, 86), (1.0, 80), (3.0, 84)):
        meter.calls["update"].append(Call(seconds, Work({"trained": 100}, 200.0, 80.0), allocated, 95))
    # 400 and 560 FLOPs in 4 s at a peak of 1000 a second
    header, line = meter.speeds(peak=1000.0).splitlines()
    assert line.split() == ["update", "3", "13.00", "10.0%", "14.0%", "50", "trained"]
    assert "unknown" in meter.speeds(peak=None)
    table, missed = meter.memory({"update": 100.0})
    assert "86.0%" in table and not missed
    for planned in (101.5, 74.0):  # 86 is 84.7 % and 116.2 % of them
        (why,) = meter.memory({"update": planned})[1]
        assert why.startswith("update takes 0.00 GB, ") and "of the plan's 0.00" in why
    assert meter.memory({})[1] == []


def test_a_log_with_faults_fails_the_check():
    lines = [
        {"agent": agent, "x": 1.0} for agent in ("evaluation", "explorer", "buffer", "policy", "evaluation")
    ]
    assert gpu_check.check_log(lines, 0.05) == []
    assert "log-probs is 0.06" in gpu_check.check_log(lines, 0.06)[0]
    assert "log-probs is nan" in gpu_check.check_log(lines, float("nan"))[0]
    assert gpu_check.check_log(lines[1:], 0.0)[0].startswith("the log holds lines of ['explorer'")
    lines[3]["x"] = float("inf")
    assert gpu_check.check_log(lines, 0.0) == ["x of policy is inf"]


def test_calls_are_measured_only_inside_the_context():
    class Speaker:
        def say(self, text, loud=False):
            return text.upper() if loud else text

    meter = Meter("cpu")
    with meter.around(
        Speaker, "say", "talk", lambda result, speaker, text, **_: Work({"word": len(text)}, 1)
    ):
        assert Speaker().say("abc", loud=True) == "ABC"
    assert Speaker().say("x") == "x"
    assert [call.work.tokens for call in meter.calls["talk"]] == [{"word": 3}]


def test_the_peak_is_found_by_the_gpus_name(monkeypatch):
    def peak(name):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        return gpu_check.peak_flops("cuda")

    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB", "NVIDIA A10G", "NVIDIA L4")
    assert [peak(name) for name in names] == [989e12, 756e12, 312e12, 70e12, 121e12]
    assert peak("NVIDIA L40S") == 362e12 and peak("Tesla V100") is None


def test_the_test_files_exist():
    assert [path for path in gpu_check.TESTED if not (gpu_check.ROOT / path).is_file()] == []


def test_a_part_that_fails_or_takes_too_long_returns_its_reason(capsys):
    def fails(error):
        raise error

    assert gpu_check.attempt(fails, 60, Failed("too slow")) == "fails: Failed: too slow"
    assert gpu_check.attempt(fails, 60, ValueError("a\nb")) == "fails: ValueError: a b"
    assert gpu_check.attempt(fails, 60, SystemExit(2)) == "fails: SystemExit: 2"
    assert "more than 1 s" in gpu_check.attempt(time.sleep, 1, 5)
    assert gpu_check.attempt(lambda: None, 60) is None
    assert "passed" in capsys.readouterr().out


def test_the_other_part_runs_after_a_failure(monkeypatch, capsys):
    def bad(device, peak):
        raise Failed("broken")

    seen = []
    monkeypatch.setattr(
        gpu_check, "PARTS", {"a": (bad, 9), "b": (lambda *arguments: seen.append(arguments), 9)}
    )
    assert gpu_check.main(["--dry_run", "--peak_tflops", "2"]) == 1
    assert seen == [("cpu", 2e12)] and capsys.readouterr().out.endswith("Failed: broken\n")


def test_a_missing_gpu_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err.startswith("error: torch finds no GPU; --dry_run")


@pytest.mark.slow
def test_the_dry_run_measures_every_phase(capsys):
    assert gpu_check.main(["--dry_run", "--only", "loop"]) == 0
    out = capsys.readouterr().out
    phases = ("reward model fit", "rollout", "step rewards", "log-probs", "update")
    assert all(f"\n{phase} " in out for phase in phases) and out.endswith("\nall parts passed\n")
