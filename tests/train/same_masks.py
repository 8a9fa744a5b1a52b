"""Runs rekindle's worker, or transformers.Trainer as tests/bench has it, with dropout's masks made
from what they fall on: `python same_masks.py ours JOB.json`, `... theirs WISH.json`.

What an element is multiplied with follows from the step, the site (the embeddings, each block's
attention and its network, the head), the text by its own token ids, and the place in it. So both
drop the same elements, wherever they lie in a batch, and have to train the same weights. Counted
sites and rows of texts are those of DistilBERT."""

from __future__ import annotations

import itertools
import runpy
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

LONGEST = 128
SITES = 10  # embeddings, attention and network of four blocks, head


class Masks:
    """The masks of one forward pass after the other; `texts` are the token ids of this one's."""

    def __init__(self) -> None:
        self.step, self.site, self.texts = -1, 0, list[tuple[int, ...]]()
        self.of_attention = 0

    def begin(self, texts: list[tuple[int, ...]]) -> None:
        assert self.step < 0 or self.site == SITES, f"{self.site} sites in step {self.step}"
        self.step, self.site, self.texts, self.of_attention = self.step + 1, 0, texts, 0

    def _draw(self, text: tuple[int, ...], share: float, shape: tuple[int, ...]) -> torch.Tensor:
        named = f"{self.step} {self.site} {text}"
        draw = torch.Generator().manual_seed(zlib.crc32(named.encode()))
        return (torch.rand(shape, generator=draw) >= share) / (1 - share)

    def of_rows(self, share: float, width: int) -> list[torch.Tensor]:
        """[length, width] of each text at the next site."""
        found = [self._draw(text, share, (LONGEST, width))[: len(text)] for text in self.texts]
        self.site += 1
        return found

    def of_scores(self, share: float, heads: int, rows: int, longest: int) -> torch.Tensor:
        """[rows, heads, longest, longest] of the next `rows` texts of one attention."""
        texts = self.texts[self.of_attention : self.of_attention + rows]
        shape = (heads, LONGEST, LONGEST)
        found = [self._draw(text, share, shape)[:, :longest, :longest] for text in texts]
        self.of_attention += rows
        if self.of_attention == len(self.texts):
            self.site, self.of_attention = self.site + 1, 0
        return torch.stack(found)


def patch_ours(masks: Masks) -> None:
    """Texts lie one behind the other; the last block computes first tokens alone."""
    from rekindle.train import attention, dropout, part

    forward = part.Part.forward

    def begun(self: Any, carried: Any = None, *, micro: Any) -> Any:
        if self.training:
            ids = micro.inputs["input_ids"][0].tolist()
            starts = micro.documents.starts.tolist()
            masks.begin([tuple(ids[a:b]) for a, b in itertools.pairwise(starts)])
        return forward(self, carried, micro=micro)

    def kept(shape: Any, share: float, device: Any, dtype: Any, part: Any = None) -> torch.Tensor:
        if len(shape) == 4:
            heads, rows, longest, _ = shape
            return masks.of_scores(share, heads, rows, longest).transpose(0, 1)
        rows = masks.of_rows(share, shape[-1])
        if shape[-2] == sum(map(len, rows)):
            return torch.cat(rows).view(*shape)
        return torch.stack([row[0] for row in rows]).view(*shape)

    part.Part.forward = begun
    dropout.kept = attention.kept = kept


def patch_theirs(masks: Masks) -> None:
    """Texts lie beside each other, padded."""
    import transformers

    forward = transformers.DistilBertForSequenceClassification.forward

    def begun(self: Any, input_ids: Any = None, attention_mask: Any = None, **more: Any) -> Any:
        if self.training:
            lengths = attention_mask.sum(1).tolist()
            rows = zip(input_ids.tolist(), lengths, strict=True)
            masks.begin([tuple(ids[:length]) for ids, length in rows])
        return forward(self, input_ids=input_ids, attention_mask=attention_mask, **more)

    def dropped(x: torch.Tensor, p: float = 0.5, training: bool = True, _: bool = False) -> Any:
        if not training or not p:
            return x
        rows = masks.of_rows(p, x.shape[-1])
        if x.dim() == 2:
            return x * torch.stack([row[0] for row in rows])
        padded = [F.pad(row, (0, 0, 0, x.shape[1] - len(row))) for row in rows]
        return x * torch.stack(padded)

    def attended(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        assert not is_causal
        scores = query @ key.transpose(-1, -2) * (scale or query.shape[-1] ** -0.5)
        if attn_mask is not None:
            hidden = attn_mask if attn_mask.dtype == torch.bool else attn_mask >= 0
            scores = scores.masked_fill(~hidden, float("-inf"))
        weights = scores.softmax(-1)
        if dropout_p:
            rows, heads, longest, _ = weights.shape
            weights = weights * masks.of_scores(dropout_p, heads, rows, longest)
        return weights @ value

    transformers.DistilBertForSequenceClassification.forward = begun
    F.dropout = dropped
    F.scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention = attended


def main() -> None:
    who, argument = sys.argv[1:]
    masks = Masks()
    if who == "ours":
        patch_ours(masks)
        sys.argv = ["worker", argument]
        runpy.run_module("rekindle.train.worker", run_name="__main__")
    else:
        patch_theirs(masks)
        bench = Path(__file__).parents[1] / "bench"
        sys.path.insert(0, str(bench))
        sys.argv = ["peers.py", argument]
        runpy.run_path(str(bench / "peers.py"), run_name="__main__")


if __name__ == "__main__":
    main()
