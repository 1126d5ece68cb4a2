"""The step reward model as a folder: saving and loading."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from chat import Chat
from model import cast, load_tokenizer
from record.model_checks import check_shapes, check_tokenizer, explained, read_json
from reward_model import StepRewardModel, new_backbone


def save_reward_model(model: StepRewardModel, folder: str | Path) -> None:
    """Write the weights, the backbone's config and tokenizer (if it has its own), and the fit's report."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().cpu().contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    model.backbone.config.save_pretrained(folder)
    if model.own_tokenizer:
        model.chat.tokenizer.save_pretrained(folder / "tokenizer")
    vocabulary = _vocabulary(model.chat)
    about = {"own_tokenizer": model.own_tokenizer, "vocabulary": vocabulary, "report": model.report}
    (folder / "reward_model.json").write_text(json.dumps(about, indent=2))


def load_reward_model(folder: str | Path, chat: Chat, **settings) -> StepRewardModel:
    """Load a step reward model. Raises ValueError if files are missing, damaged or foreign.

    chat: the policy's chat, which the model uses unless it has its own tokenizer. settings: further arguments
    of `StepRewardModel`.
    """
    from transformers import AutoConfig

    folder = Path(folder)
    for name in ("reward_model.json", "config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} contains no step reward model: it has no {name}")
    with explained(f"the step reward model in {folder} is damaged", "copy it again, or fit a new one"):
        about = read_json(folder / "reward_model.json")
        own_tokenizer, vocabulary = about["own_tokenizer"], about["vocabulary"]
        backbone = new_backbone(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        if own_tokenizer:
            chat = Chat(load_tokenizer(folder / "tokenizer"))
            check_tokenizer(chat, len(backbone.get_input_embeddings().weight))
        model = StepRewardModel(backbone, chat, own_tokenizer, **settings)
        weights = load_file(folder / "model.safetensors")
        check_shapes("its weights", model.state_dict(), weights)
        model.load_state_dict(weights)
        model.report = about["report"]
    if vocabulary != _vocabulary(chat):
        raise ValueError(f"the step reward model in {folder} has another vocabulary; fit a new one")
    cast(model.backbone, model.dtype)
    return model


def _vocabulary(chat: Chat) -> str:
    """Return a digest of the tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(chat.tokenizer.get_vocab().items())).encode()).hexdigest()
