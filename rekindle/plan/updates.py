"""What an optimizer keeps of each weight, and what its update costs, by
`train.optimizer`.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) and AdamW in 8 bits (Dettmers
et al. 2022, arXiv 2110.02861) work on matrices of blocks; everything else has AdamW's two
moments. train/updates.py is what runs. Bytes moved are counted operation by operation:
`UNMEASURED`."""

from collections.abc import Iterator

from rekindle.plan.work import Work

BLOCK = 256  # numbers that share a scale, at most
PIECE = 1 << 24  # numbers whose moments are in full precision at a time
NEWTON_SCHULZ_STEPS = 5
# Bytes that an update moves for an element of a matrix. Muon: the scaling, two
# interpolations, the cast, the norm, weight decay and the step. 8 bits: both moments to
# fp32 (21 each), the fused step (28) and back (25 each). The products of Newton and
# Schulz are counted as operations.
MOVED = {"muon": 62.0, "adamw8bit": 120.0}
UNMEASURED = "the time of the optimizer's update is counted from its operations, not measured"


def scale_blocks(columns: int) -> tuple[int, int]:
    """How many blocks a row of a matrix has, and how many numbers each: as few as 256 at
    most allow, of equal length. 1,000 columns: 4 blocks of 250; 257: 2 of 129, the last
    one padded."""
    count = max(1, -(-columns // BLOCK))
    return count, -(-columns // count)


def matrices(work: Work) -> Iterator[tuple[int, int]]:
    """Rows and columns of the trained matrices of a block,
    whose columns are not divided."""
    if not work.lora_rank:
        yield from ((m.outputs, m.inputs) for m in work.shape.matrices)
    for m in work.adapted:
        yield from ((work.lora_rank, m.inputs), (m.outputs, work.lora_rank))


def moments_bytes(work: Work, trained: int, blocks: int, stored: int) -> int:
    """Bytes of an optimizer's state for so many trained elements, in so many blocks, of
    `stored` bytes each, not sharded. Llama-3-8B: 64 GB with AdamW, 36 GB with Muon, 22 GB
    in 8 bits."""
    in_matrices = blocks * sum(rows * columns for rows, columns in matrices(work))
    if work.optimizer == "muon":
        return stored * (2 * trained - in_matrices)  # one moment of a matrix
    if work.optimizer == "adamw8bit":
        moments_of_block = 0
        for rows, columns in matrices(work):
            count, size = scale_blocks(columns)
            # two moments, each a byte a number and a scale for each block of them
            moments_of_block += 2 * rows * count * (size + stored)
        return 2 * stored * (trained - in_matrices) + blocks * moments_of_block
    return 2 * stored * trained


def rows_of_piece(columns: int) -> int:
    """Rows of a matrix whose moments are in full precision at a time.
    4,096 columns: 4,096."""
    return max(1, PIECE // max(1, columns))


def seconds(
    work: Work, trained: float, blocks: float, peak: float, bandwidth: float, moved: float
) -> float:
    """Seconds of an update of so many trained elements, in so many blocks, on one rank:
    at a `peak` of operations a second that products reach, and a `bandwidth` in bytes a
    second, of which an element that AdamW updates takes `moved` bytes. Every replica does
    all of it."""
    in_matrices = 0.0
    if work.optimizer in MOVED:
        in_matrices = blocks * sum(rows * columns for rows, columns in matrices(work))
    moved_bytes = moved * (trained - in_matrices)
    moved_bytes += MOVED.get(work.optimizer, 0.0) * in_matrices
    moving = moved_bytes / (work.layout.shard * work.layout.cp) / bandwidth
    if work.optimizer != "muon":
        return moving
    operations = 0
    for sides in matrices(work):
        short, long = sorted(sides)
        # in each iteration X X', its square, and that times X
        operations += 4 * short**2 * long + 2 * short**3
    return moving + blocks * NEWTON_SCHULZ_STEPS * operations / peak
