"""What a language model writes by vLLM, the choice for GPUs: where `REKINDLE_VLLM` is set, as in
the image on vLLM's, to more arguments of `vllm serve` or to none.

Requests, smoke rows, log, shadow and metrics stay rekindle's. The engine is a process of vLLM's
own; where that fails, this one ends, too. Written against vLLM 0.32."""

import argparse
import json
import multiprocessing.connection
import os
import shlex
import signal
import threading
from typing import Any

from rekindle.errors import RequestError, UnsupportedError
from rekindle.serve.work import Event, Work, failure_of
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
        ends = [child.sentinel for child in multiprocessing.active_children()]
        threading.Thread(target=self._watch, args=(ends,), daemon=True).start()

    def _watch(self, ends: list[int]) -> None:
        """What waits for an engine that was killed would wait without end."""
        multiprocessing.connection.wait(ends)
        self.engine.engine_core.outputs_queue.put(RuntimeError("vLLM's engine has ended"))

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
                self._take(output, events)
        except Exception as error:  # noqa: BLE001 - these fail
            failure, answered = failure_of(error), {w for w, e in events if not isinstance(e, int)}
            works = {text.work for text in [*self.texts.values(), *begun]} - answered
            events += [(work, failure) for work in works]
            self.texts.clear()
            os.kill(os.getpid(), signal.SIGTERM)
        self.room, self.busy = self.most - len(self.texts), bool(self.texts)
        return events

    def _add(self, text: Text) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = text.work.options
        how = SamplingParams(
            temperature=options.temperature, seed=options.seed, max_tokens=text.limit,
            stop_token_ids=[self.end], detokenize=False, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self.number += 1
        self.engine.add_request(str(self.number), {"prompt_token_ids": text.prompt}, how)
        self.texts[str(self.number)] = text

    def _take(self, output: Any, events: list[Event]) -> None:
        """The tokens of a text, and, when it is whole, its answer."""
        text = self.texts.get(output.request_id)
        if text is None:
            return
        tokens = list(output.outputs[0].token_ids)
        text.written += tokens
        events += [(text.work, token) for token in tokens if token != self.end]
        if output.finished:
            del self.texts[output.request_id]
            events.append((text.work, self.prediction(text)))


def _engine(folder: str, words: list[str]) -> Any:
    """vLLM's engine of a model folder, which needs none of its tokenizers."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # nothing is sent to anybody
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
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
