"""The tiny model: its tokenizer has all words of Household, and its weights depend only on the seed."""

import dataclasses

import pytest
import torch
from device import DEVICE
from tiny import BATCH, WORDS, needs_models, tiny

from chat import Chat, first_message, window_message
from demo.tiny_model import check_actions, tiny_tokenizer
from demo.toy import ToyEnv
from envs import SILENT_WORDS, Corpus, Household, make_env
from flags import UsageError, prepare
from model import load_base
from record.artifacts import load_start

pytestmark = needs_models


def test_word_tokenizer_keeps_actions_and_shortens_prompts():
    chat = Chat(tiny_tokenizer(WORDS, SILENT_WORDS))
    tokens = chat.tokenizer.convert_ids_to_tokens
    for action in ("go to desk 1", "take mug 1 from desk 1", "inventory", "look"):
        assert chat.decode(chat.reply(action)) == action
    words = tokens(chat.first("You look. Go to the desk 1 | nothing, here; lamp"))
    assert " ".join(words) == "<user> look go to desk 1 | nothing here ; <unk> <assistant>"
    assert words[2:4] == ["go to", "desk 1"]
    text = "look | go to desk 1 | look"
    assert chat.encode(text) == chat.tokenizer(text)["input_ids"]
    assert tokens(chat.extend(chat.reply("look"), "look")) == ["<user>", "look", "<assistant>"]


def test_word_tokenizer_has_every_word_of_household():
    env = make_env("household")
    chat = Chat(tiny_tokenizer(env.vocabulary, env.silent_words))
    unknown = chat.tokenizer.unk_token_id
    for index in range(40):
        view = env.reset("train", index)
        assert unknown not in chat.first(first_message("short", view))
        history = []
        for turn in range(6):
            assert all(chat.decode(chat.reply(action)) == action for action in view.admissible)
            assert unknown not in chat.first(window_message("short", view, history[-2:], turn))
            action = env.searching_expert()
            history.append((view.observation, action))
            view = env.step(action)


def test_an_environment_chooses_the_words_that_the_tiny_model_does_not_read():
    chat = Chat(tiny_tokenizer(("walk in", "look around, now.", "-")))
    for action in ("walk in", "look around , now .", "look - now"):
        assert chat.decode(chat.reply(action)) == action
    chat = Chat(tiny_tokenizer(("walk in", "look around, now.", "-"), ("in", "around", "]", "-", ",", "^")))
    assert chat.decode(chat.reply("walk in - look ] around, ^now.")) == "walk look now ."


class Doors(ToyEnv):
    """The toy environment with other actions and words."""

    actions, vocabulary = ("walk in", "go out"), ("walk in", "go out")

    def _view(self):
        return dataclasses.replace(super()._view(), admissible=self.actions)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, None),
        ({"actions": ("walk in", "fill in <name>")}, None),  # a template is no action
        ({"silent_words": ("in",)}, "action 'walk in' only as 'walk'"),
        ({"vocabulary": ("walk", "go out")}, "action 'walk in' only as 'walk <unk>'"),
        ({"actions": ("walk in", "go - out")}, "action 'go - out' only as 'go <unk> out'"),
        ({"actions": ("go out-in",), "vocabulary": ("go out - in",)}, "'go out-in' only as 'go out - in'"),
        ({"actions": ("walk in-out", "é [x] [ ]"), "vocabulary": Corpus(("walk in",), (), 300)}, None),
    ],
)
def test_a_vocabulary_that_maims_an_action_is_refused(changes, message):
    env = Doors()
    for name, value in changes.items():
        setattr(env, name, value)
    chat = Chat(tiny_tokenizer(env.vocabulary, getattr(env, "silent_words", ())))
    if message is None:
        check_actions(chat, env)
        return
    with pytest.raises(ValueError, match="--env toy: the tiny model can write its action ") as caught:
        check_actions(chat, env)
    assert message in str(caught.value)


def test_a_run_with_a_maimed_vocabulary_is_refused_at_load(monkeypatch):
    args = prepare(["--device", "cpu"])
    load_start(args, None)
    monkeypatch.setattr(Household, "silent_words", (*SILENT_WORDS, "go to"))
    with pytest.raises(
        UsageError, match="--env household: .* write its action 'go to [a-z]+ 1' only as '[a-z]+ 1';"
    ):
        load_start(args, None)


def test_weights_depend_only_on_the_seed():
    base = tiny(seed=3)
    torch.manual_seed(99)
    again, other = tiny(seed=3), tiny(seed=4)
    weights = [b.model.get_input_embeddings().weight for b in (base, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_saved_tiny_model_is_loaded_by_transformers_and_by_load_base(tmp_path):
    from transformers import AutoModelForCausalLM

    base = tiny(seed=3)
    assert base.changed
    base.save(tmp_path)
    assert not base.changed
    model = AutoModelForCausalLM.from_pretrained(tmp_path).to(DEVICE)
    assert torch.equal(model(BATCH.input_ids).logits, base.model(BATCH.input_ids).logits)
    loaded = load_base(str(tmp_path))
    message = "go to the desk 1 | nothing"
    assert loaded.chat.first(message) == base.chat.first(message) and not loaded.changed
    assert loaded.chat.decode(loaded.chat.reply("take mug 1 from desk 1")) == "take mug 1 from desk 1"
