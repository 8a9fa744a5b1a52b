"""What a language model writes by vLLM, the choice for GPUs: where `REKINDLE_VLLM` is
set, as in the image on vLLM's, to more arguments of `vllm serve` or to none.

All else stays rekindle's. The engine's core is in this process: in one of its own it
outlives this one's kill and takes a terminal's signals. Where it fails, the server ends.
For vLLM 0.32.

A turn of the inference thread is a step of vLLM's scheduler, so that proof, log, routes
and roll-out stay. The environment chooses it, because what can write is a matter of image
and machine, not of the model; a field `deploy.engine` is rejected. So is vLLM's OpenAI
server behind a proxy: two servers, requests counted twice, and no tokens for the log. An
engine core in a process of its own, vLLM's default, was tried: it keeps its GPU memory
when the server is killed, Ctrl-C ends its texts, which look whole, its client waits
without end where it was killed, and `rekindle predict` waits for it at exit. The cost: no
shadow, because two engines in a process share global state; scheduler and HTTP share one
interpreter's lock; the image pins vLLM's version."""

import argparse
import json
import math
import os
import shlex
from typing import Any

from rekindle.errors import RequestError, UnsupportedError
from rekindle.serve.work import Answer, Event, PendingInstance, failure_of, not_finite
from rekindle.serve.writer import LanguageModel, TextUnderWay
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
        dtype = "bfloat16" if precision == "bf16" else stored
        arguments = ["--dtype", dtype, "--disable-log-stats", *shlex.split(os.environ[VLLM])]
        self.engine = _engine(str(opened.path), arguments)
        config = self.engine.vllm_config
        super().__init__(opened, task, config.model_config.max_model_len)
        self.most: int = config.scheduler_config.max_num_seqs
        self.texts: dict[str, TextUnderWay] = {}
        self.number = 0  # of the newest request, its name in the engine
        self.room = self.most

    def turn(self, new: list[PendingInstance]) -> list[Event]:
        """What one step writes of the texts under way, the new ones among them."""
        events: list[Event] = []
        new_texts = self.begin_texts(new, events)
        try:
            gone = [name for name, text in self.texts.items() if text.work.gone]
            self.engine.abort_request(gone)
            for name in gone:
                del self.texts[name]
            for text in new_texts:
                try:
                    self._add_request(text)
                except ValueError as error:  # what vLLM takes of no client
                    events.append((text.work, failure_of(error)))
            if self.texts:
                for output in self.engine.step():
                    if output.request_id in self.texts:
                        self._take_output(output, events)
        except Exception as error:  # noqa: BLE001 - these fail
            failure = failure_of(error)
            works = {text.work for text in [*self.texts.values(), *new_texts]}
            works -= {work for work, event in events if not isinstance(event, int)}
            events += [(work, failure) for work in works]
            self.texts.clear()
            self.broken = True
        self.room = self.most - len(self.texts)
        self.busy = bool(self.texts)
        return events

    def _add_request(self, text: TextUnderWay) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = text.work.options
        seed = text.draw.initial_seed() & (1 << 63) - 1  # vLLM's own is of the engine, and -1 none
        sampling = SamplingParams(
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
        name = str(self.number)
        self.engine.add_request(name, {"prompt_token_ids": text.prompt}, sampling)
        self.texts[name] = text

    def _take_output(self, output: Any, events: list[Event]) -> None:
        """Add the new tokens of a text, and, when it is whole, its answer."""
        text = self.texts[output.request_id]
        (completion,) = output.outputs  # one: `n` is 1
        tokens = list(completion.token_ids)
        text.written += tokens
        is_finite = math.isfinite(completion.cumulative_logprob or 0)
        if is_finite:
            events += [(text.work, token) for token in tokens if token not in self.stops]
        if output.finished or not is_finite:
            del self.texts[output.request_id]
            self.engine.abort_request([output.request_id])
            answer: Answer = self.prediction(text)
            if not is_finite:
                answer = not_finite()
            elif completion.finish_reason not in ("stop", "length"):
                reason = completion.finish_reason
                answer = failure_of(RuntimeError(f"vLLM ended a text: {reason}"))
            events.append((text.work, answer))


def _engine(folder: str, arguments: list[str]) -> Any:
    """vLLM's engine of a model folder, which needs none of its tokenizers."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # nothing is sent to anybody
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the core stays in this process
    try:
        from vllm import EngineArgs, LLMEngine
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        fix = f"install vllm, use the image on it (docs/serving.md), or unset {VLLM}"
        raise RequestError(f"vLLM cannot be imported: {error}", where=VLLM, fix=fix) from error
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog=VLLM, exit_on_error=False))
    # last, so that they win over the user's
    arguments = [*arguments, "--model", folder, "--skip-tokenizer-init"]
    arguments += ["--generation-config", "vllm"]
    try:
        options = parser.parse_args(arguments)
        return LLMEngine.from_engine_args(EngineArgs.from_cli_args(options))
    except (SystemExit, argparse.ArgumentError, ValueError, RuntimeError) as error:
        fix = "the log above says why; `vllm serve --help` lists what it takes"
        raise RequestError(f"vLLM does not start: {error}", where=VLLM, fix=fix) from error
