"""The tensors of one rank, by size: weights, what a block keeps for its backward pass, weights and
gradients on the way. temporaries.py has what is there for a moment only.

Derived from what rekindle's engine runs: transformers' eager blocks, autocast over fp32 weights on
replicas, FSDP2 with bf16 weights, torch's pipeline schedules. Every number is bytes an element or a
count of tensors, and none is fitted."""

from functools import cached_property

from rekindle.plan import quantised, updates
from rekindle.plan.inflight import stages_of
from rekindle.plan.shape import Matrix
from rekindle.plan.work import Work

# Logits that the loss makes at a time, in fp32: what a CPU's cache likes; on a GPU so many that
# the matrix, which each piece reads twice, costs less to read than to multiply with.
LOGITS_BYTES = {"cpu": 1 << 25, "cuda": 1 << 29}
TAUGHT = 4  # matrices as large as the logits that a teacher's divergence makes, them included
# A smaller teacher is held whole: gathering it in every micro-batch costs more than it saves.
WHOLE_TEACHER_BYTES = 1 << 30


def rows_at_once(columns: int, device: str) -> int:
    """Rows of logits that the loss makes at a time: of 128,256 columns 65, on a GPU 1,046."""
    return max(1, LOGITS_BYTES.get(device, LOGITS_BYTES["cpu"]) // (4 * max(1, columns)))


class Rank:
    """The numbers of one rank. Bytes an element: `stored` of weights and moments, `gathered` of the
    weights that FSDP puts together, `compute` of products, `stream` of the residual stream, `exact`
    of sums that are too long for half precision."""

    def __init__(self, work: Work, pp_rank: int) -> None:
        self.work, self.shape, self.layout, self.pp_rank = work, work.shape, work.layout, pp_rank
        layout, shape, tp = work.layout, work.shape, work.layout.tp
        self.half = work.precision in ("bf16", "fp16", "fp8")
        self.sharded = not layout.only_replicates and layout.dp * layout.shard * layout.cp > 1
        self.stored = 8 if work.precision == "fp64" else work.weights_bytes
        self.compute = 2 if self.half else self.stored
        self.gathered = 2 if self.half else self.stored
        self.exact = max(4, self.stored if not self.half else 4)
        self.rms = shape.norm == "rms"
        narrow = self.sharded or self.stored == 2
        self.stream = self.compute if narrow and (self.rms or shape.causal) else self.stored
        if self.half and not shape.causal:
            self.stream = 4  # CUDA's autocast computes layer_norm in fp32, and the stream is one
        self.casts = self.half and (self.stream > 2 or not self.rms)
        self.along = tp > 1 and shape.causal and self.rms
        self.tokens = work.tokens
        self.part = self.tokens // tp if self.along else self.tokens
        self.query = shape.heads * shape.head_dim // tp
        self.keys = shape.kv_heads * shape.head_dim // tp
        self.inner, self.hidden = shape.ffn // tp, shape.d_model
        self.group = layout.shard * layout.cp
        self.head = shape.vocab // tp
        self.written = work.attention == "written"  # attention, operation by operation
        self.pairs = self.tokens * work.sequence * shape.heads // tp  # of tokens, of all heads here
        self.joined = not shape.causal and shape.vocab > 0  # texts share a sequence, images do not
        self._cut()
        self._size()

    def _size(self) -> None:
        work, layout, tp, stream = self.work, self.layout, self.layout.tp, self.stream
        # a norm's input in fp32, and the normalised, which only a norm's own weights need
        self.entering = max(4, self.stream) * self.part * self.hidden
        self.scaled = 0 if self.adapters else stream
        # what a norm keeps: its input and the normalised, and the scale, or mean and scale
        self.normed = self.entering + 8 * self.part
        # while a norm's gradients are made: of RMS five tensors in fp32, three of the stream
        self.norm_backward = 2 * stream * self.part * self.hidden
        if self.rms:
            self.normed = self.entering + (self.scaled * self.hidden + 4) * self.part
            self.norm_backward = (5 * 4 + 3 * stream) * self.part * self.hidden
        # what the last norm gives, an element; and what it keeps in a language model
        self.last_norm = stream if self.rms else max(self.exact, stream)
        normalised = self.scaled * self.part * self.hidden if self.rms else 0
        self.behind = self.entering + normalised if self.shape.causal else 0
        # token numbers, positions, labels, targets; of a classifier token numbers and a mask
        columns = 4 if self.shape.causal else 2
        self.inputs_held = columns * 8 * self.tokens * work.accumulation
        # Whether autocast keeps its copies for the whole step: of trained weights, but not of a tp
        # rank's share of them. Of the others each micro-batch has its own.
        self.remembered = tp == 1 and not self.adapters
        # keys that a rank's queries see: those before the end of each of its two chunks
        cp = layout.cp
        self.seen = self.tokens if cp == 1 else self.tokens * (2 * cp + 1) // 2
        # bytes of a gradient: FSDP keeps what it reduced in fp32 beside narrower ones
        narrow = self.sharded and self.stored < self.exact
        self.each_gradient = self.exact + self.stored if narrow else self.stored
        # while a block's gradients are reduced: whole, in fp32
        self.reduced = self.exact * self.trained_block if self.sharded else 0
        # FSDP gathers the weights of each block when they are needed, and forgets them
        self.grouped = self.sharded and layout.pp == 1 and self.group > 1
        # gradients lie in the buckets of replicas
        self.replicated = layout.only_replicates and layout.world > 1
        self.copies = "gathered weights" if self.sharded else "copies of weights"

    def _cut(self) -> None:
        """What this rank has: blocks of each of its stages, elements of a block and of the ends."""
        work, layout, shape = self.work, self.layout, self.shape
        stages, place = layout.stages, self.pp_rank
        mine = stages_of(layout, place)
        each, more = divmod(shape.layers, stages)
        self.blocks = [each + (stage < more) for stage in mine]
        self.stages = mine
        self.final = stages - 1
        self.first, self.last = 0 in mine, stages - 1 in mine
        first, last = work.ends_share()
        self.block = work.block_share()
        self.ends = (first if self.first else 0) + (last if self.last else 0)
        self.adapters = work.adapters_share()
        self.trained_block = self.adapters or self.block
        head = shape.head.parameters if shape.head and not shape.causal else 0
        self.count = sum(self.blocks)
        ends = [first * (stage == 0) + last * (stage == self.final) for stage in mine]
        if self.adapters:
            ends = [head if stage == self.final else 0 for stage in mine]
        self.trained_ends = sum(ends)
        # The embedding is an FSDP group of its own, unless the head is tied to it; the root group
        # has the rest of the ends.
        apart = self.first and not (shape.causal and shape.head is None)
        self.embedding = first if apart else 0
        self.root = self.ends - self.embedding
        self.trained_embedding = 0 if self.adapters else self.embedding
        # trained elements of each stage, and of all of them, whole
        self.each = [n * self.trained_block + end for n, end in zip(self.blocks, ends, strict=True)]
        self.trained = sum(self.each)

    # What is there between two steps

    @cached_property
    def weights(self) -> int:
        block = self.block + self.adapters
        if self.work.quantised:
            block -= sum(m.inputs * m.outputs for m in self.shape.matrices)
            codes = self.count * quantised.block_bytes(self.work)
            return self.stored * (self.count * block + self.ends) + codes
        return self.stored * (self.count * block + self.ends) // self.group

    def static(self) -> dict[str, int]:
        return {
            "parameters": self.weights, "optimizer": self.moments, "teacher": self.taught[0],
        }  # fmt: skip

    @cached_property
    def moments(self) -> int:
        return updates.moments_bytes(self.work, self.trained, self.count, self.stored) // self.group

    @cached_property
    def taught(self) -> tuple[int, int]:
        """Of a teacher its weights, whose blocks all ranks divide where they are large, and those
        that are put together for a while: a block, and the piece that it came in."""
        teacher, world = self.work.teacher, self.layout.world
        if teacher is None:
            return 0, 0
        width = 2 if self.half else 4
        if world == 1 or width * teacher.parameters <= WHOLE_TEACHER_BYTES:
            return width * teacher.parameters, 0
        blocks = teacher.layers * teacher.block_parameters
        own = teacher.parameters - blocks + -(-blocks // world)
        return width * own, 2 * width * teacher.block_parameters

    @cached_property
    def lesson(self) -> int:
        """What a teacher says of each token, until the loss is known."""
        teacher = self.work.teacher
        if teacher is None or not self.shape.causal:
            return 0
        return (2 if self.half else 4) * self.tokens * teacher.d_model

    @property
    def snapshot(self) -> int:
        """Host memory for a save's copies: trained weights and what the optimizer keeps of them."""
        return self.stored * self.trained // self.group + self.moments

    # What a block keeps for its backward pass

    @cached_property
    def norm_and_attention(self) -> int:
        """Until the attention's output matrix has been given its input."""
        tokens = self.tokens
        kept = self.normed + self.inputs(3)
        kept += self.compute * tokens * 2 * self.query + 2 * self.compute * self.seen * self.keys
        if self.shape.head_norms:
            both = self.query + self.keys
            scaled = 0 if self.adapters else self.compute
            kept += ((4 if self.half else self.compute) + scaled) * tokens * both
        return kept + self.scores

    def inputs(self, matrices: int) -> int:
        """Of matrices that share an input: autocast casts it for each of them."""
        size = self.tokens * self.hidden
        if self.casts:
            return matrices * 2 * size
        return (self.compute if self.rms else max(4, self.stream)) * size

    @cached_property
    def scores(self) -> int:
        if self.written:  # softmax in fp32, what is kept of it, and the product
            return (self.exact + 2 * self.compute) * self.pairs
        kept = 4 * self.tokens * self.shape.heads // self.layout.tp  # log of the sums
        if self.shape.attention_dropout and (self.shape.causal or self.joined):
            # one call a document or group, each of which keeps its result beside the joined ones
            kept += self.compute * self.tokens * self.query
        return kept

    @cached_property
    def mlp(self) -> int:
        """The rest of the block."""
        kept = self.normed + self.inputs(2 if self.shape.gated else 1)
        if self.shape.dropout:  # a byte an element
            kept += self.tokens * self.hidden * self.shape.dropouts
        return kept + self.activation * self.tokens * self.inner

    @cached_property
    def narrowed(self) -> int:
        """What the last block keeps less: behind attention it computes each text's first token."""
        if not self.joined or not self.last or self.work.checkpointing != "none":
            return 0
        return self.mlp - self.mlp // self.work.sequence

    @cached_property
    def activation(self) -> int:
        """Bytes a token and column of the feed-forward that the backward pass needs."""
        if self.shape.gated:  # gate, up, silu of the gate, their product
            return 4 * self.compute
        if self.shape.gelu == "written":  # x, x^3's x, tanh, 1 + tanh, the product
            return 12 + 2 * self.compute if self.half else 5 * self.compute
        return 2 * self.compute  # gelu's input and output

    @cached_property
    def kept(self) -> int:
        """Of one block, between its forward and its backward pass."""
        if self.work.checkpointing == "none":
            return self.whole
        entry = self.stream * self.part * self.hidden
        return entry + (0 if self.work.checkpointing == "full" else self.products)

    def outputs(self, matrices: tuple[Matrix, ...]) -> int:
        """Elements a token of what matrices give."""
        tp = self.layout.tp
        return sum(m.outputs // (tp if m.divided == "column" else 1) for m in matrices)

    @cached_property
    def products(self) -> int:
        """Results of matrices, those of adapters too, and of attention."""
        adapted = self.work.adapted
        rows = tuple(m for m in adapted if m.divided == "row")  # they follow the stream's division
        wide = self.outputs(self.shape.matrices) + self.query + self.work.lora_rank * len(adapted)
        wide += self.outputs(adapted) - self.outputs(rows)
        sums = 0 if self.written else 4 * self.shape.heads // self.layout.tp
        kept = self.tokens * (self.compute * wide + sums)
        return kept + self.compute * self.part * self.outputs(rows)

    @cached_property
    def whole(self) -> int:
        kept = self.norm_and_attention + self.mlp
        if self.adapters:  # the narrow results between the two matrices of each adapter
            kept += self.compute * self.tokens * self.work.lora_rank * len(self.work.adapted)
            if self.casts and any(m.name == "o" for m in self.work.adapted):
                # peft widens what attention gives, and autocast narrows it again: a copy
                kept += self.compute * self.tokens * self.query
        return kept

    # What the ends keep

    def loss_kept(self, stage: int) -> int:
        """Gradients of hidden states and of a trained head, from the loss to its backward pass."""
        if self.stages[stage] != self.final or not self.shape.causal:
            return 0
        return self.compute * (self.tokens + (0 if self.adapters else self.head)) * self.hidden

    def ends_kept(self, stage: int) -> int:
        """Before the first block and behind the last one, of a micro-batch."""
        first, last = self.stages[stage] == 0, self.stages[stage] == self.final
        size, wide = self.part * self.hidden, max(4, self.stream)
        kept = 0
        if self.rms:  # cosines and sines
            kept += 2 * self.stream * self.tokens * self.shape.head_dim
        if first:
            kept += size if self.shape.dropout else 0
            kept += 0 if self.shape.causal else wide * size
            # no gradient flows into the first norm of a frozen model
            kept -= self.entering if self.adapters and self.work.checkpointing == "none" else 0
        return kept + (self.behind if last else 0)

    # Weights and gradients on the way

    def passing(self, blocks_held: int, begun: int = 0) -> tuple[int, int]:
        """Copies of weights that are there in the forward pass, and in the backward pass, while
        activations of so many blocks are held, those of the first one `begun` times."""
        block = self.block + self.adapters
        if self.sharded:
            whole = self.gathered * (self.count * block + self.ends)
            if self.layout.pp > 1 or self.group == 1:
                return whole, whole
            root = self.gathered * self.root
            # forward: the buffer of the last block's gathering; backward: a block and the next one
            return root + self.gathered * block, root + 2 * self.gathered * block
        if self.work.quantised:
            # the largest matrix while it is multiplied with
            most = max(m.inputs * m.outputs for m in self.shape.matrices)
            return 2 * (self.work.compute_bytes * most,)
        if not self.half or self.stored == 2:
            return 0, 0
        matrices = self.block - self.shape.block_norms
        if self.remembered:
            # a block that is computed again makes autocast forget the copies of all others
            again = self.work.checkpointing != "none"
            return 2 * matrices * self.count, 2 * matrices * (1 if again else self.count)
        if self.work.checkpointing != "none":
            return 2 * matrices, 2 * matrices
        copies = 2 * matrices * blocks_held
        if self.adapters:  # nothing before the first block is trained: its input has no gradient
            entry = [m for m in self.shape.matrices if m.name in ("q", "k", "v")]
            copies -= 2 * begun * sum(m.inputs * m.outputs for m in entry) // self.layout.tp
        return copies, copies

    def gradients(self, there: tuple[bool, ...], ending: bool = False) -> int:
        """Of the stages that have some already; `ending`: of the last micro-batch, too."""
        trained = sum(own for own, has in zip(self.each, there, strict=True) if has)
        if self.layout.pp > 1 and self.sharded:  # whole, until the last backward pass
            return self.exact * trained
        if self.replicated:
            own = self.stored * self.trained if self.work.accumulation > 1 else 0
            return self.stored * self.trained + own  # and the buckets
        if self.sharded and not ending:
            return self.exact * trained // self.group
        return self.each_gradient * trained // self.group

    def waiting(self, blocks: int) -> int:
        """Narrow gradients of weights, until a backward pass has gone through everything: autograd
        does last what was made first, and autocast made its copies in the first micro-batch."""
        if self.sharded or not self.half or self.stored == 2 or not self.remembered:
            return 0
        return 2 * blocks * (self.block - self.shape.block_norms)

    @cached_property
    def left(self) -> int:
        """What FSDP reduced last, and lets go of in the next backward pass only."""
        if not self.sharded or self.layout.pp > 1 or 1 in (self.group, self.work.accumulation):
            return 0
        return self.exact * (self.trained_embedding if self.embedding else self.trained_ends)
