"""What a language model writes by vLLM, the choice for GPUs: where `REKINDLE_VLLM` is set, as in
the image on vLLM's, to more arguments of `vllm serve` or to none.

All else stays rekindle's. The engine's core is in this process: in one of its own it outlives this
one's kill and takes a terminal's signals. Where it fails, the server ends. For vLLM 0.32."""

import argparse
import json
import math
import os
import shlex
from typing import Any

from rekindle.errors import RequestError, UnsupportedError
from rekindle.serve.work import Answer, Event, Work, failure_of, not_finite
from rekindle.serve.writer import LanguageModel, Text
from rekindle.tasks.causal_lm import CausalLM
from rekindle.train.modelfolder import ModelFolder

VLLM = "REKINDLE_VLLM"


class VllmWriter(LanguageModel):
    """Each turn is a step of vLLM's scheduler."""

    def __init__(self, opened: ModelFolder, task: CausalLM, precision: str) -> None:
        if precision == "int8":
            fix = f"leave deploy.precision out, and set {VLLM} to --quantization with what vLLM has"
            raise UnsupportedError("vLLM does not serve rekindle's int8", where=VLLM, fix=fix)
        stored = json.loads((opened.path / "config.json").read_bytes())["dtype"]
        kind = "bfloat16" if precision == "bf16" else stored
        words = ["--dtype", kind, "--disable-log-stats", *shlex.split(os.environ[VLLM])]
        self.engine = _engine(str(opened.path), words)
        config = self.engine.vllm_config
        super().__init__(opened, task, config.model_config.max_model_len)
        self.most: int = config.scheduler_config.max_num_seqs
        self.texts: dict[str, Text] = {}
        self.number, self.room = 0, self.most

    def turn(self, new: list[Work]) -> list[Event]:
        """What one step writes of the texts under way, the new ones among them."""
        events: list[Event] = []
        begun = self.begun(new, events)
        try:
            gone = [name for name, text in self.texts.items() if text.work.gone]
            self.engine.abort_request(gone)
            for name in gone:
                del self.texts[name]
            for text in begun:
                try:
                    self._add(text)
                except ValueError as error:  # what vLLM takes of no client
                    events.append((text.work, failure_of(error)))
            for output in self.engine.step() if self.texts else ():
                if output.request_id in self.texts:
                    self._take(output, events)
        except Exception as error:  # noqa: BLE001 - these fail
            failure, answered = failure_of(error), {w for w, e in events if not isinstance(e, int)}
            works = {text.work for text in [*self.texts.values(), *begun]} - answered
            events += [(work, failure) for work in works]
            self.texts.clear()
            self.broken = True
        self.room, self.busy = self.most - len(self.texts), bool(self.texts)
        return events

    def _add(self, text: Text) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = text.work.options
        seed = text.draw.initial_seed() & (1 << 63) - 1  # vLLM's own is of the engine, and -1 none
        how = SamplingParams(
            temperature=options.temperature,
            seed=seed,
            max_tokens=text.limit,
            logprobs=0,
            stop_token_ids=self.stops,
            ignore_eos=True,  # also those of generation_config.json
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.number += 1
        self.engine.add_request(str(self.number), {"prompt_token_ids": text.prompt}, how)
        self.texts[str(self.number)] = text

    def _take(self, output: Any, events: list[Event]) -> None:
        """The tokens of a text, and, when it is whole, its answer."""
        text, (found,) = self.texts[output.request_id], output.outputs
        tokens = list(found.token_ids)
        text.written += tokens
        is_finite = math.isfinite(found.cumulative_logprob or 0)
        events += [(text.work, token) for token in tokens if is_finite and token not in self.stops]
        if output.finished or not is_finite:
            del self.texts[output.request_id]
            self.engine.abort_request([output.request_id])
            answer: Answer = self.prediction(text)
            if not is_finite:
                answer = not_finite()
            elif found.finish_reason not in ("stop", "length"):
                answer = failure_of(RuntimeError(f"vLLM ended a text: {found.finish_reason}"))
            events.append((text.work, answer))


def _engine(folder: str, words: list[str]) -> Any:
    """vLLM's engine of a model folder, which needs none of its tokenizers."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # nothing is sent to anybody
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        from vllm import EngineArgs, LLMEngine
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        fix = f"install vllm, use the image on it (docs/serving.md), or unset {VLLM}"
        raise RequestError(f"vLLM cannot be imported: {error}", where=VLLM, fix=fix) from error
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog=VLLM, exit_on_error=False))
    own = ["--model", folder, "--skip-tokenizer-init", "--generation-config", "vllm"]
    try:
        return LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(words + own)))
    except (SystemExit, argparse.ArgumentError, ValueError, RuntimeError) as error:
        fix = "the log above says why; `vllm serve --help` lists what it takes"
        raise RequestError(f"vLLM does not start: {error}", where=VLLM, fix=fix) from error
