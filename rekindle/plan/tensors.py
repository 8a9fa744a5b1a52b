"""What one rank holds, by size: weights, optimizer and teacher between two steps; activations,
copies of weights and gradients in a step, and what is there for a moment only.

Sums over a block after Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1): so many bytes an
element of the residual stream, of the projections and of the feed-forward. The bytes are those of
rekindle's engine: transformers' eager blocks, autocast over fp32 weights on replicas, FSDP2 with
bf16 weights, torch's pipeline schedules. What is below 2 % of a peak is left out."""

from rekindle.plan import quantised, updates
from rekindle.plan.inflight import Moment, stages_of
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
    """The numbers of one rank. Bytes an element: `stored` of weights and moments, `compute` of
    products and gathered weights, `stream` of the residual stream, `exact` of long sums."""

    def __init__(self, work: Work, pp_rank: int) -> None:
        self.work, self.shape, self.layout, self.pp_rank = work, work.shape, work.layout, pp_rank
        layout, shape, tp = work.layout, work.shape, work.layout.tp
        self.half = work.precision in ("bf16", "fp16", "fp8")
        self.again = work.checkpointing != "none"
        self.single = layout.pp == 1
        self.sharded = not layout.only_replicates and layout.dp * layout.shard * layout.cp > 1
        self.replicated = layout.only_replicates and layout.world > 1
        self.group = layout.shard * layout.cp
        # FSDP gathers the weights of each block when they are needed, and forgets them
        self.grouped = self.sharded and self.single and self.group > 1
        self.stored = 8 if work.precision == "fp64" else work.weights_bytes
        self.compute = 2 if self.half else self.stored
        self.exact = max(4, self.stored)
        self.copied = "gathered weights" if self.sharded else "copies of weights"
        self.rms = shape.norm == "rms"
        narrow = (self.sharded or self.stored == 2) and (self.rms or shape.causal)
        self.stream = self.compute if narrow else self.stored
        if self.half and not shape.causal:
            self.stream = 4  # CUDA's autocast computes layer_norm in fp32, and the stream is one
        self.texts = not shape.causal and shape.vocab > 0  # with a class; images have no table
        self.casts = self.half and (self.stream > 2 or not self.rms)
        # autocast keeps its copies for the whole step: those of trained, whole weights
        self.remembered = tp == 1 and not work.lora_rank
        # elements of what goes into a product, and of the stream, which tp ranks may divide
        self.whole = work.tokens * shape.d_model
        self.size = self.whole // (tp if shape.causal and self.rms else 1)
        self.queries = work.tokens * shape.heads * shape.head_dim // tp
        self.inner = work.tokens * shape.ffn // tp
        written = work.attention == "written"  # operation by operation: all scores are there
        self.scores = work.tokens * work.sequence * shape.heads // tp if written else 0
        self._cut()
        self._keep()

    def _cut(self) -> None:
        """Blocks of each of its stages, weights of a block and of the ends, in elements."""
        work, layout, shape = self.work, self.layout, self.shape
        self.stages, self.final = stages_of(layout, self.pp_rank), layout.stages - 1
        each, more = divmod(shape.layers, layout.stages)
        self.blocks = [each + (stage < more) for stage in self.stages]
        self.count = sum(self.blocks)
        self.adapters = work.adapters_share()
        self.block = work.block_share() + self.adapters
        self.matrices = work.block_share() - shape.block_norms
        self.trained_block = self.adapters or self.block
        # of a language model's head, which may be the table
        self.head = shape.vocab // layout.tp * shape.d_model if shape.causal else 0
        self.trained_head = 0 if self.adapters else self.head
        first, last = work.ends_share()
        ends = [first * (stage == 0) + last * (stage == self.final) for stage in self.stages]
        self.ends = sum(ends)
        # The embedding is an FSDP group of its own, unless the head is tied to it; the root group
        # has the rest of the ends.
        apart = 0 in self.stages and not (shape.causal and shape.head is None)
        self.embedding = first if apart else 0
        self.root = self.ends - self.embedding
        if self.adapters:
            head = shape.head.parameters if shape.head and not shape.causal else 0
            ends = [head * (stage == self.final) for stage in self.stages]
        # of each stage, and of all of them, whole
        self.each = [n * self.trained_block + end for n, end in zip(self.blocks, ends, strict=True)]
        self.trained, self.trained_ends = sum(self.each), sum(ends)
        moments = updates.moments_bytes(work, self.trained, self.count, self.stored)
        self.moments = moments // self.group

    # Between two steps

    @property
    def taught(self) -> tuple[int, int]:
        """Of a teacher its weights, whose blocks all ranks divide where they are large, and those
        that are put together for a while: a block, and the piece that it came in."""
        teacher, world, width = self.work.teacher, self.layout.world, 2 if self.half else 4
        if teacher is None:
            return 0, 0
        if world == 1 or width * teacher.parameters <= WHOLE_TEACHER_BYTES:
            return width * teacher.parameters, 0
        blocks = teacher.layers * teacher.block_parameters
        own = teacher.parameters - blocks + -(-blocks // world)
        return width * own, 2 * width * teacher.block_parameters

    def static(self) -> dict[str, int]:
        kept, codes = self.count * self.block + self.ends, 0
        if self.work.quantised:
            kept -= self.count * sum(m.inputs * m.outputs for m in self.shape.matrices)
            codes = self.count * quantised.block_bytes(self.work)
        weights = self.stored * kept // self.group + codes
        return {"parameters": weights, "optimizer": self.moments, "teacher": self.taught[0]}

    @property
    def snapshot(self) -> int:
        """Host memory for a save's copies: trained weights and what the optimizer keeps of them."""
        return self.stored * self.trained // self.group + self.moments

    # Activations

    def _keep(self) -> None:
        """Bytes that a block keeps for its backward pass, whole and as checkpointing has it."""
        # a norm's input in fp32, and the normalised, which an RMS norm's own weights need
        scaled = self.stream if self.rms and not self.adapters else 0
        self.norm = (max(4, self.stream) + scaled) * self.size
        dropped = self.shape.dropouts * self.whole if self.shape.dropout else 0  # a byte each
        self.mlp = self.norm + self._entering(2 if self.shape.gated else 1) + dropped
        self.mlp += self._feeding()[0] * self.inner
        between = self.compute * self.work.tokens * self.work.lora_rank * len(self.work.adapted)
        attention = self._attention()
        of_block = attention + self.mlp + between
        wide = self._outputs(self.shape.matrices, self.whole)
        adapted = between + self._outputs(self.work.adapted, self.size)
        # between zero bubble's halves: gradients of products and norms' results
        self.halved = (adapted if self.adapters else wide) + 2 * self.stream * self.size
        selective = self.work.checkpointing == "selective"
        self.products = selective * (self.compute * self.queries + wide + adapted)
        self.kept = self.stream * self.size + self.products if self.again else of_block
        # of one that is computed again, what it then has beyond that
        self.recomputed = self.again * max(of_block - self.products, attention)
        # gradients of the head, made before those of blocks, and of half a block
        self.of_head = self.single * self.compute * self.trained_head
        self.of_half = 0 if self.adapters else self.compute * self.block // 2
        # what FSDP reduced last, and lets go of in the next backward pass only
        last = self.trained_ends if self.adapters else self.embedding or self.ends
        self.left = self.exact * last * (self.grouped and self.work.accumulation > 1)

    def _entering(self, matrices: int) -> int:
        """The input of matrices that share it: autocast casts it for each of them."""
        if self.casts:
            return matrices * 2 * self.whole
        return (self.compute if self.rms else max(4, self.stream)) * self.whole

    def _attention(self) -> int:
        """Norm, queries, keys and values, the result; of cp the keys before the end of the rank's
        two chunks; softmax in fp32, what is kept of it and the product, where it is written out."""
        cp, shape = self.layout.cp, self.shape
        keys = self.queries * shape.kv_heads // shape.heads
        seen = keys if cp == 1 else keys * (2 * cp + 1) // 2
        kept = self.norm + self._entering(3) + 2 * self.compute * (self.queries + seen)
        if shape.head_norms:
            scaled = 0 if self.adapters else self.compute
            kept += (max(4, self.compute) + scaled) * (self.queries + keys)
        # dropout of documents or groups joins copies of their results; peft widens the result
        joined = shape.attention_dropout > 0 and shape.vocab > 0 and not self.scores
        kept += (joined + (self.adapters > 0 and self.casts)) * self.compute * self.queries
        return kept + (self.exact + 2 * self.compute) * self.scores

    def _feeding(self) -> tuple[int, int]:
        """Bytes an element of the feed-forward that are kept, and that its backward pass adds: of
        gate, up, silu and their product; of all of gelu's operations; of its input and output."""
        if self.shape.gated:
            return 4 * self.compute, 2 * self.compute
        if self.shape.gelu == "written":
            return (16, 12) if self.half else (5 * self.compute, 2 * self.compute)
        return 2 * self.compute, self.compute

    def _outputs(self, matrices: tuple[Matrix, ...], rows: int) -> int:
        """What matrices give: so many elements those that tp ranks divide by rows."""
        columns = self.work.tokens // self.layout.tp
        given = (columns * m.outputs if m.divided == "column" else rows for m in matrices)
        return self.compute * sum(given)

    def activations(self, at: Moment) -> int:
        """Of all micro-batches under way, and what a pipeline has sent: all of it where a rank has
        two stages. It receives into buffers."""
        two, sent = len(self.stages) > 1, 0
        kept = 0 if self.shape.causal else self.norm
        if self.texts and self.final in self.stages and not self.again:
            kept -= self.mlp  # behind the last attention a text goes on with its first token
        for number, stage in enumerate(self.stages):
            held, backward = at.held[number], at.backward[number]
            kept += held * self.blocks[number] * self.kept
            sent += (held + two * backward) * (stage < self.final) + two * backward * (stage > 0)
            sent -= held * (stage > 0 and (self.stream >= 4 or self.again))
        return kept + sent * self.stream * self.size

    # Copies of weights, and gradients

    def copies(self, held: int, backward: bool) -> int:
        """FSDP: the root, and the block that is in work, or that and the next one; all weights in
        layouts that gather once. A base in 4 bits: the largest matrix. Autocast: of all blocks,
        but those that are computed again; or those of each micro-batch."""
        if self.grouped:
            return self.compute * ((1 + backward) * self.block + self.root)
        if self.sharded:
            return self.compute * (self.count * self.block + self.ends)
        if self.work.quantised:
            return self.compute * max(m.inputs * m.outputs for m in self.shape.matrices)
        if self.compute == self.stored:
            return 0
        if self.remembered:
            return 2 * self.matrices * (1 if self.again and backward else self.count)
        return 2 * self.matrices * (1 if self.again else held)

    def gradients(self, there: tuple[bool, ...], ending: bool = False) -> int:
        """Of the stages that have some already; `ending`: of the last micro-batch, too."""
        trained = sum(own * has for own, has in zip(self.each, there, strict=True))
        if self.replicated:  # and the buckets
            return self.stored * self.trained * (2 if self.work.accumulation > 1 else 1)
        if not self.sharded:
            return self.stored * trained
        if self.single:
            return (self.exact + ending * self._narrow()) * trained // self.group
        # whole until the last backward pass; zero bubble's second half leaves them to be widened
        narrow = self.half and self.layout.schedule == "zero_bubble"
        first = self.each[0] * there[0] if self.stages[0] == 0 else 0  # it is not cut in halves
        return self.exact * trained + narrow * self.compute * (trained - first)

    def _narrow(self) -> int:
        """Bytes of a gradient in the type of weights, which FSDP keeps beside what it reduced."""
        return self.stored if self.stored < self.exact else 0

    def added(self, weights: int, there: bool) -> int:
        """Gradients of so many weights that a backward pass adds: FSDP divides them. Those in the
        buckets of replicas are counted. Autocast widens its own behind the first block only."""
        if self.sharded:
            each = (0 if there else self.exact) + self.single * self._narrow()
            return each * weights // (self.group if self.single else 1)
        if there:
            return self.compute * weights if self.compute < self.stored and self.remembered else 0
        return 0 if self.replicated else self.stored * weights

    # What is there for a moment

    def loss(self, stage: int) -> int:
        """Hidden states, gradients of head and stream, and of a piece of rows logits and theirs."""
        if self.stages[stage] != self.final or not self.shape.causal:
            return 0
        taught, wide = self.work.teacher is not None, self.head // self.shape.d_model
        rows = min(self.work.tokens, rows_at_once(wide * (TAUGHT if taught else 1), "cuda"))
        last = self.stream if self.rms else max(self.exact, self.stream)
        found = self.norm + (2 * last + self.exact) * self.whole + self.exact * self.trained_head
        if not self.sharded and self.compute < self.stored:  # autocast's copy
            found += self.compute * self.head
        piece = (self.exact + (self.compute if self.compute < self.exact else 0)) * rows * wide
        piece += self.compute * max(rows * self.shape.d_model, self.trained_head)
        return found + max(piece, taught * TAUGHT * self.exact * rows * wide)

    def teaching(self) -> int:
        """While a teacher's block runs, in its feed-forward."""
        teacher = self.work.teacher
        if teacher is None:
            return 0
        wide = (3 if teacher.gated else 2) * teacher.ffn + 4 * teacher.d_model
        return (2 if self.half else 4) * self.work.tokens * wide

    def in_block(self) -> int:
        """What a block's backward pass adds to what it has kept: in the feed-forward, beside half
        of its gradients; at an input that tp ranks do not divide; or at the scores."""
        stream = self.stream * self.size
        feeding = self._feeding()[1] * self.inner + self.of_half
        undivided = 2 * self.compute * self.whole + stream
        return stream + max(feeding, undivided, self.exact * self.scores)
