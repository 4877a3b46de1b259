"""Offline decoding against transformers' `generate`: tokens/s on the embedded model, in one run.

Both continue the same prompts greedily by the same number of tokens, end tokens ignored, in float32
on all cores. Runs alternate after a warm-up, so that both meet the same machine. transformers has
several implementations of experts; the one that is fastest here is measured.

    python benchmarks/offline.py --repeats 5

The bound is what a decode step would take if it did nothing but read its weights once: experts from
one rank each, all others on every rank.

The comparison means something on a quiet machine only (see `load_before_and_after`): threads of
torch wait for each other at the end of each operation, so a core taken by somebody else costs it
far more than its share. `cpu_seconds` shows what each side spent.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np

import report


TARGET_SPEEDUP = 3.0
# Not batched_mm: it copies the weights of every token's experts, minutes for one trial on CPU.
EXPERT_IMPLEMENTATIONS = ("grouped_mm", "eager")


def main() -> int:
    args = parse_arguments()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(args.ep_size))
    from jaxmoe.assets import EMBEDDED_MODEL

    print(json.dumps(compare(args, EMBEDDED_MODEL)))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ep-size", type=int, nargs="+", default=[8, 1], metavar="N", help="(%(default)s)")
    add("--batch", type=int, default=32, metavar="N", help="(%(default)s)")
    add("--prompt-len", type=int, default=128, metavar="N", help="longest; shortest is half")
    add("--new-tokens", type=int, default=64, metavar="N", help="(%(default)s)")
    add("--repeats", type=int, default=5, metavar="N", help="(%(default)s)")
    add("--torch-threads", type=int, default=os.cpu_count(), metavar="N", help="(%(default)s)")
    add("--experts", choices=EXPERT_IMPLEMENTATIONS, help="of transformers (the fastest)")
    return parser.parse_args()


def compare(args: argparse.Namespace, model_dir: Path) -> dict:
    prompts = make_prompts(args.batch, args.prompt_len)
    ours = {f"ep{size}": Ours(model_dir, size, args, prompts) for size in args.ep_size}
    theirs = Transformers(model_dir, args, prompts)
    runs = {**ours, "transformers": theirs}
    for run in runs.values():
        run.warm_up()
    load_before = os.getloadavg()[0]
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.repeats):
        for name, run in runs.items():
            gc.collect()
            began, cpu_began = time.perf_counter(), time.process_time()
            run()
            seconds[name].append(time.perf_counter() - began)
            cpu_seconds[name].append(time.process_time() - cpu_began)

    num_tokens = args.batch * args.new_tokens
    rates = {name: summary([num_tokens / s for s in each]) for name, each in seconds.items()}
    for name, each in cpu_seconds.items():
        rates[name]["cpu_seconds"] = statistics.median(each)
    bandwidth = memory_bandwidth()
    for name, run in ours.items():
        rates[name] |= run.detail() | {
            "speedup": rates[name]["median"] / rates["transformers"]["median"],
            "decode_bound": args.batch / (run.weight_bytes_of_a_step() / bandwidth),
            "tokens_equal_transformers": equal_fraction(run.tokens, theirs.tokens),
        }
    rates["transformers"]["experts"] = theirs.experts
    return report.rounded(
        {
            "benchmark": "offline",
            "unit": "generated tokens/s, prefill included",
            "batch": args.batch,
            "prompt_tokens": [min(map(len, prompts)), max(map(len, prompts))],
            "new_tokens": args.new_tokens,
            "repeats": args.repeats,
            "results": rates,
            "target_speedup": TARGET_SPEEDUP,
            "machine": report.machine()
            | {"load_before_and_after": [load_before, os.getloadavg()[0]]}
            | {"memory_gb_per_s": bandwidth / 1e9},
            "torch_threads": args.torch_threads,
            "versions": report.versions("jax", "torch", "transformers"),
            **report.origin(),
        }
    )


def make_prompts(batch: int, longest: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(max(1, longest // 2), longest + 1, batch)
    lengths[0] = longest
    return [rng.integers(0, 256, length).tolist() for length in lengths]


class Ours:
    def __init__(
        self, model_dir: Path, ep_size: int, args: argparse.Namespace, prompts: list[list[int]]
    ):
        from jaxmoe.offline import GenerationOptions, OfflineEngine

        self._engine = OfflineEngine.load(
            model_dir, ep_size=ep_size, dtype="float32", batch_size=args.batch
        )
        self._options = GenerationOptions(max_new_tokens=args.new_tokens, ignore_eos=True)
        self._prompts = prompts
        self.tokens: list[list[int]] = []

    def __call__(self) -> None:
        results = self._engine.generate(self._prompts, self._options)
        self.tokens = [list(result.token_ids) for result in results]

    def warm_up(self) -> None:
        self()
        self._engine.statistics = type(self._engine.statistics)()

    def detail(self) -> dict:
        done = self._engine.statistics
        return {"prefill_rate": done.prefill_rate, "decode_rate": done.decode_rate}

    def weight_bytes_of_a_step(self) -> int:
        from jaxmoe.step import path_names

        total = 0
        for path, weight in jax.tree_util.tree_leaves_with_path(self._engine.model.params):
            ranks = 1 if "experts" in path_names(path) else self._engine.model.mesh.size
            total += weight.nbytes * ranks
        return total


class Transformers:
    def __init__(self, model_dir: Path, args: argparse.Namespace, prompts: list[list[int]]):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(args.torch_threads)
        self._torch = torch
        self._new_tokens = args.new_tokens
        self._pad = 0  # masked, so any token will do
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        self._ids = torch.tensor(
            [[self._pad] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
        )
        self._mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        self.tokens: list[list[int]] = []
        names = (args.experts,) if args.experts else EXPERT_IMPLEMENTATIONS
        models = {
            name: AutoModelForCausalLM.from_pretrained(
                model_dir, dtype=torch.float32, experts_implementation=name
            ).eval()
            for name in names
        }
        for model in models.values():
            model.generation_config.eos_token_id = (
                None  # else end tokens are forbidden, not ignored
            )
        trials = {}
        for name, self._model in models.items() if len(names) > 1 else ():
            self._generate(1)
            began = time.perf_counter()
            self._generate(4)
            trials[name] = time.perf_counter() - began
        chosen = min(trials, key=trials.__getitem__) if trials else names[0]
        self._model = models[chosen]
        self.experts = {"used": chosen, "seconds_for_4_tokens": trials}

    def __call__(self) -> None:
        self.tokens = self._generate(self._new_tokens)

    def warm_up(self) -> None:
        self()

    def _generate(self, new_tokens: int) -> list[list[int]]:
        with self._torch.inference_mode():
            output = self._model.generate(
                self._ids,
                attention_mask=self._mask,
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=self._pad,
            )
        return output[:, self._ids.shape[1] :].tolist()


def summary(values: list[float]) -> dict:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def equal_fraction(ours: list[list[int]], theirs: list[list[int]]) -> float:
    return float(np.mean(np.asarray(ours) == np.asarray(theirs)))


def memory_bandwidth() -> float:
    """Bytes a second one core reads of an array that fits no cache."""
    array = np.ones(1 << 26, np.float32)
    best = min(_timed(array.sum) for _ in range(5))
    return array.nbytes / best * (os.cpu_count() or 1)


def _timed(function) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
