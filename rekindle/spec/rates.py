"""Which learning rates a config has to name, and which are too small for how weights are stored.

Weights that were trained before have no default rate: the one that suits a model from scratch
destroys them. `findings` proposes one instead, by the kind of model and by what is trained:

- text and token classification, all weights: 2e-5, 3e-5 or 5e-5 (BERT; Devlin et al. 2019, arXiv
  1810.04805, appendix A.3);
- text and token classification, LoRA: 3e-4 to 5e-4 (RoBERTa; Hu et al. 2021, arXiv 2106.09685,
  appendix D);
- language models, all weights: 2e-5 (Llama 2; Touvron et al. 2023, arXiv 2307.09288, section 3.1);
- language models, LoRA: 2e-4, and 1e-4 from 33B (QLoRA; Dettmers et al. 2023, arXiv 2305.14314,
  appendix B), ten times the rate of all weights (Schulman and Thinking Machines 2025, "LoRA Without
  Regret").

bf16 has eight significant bits: what is added to a weight w is lost below 2^-9 |w|, and mostly lost
below 2^-8 |w|. AdamW moves a weight by about `lr` a step, and most weights of a transformer are
about 0.02 (`initializer_range` of transformers): below 2^-8 x 0.02 = 7.8e-5 most updates vanish.
The moments, which are stored in bf16 too, lose in the same way, so that no rate makes it exact."""

from collections.abc import Iterator

from rekindle.errors import Problem, RequestError
from rekindle.spec.model import ModelSpec, TrainSpec

LEAST_LR_OF_BF16 = 2**-8 * 0.02

# (proposed, how it is usual), by task and by whether adapters alone are trained
_ENCODER = ("3e-5", "2e-5 to 5e-5 are usual for encoders such as BERT")
_ENCODER_LORA = ("4e-4", "3e-4 to 5e-4 are usual for encoders with LoRA")
_USUAL = {
    ("text_classification", False): _ENCODER, ("text_classification", True): _ENCODER_LORA,
    ("token_classification", False): _ENCODER, ("token_classification", True): _ENCODER_LORA,
    ("causal_lm", False): ("2e-5", "1e-5 to 2e-5 are usual for all weights of a language model"),
    ("causal_lm", True): ("2e-4", "1e-4 to 2e-4 are usual for LoRA of a language model"),
}  # fmt: skip
_OWN = ("1e-4", "a tenth of the rate that its first training had is a good start")

Finding = tuple[str, str, str]


def findings(task: str, model: ModelSpec, train: TrainSpec) -> Iterator[Finding]:
    """What is wrong with `train.lr`: (field of `train`, what, fix). Not for scripts."""
    if train.entrypoint:
        return
    lora, start = model.lora is not None, _pretrained(task, model)
    if train.lr is None and start:
        rate, usual = _USUAL.get((task, lora), _OWN) if isinstance(model.source, str) else _OWN
        what = f"is missing, and {start}: the default of 1e-3 is for weights from scratch"
        yield "lr", what, f"set `lr: {rate}` ({usual})"
    elif train.weights == "bf16" and not lora and train.lr and train.lr < LEAST_LR_OF_BF16:
        what = f"bf16 cannot hold most updates of `lr: {train.lr:g}`"
        fix = "set `weights: fp32` (`layout: {shard: N}` divides them), or train `model.lora`"
        fix += f", or take an `lr` of at least {LEAST_LR_OF_BF16:.1e}"
        yield "weights", f"{what}: they are below 2^-8 of a weight", fix


def require(task: str, model: ModelSpec, train: TrainSpec) -> None:
    """Raise RequestError with all findings: for trainings that no config was checked for."""
    found = findings(task, model, train)
    if problems := [Problem(what, f"train.{field}", fix) for field, what, fix in found]:
        raise RequestError(problems)


def _pretrained(task: str, model: ModelSpec) -> str:
    """Where weights that were trained before come from, in words; "" from scratch."""
    if model.init_from == "champion":
        return "`model.init_from: champion` goes on with trained weights"
    if model.init_from != "base":
        return f"`model.init_from: {model.init_from}` names trained weights"
    if isinstance(model.source, str) and task != "image_classification":
        return f"`model.source: {model.source}` names pretrained weights"
    return ""
