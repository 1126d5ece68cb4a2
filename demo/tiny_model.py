"""The tiny model: a Qwen2 of random weights whose tokenizer knows the words of one environment."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from chat import Chat
from envs import Corpus
from model import Base, cast

# Words that tell a tiny model nothing are left out of its prompts; no action holds one of them.
SILENT = r"\b(?:a|an|the|you|see|and|is|are|it|of|middle|room|looking|quickly|around|arrive|at|on|in)\b|[,.]"


UNIT = r"go to|[a-z]+ \d+|[a-z]+|\d+|[^\sa-z\d]"  # "mug 1" is one token, and so is the verb "go to"


TINY_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<assistant>{{ message.content }}<end>"
    "{% else %}<user>{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_tokenizer(vocabulary: tuple[str, ...] | Corpus):
    """Of all the words of a closed vocabulary, or trained on the texts of an open one."""
    from transformers import PreTrainedTokenizerFast

    control = ["<pad>", "<unk>", "<user>", "<assistant>", "<end>"]
    if isinstance(vocabulary, Corpus):
        tokenizer = _subword_tokenizer(vocabulary, control)
    else:
        tokenizer = _word_tokenizer(vocabulary, control)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        extra_special_tokens=["<user>", "<assistant>"],
        chat_template=TINY_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _word_tokenizer(vocabulary: Iterable[str], control: list[str]):
    """One token a word, and one for a named thing such as "mug 1". Unknown words become <unk>."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    texts = (re.sub(SILENT, " ", text.lower()) for text in vocabulary)
    words = sorted({unit for text in texts for unit in re.findall(UNIT, text)})
    ids = {word: i for i, word in enumerate(control + words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(SILENT), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(UNIT), "removed", invert=True)
    return tokenizer


def _subword_tokenizer(corpus: Corpus, control: list[str]):
    """Byte-level BPE of lower-cased text. A word has the same tokens wherever it stands, in brackets too, so
    that copying a text from the prompt into an action means copying its tokens."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    brackets = [normalizers.Replace("[", "[ "), normalizers.Replace("]", " ]")]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), *brackets, normalizers.Prepend(" ")]
    )
    words = pre_tokenizers.Split(Regex(r" ?[a-z]+| ?\d+| ?[^\sa-z\d]|\s"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    tokenizer.decoder = decoders.Sequence(
        [
            *(decoders.ByteLevel(), decoders.Replace("[ ", "["), decoders.Replace(" ]", "]")),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=corpus.size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=control,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.texts, trainer)
    tokenizer.add_tokens([AddedToken(name, lstrip=True, normalized=True) for name in corpus.names])
    return tokenizer


def tiny_base(
    vocabulary: tuple[str, ...] | Corpus,
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

    vocabulary: an environment's `vocabulary`. max_length: tokens of the longest prompt and reply together.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = tiny_tokenizer(vocabulary)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=d_model,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        initializer_range=0.1,  # the usual 0.02 suits wide models; so narrow a model hardly learns from it
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    cast(model, getattr(torch, dtype))
    return Base(
        model, Chat(tokenizer, [tokenizer.eos_token_id]), device, gradient_checkpointing, True, autocast
    )
