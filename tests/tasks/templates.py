"""Chat templates of the shapes that published models have, written for these tests; and tokenizers that read them.

`SHAPES` names for each its end-of-text token, other special tokens, and what stands behind an answer: between two turns, and
behind the last; and the token at which an answer ends, "" where the template has none.
"""

import dataclasses
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from rekindle.tasks.causal_lm import train_bpe


@dataclasses.dataclass(frozen=True)
class Shape:
    template: str
    eos: str
    special: tuple[str, ...]
    behind: tuple[str, str]
    stop: str
    # added to the vocabulary, but not marked as special
    plain: tuple[str, ...] = ()


def turns(assistant: str, user: str, opening: str = "", system: str = "{{ m.content }}\n") -> str:
    """A template by what it makes of each role's turn, and what opens an answer."""
    return (
        "{{ bos_token }}{% for m in messages %}"
        f"{{% if m.role == 'system' %}}{system}{{% elif m.role == 'user' %}}{user}{{% else %}}{assistant}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{opening}{{% endif %}}"
    )


ALTERNATING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}"
)
CHATML_USER = "{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
CHATML_SYSTEM = "{{ '<|im_start|>system\n' + m.content + '<|im_end|>\n' }}"
CHATML_OPENING = "{{ '<|im_start|>assistant\n' }}"
CHATML = turns(
    "{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}",
    CHATML_USER,
    CHATML_OPENING,
    CHATML_SYSTEM,
)
IM = ("<|im_start|>", "<|im_end|>")
SHAPES = {
    "ChatML whose eos is another token": Shape(
        CHATML, "</s>", IM, ("<|im_end|>\n",) * 2, "<|im_end|>"
    ),
    "ChatML whose tokens are not marked as special": Shape(
        CHATML, "</s>", (), ("<|im_end|>\n",) * 2, "<|im_end|>", plain=(*IM, "\n\n")
    ),
    "ChatML on a tokenizer without its tokens": Shape(
        CHATML, "</s>", (), ("<|im_end|>\n",) * 2, ""
    ),
    "a default system turn, which ends as answers do": Shape(
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nHelp.<|im_end|>\n' }}{% endif %}"
        + CHATML,
        "</s>",
        IM,
        ("<|im_end|>\n",) * 2,
        "<|im_end|>",
    ),
    "thoughts of earlier answers are removed": Shape(
        turns(
            "{% set c = m.content.split('</think>')[-1] %}"
            "{{ '<|im_start|>assistant\n' + ('<think>\n\n</think>\n\n' if loop.last else '') + c + '<|im_end|>\n' }}",
            CHATML_USER,
            CHATML_OPENING,
            CHATML_SYSTEM,
        ),
        "</s>",
        IM,
        ("<|im_end|>\n",) * 2,
        "<|im_end|>",
    ),
    "the next turn's token is all that ends an answer": Shape(
        "[gMASK]<sop>"
        + turns(
            "{{ '<|assistant|>\n' + m.content }}",
            "{{ '<|user|>\n' + m.content }}",
            "{{ '<|assistant|>' }}",
        ),
        "<|endoftext|>",
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>"),
        ("", ""),
        "",
    ),
    "headings without any special token": Shape(
        turns(
            "{{ '### Response:\n' + m.content + '\n\n' }}",
            "{{ '### Instruction:\n' + m.content + '\n\n' }}",
            "{{ '### Response:\n' }}",
        ),
        "</s>",
        (),
        ("\n\n", "\n\n"),
        "",
    ),
    "eos behind the last answer only": Shape(
        turns(
            "{{ 'A: ' + m.content + '\n' }}{% if loop.last %}{{ eos_token }}{% endif %}",
            "{{ 'Q: ' + m.content + '\n' }}",
            "{{ 'A: ' }}",
        ),
        "</s>",
        (),
        ("\n", "\n</s>"),
        "</s>",
    ),
    "another token between turns than behind the last": Shape(
        turns(
            "{{ '<|a|>' + m.content }}{{ '<|end|>\n<|endoftext|>' if loop.last else '<|turn|>\n' }}",
            "{{ '<|u|>' + m.content }}",
            "{{ '<|a|>' }}",
        ),
        "<|endoftext|>",
        ("<|a|>", "<|u|>", "<|end|>", "<|turn|>"),
        ("<|turn|>\n", "<|end|>\n<|endoftext|>"),
        "<|turn|>",
    ),
    "a role that is renamed, and no turn of the system": Shape(
        ALTERNATING
        + turns(
            "{{ '<start_of_turn>model\n' + m.content | trim + '<end_of_turn>\n' }}",
            "{{ '<start_of_turn>user\n' + m.content | trim + '<end_of_turn>\n' }}",
            "{{ '<start_of_turn>model\n' }}",
        ),
        "<eos>",
        ("<start_of_turn>", "<end_of_turn>"),
        ("<end_of_turn>\n",) * 2,
        "<end_of_turn>",
    ),
    "headers between tokens": Shape(
        turns(
            "{{ '<|h|>assistant<|/h|>\n\n' + m.content | trim + '<|eot_id|>' }}",
            "{{ '<|h|>user<|/h|>\n\n' + m.content | trim + '<|eot_id|>' }}",
            "{{ '<|h|>assistant<|/h|>\n\n' }}",
        ),
        "<|end_of_text|>",
        ("<|h|>", "<|/h|>", "<|eot_id|>"),
        ("<|eot_id|>",) * 2,
        "<|eot_id|>",
    ),
    "a separator behind each role": Shape(
        turns(
            "{{ '<|im_start|>assistant<|im_sep|>' + m.content + '<|im_end|>' }}",
            "{{ '<|im_start|>user<|im_sep|>' + m.content + '<|im_end|>' }}",
            "{{ '<|im_start|>assistant<|im_sep|>' }}",
        ),
        "<|endoftext|>",
        (*IM, "<|im_sep|>"),
        ("<|im_end|>",) * 2,
        "<|im_end|>",
    ),
    "turns between tokens, the last of which is eos": Shape(
        turns(
            "{{ '<|START|><|CHATBOT|>' + m.content + '<|END|>' }}",
            "{{ '<|START|><|USER|>' + m.content + '<|END|>' }}",
            "{{ '<|START|><|CHATBOT|>' }}",
        ),
        "<|END|>",
        ("<|START|>", "<|CHATBOT|>", "<|USER|>"),
        ("<|END|>",) * 2,
        "<|END|>",
    ),
    "instructions in brackets, a new beginning in each turn": Shape(
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}",
        "</s>",
        (),
        (" </s>",) * 2,
        "</s>",
    ),
    "answers that are marked": Shape(
        turns(
            "{{ 'A:' }}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}",
            "{{ 'Q:' + m.content + '\n' }}",
            "{{ 'A:' }}",
        ),
        "</s>",
        IM,
        ("<|im_end|>\n",) * 2,
        "<|im_end|>",
    ),
    "a prompt that opens a thought": Shape(
        turns(
            "{{ '<|A|>' + m.content.split('</think>')[-1] + eos_token }}",
            "{{ '<|U|>' + m.content }}",
            "{{ '<|A|><think>\n' }}",
        ),
        "<|eos|>",
        ("<|A|>", "<|U|>"),
        ("<|eos|>",) * 2,
        "<|eos|>",
    ),
    "one that asks for tools and documents": Shape(
        "{% if tools is not none %}{{ tools | tojson }}{% endif %}"
        "{% if documents is not none %}{{ documents | tojson }}{% endif %}" + CHATML,
        "</s>",
        IM,
        ("<|im_end|>\n",) * 2,
        "<|im_end|>",
    ),
}


def tokenizer_for(shape: Shape, texts: list[str] | None = None) -> PreTrainedTokenizerFast:
    """Of bytes, with the special tokens of a template."""
    backend = train_bpe([texts or ["some words"]], vocab_size=512, min_frequency=1)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=shape.eos, bos_token="<s>", pad_token="<pad>"
    )
    made.add_special_tokens({"additional_special_tokens": list(shape.special)})
    made.add_tokens(list(shape.plain))
    made.chat_template = shape.template
    return made


def saved(shape: Shape, folder: Path, texts: list[str] | None = None) -> Path:
    """A folder with the tokenizer alone, as `model.tokenizer` names one."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_for(shape, texts).save_pretrained(folder)
    return folder
