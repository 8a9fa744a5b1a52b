"""What a base in 4 bits takes (`model.lora.base: 4bit`): its bytes, and what it costs in
time.

A matrix is brought back to the type of the products in each pass, so a step is not faster
than one with a base in full. Counted from operations; no GPU has measured it."""

from rekindle.plan.work import Work

BLOCK = 64  # numbers that share a scale
SCALE_BYTES = 4
UNMEASURED = "the time of bringing back a base in 4 bits is counted, not measured"


def block_bytes(work: Work) -> int:
    """Bytes of the matrices of a block. Llama 3 8B: 123 MB, where fp32 takes 872 MB."""
    size = 0
    for matrix in work.shape.matrices:
        elements = matrix.inputs * matrix.outputs
        code_bytes = -(-elements // 2)  # two codes a byte
        size += code_bytes + SCALE_BYTES * -(-elements // BLOCK)
    return size


def seconds(work: Work, bandwidth: float) -> float:
    """Seconds to bring back a block's matrices in each pass of a micro-batch,
    recomputation included."""
    passes = 2 if work.checkpointing == "none" else 3
    written = work.compute_bytes * sum(m.inputs * m.outputs for m in work.shape.matrices)
    return passes * (block_bytes(work) + written) / bandwidth
