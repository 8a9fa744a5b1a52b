"""What tells transformers' kernels which documents share a sequence, against what its own collator makes."""

import numpy as np
import torch
from transformers import DataCollatorWithFlattening

from rekindle.objectives.micro import Documents
from rekindle.train.part import document_keywords

LENGTHS = [3, 1, 5]


def test_documents_of_a_sequence_are_numbered_as_transformers_numbers_them():
    texts = [{"input_ids": list(range(length))} for length in LENGTHS]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    expected = collate(texts)
    numbers_BS = np.repeat([1, 2, 3], LENGTHS)[None]
    found = document_keywords(expected["position_ids"], Documents.of(numbers_BS))
    for name, value in found.items():
        theirs = expected[name]
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs), name
            assert value.dtype == theirs.dtype, name
        else:
            assert value == theirs, name
    assert found.keys() == {
        "seq_idx",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    }


def test_of_several_sequences_only_numbers_are_told():
    positions_BT = torch.tensor([[0, 1, 0], [0, 1, 2]])
    found = document_keywords(positions_BT, Documents.of(np.array([[1, 1, 2], [1, 1, 1]])))
    assert found.keys() == {"seq_idx"}
    assert found["seq_idx"].tolist() == [[0, 0, 1], [0, 0, 0]]
