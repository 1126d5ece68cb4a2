"""A forward pass over rows in which the model reads each distinct prompt once.

A group's episodes start with one prompt. `split_prompts` splits a batch into its distinct prompts and what
follows them in each row. `read_shared` reads the prompts first, and then the rest of the rows, which attend
to the keys and values of their prompt. The graph is kept, so the gradient is that of whole rows:

    rows       P1 P2 a1 a2      P1 P2 a3 a4      P3 P4 a5          12 tokens
    prompts    P1 P2            P3 P4                               read first; causal
    the rest   a1               a3               -                  read second; a mask and positions
                                                                    (the last token of a row predicts none)

Left out: prompts that are equal only in their beginning, and sharing after the first reply.

Shapes: B rows, T tokens (columns), G distinct prompts, P tokens of the longest prompt, S tokens of the
longest rest, H heads, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from batch import Batch

HIDDEN = -1e9  # added to the attention score of a hidden column
WORTH = 0.75  # prompts are shared if at most this share of a batch's tokens, padding included, is left


@dataclass
class SharedPrompts:
    """A batch in two parts, both padded on the right."""

    prompt_ids: Tensor  # (G, P) the distinct prompts
    rest_ids: Tensor  # (B, S) the tokens after each row's prompt, without the row's last token
    lengths: Tensor  # (B,) tokens of each row's prompt
    prompts: Tensor  # (B,) the prompt of each row, an index of G


def attention_limit(model) -> int:
    """Return the number of tokens that all layers attend to, 0 for a model with recurrent layers."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    if kinds - {"full_attention", "sliding_attention", "chunked_attention"} or model._is_stateful:
        return 0
    windows = []
    if kinds != {"full_attention"}:
        windows = [getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)]
    return min(filter(None, windows), default=2**30)


def split_prompts(model, batch: Batch) -> SharedPrompts | None:
    """Split a batch into prompts and rests. A row's prompt is all that comes before its first action token.

    Returns None if this saves less than a quarter of the tokens, or if the model cannot read rows in two
    passes: its attention takes no 4-D mask, or a layer does not attend to all tokens.
    """
    if getattr(model.config, "_attn_implementation", None) not in ("sdpa", "eager"):
        return None
    if batch.input_ids.shape[1] > attention_limit(model) or not batch.attention_mask[:, 0].all():
        return None
    lengths = [row.spans[0][1] for row in batch.rows]
    prompts = [tuple(row.input_ids[:n]) for row, n in zip(batch.rows, lengths, strict=True)]
    rests = [row.input_ids[n:-1] or [0] for row, n in zip(batch.rows, lengths, strict=True)]
    distinct = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    tokens = len(distinct) * max(lengths) + len(rests) * max(map(len, rests))
    if tokens > WORTH * batch.input_ids.numel():
        return None
    device = batch.input_ids.device
    return SharedPrompts(
        pad_sequence([torch.tensor(prompt) for prompt in distinct], batch_first=True).to(device),
        pad_sequence([torch.tensor(rest) for rest in rests], batch_first=True).to(device),
        torch.tensor(lengths, device=device),
        torch.tensor([distinct[prompt] for prompt in prompts], device=device),
    )


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the attention mask (B, 1, Q, K) for `visible` (B, Q, K) bool: the columns each token may see."""
    return torch.where(visible, 0.0, HIDDEN).to(dtype)[:, None]


class PromptCache:
    """Keys and values (G, H, P, .) of the prompts, which the rest of each row attends to.

    It has the methods that transformers calls on a cache. The first pass fills it, the second one reads it.
    """

    def __init__(self, prompts: Tensor):
        self.prompts = prompts  # (B,) the prompt of each row
        self.columns = 0  # P after the first pass
        self.layers: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Return all keys and values that a layer's new tokens may attend to. Attention calls it."""
        if layer == len(self.layers):
            self.layers.append((keys, values))
            return keys, values
        prompt_keys, prompt_values = self.layers[layer]
        keys = torch.cat([prompt_keys[self.prompts], keys], dim=2)
        return keys, torch.cat([prompt_values[self.prompts], values], dim=2)

    def get_seq_length(self, layer: int = 0) -> int:
        return self.columns

    get_query_offset = get_seq_length

    def get_mask_sizes(self, queries: int, layer: int = 0) -> tuple[int, int]:
        return self.columns + queries, 0


def read_shared(hidden: Callable[..., Tensor], shared: SharedPrompts, dtype: torch.dtype) -> Tensor:
    """Return the hidden states (B, 1 + S, D) of the last token of each row's prompt and of the rest.

    hidden(input_ids, mask, positions, cache): a function like `model.Base.hidden`. dtype: type of the mask.
    """
    cache = PromptCache(shared.prompts)
    prompt_states = hidden(shared.prompt_ids, None, None, cache)
    cache.columns = shared.prompt_ids.shape[1]
    (count, width), device = shared.rest_ids.shape, shared.rest_ids.device
    in_prompt = torch.arange(cache.columns, device=device) < shared.lengths[:, None]
    before = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    visible = [in_prompt[:, None].expand(-1, width, -1), before.expand(count, -1, -1)]
    positions = shared.lengths[:, None] + torch.arange(width, device=device)
    rest_states = hidden(shared.rest_ids, additive_mask(torch.cat(visible, 2), dtype), positions, cache)
    last = prompt_states[shared.prompts, shared.lengths - 1]
    return torch.cat([last[:, None], rest_states], dim=1)
