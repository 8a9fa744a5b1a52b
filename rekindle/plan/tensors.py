"""What one rank holds, by size: weights, optimizer and teacher between two steps;
activations, copies of weights and gradients in a step, and what is there for a moment
only.

Sums over a block after Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1): so many
bytes an element of the residual stream, of the projections and of the feed-forward. The
bytes are those of rekindle's engine: transformers' eager blocks, autocast over fp32
weights on replicas, FSDP2 with bf16 weights, torch's pipeline schedules. What is below 2
% of a peak is left out."""

from rekindle.objectives.tokens import TAUGHT, rows_at_once
from rekindle.plan import quantised, updates
from rekindle.plan.inflight import Moment, stages_of
from rekindle.plan.shape import Matrix
from rekindle.plan.work import Work

# A smaller teacher is held whole: gathering it in every micro-batch costs more than it
# saves.
WHOLE_TEACHER_BYTES = 1 << 30


class Rank:
    """The numbers of one rank. Bytes an element: `stored_width` of weights and moments,
    `compute_width` of products and gathered weights, `stream` of the residual stream,
    whose `size` are its elements on this rank, `exact_width` of long sums. What ends in
    `_bytes` is an amount."""

    def __init__(self, work: Work, pp_rank: int) -> None:
        self.work = work
        self.shape = work.shape
        self.layout = work.layout
        self.pp_rank = pp_rank
        self.recomputes = work.checkpointing != "none"
        self.rms_norm = work.shape.norm == "rms"
        # a classifier of texts; images have no table
        self.classifies_text = not work.shape.causal and work.shape.vocab > 0
        self._set_division()
        self._set_widths()
        self._set_row_elements()
        self._set_weight_elements()
        self._set_activation_bytes()

    def _set_division(self) -> None:
        """Sets how ranks share the states."""
        layout = self.layout
        self.no_pipeline = layout.pp == 1
        self.sharded = not layout.only_replicates and layout.dp * layout.shard * layout.cp > 1
        self.replicated = layout.only_replicates and layout.world > 1
        self.shard_ranks = layout.shard * layout.cp
        # FSDP gathers the weights of each block when they are needed, and forgets them
        self.gathers_blocks = self.sharded and self.no_pipeline and self.shard_ranks > 1
        self.copies_term = "gathered weights" if self.sharded else "copies of weights"

    def _set_widths(self) -> None:
        """Sets the bytes of an element."""
        work = self.work
        causal = self.shape.causal
        self.half_precision = work.precision in ("bf16", "fp16", "fp8")
        self.stored_width = 8 if work.precision == "fp64" else work.weights_bytes
        self.compute_width = 2 if self.half_precision else self.stored_width
        self.exact_width = max(4, self.stored_width)
        self.stream = self.stored_width
        if (self.sharded or self.stored_width == 2) and (self.rms_norm or causal):
            self.stream = self.compute_width
        if self.half_precision and not causal:
            # CUDA's autocast computes layer_norm in fp32, and the stream is one
            self.stream = 4
        self.casts_inputs = self.half_precision and (self.stream > 2 or not self.rms_norm)
        # autocast keeps its copies for the whole step: those of trained, whole weights
        self.keeps_casts = self.layout.tp == 1 and not work.lora_rank

    def _set_row_elements(self) -> None:
        """Sets the elements of a micro-batch's activations."""
        work = self.work
        shape = self.shape
        tp = self.layout.tp
        # of what goes into a product, and of the stream, which tp ranks may divide
        self.whole_elements = work.tokens * shape.d_model
        self.size = self.whole_elements
        if shape.causal and self.rms_norm:
            self.size = self.whole_elements // tp
        self.query_elements = work.tokens * shape.heads * shape.head_dim // tp
        self.ffn_elements = work.tokens * shape.ffn // tp
        self.score_elements = 0
        if work.attention == "written":  # operation by operation: all scores are there
            self.score_elements = work.tokens * work.sequence * shape.heads // tp

    def _set_weight_elements(self) -> None:
        """Sets the elements of a block's weights, of the ends',
        and of what is trained."""
        work = self.work
        layout = self.layout
        shape = self.shape
        self.stages = stages_of(layout, self.pp_rank)
        self.last_stage = layout.stages - 1
        fewest_blocks, larger_stages = divmod(shape.layers, layout.stages)
        self.blocks_by_stage = []
        for stage in self.stages:
            # the first stages have one block more where blocks do not divide evenly
            blocks = fewest_blocks + 1 if stage < larger_stages else fewest_blocks
            self.blocks_by_stage.append(blocks)
        self.block_count = sum(self.blocks_by_stage)
        self.adapter_elements = work.adapters_share()
        self.block_elements = work.block_share() + self.adapter_elements
        self.matrix_elements = work.block_share() - shape.block_norms
        self.trained_block_elements = self.adapter_elements or self.block_elements
        # of a language model's head, which may be the table
        self.head_elements = 0
        if shape.causal:
            self.head_elements = shape.vocab // layout.tp * shape.d_model
        self.trained_head_elements = 0 if self.adapter_elements else self.head_elements
        first, last = work.ends_share()
        ends_by_stage = self._by_stage(first, last)
        self.end_elements = sum(ends_by_stage)
        # The embedding is an FSDP group of its own, unless the head is tied to it; the
        # root group has the rest of the ends.
        tied = shape.causal and shape.head is None
        self.embedding_elements = first if 0 in self.stages and not tied else 0
        self.root_elements = self.end_elements - self.embedding_elements
        if self.adapter_elements:
            # adapters freeze the ends, but the new head of a classifier is trained whole
            classifier_elements = 0
            if shape.head is not None and not shape.causal:
                classifier_elements = shape.head.parameters
            ends_by_stage = self._by_stage(0, classifier_elements)
        self.trained_by_stage = [
            blocks * self.trained_block_elements + ends
            for blocks, ends in zip(self.blocks_by_stage, ends_by_stage, strict=True)
        ]
        # of all its stages, not divided by shards
        self.trained_elements = sum(self.trained_by_stage)
        self.trained_end_elements = sum(ends_by_stage)
        whole_moments = updates.moments_bytes(
            work, self.trained_elements, self.block_count, self.stored_width
        )
        self.moments_bytes = whole_moments // self.shard_ranks

    def _by_stage(self, first: int, last: int) -> list[int]:
        """Elements of the ends on each of its stages: of the first stage,
        and of the last."""
        elements = []
        for stage in self.stages:
            count = 0
            if stage == 0:
                count += first
            if stage == self.last_stage:
                count += last
            elements.append(count)
        return elements

    # Between two steps

    @property
    def teacher_bytes(self) -> tuple[int, int]:
        """A teacher's weights, whose blocks all ranks divide where they are large, and
        those that are put together for a while: a block, and the piece that it came in.
        """
        teacher = self.work.teacher
        world = self.layout.world
        if teacher is None:
            return 0, 0
        width = 2 if self.half_precision else 4
        if world == 1 or width * teacher.parameters <= WHOLE_TEACHER_BYTES:
            return width * teacher.parameters, 0
        blocks = teacher.layers * teacher.block_parameters
        own_share = teacher.parameters - blocks + -(-blocks // world)
        return width * own_share, 2 * width * teacher.block_parameters

    def static(self) -> dict[str, int]:
        """Bytes that stay from one step to the next, by term."""
        elements = self.block_count * self.block_elements + self.end_elements
        code_bytes = 0
        if self.work.quantised:
            elements -= self.block_count * sum(m.inputs * m.outputs for m in self.shape.matrices)
            code_bytes = self.block_count * quantised.block_bytes(self.work)
        return {
            "parameters": self.stored_width * elements // self.shard_ranks + code_bytes,
            "optimizer": self.moments_bytes,
            "teacher": self.teacher_bytes[0],
        }

    @property
    def snapshot(self) -> int:
        """Host memory for a save's copies:
        trained weights and what the optimizer keeps of them."""
        return self.stored_width * self.trained_elements // self.shard_ranks + self.moments_bytes

    # Activations

    def _set_activation_bytes(self) -> None:
        """Sets the bytes that a block keeps for its backward pass,
        whole and checkpointed."""
        work = self.work
        shape = self.shape
        # a norm's input in fp32, and the normalised, which an RMS norm's own weights need
        norm_width = max(4, self.stream)
        if self.rms_norm and not self.adapter_elements:
            norm_width += self.stream
        self.norm_bytes = norm_width * self.size
        self.ffn_bytes = self._ffn_bytes()
        between_adapters = self.compute_width * work.tokens * work.lora_rank * len(work.adapted)
        attention = self._attention_bytes()
        block_bytes = attention + self.ffn_bytes + between_adapters
        wide_outputs = self._output_bytes(shape.matrices, self.whole_elements)
        adapter_outputs = between_adapters
        adapter_outputs += self._output_bytes(work.adapted, self.size)
        # between zero bubble's halves: gradients of products and norms' results
        self.halved_bytes = 2 * self.stream * self.size
        self.halved_bytes += adapter_outputs if self.adapter_elements else wide_outputs
        product_bytes = 0  # what selective recomputation keeps
        if work.checkpointing == "selective":
            queries = self.compute_width * self.query_elements
            product_bytes = queries + wide_outputs + adapter_outputs
        self.kept_bytes = block_bytes
        self.recomputed_bytes = 0  # of a block that is computed again, beyond what it kept
        if self.recomputes:
            self.kept_bytes = self.stream * self.size + product_bytes
            self.recomputed_bytes = max(block_bytes - product_bytes, attention)
        # gradients of the head, made before those of blocks, and of half a block
        self.head_gradient_bytes = 0
        if self.no_pipeline:
            self.head_gradient_bytes = self.compute_width * self.trained_head_elements
        self.half_block_gradient_bytes = 0
        if not self.adapter_elements:
            self.half_block_gradient_bytes = self.compute_width * self.block_elements // 2
        # what FSDP reduced last, and lets go of in the next backward pass only
        self.unreleased_bytes = 0
        if self.gathers_blocks and work.accumulation > 1:
            last = self.embedding_elements or self.end_elements
            if self.adapter_elements:
                last = self.trained_end_elements
            self.unreleased_bytes = self.exact_width * last

    def _ffn_bytes(self) -> int:
        """What a feed-forward keeps: its norm, its input, dropout's mask,
        and what is inside."""
        shape = self.shape
        size = self.norm_bytes + self._input_bytes(2 if shape.gated else 1)
        if shape.dropout:
            size += shape.dropouts * self.whole_elements  # a mask has a byte an element
        return size + self._ffn_widths()[0] * self.ffn_elements

    def _input_bytes(self, matrices: int) -> int:
        """The input of matrices that share it: autocast casts it for each of them."""
        if self.casts_inputs:
            return matrices * 2 * self.whole_elements
        width = self.compute_width if self.rms_norm else max(4, self.stream)
        return width * self.whole_elements

    def _attention_bytes(self) -> int:
        """What attention keeps: norm, queries, keys and values, and the result; where it
        is written out also the softmax in fp32, what is kept of it, and the product."""
        cp = self.layout.cp
        shape = self.shape
        key_elements = self.query_elements * shape.kv_heads // shape.heads
        gathered_keys = key_elements
        if cp > 1:
            # of 2 cp chunks a rank has the k-th and the k-th from the end, and gathers
            # all keys before the end of each: 2 cp + 1 chunks, where its own are two
            gathered_keys = key_elements * (2 * cp + 1) // 2
        size = self.norm_bytes + self._input_bytes(3)
        size += 2 * self.compute_width * (self.query_elements + gathered_keys)
        if shape.head_norms:
            width = max(4, self.compute_width)
            if not self.adapter_elements:
                width += self.compute_width
            size += width * (self.query_elements + key_elements)
        results = self.compute_width * self.query_elements
        # dropout of documents or groups joins copies of their results
        if shape.attention_dropout > 0 and shape.vocab > 0 and not self.score_elements:
            size += results
        # peft widens the result
        if self.adapter_elements and self.casts_inputs:
            size += results
        return size + (self.exact_width + 2 * self.compute_width) * self.score_elements

    def _ffn_widths(self) -> tuple[int, int]:
        """Bytes an element of the feed-forward that are kept, and that its backward pass
        adds: of gate, up, silu and their product; of all of gelu's operations; of its
        input and output."""
        if self.shape.gated:
            return 4 * self.compute_width, 2 * self.compute_width
        if self.shape.gelu == "written":
            if self.half_precision:
                return 16, 12
            return 5 * self.compute_width, 2 * self.compute_width
        return 2 * self.compute_width, self.compute_width

    def _output_bytes(self, matrices: tuple[Matrix, ...], row_elements: int) -> int:
        """What matrices give; `row_elements` of each that tp ranks divide by rows."""
        tokens_share = self.work.tokens // self.layout.tp
        elements = 0
        for matrix in matrices:
            if matrix.divided == "column":
                elements += tokens_share * matrix.outputs
            else:
                elements += row_elements
        return self.compute_width * elements

    def activations(self, at: Moment) -> int:
        """Activations of all micro-batches under way, and what a pipeline has sent: all
        of it where a rank has two stages. It receives into buffers."""
        size = 0 if self.shape.causal else self.norm_bytes
        if self.classifies_text and self.last_stage in self.stages and not self.recomputes:
            size -= self.ffn_bytes  # behind the last attention a text goes on with its first token
        sent = 0  # as often as the residual stream is large
        for number, stage in enumerate(self.stages):
            micro_batches = at.held[number]
            finished = at.finished[number]
            size += micro_batches * self.blocks_by_stage[number] * self.kept_bytes
            sent += self._sent(stage, micro_batches, finished)
        return size + sent * self.stream * self.size

    def _sent(self, stage: int, held: int, finished: int) -> int:
        """Micro-batches whose stream a stage has sent and keeps, less those whose kept
        input is what it received: the buffers count that (memory.py)."""
        sent = 0
        if stage < self.last_stage:
            sent += held
        # torch's schedules keep what was sent, in either direction, where a rank has two
        # stages
        if len(self.stages) > 1:
            if stage < self.last_stage:
                sent += finished
            if stage > 0:
                sent += finished
        if stage > 0 and (self.stream >= 4 or self.recomputes):
            sent -= held
        return sent

    # Copies of weights, and gradients

    def copies(self, held: int, backward: bool) -> int:
        """FSDP: the root, and the block that is in work, or that and the next one; all
        weights in layouts that gather once. A base in 4 bits: the largest matrix.
        Autocast: of all blocks, but those that are computed again; or those of each
        micro-batch."""
        if self.gathers_blocks:
            blocks = 2 if backward else 1
            return self.compute_width * (blocks * self.block_elements + self.root_elements)
        if self.sharded:
            all_blocks = self.block_count * self.block_elements
            return self.compute_width * (all_blocks + self.end_elements)
        if self.work.quantised:
            return self.compute_width * max(m.inputs * m.outputs for m in self.shape.matrices)
        if self.compute_width == self.stored_width:
            return 0
        if self.keeps_casts:
            blocks = 1 if self.recomputes and backward else self.block_count
        else:
            blocks = 1 if self.recomputes else held
        return 2 * self.matrix_elements * blocks

    def gradients(self, has_gradients: tuple[bool, ...], ending: bool = False) -> int:
        """Gradients of the stages that have some already; `ending`:
        of the last micro-batch, too."""
        if self.replicated:
            # buckets come on top of the gradients that an earlier micro-batch has left
            copies = 2 if self.work.accumulation > 1 else 1
            return self.stored_width * self.trained_elements * copies
        trained = 0
        for elements, has in zip(self.trained_by_stage, has_gradients, strict=True):
            if has:
                trained += elements
        if not self.sharded:
            return self.stored_width * trained
        if self.no_pipeline:
            width = self.exact_width
            if ending:
                width += self._narrow_width()
            return width * trained // self.shard_ranks
        whole = self.exact_width * trained  # until the last backward pass
        if not (self.half_precision and self.layout.schedule == "zero_bubble"):
            return whole
        # zero bubble's second half leaves them to be widened; the first stage's are not
        # cut
        widened = trained
        if self.stages[0] == 0 and has_gradients[0]:
            widened -= self.trained_by_stage[0]
        return whole + self.compute_width * widened

    def _narrow_width(self) -> int:
        """Bytes of a gradient in the type of weights,
        which FSDP keeps beside what it reduced."""
        return self.stored_width if self.stored_width < self.exact_width else 0

    def added(self, weights: int, has_gradients: bool) -> int:
        """Gradients of so many weights that a backward pass adds: FSDP divides them.
        Those in the buckets of replicas are counted. Autocast widens its own behind the
        first block only."""
        if self.sharded:
            width = 0 if has_gradients else self.exact_width
            if not self.no_pipeline:
                return width * weights
            return (width + self._narrow_width()) * weights // self.shard_ranks
        if has_gradients:
            widens = self.compute_width < self.stored_width and self.keeps_casts
            return self.compute_width * weights if widens else 0
        return 0 if self.replicated else self.stored_width * weights

    # What is there for a moment

    def loss(self, stage: int) -> int:
        """Hidden states, gradients of head and stream,
        and of a piece of rows logits and theirs."""
        if self.stages[stage] != self.last_stage or not self.shape.causal:
            return 0
        columns = self.head_elements // self.shape.d_model
        matrices_at_once = 1 if self.work.teacher is None else TAUGHT
        rows = min(self.work.tokens, rows_at_once(columns * matrices_at_once, "cuda"))
        last_norm = self.stream if self.rms_norm else max(self.exact_width, self.stream)
        hidden = self.norm_bytes + (2 * last_norm + self.exact_width) * self.whole_elements
        hidden += self.exact_width * self.trained_head_elements
        if not self.sharded and self.compute_width < self.stored_width:
            hidden += self.compute_width * self.head_elements  # autocast's copy
        logit_width = self.exact_width
        if self.compute_width < self.exact_width:
            logit_width += self.compute_width
        piece = logit_width * rows * columns
        piece += self.compute_width * max(rows * self.shape.d_model, self.trained_head_elements)
        if self.work.teacher is not None:
            piece = max(piece, TAUGHT * self.exact_width * rows * columns)
        return hidden + piece

    def teaching(self) -> int:
        """What there is while a teacher's block runs, in its feed-forward."""
        teacher = self.work.teacher
        if teacher is None:
            return 0
        ffn_matrices = 3 if teacher.gated else 2
        width = 2 if self.half_precision else 4
        return width * self.work.tokens * (ffn_matrices * teacher.ffn + 4 * teacher.d_model)

    def in_block(self) -> int:
        """What a block's backward pass adds to what it has kept: in the feed-forward,
        beside half of its gradients; at an input that tp ranks do not divide; or at the
        scores."""
        stream = self.stream * self.size
        ffn = self._ffn_widths()[1] * self.ffn_elements + self.half_block_gradient_bytes
        undivided_input = 2 * self.compute_width * self.whole_elements + stream
        scores = self.exact_width * self.score_elements
        return stream + max(ffn, undivided_input, scores)
