"""Sampling replies: the `Sampler` protocol, and `KVSampler`, a decoder for any Hugging Face causal LM.

`KVSampler` uses the very weights that are trained, so there is no copy to keep in sync. All prompts of a call
form one batch with one key-value cache. Each row draws from its own generator, so its tokens do not depend on
the other rows. The docstring of `KVSampler` says when the cache is kept and when it is cleared.

All rows of the cache have the same columns. A column without a token of the row is a hole: the attention mask
hides it, and positions skip it. Example: row a (4 prompt tokens, 3 sampled) and row b (2 prompt tokens, 2
sampled). A row's last sampled token enters the cache with its next prompt:

    a   p p p p s s     positions 0 1 2 3 4 5
    b   p p . . s .               0 1     2

Left out:
* Top-k, top-p and penalties, also those in a checkpoint's generation_config: the sampler's log-probs
  would differ from the trainer's. Tokens are drawn from softmax(logits / temperature).
* Sharing the memory of equal prompts. They are read once, but each row has a copy of their keys and values.
* Models with recurrent layers, and sequences longer than an attention window. Both are refused.

Shapes: B rows (prompts), b rows that are still decoded, Q new tokens, K cached columns, H heads, D hidden
size, V vocabulary.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from scale.shared_prompts import additive_mask, attention_limit

PREFILL_TOKENS = 2**14  # prompt tokens per forward pass; with more, activations would outweigh the cache


@dataclass
class Sample:
    """One reply."""

    token_ids: list[int]  # the sampled tokens, with the stop token if one was sampled
    logprobs: list[float]  # one for each token, at the sampling temperature
    stopped: bool  # True: ended with a stop token; False: reached max_tokens


class Sampler(Protocol):
    def sample(
        self,
        policy,
        prompts: list[list[int]],
        episodes: list[int],
        rngs: list[random.Random],
        temperature: float,
        max_tokens: int,
    ) -> list[Sample]:
        """Sample one reply to each of the B prompts.

        episodes: the number of each prompt's episode, so that earlier work for that episode can be reused.
        rngs: the generator of each row. Temperature 0 takes the most probable token, and its log-prob is then
        the one at temperature 1. Raises ValueError if a prompt is empty, or too long for a reply of
        `max_tokens`; FloatingPointError if the policy's logits are NaN or infinite.
        """

    def reset(self) -> None:
        """Clear everything that is cached."""

    def close(self) -> None:
        """Free memory and processes. The sampler cannot be used afterwards."""


def check_lengths(prompts: list[list[int]], max_tokens: int, limit: int, whose: str) -> None:
    """Raise ValueError for an empty prompt, or if a prompt and its reply could exceed `limit` tokens.

    whose: the end of the message, for example "vLLM was started for".
    """
    if not all(prompts):
        raise ValueError("a prompt has no tokens")
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: a reply has at least one token")
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_tokens > limit:
        raise ValueError(
            f"a prompt of {longest} tokens and a reply of up to {max_tokens} exceed the {limit} that {whose}"
        )


def check_decodable(model, prompts: list[list[int]], max_tokens: int, max_length: int) -> None:
    """Raise ValueError if `KVSampler` cannot decode the model correctly.

    It cannot decode recurrent layers. It cannot decode a sequence that exceeds the model's length or the
    attention window of a layer, because `additive_mask` has no windows.
    """
    kind, limit = model.config.get_text_config().model_type, attention_limit(model)
    if limit == 0:
        raise ValueError(f"model type {kind!r} has recurrent layers: KVSampler cannot decode it")
    check_lengths(prompts, max_tokens, min(limit, max_length), f"model type {kind!r} attends to")


def draw(logits: Tensor, rngs: list[random.Random | None], temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature). Returns tokens (b,) and log-probs (b,).

    logits (b, V). Each row inverts its cumulative distribution at one uniform number of its own generator.
    A row with generator None has stopped: its token is arbitrary, and no number is drawn.
    Raises FloatingPointError if a logit is NaN or +inf.
    """
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    if temperature == 0:
        token = logits.argmax(-1)
    else:
        uniform = [0.0 if rng is None else rng.random() for rng in rngs]
        uniform = torch.tensor(uniform, dtype=torch.float64, device=logits.device)[:, None]
        cumulative = logprobs.double().exp().cumsum(-1)
        total = cumulative[:, -1:]
        if total.isnan().any():
            raise FloatingPointError("the policy's logits are not numbers: lower its learning rate")
        # The first token whose cumulative probability exceeds u * total. The target stays below the total, so
        # a token of probability 0 is never drawn
        target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
        token = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return token, logprobs.gather(-1, token[:, None])[:, 0]


class Cache:
    """Keys and values (B, H, K, .) of every layer, in buffers with room for more columns.

    It has the methods that transformers calls on a cache. The caller advances `columns` after each forward
    pass. Unwritten columns are 0, because a NaN spoils a sum even if it is hidden.
    """

    def __init__(self, size: int):
        self.size = size  # columns of every new or enlarged buffer
        self.columns = 0  # columns in use
        self.layers: list[list[Tensor]] = []  # [keys, values] of each layer

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Write the new columns of one layer; return all its keys and values. Attention calls it."""
        end = self.columns + keys.shape[2]
        if layer == len(self.layers):
            self.layers.append([keys[:, :, :0], values[:, :, :0]])
        self.grow(layer)
        for buffer, new in zip(self.layers[layer], (keys, values), strict=True):
            buffer[:, :, self.columns : end] = new
        keys, values = self.layers[layer]
        return keys[:, :, :end], values[:, :, :end]

    def grow(self, layer: int) -> None:
        """Enlarge the layer's buffers to `size` columns if they have fewer."""
        for i, buffer in enumerate(self.layers[layer]):
            if buffer.shape[2] < self.size:
                self.layers[layer][i] = torch.nn.functional.pad(
                    buffer, (0, 0, 0, self.size - buffer.shape[2])
                )

    def take(self, rows: Tensor, columns: Tensor | None = None) -> Cache:
        """Copy these rows into a new cache of this `size`. `columns` (rows, k): the columns to copy for each
        row, in order; None: all."""
        taken = Cache(self.size)
        taken.columns = self.columns if columns is None else columns.shape[1]
        for pair in self.layers:
            pair = [x[rows, :, : self.columns] for x in pair]
            if columns is not None:
                places = columns[:, None, :, None]
                pair = [x.gather(2, places.expand(-1, x.shape[1], -1, x.shape[3])) for x in pair]
            taken.layers.append(pair)
            taken.grow(len(taken.layers) - 1)
        return taken

    @classmethod
    def join(cls, parts: list[Cache]) -> Cache:
        """Stack the rows of all parts. Each layer of the parts is freed as soon as it is stacked."""
        whole = cls(parts[0].size)
        whole.columns = parts[0].columns
        for pairs in zip(*(part.layers for part in parts), strict=True):
            whole.layers.append([torch.cat(buffers) for buffers in zip(*pairs, strict=True)])
            for pair in pairs:
                pair.clear()
        return whole

    def put_back(self, rows: Tensor, taken: Cache) -> None:
        """Copy to these rows the columns that were added to `taken` after `take(rows)`."""
        for layer, pair in enumerate(taken.layers):
            for buffer, source in zip(self.layers[layer], pair, strict=True):
                buffer[rows, :, self.columns : taken.columns] = source[:, :, self.columns : taken.columns]
        self.columns = taken.columns

    def get_seq_length(self, layer: int = 0) -> int:
        return self.columns

    get_query_offset = get_seq_length

    def get_mask_sizes(self, queries: int, layer: int = 0) -> tuple[int, int]:
        return self.columns + queries, 0


def prefill_part(policy, cache: Cache, ids: Tensor, lengths: Tensor, cached: Tensor, real: Tensor) -> Tensor:
    """Feed new prompt tokens to the cache. Returns the hidden state at each row's last one (B, D).

    ids (B, Q): padded on the right. lengths (B,): tokens of each row without padding. cached (B,): tokens of
    each row in the cache. real (B, K): see `Live`; it includes the Q new columns.
    """
    columns = torch.arange(ids.shape[1], device=ids.device)
    if cache.columns == 0:
        hidden = policy.hidden(ids, cache=cache)  # causal attention never looks right, at the padding
    else:
        causal = torch.arange(real.shape[1], device=ids.device) <= cache.columns + columns[:, None]
        mask = additive_mask(real[:, None] & causal, policy.model.dtype)
        positions = cached[:, None] + torch.minimum(columns, lengths[:, None] - 1)
        hidden = policy.hidden(ids, mask, positions, cache)
    cache.columns += len(columns)
    return hidden[torch.arange(len(ids), device=ids.device), lengths - 1]


@dataclass
class Live:
    """The b rows of a call that are still decoded.

    A stopped row stays in the batch, its tokens ignored, until half of the rows have stopped. Then `shrink`
    removes all stopped rows, so the cache is copied at most log2(B) times.
    """

    rows: Tensor  # (b,) index of each row in the call
    positions: Tensor  # (b,) position of the next token
    real: Tensor  # (b, K) bool: the column holds a token of the row, so it is no hole
    whole: Cache  # of all B rows
    cache: Cache  # of the b rows: `whole` itself until the first shrink
    active: Tensor  # (b,) bool: False once the row has stopped

    def active_rngs(self, rngs: list[random.Random]) -> list[random.Random | None]:
        """Return the generator of each of the b rows, None for a row that has stopped."""
        pairs = zip(self.rows.tolist(), self.active.tolist(), strict=True)
        return [rngs[row] if active else None for row, active in pairs]

    def shrink(self) -> None:
        """Remove the stopped rows."""
        self.put_back()
        kept = self.active.nonzero()[:, 0]
        self.rows, self.positions = self.rows[kept], self.positions[kept]
        self.real, self.active = self.real[kept], self.active[kept]
        self.cache = self.whole.take(self.rows)

    def feed(self, policy, tokens: Tensor) -> Tensor:
        """Run one token per row (b,) through the model. Returns the hidden states (b, D)."""
        self.real = torch.nn.functional.pad(self.real, (0, 1), value=True)
        mask = additive_mask(self.real[:, None], policy.model.dtype)
        hidden = policy.hidden(tokens[:, None], mask, self.positions[:, None], self.cache)[:, -1]
        self.cache.columns += 1
        self.positions = self.positions + 1
        return hidden

    def put_back(self) -> None:
        """Copy the columns of the decoded tokens to the cache of all rows."""
        if self.cache is not self.whole:
            self.whole.put_back(self.rows, self.cache)


class KVSampler:
    """Decodes with the policy's own model, and keeps keys and values from turn to turn.

    The KV cache lives on from call to call of `sample`, by these rules:
    * a row is reused if the prompt extends all tokens cached for its episode (full context). Only the new
      prompt tokens are prefilled.
    * a row is recomputed if the prompt does not extend them (window context).
    * if no row is reused, equal prompts are read once, such as the first prompts of a group.
    * a row is removed if its episode is not in the call, because it has ended.
    * the cache is cleared if the policy is another object, or its `version` has changed with its weights.
    * no row is reused if the previous call raised an exception.
    `reset` clears the cache. `World` calls it before and after each rollout: an update needs the memory.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self._owner = None  # (policy, version) whose weights computed the cache
        self._cache = Cache(0)
        self._real = None  # (B, K) bool: the column holds a token of the row, so it is no hole
        self._episodes: list[int] = []  # the episode of each row
        self._tokens: list[list[int]] = []  # the cached tokens of each row

    close = reset

    @torch.no_grad()
    def sample(self, policy, prompts, episodes, rngs, temperature, max_tokens) -> list[Sample]:
        """See `Sampler.sample`. Also raises ValueError for a model that `check_decodable` refuses."""
        check_decodable(policy.activate(), prompts, max_tokens, policy.max_length)
        if self._owner is None or self._owner[0] is not policy or self._owner[1] != policy.version:
            self.reset()
            self._owner = (policy, policy.version)
        hidden = self._prefill(policy, prompts, episodes, max_tokens)
        samples = self._decode(policy, hidden, prompts, rngs, temperature, max_tokens)
        self._keep(prompts, episodes, samples)
        return samples

    def _prefill(self, policy, prompts, episodes, max_tokens: int) -> Tensor:
        """Feed the prompt tokens that are not cached. Returns the hidden state at each prompt's end."""
        reusable = self._reusable(prompts, episodes)
        self._episodes = []  # if this call fails, the next one finds no row to reuse
        cached = [0 if row is None else len(self._tokens[row]) for row in reusable]
        new = [prompt[n:] for prompt, n in zip(prompts, cached, strict=True)]
        width = max(map(len, new))
        if any(cached):
            self._arrange(reusable, cached, width + max_tokens - 1)  # the last token is not fed
            return self._read(policy, new, cached)
        distinct = {prompt: row for row, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        repeated = len(distinct) < len(prompts)
        self._cache = Cache(width if repeated else width + max_tokens - 1)
        self._real = torch.zeros(len(distinct), 0, dtype=torch.bool, device=policy.device)
        states = self._read(policy, [list(prompt) for prompt in distinct], [0] * len(distinct))
        if repeated:
            rows = torch.tensor([distinct[tuple(prompt)] for prompt in prompts], device=policy.device)
            self._cache.size = width + max_tokens - 1
            self._cache, self._real, states = self._cache.take(rows), self._real[rows], states[rows]
        return states

    def _read(self, policy, new: list[list[int]], cached: list[int]) -> Tensor:
        """Feed these new tokens to the rows of the cache. Returns the hidden state at each row's end."""
        width, device = max(map(len, new)), policy.device
        ids = torch.tensor([part + [policy.chat.pad_id] * (width - len(part)) for part in new], device=device)
        lengths, cached = torch.tensor([[len(part) for part in new], cached], device=device)
        self._real = torch.cat([self._real, torch.arange(width, device=device) < lengths[:, None]], dim=1)

        groups = torch.arange(len(new), device=device).split(max(1, PREFILL_TOKENS // width))
        caches = [self._cache] if len(groups) == 1 else [self._cache.take(rows) for rows in groups]
        states = [
            prefill_part(policy, cache, ids[rows], lengths[rows], cached[rows], self._real[rows])
            for rows, cache in zip(groups, caches, strict=True)
        ]
        if len(caches) > 1:
            self._cache = Cache.join(caches)
        return torch.cat(states)

    def _reusable(self, prompts: list[list[int]], episodes: list[int]) -> list[int | None]:
        """Return for each prompt the cached row of its episode, or None if the prompt does not extend it."""
        row_of = {episode: row for row, episode in enumerate(self._episodes)}
        rows: list[int | None] = []
        for prompt, episode in zip(prompts, episodes, strict=True):
            row = row_of.get(episode)
            tokens = [] if row is None else self._tokens[row]
            extends = row is not None and len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens
            rows.append(row if extends else None)
        return rows

    def _arrange(self, rows: list[int | None], cached: list[int], new: int) -> None:
        """Give the cache one row per prompt of the call, and the size that the call needs.

        rows: the cached row of each prompt; None: an empty row. cached: the cached tokens of each row. new:
        columns that the call adds.
        """
        longest = max(cached)
        if rows != list(range(len(self._tokens))) or self._cache.columns > 2 * longest:
            # Rows were removed or added, or most columns are holes: move each row's tokens to the left
            device = self._real.device
            chosen = torch.tensor([row or 0 for row in rows], device=device)
            order = self._real[chosen].int().argsort(dim=1, descending=True, stable=True)[:, :longest]
            self._cache.size = longest + new
            self._cache = self._cache.take(chosen, order)
            counts = torch.tensor(cached, device=device)
            self._real = torch.arange(longest, device=device) < counts[:, None]
        else:
            self._cache.size = self._cache.columns + new

    def _decode(self, policy, hidden: Tensor, prompts, rngs, temperature, max_tokens) -> list[Sample]:
        """Sample until every row has stopped. hidden (B, D): the states at the prompts' ends."""
        count, device = len(prompts), hidden.device
        stop_ids = torch.tensor(policy.chat.stop_ids, device=device)
        tokens = torch.zeros(count, max_tokens, dtype=torch.long, device=device)
        logprobs = torch.zeros(count, max_tokens, device=device)
        lengths = torch.full((count,), max_tokens, device=device)
        live = Live(
            rows=torch.arange(count, device=device),
            positions=torch.tensor([len(prompt) for prompt in prompts], device=device),
            real=self._real,
            whole=self._cache,
            cache=self._cache,
            active=torch.ones(count, dtype=torch.bool, device=device),
        )
        for step in range(max_tokens):
            token, logprob = draw(policy.logits(hidden), live.active_rngs(rngs), temperature)
            tokens[live.rows, step], logprobs[live.rows, step] = token, logprob
            stopping = live.active & torch.isin(token, stop_ids)
            lengths[live.rows[stopping]] = step + 1
            live.active = live.active & ~stopping
            active = int(live.active.sum())
            if active == 0 or step + 1 == max_tokens:
                break
            if active <= len(live.rows) // 2:
                live.shrink()
            hidden = live.feed(policy, tokens[live.rows, step])
        live.put_back()
        rows = zip(tokens.tolist(), logprobs.tolist(), lengths.tolist(), strict=True)
        return [Sample(ids[:n], scores[:n], ids[n - 1] in policy.chat.stop_ids) for ids, scores, n in rows]

    def _keep(self, prompts, episodes, samples: list[Sample]) -> None:
        """Record the cached tokens: each prompt, and its reply without the last token, which is not fed."""
        fed = torch.tensor([len(sample.token_ids) - 1 for sample in samples], device=self._real.device)
        new = torch.arange(self._cache.columns - self._real.shape[1], device=self._real.device)
        self._real = torch.cat([self._real, new < fed[:, None]], dim=1)
        self._episodes = list(episodes)
        self._tokens = [prompt + s.token_ids[:-1] for prompt, s in zip(prompts, samples, strict=True)]
