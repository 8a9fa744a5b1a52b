"""The tensors of one rank that are there for a moment only, by size: what a block, the loss and a
norm make while they run, beyond what is kept for the backward pass."""

from functools import cached_property

from rekindle.plan.tensors import TAUGHT, Rank, rows_at_once


class Temporaries(Rank):
    @cached_property
    def mlp_backward(self) -> int:
        """While a feed-forward's gradients are made: more than what the block has kept."""
        tokens, inner = self.tokens, self.inner
        stream = self.stream * self.part * self.hidden
        if self.shape.gated:  # gradients of product, silu and up; the product is gone
            return 2 * self.compute * tokens * inner + stream
        if self.shape.gelu == "written":
            return (12 if self.half else 2 * self.compute) * tokens * inner + stream
        return self.compute * tokens * inner + stream

    @cached_property
    def attention_backward(self) -> int:
        """While the gradient goes back through a softmax that is written out."""
        return 2 * self.exact * self.pairs if self.written else 0

    def block_backward(self, own: int) -> int:
        """The most that a block's backward pass adds to what the block has kept, where gradients of
        its own weights stay with `own` bytes an element until its end: in the feed-forward behind
        its last matrix, and at its first ones; at the norm before it, and at the block's first one;
        and at a softmax."""
        stream = self.stream * self.part * self.hidden
        tp = self.layout.tp
        # elements of each matrix here
        *_, last = sizes = [
            m.inputs * m.outputs // (tp if m.divided else 1) for m in self.shape.matrices
        ]
        attention = sum(sizes[:4])
        at_norm = self.norm_backward - self.mlp + own * (sum(sizes) - attention)
        # what came in and a gradient of the input for each; what is left is that of a result
        at_entry = (3 if self.shape.gated else 2) * self.compute * self.tokens * self.hidden
        at_entry -= (self.activation - self.compute) * self.tokens * self.inner
        most = max(
            self.mlp_backward + own * last, at_entry + own * (sum(sizes) - attention), at_norm,
            at_norm - self.norm_and_attention + own * attention,
            stream + self.attention_backward // 2 - self.mlp,
        )  # fmt: skip
        if self.adapters and self.along and self.work.checkpointing == "full":
            # the last product is made again, as the adapter beside it comes later, and divided
            most = max(most, 2 * self.compute * self.tokens * self.hidden + 2 * stream)
        if self.work.checkpointing != "none":  # when an encoder's block has been computed again
            most = max(most, self.norms_forward + stream)
        return most

    @cached_property
    def halved(self) -> int:
        """Gradients of products and norms' results, between zero bubble's halves."""
        adapted = self.work.adapted
        wide = self.outputs(adapted or self.shape.matrices) + self.work.lora_rank * len(adapted)
        norms = 0 if adapted else 2 * self.stream * self.part * self.hidden
        return self.compute * self.tokens * wide + norms

    @cached_property
    def norms_forward(self) -> int:
        """At the end of an encoder's block: what its norms give, and the dropout before."""
        if self.shape.causal:
            return 0
        kept = 0 if self.half else self.stream
        return (2 * self.stream + self.compute - kept) * self.part * self.hidden

    @cached_property
    def attention_forward(self) -> int:
        """Attention written out: bias, scores and the cast weights; or nothing."""
        if not self.written:
            return 0
        return (3 if self.half else 2) * self.compute * self.pairs

    def loss(self, stage: int) -> int:
        """While the loss makes its gradients, besides what is kept."""
        if self.stages[stage] != self.final or not self.shape.causal:
            return 0
        wide = self.head * (1 if self.work.teacher is None else TAUGHT)
        size, rows = self.tokens * self.hidden, min(self.tokens, rows_at_once(wide, "cuda"))
        table = self.head * self.hidden
        trained = 0 if self.adapters else table
        narrow = self.compute if self.compute < self.exact else 0
        cast = self.compute if self.stored != self.compute and not self.sharded else 0
        found = 2 * self.last_norm * size  # its output, and the chosen tokens of that
        found += 2 * size if self.last_norm > self.compute else 0
        found += self.exact * (size + trained) + cast * table
        # of a piece: its logits and their gradient, and what that gives for its rows, or the head
        adding = rows * self.head * (self.exact + narrow)
        adding += self.compute * max(rows * self.hidden, trained)
        if self.work.teacher is not None:
            adding = max(adding, TAUGHT * self.exact * rows * self.head)
        return found + max(adding, narrow * (size + trained))

    @cached_property
    def teaching(self) -> int:
        """While a teacher's block runs: in its feed-forward, or a norm of what came in, in fp32."""
        teacher, wide = self.work.teacher, 2 if self.half else 4
        if teacher is None:
            return 0
        feeding = wide * ((3 if teacher.gated else 2) * teacher.ffn + 4 * teacher.d_model)
        norm = (3 * max(4, wide) + 3 * wide) * teacher.d_model
        return self.tokens * max(feeding, norm)
