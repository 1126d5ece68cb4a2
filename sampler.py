"""Sampling replies: one protocol and its two engines, `KVSampler` and `VLLMSampler`.

`KVSampler` is a decoder of our own for any Hugging Face causal LM and decodes with the very weights that are
trained. All live episodes are one batch with one key-value cache. The cache is kept from call to call: a
prompt that extends the tokens cached for its episode pays for its new tokens alone. Columns are shared by the
rows; where a row has no token a column is a hole that the attention mask hides, and positions are counted per
row.

`VLLMSampler` hands the prompts to vLLM, which holds a copy of the base and is given the adapter of A or B
anew whenever that has changed. Full weights, critics and the reference are not its business.

The distribution is always the model's own softmax at the temperature asked for: there is no top-k, top-p or
penalty, whatever a checkpoint's generation_config says. Each row draws from its own generator, so its tokens
do not depend on the rows beside it.

Shapes: B rows, Q new tokens, K cached columns, H heads, V vocabulary.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass
class Sample:
    token_ids: list[int]  # the sampled tokens, the stop token included
    logprobs: list[float]  # of each, at the sampling temperature
    stopped: bool  # ended with a stop token; False: it hit max_tokens


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
        """One reply to each prompt. `episodes`: the number of each one's, so that what was computed for it
        can be reused."""

    def reset(self) -> None:
        """Forget all that is cached."""

    def close(self) -> None:
        """Give back what it holds; it cannot be used afterwards."""


PREFILL_TOKENS = 2**14  # of prompts, read at once: what a model holds of more would outweigh the cache


HIDDEN = -1e9  # added to the attention score of a column that must not be seen


class Cache:
    """Keys and values (B, H, K, .) of every layer, in buffers with room for more. It has what transformers
    asks of a cache and no more. Columns never written are 0, since a hidden NaN would still spoil a sum."""

    def __init__(self, room: int = 0):
        self.room = room  # columns to have ready beyond the first ones
        self.columns = 0  # filled
        self.layers: list[list[Tensor]] = []  # [keys, values] of each layer

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Called by attention layer after layer: put in the new columns, get all."""
        end = self.columns + keys.shape[2]
        if layer == len(self.layers):
            self.layers.append(
                [x.new_zeros(*x.shape[:2], end + self.room, x.shape[3]) for x in (keys, values)]
            )
        self.grow(layer, end)
        for buffer, new in zip(self.layers[layer], (keys, values), strict=True):
            buffer[:, :, self.columns : end] = new
        keys, values = self.layers[layer]
        return keys[:, :, :end], values[:, :, :end]

    def grow(self, layer: int, end: int) -> None:
        """Have room for `end` columns, and for `room` more."""
        for i, buffer in enumerate(self.layers[layer]):
            if buffer.shape[2] < end:
                more = end + self.room - buffer.shape[2]
                self.layers[layer][i] = torch.nn.functional.pad(buffer, (0, 0, 0, more))

    def take(self, rows: Tensor, columns: Tensor | None = None) -> Cache:
        """A cache of these rows alone; with `columns` (rows, k) of these columns of each, in that order."""
        taken = Cache(self.room)
        taken.columns = self.columns if columns is None else columns.shape[1]
        for pair in self.layers:
            pair = [x[rows, :, : self.columns] for x in pair]
            if columns is not None:
                places = columns[:, None, :, None]
                pair = [x.gather(2, places.expand(-1, x.shape[1], -1, x.shape[3])) for x in pair]
            taken.layers.append(pair)
        return taken

    @classmethod
    def joined(cls, parts: list[Cache]) -> Cache:
        """The rows of all parts, one below the other; the parts are emptied: the cache never exists twice."""
        whole = cls(parts[0].room)
        whole.columns = parts[0].columns
        for pairs in zip(*(part.layers for part in parts), strict=True):
            whole.layers.append([torch.cat(buffers) for buffers in zip(*pairs, strict=True)])
            for pair in pairs:
                pair.clear()
        return whole

    def put_back(self, rows: Tensor, taken: Cache) -> None:
        """Give these rows the columns that were added to `taken`, which is a cache of theirs."""
        for layer, pair in enumerate(taken.layers):
            self.grow(layer, taken.columns)
            for buffer, source in zip(self.layers[layer], pair, strict=True):
                buffer[rows, :, self.columns : taken.columns] = source[:, :, self.columns : taken.columns]
        self.columns = taken.columns

    def get_seq_length(self, layer: int = 0) -> int:
        return self.columns

    get_query_offset = get_seq_length

    def get_mask_sizes(self, queries: int, layer: int = 0) -> tuple[int, int]:
        return self.columns + queries, 0


class KVSampler:
    """Decodes with the policy's own model. The cache belongs to one policy at one version: whatever else
    comes, it is dropped. Episodes that are not asked for any more leave it."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self._owner = None  # (policy, its version) the cache was computed with
        self._cache, self._real = Cache(), None  # (B, K) bool: the columns that hold one of the row's tokens
        self._episodes, self._tokens = [], []  # of each row

    close = reset

    @torch.no_grad()
    def sample(self, policy, prompts, episodes, rngs, temperature, max_tokens) -> list[Sample]:
        """Temperature 0 takes the likeliest token; its log-probs are then those at temperature 1."""
        model = policy.activate()
        check_decodable(model, prompts, max_tokens, policy.max_length)
        if self._owner is None or self._owner[0] is not policy or self._owner[1] != policy.version:
            self.reset()
            self._owner = (policy, policy.version)
        hidden = self._prefill(policy, prompts, episodes, max_tokens)

        count, device = len(prompts), hidden.device
        stop_ids = torch.tensor(policy.chat.stop_ids, device=device)
        tokens = torch.zeros(count, max_tokens, dtype=torch.long, device=device)
        logprobs = torch.zeros(count, max_tokens, device=device)
        lengths = torch.full((count,), max_tokens, device=device)
        # The rows that are decoded. Those that are done ride along unread until they are half
        rows, live = torch.arange(count, device=device), torch.ones(count, dtype=torch.bool, device=device)
        positions = torch.tensor([len(prompt) for prompt in prompts], device=device)
        cache, real, parents = self._cache, self._real, []
        for step in range(max_tokens):
            drawing = [rngs[i] if on else None for i, on in zip(rows.tolist(), live.tolist(), strict=True)]
            token, logprob = draw(policy.logits(hidden), drawing, temperature)
            tokens[rows, step], logprobs[rows, step] = token, logprob
            stopping = live & torch.isin(token, stop_ids)
            lengths[rows[stopping]] = step + 1
            live = live & ~stopping
            going = int(live.sum())
            if going == 0 or step + 1 == max_tokens:
                break
            if going <= len(rows) // 2:
                keep = live.nonzero()[:, 0]
                parents.append((cache, keep))
                cache, live = cache.take(keep), live[keep]
                cache.room = max_tokens - step - 2  # all that may still come after the next token
                rows, token, positions, real = (x[keep] for x in (rows, token, positions, real))
            real = torch.nn.functional.pad(real, (0, 1), value=True)
            mask = hide(real[:, None], model)
            hidden = policy.hidden(token[:, None], mask, positions[:, None], cache)[:, -1]
            cache.columns += 1
            positions = positions + 1
        for parent, keep in reversed(parents):
            parent.put_back(keep, cache)
            cache = parent

        # The last token of a reply was sampled but never fed: it goes in with the next turn
        fed = torch.arange(self._cache.columns - self._real.shape[1], device=device)
        self._real = torch.cat([self._real, fed < lengths[:, None] - 1], dim=1)
        samples = [
            Sample(ids[:n], scores[:n], ids[n - 1] in policy.chat.stop_ids)
            for ids, scores, n in zip(tokens.tolist(), logprobs.tolist(), lengths.tolist(), strict=True)
        ]
        self._episodes = list(episodes)
        self._tokens = [prompt + s.token_ids[:-1] for prompt, s in zip(prompts, samples, strict=True)]
        return samples

    def _prefill(self, policy, prompts, episodes, room: int) -> Tensor:
        """Run what is not cached yet; the hidden state at each prompt's end (B, D)."""
        device, rows = policy.device, self._reusable(prompts, episodes)
        known = [0 if row is None else len(self._tokens[row]) for row in rows]
        counts = torch.tensor(known, device=device)
        episodes_before, self._episodes = self._episodes, []  # until the call is through, nothing is reusable
        if not any(known):
            self._cache, self._real = Cache(room), torch.zeros(len(rows), 0, dtype=torch.bool, device=device)
        elif rows != list(range(len(episodes_before))) or self._cache.columns > 2 * max(known):
            # Episodes left, or holes take more room than tokens: pack each row's tokens to the left
            chosen = torch.tensor([row or 0 for row in rows], device=device)
            order = self._real[chosen].int().argsort(dim=1, descending=True, stable=True)[:, : max(known)]
            self._cache = self._cache.take(chosen, order)
            self._real = torch.arange(max(known), device=device) < counts[:, None]

        new = [prompt[n:] for prompt, n in zip(prompts, known, strict=True)]
        width = max(map(len, new))
        ids = torch.tensor([part + [policy.chat.pad_id] * (width - len(part)) for part in new], device=device)
        ends = torch.tensor(list(map(len, new)), device=device)
        columns = torch.arange(width, device=device)
        self._real = torch.cat([self._real, columns < ends[:, None]], dim=1)
        groups = torch.arange(len(new), device=device).split(max(1, PREFILL_TOKENS // width))
        parts = [self._cache] if len(groups) == 1 else [self._cache.take(rows) for rows in groups]
        states = []
        for rows, part in zip(groups, parts, strict=True):
            if part.columns == 0:  # padded on the right: causality alone keeps the padding out of sight
                hidden = policy.hidden(ids[rows], cache=part)
            else:
                real = self._real[rows]
                seen = torch.arange(real.shape[1], device=device) <= part.columns + columns[:, None]
                mask = hide(real[:, None] & seen, policy.activate())
                positions = counts[rows, None] + torch.minimum(columns, ends[rows, None] - 1)
                hidden = policy.hidden(ids[rows], mask, positions, part)
            part.columns += width
            states.append(hidden[torch.arange(len(rows), device=device), ends[rows] - 1])
        if len(parts) > 1:
            self._cache = Cache.joined(parts)
        return torch.cat(states)

    def _reusable(self, prompts: list[list[int]], episodes: list[int]) -> list[int | None]:
        """For each prompt the cached row of its episode, if the prompt extends its tokens."""
        row_of = {episode: row for row, episode in enumerate(self._episodes)}
        rows: list[int | None] = []
        for prompt, episode in zip(prompts, episodes, strict=True):
            row = row_of.get(episode)
            tokens = self._tokens[row] if row is not None else prompt
            rows.append(row if len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens else None)
        return rows


def check_lengths(prompts: list[list[int]], max_tokens: int, limit: int, whose: str) -> None:
    """Refuse prompts without tokens, and replies that would not fit whole."""
    if not all(prompts):
        raise ValueError("a prompt has no tokens")
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: a reply has at least one token")
    if (longest := max(map(len, prompts))) + max_tokens > limit:
        raise ValueError(
            f"a prompt of {longest} tokens and a reply of up to {max_tokens} exceed the {limit} that {whose}"
        )


def check_decodable(model, prompts: list[list[int]], max_tokens: int, max_length: int) -> None:
    """Refuse what `KVSampler` would get wrong: layers with a state instead of keys, replies beyond what the
    model reads, or beyond a layer's window (the mask knows none)."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    if kinds - {"full_attention", "sliding_attention", "chunked_attention"} or model._is_stateful:
        raise ValueError(f"model type {config.model_type!r} has recurrent layers: it cannot be decoded here")
    limits = [max_length]
    if kinds != {"full_attention"}:
        limits += [getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)]
    limit = min(filter(None, limits))
    check_lengths(prompts, max_tokens, limit, f"model type {config.model_type!r} attends to")


def hide(seen: Tensor, model) -> Tensor:
    """The additive attention mask (B, 1, Q, K) of what each new token may see (B, Q, K)."""
    return torch.where(seen, 0.0, HIDDEN).to(model.dtype)[:, None]


def draw(logits: Tensor, rngs: list[random.Random | None], temperature: float) -> tuple[Tensor, Tensor]:
    """A token for each row of logits (B, V), by inverting its cumulative distribution at a uniform number of
    the row's own generator (None: a row that is done), and its log-prob (B,)."""
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
        # The first token whose cumulative probability exceeds u * total < total: its own is not 0
        height = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
        token = torch.searchsorted(cumulative, height, right=True)[:, 0]
    return token, logprobs.gather(-1, token[:, None])[:, 0]
