"""Sampling replies: one protocol, and `KVSampler`, a decoder of our own for any Hugging Face causal LM.

All live episodes are one batch with one key-value cache. The cache is kept from call to call: a prompt that
extends the tokens cached for its slot pays for its new tokens alone. Columns are shared by the rows; where a
row has no token a column is a hole that the attention mask hides, and positions are counted per row.

The distribution is always the model's own softmax at the temperature asked for: no top-k, top-p or penalty
exists here, whatever a checkpoint's generation_config says. Each row draws from its own generator, so its
tokens do not depend on the rows beside it.

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
        slots: list[int],
        rngs: list[random.Random],
        temperature: float,
        max_tokens: int,
    ) -> list[Sample]:
        """One reply to each prompt. `slots` name the episodes, so that what was computed for one can be
        reused."""

    def reset(self) -> None:
        """Forget all that is cached."""


class Cache:
    """Keys and values (B, H, K, .) of every layer, in buffers that grow by doubling. What transformers asks
    of a cache and no more."""

    def __init__(self):
        self.layers: list[list[Tensor]] = []  # [keys, values] of each layer
        self.columns = 0  # filled

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Called by attention layer after layer: put in the new columns, get all."""
        end = self.columns + keys.shape[2]
        if layer == len(self.layers):
            self.layers.append([x.new_empty(*x.shape[:2], 2 * end, x.shape[3]) for x in (keys, values)])
        for i, new in enumerate((keys, values)):
            buffer = self.layers[layer][i]
            if buffer.shape[2] < end:
                grown = buffer.new_empty(*buffer.shape[:2], 2 * end, buffer.shape[3])
                grown[:, :, : self.columns] = buffer[:, :, : self.columns]
                self.layers[layer][i] = buffer = grown
            buffer[:, :, self.columns : end] = new
        keys, values = self.layers[layer]
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, layer: int = 0) -> int:
        return self.columns

    get_query_offset = get_seq_length

    def get_mask_sizes(self, queries: int, layer: int = 0) -> tuple[int, int]:
        return self.columns + queries, 0

    def select(self, rows: Tensor) -> None:
        self.layers = [[x[rows] for x in pair] for pair in self.layers]


class KVSampler:
    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self._owner = None  # (policy, its version) the cache was computed with
        self._cache, self._tokens, self._slots = Cache(), [], []  # the tokens cached for each row, its slot
        self._real = None  # (B, K) bool: columns that hold one of the row's tokens

    @torch.inference_mode()
    def sample(self, policy, prompts, slots, rngs, temperature, max_tokens) -> list[Sample]:
        """Temperature 0 takes the likeliest token; its log-probs are then those at temperature 1."""
        model = policy.activate()
        self._check(model.config, prompts, max_tokens, policy.max_length)
        hidden = self._prefill(policy, prompts, slots)
        B, device = len(prompts), policy.device
        positions = torch.tensor([len(prompt) for prompt in prompts], device=device)
        stop_ids = torch.tensor(policy.chat.stop_ids, device=device)
        live = torch.ones(B, dtype=torch.bool, device=device)
        tokens, logprobs, stops = [], [], []
        for step in range(max_tokens):
            token, logprob = self._draw(policy.logits(hidden), rngs, live, temperature)
            tokens.append(token)
            logprobs.append(logprob)
            stops.append(~live)
            live = live & ~torch.isin(token, stop_ids)
            if step + 1 == max_tokens or not live.any():
                break
            self._real = torch.cat([self._real, live[:, None]], dim=1)
            mask = torch.where(self._real, 0.0, torch.finfo(model.dtype).min).to(model.dtype)[:, None, None]
            hidden = policy.hidden(token[:, None], mask, positions[:, None], self._cache)[:, -1]
            self._cache.columns += 1
            positions += 1
        tokens, logprobs = torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist()
        lengths = (~torch.stack(stops, 1)).sum(1).tolist()
        samples = [
            Sample(ids[:n], scores[:n], ids[n - 1] in policy.chat.stop_ids)
            for ids, scores, n in zip(tokens, logprobs, lengths, strict=True)
        ]
        # The last token of a reply was sampled but never fed: it goes in with the next turn
        self._tokens = [p + s.token_ids[:-1] for p, s in zip(prompts, samples, strict=True)]
        self._slots = list(slots)
        return samples

    @staticmethod
    def _check(config, prompts, max_tokens: int, max_length: int) -> None:
        if not all(prompts):
            raise ValueError("a prompt is empty")
        longest = max(map(len, prompts)) + max_tokens
        if longest > max_length:
            raise ValueError(
                f"a prompt with its reply may take {longest} tokens; the model reads {max_length}"
            )

    def _prefill(self, policy, prompts, slots) -> Tensor:
        """Run what is not cached yet; the hidden state at each prompt's end (B, D)."""
        owner = (policy, policy.version)
        if owner != self._owner:
            self.reset()
            self._owner = owner
        device = policy.device
        row_of = {slot: row for row, slot in enumerate(self._slots)}
        rows = [row_of.get(slot) for slot in slots]
        rows = [
            row
            if row is not None
            and len(p) > len(self._tokens[row])
            and p[: len(self._tokens[row])] == self._tokens[row]
            else None
            for row, p in zip(rows, prompts, strict=True)
        ]
        if not any(row is not None for row in rows):
            self._cache = Cache()
            known = [0] * len(prompts)
            real = torch.zeros(len(prompts), 0, dtype=torch.bool, device=device)
        else:
            known = [0 if row is None else len(self._tokens[row]) for row in rows]
            real = self._real
            if rows != list(range(len(self._slots))):
                chosen = torch.tensor([row or 0 for row in rows], device=device)
                self._cache.select(chosen)
                real = real[chosen] & torch.tensor([row is not None for row in rows], device=device)[:, None]
        new = [prompt[n:] for prompt, n in zip(prompts, known, strict=True)]
        width = max(map(len, new))
        ids = torch.tensor([x + [policy.chat.pad_id] * (width - len(x)) for x in new], device=device)
        lengths = torch.tensor(list(map(len, new)), device=device)
        columns = torch.arange(width, device=device)
        self._real = torch.cat([real, columns < lengths[:, None]], dim=1)
        if self._cache.columns == 0:
            hidden = policy.hidden(ids, None, None, self._cache)
        else:
            dtype = policy.activate().dtype
            seen = torch.arange(self._real.shape[1], device=device) <= self._cache.columns + columns[:, None]
            mask = torch.where(self._real[:, None] & seen, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]
            positions = torch.tensor(known, device=device)[:, None] + columns
            hidden = policy.hidden(ids, mask, positions, self._cache)
        self._cache.columns += width
        return hidden[torch.arange(len(new), device=device), lengths - 1]

    @staticmethod
    def _draw(logits: Tensor, rngs, live: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """A token for each row, by inverting its cumulative distribution at a uniform number of its own
        generator."""
        logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            uniform = [rng.random() if alive else 0.5 for rng, alive in zip(rngs, live.tolist(), strict=True)]
            uniform = torch.tensor(uniform, dtype=torch.float64, device=logits.device)[:, None]
            cumulative = logprobs.double().exp().cumsum(-1)
            total = cumulative[:, -1:]
            # the first token whose cumulative probability exceeds u * total < total: none of probability 0
            height = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
            token = torch.searchsorted(cumulative, height, right=True)[:, 0]
        return token, logprobs.gather(-1, token[:, None])[:, 0]
