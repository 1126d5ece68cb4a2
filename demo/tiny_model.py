"""The tiny model: a small Qwen2 with random weights and a tokenizer for the words of one environment.

It shows the method on a CPU in minutes. An environment with a closed vocabulary (a tuple of its words and
phrases) gets one token per word. An environment with an open vocabulary (`Corpus`) gets byte-level BPE. The
tokenizer of a closed vocabulary removes the environment's `silent_words` from every text.
"""

from __future__ import annotations

import contextlib
import random
import re

import torch

from chat import Chat, parse_action
from envs import Corpus, Env, EnvironmentCrashed
from model import Base, cast

CONTROL = ["<pad>", "<unk>", "<user>", "<assistant>", "<end>"]

UNIT = r"go to|[a-z]+ \d+|[a-z]+|\d+|[^\sa-z\d]"  # "mug 1" is one token, and so is the verb "go to"

TINY_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<assistant>{{ message.content }}<end>"
    "{% else %}<user>{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_tokenizer(vocabulary: tuple[str, ...] | Corpus, silent_words: tuple[str, ...] = ()):
    """Build the tokenizer: one token per word for a closed vocabulary, byte-level BPE for a `Corpus`.

    silent_words: words and signs that are removed from every text; ignored for a `Corpus`.
    """
    from transformers import PreTrainedTokenizerFast

    if isinstance(vocabulary, Corpus):
        tokenizer = _subword_tokenizer(vocabulary)
    else:
        tokenizer = _word_tokenizer(vocabulary, silent_words)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        extra_special_tokens=["<user>", "<assistant>"],
        chat_template=TINY_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _word_tokenizer(vocabulary: tuple[str, ...], silent_words: tuple[str, ...]):
    """Build a tokenizer with one token per word or named thing ("mug 1"). Unknown words become <unk>."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    silence = _silence(silent_words)
    words = set()
    for text in vocabulary:
        words.update(re.findall(UNIT, re.sub(silence, " ", text.lower())))
    ids = {word: i for i, word in enumerate(CONTROL + sorted(words))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    removal = normalizers.Replace(Regex(silence), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), removal])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(UNIT), "removed", invert=True)
    return tokenizer


def _silence(silent_words: tuple[str, ...]) -> str:
    """Return a regular expression that matches these words and signs."""
    words = [re.escape(word) for word in silent_words if len(word) > 1 or word.isalnum()]
    signs = [word for word in silent_words if len(word) == 1 and not word.isalnum()]
    choices = []
    if words:
        choices.append(r"\b(?:" + "|".join(words) + r")\b")
    if signs:
        choices.append("[" + re.sub(r"([]^\\-])", r"\\\1", "".join(signs)) + "]")
    return "|".join(choices) or "(?!)"  # the last one matches nothing


def _subword_tokenizer(corpus: Corpus):
    """Train byte-level BPE on lower-cased text.

    A word has the same tokens everywhere, also next to a bracket, so that an action can copy the tokens of
    its prompt. For this, a space is added before the text, after "[" and before "]"; decoding removes it.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, models, trainers
    from tokenizers import decoders as decode
    from tokenizers import normalizers as normalize
    from tokenizers import pre_tokenizers as split

    tokenizer = Tokenizer(models.BPE())
    open_bracket, close_bracket = normalize.Replace("[", "[ "), normalize.Replace("]", " ]")
    tokenizer.normalizer = normalize.Sequence(
        [normalize.Lowercase(), open_bracket, close_bracket, normalize.Prepend(" ")]
    )
    words = split.Split(Regex(r" ?[a-z]+| ?\d+| ?[^\sa-z\d]|\s"), "isolated")
    byte_level = split.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = split.Sequence([words, byte_level])
    open_bracket, close_bracket = decode.Replace("[ ", "["), decode.Replace(" ]", "]")
    tokenizer.decoder = decode.Sequence(
        [decode.ByteLevel(), open_bracket, close_bracket, decode.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=corpus.size,
        initial_alphabet=split.ByteLevel.alphabet(),
        special_tokens=CONTROL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.texts, trainer)
    tokenizer.add_tokens([AddedToken(name, lstrip=True, normalized=True) for name in corpus.names])
    return tokenizer


def silent_words_of(env: Env) -> tuple[str, ...]:
    """Return the words that the tiny model does not read in this environment's texts."""
    return getattr(env, "silent_words", ())


def check_actions(chat: Chat, env: Env, games: int = 3, turns: int = 10) -> None:
    """Raise ValueError if an action of the first games does not survive the tokens.

    The environment would get another action than the model has chosen.
    """
    for action in _seen_actions(env, games, turns):
        intended, typable = parse_action("short", action)
        written = chat.decode(chat.reply(action))
        if typable and parse_action("short", written)[0] != intended:
            raise ValueError(
                f"--env {env.name}: the tiny model can write its action {intended!r} only as {written!r}; "
                "correct the environment's vocabulary and silent_words, or give a language model with --model"
            )


def _seen_actions(env: Env, games: int, turns: int) -> dict[str, None]:
    """Play random actions in the first games and return all admissible actions. Crashes end a game."""
    rng, seen = random.Random(0), {}
    for game in range(min(games, env.size("train"))):
        with contextlib.suppress(EnvironmentCrashed):
            view = env.reset("train", game)
            for _ in range(turns):
                seen |= dict.fromkeys(view.admissible)
                if view.done or not view.admissible:
                    break
                view = env.step(rng.choice(view.admissible))
    return seen


def tiny_base(
    vocabulary: tuple[str, ...] | Corpus,
    silent_words: tuple[str, ...] = (),
    *,
    d_model: int = 64,
    layers: int = 2,
    heads: int = 4,
    intermediate: int = 256,
    max_length: int = 1024,
    seed: int = 0,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    gradient_checkpointing: bool = False,
    autocast: bool | None = None,
) -> Base:
    """Make a Qwen2 of these sizes with random weights, and its tokenizer.

    vocabulary, silent_words: an environment's. max_length: tokens of the longest prompt and reply together.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = tiny_tokenizer(vocabulary, silent_words)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=d_model,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        initializer_range=0.1,  # the usual 0.02 suits wide models; a narrow one hardly learns from it
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    cast(model, getattr(torch, dtype))
    chat = Chat(tokenizer, [tokenizer.eos_token_id])
    return Base(model, chat, device, gradient_checkpointing, changed=True, autocast=autocast)
