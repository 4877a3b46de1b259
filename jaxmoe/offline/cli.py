"""`jaxmoe generate`: a file of prompts in, a file of texts out."""

import argparse
import dataclasses
import hashlib
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxmoe.assets import EMBEDDED_MODEL
from jaxmoe.compilations import CompilationCounter
from jaxmoe.offline.engine import OfflineEngine
from jaxmoe.offline.journal import JOURNAL_SUFFIX, Journal, open_journal
from jaxmoe.offline.options import Generation, GenerationOptions, PromptRequest
from jaxmoe.offline.pipeline import LineParser, PromptFile, Rejected, batches
from jaxmoe.plan import (
    DEEPEP_MODES,
    DTYPES,
    MOE_A2A_BACKENDS,
    QUANTIZATION_HELP,
    QUANTIZATIONS,
    SINGLE_BATCH_OVERLAP_HELP,
    TWO_BATCH_OVERLAP_HELP,
)


EXIT_OK, EXIT_SOME_REJECTED, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = GenerationOptions()
    add = parser.add_argument
    add("--model-path", metavar="DIR", help="model directory; left out, the embedded model")
    add(
        "--input",
        required=True,
        metavar="FILE",
        help='a JSON object a line with "prompt", "prompt_ids" or "messages", optionally '
        '"max_new_tokens", "temperature", "seed", "id"',
    )
    add(
        "--output",
        required=True,
        metavar="FILE",
        help="a JSON object for each input line, in the same order; while the run lasts, results "
        f"are in FILE{JOURNAL_SUFFIX}, from which a run that was stopped continues",
    )
    add("--overwrite", action="store_true", help="replace an output, start again if one was begun")
    add("--ep-size", type=int, metavar="N", help="devices the experts are spread over (all)")
    add("--ep-num-redundant-experts", type=int, metavar="N", help="extra expert slots")
    add("--deepep-mode", choices=DEEPEP_MODES, default="auto", help="(%(default)s)")
    add("--moe-a2a-backend", choices=MOE_A2A_BACKENDS, default="reference", help="(%(default)s)")
    add("--enable-two-batch-overlap", action="store_true", help=TWO_BATCH_OVERLAP_HELP)
    add("--enable-single-batch-overlap", action="store_true", help=SINGLE_BATCH_OVERLAP_HELP)
    add("--dtype", choices=DTYPES, default="auto", help="auto: float32 on CPU, else the model's")
    add("--quantization", choices=QUANTIZATIONS, help=QUANTIZATION_HELP)
    add("--batch-size", type=int, default=32, metavar="N", help="over all devices (%(default)s)")
    add(
        "--chunk-tokens",
        type=int,
        metavar="N",
        help="tokens of each device in one prefill step (128 on CPU, else 2048)",
    )
    max_new_tokens = defaults.max_new_tokens
    add("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help="(%(default)s)")
    temperature = defaults.temperature
    add("--temperature", type=float, default=temperature, metavar="X", help="0 is greedy (0)")
    add("--top-p", type=float, default=defaults.top_p, metavar="X", help="(%(default)s)")
    add("--top-k", type=int, default=defaults.top_k, metavar="N", help="0 is all (%(default)s)")
    add("--min-p", type=float, default=defaults.min_p, metavar="X", help="(%(default)s)")
    add("--seed", type=int, default=defaults.seed, metavar="N", help="line i uses N + i - 1 (0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends a text; may be repeated")
    add("--stop-token-ids", type=int, nargs="+", default=[], metavar="ID")
    add("--ignore-eos", action="store_true", help="go on past the model's end tokens")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 0, or 1 if lines were rejected and the rest is done, 2 for an error
    that stopped the run, 130 if it was interrupted."""
    try:
        options = GenerationOptions(
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            seed=args.seed,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            stop=tuple(args.stop),
            stop_token_ids=tuple(args.stop_token_ids),
            ignore_eos=args.ignore_eos,
        )
        model_path = EMBEDDED_MODEL if args.model_path is None else Path(args.model_path)
        return _generate(args, options, model_path)
    except KeyboardInterrupt:
        _say("interrupted; the same command continues")
        return EXIT_INTERRUPTED
    except (OSError, ValueError) as error:
        _say(f"error: {error}")
        return EXIT_ERROR


def _generate(args: argparse.Namespace, options: GenerationOptions, model_path: Path) -> int:
    began = time.perf_counter()
    compilations = CompilationCounter()
    input_path, output_path = Path(args.input), Path(args.output)
    if output_path.exists() and output_path.samefile(input_path):
        raise ValueError(f"the output must not be the input {input_path}")
    made_from = {
        "input_sha256": _sha256(input_path),
        "model": str(model_path.resolve()),
        "model_sha256": _model_fingerprint(model_path),
        "dtype": args.dtype,
        "quantization": args.quantization,
        **dataclasses.asdict(options),
    }
    with open_journal(output_path, made_from, overwrite=args.overwrite) as journal:
        source = PromptFile(input_path, skip=journal.done)
        if journal.done:
            _say(f"continuing: {len(journal.done)} of {source.num_prompts} prompts are done")
        engine = OfflineEngine.load(
            model_path,
            ep_size=args.ep_size,
            dtype=args.dtype,
            quantization=args.quantization,
            num_redundant_experts=args.ep_num_redundant_experts,
            batch_size=args.batch_size,
            chunk_tokens=args.chunk_tokens,
            deepep_mode=args.deepep_mode,
            moe_a2a_backend=args.moe_a2a_backend,
            two_batch_overlap=args.enable_two_batch_overlap,
            single_batch_overlap=args.enable_single_batch_overlap,
        )
        rejected = _run_all(engine, options, source, journal)
        journal.finish({"index": line.index, "error": line.error} for line in rejected)

    done = engine.statistics
    _say(
        f"{done.prompts} prompts, {done.prompt_tokens} prompt tokens, {done.generated_tokens} "
        f"generated tokens in {time.perf_counter() - began:.1f} s; prefill "
        f"{done.prefill_rate:.0f} tokens/s, decode {done.decode_rate:.0f} tokens/s "
        f"(with {compilations.count} compilations)"
    )
    if rejected:
        _say(f"{len(rejected)} of {source.num_prompts} lines were not run, see above")
    return EXIT_SOME_REJECTED if rejected else EXIT_OK


def _run_all(
    engine: OfflineEngine, options: GenerationOptions, source: PromptFile, journal: Journal
) -> list[Rejected]:
    parser = LineParser(
        options,
        engine.tokenizer,
        vocab_size=engine.config.vocab_size,
        max_tokens=engine.config.max_position_embeddings,
    )
    rejected: list[Rejected] = []
    with tqdm(
        total=source.num_prompts, initial=len(journal.done), unit="prompt", file=sys.stderr
    ) as bar:
        for item in batches(source, parser, engine.batch_size):
            if isinstance(item, Rejected):
                with tqdm.external_write_mode(file=sys.stderr):
                    _say(f"line {item.line_number}: {item.error}")
                rejected.append(item)
                bar.update(1)
                continue
            generations = engine.run_batch(item, options)
            journal.append(map(_result, item, generations))
            bar.set_postfix_str(f"{engine.statistics.decode_rate:.0f} tokens/s", refresh=False)
            bar.update(len(item))
    return rejected


def _result(request: PromptRequest, generation: Generation) -> dict[str, Any]:
    return {
        "index": request.index,
        **({} if request.id is None else {"id": request.id}),
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.completion_tokens,
    }


def _model_fingerprint(model_path: Path) -> str:
    """Of the small files' contents and the names and sizes of the large ones."""
    digest = hashlib.sha256()
    for path in sorted(model_path.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(model_path)} {path.stat().st_size}\n".encode())
            if path.suffix == ".json":
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(message: str) -> None:
    print(f"jaxmoe generate: {message}", file=sys.stderr, flush=True)
