"""Trains the embedded model.

    python -m examples.train_tiny.train --out DIR --minutes 8.5
    python -m examples.train_tiny.train --out DIR --minutes 8.5 --schedule-steps auto --export DIR

Grain reads, optax updates, Orbax keeps parameters, optimiser, step and the place in the data, so
the second command goes on as if the first had not stopped. The learning rate warms up, stays, and
decays linearly to 0 over the last part of `--schedule-steps`; without them it stays, so a run need
not know how long it will be until its last part. The routers' correction biases move by a fixed
amount a step, against the sign of each expert's excess load (arXiv:2408.15664), outside the
gradient.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl import flags
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float32, Int32

from examples.train_tiny import model
from examples.train_tiny.export import export, load_export
from examples.train_tiny.model import Metrics, PackedBatch
from jaxmoe.assets import EMBEDDED_MODEL
from jaxmoe.config import ModelConfig


HERE = Path(__file__).parent
LOG_FILE = "log.jsonl"
PROGRESS_FILE = "training_progress.json"
RUN_AHEAD = 4  # steps dispatched before the oldest one's metrics are waited for
PRINT_SECONDS = 5.0
STEPS_TO_MEASURE = 50
AUTO_MARGIN = 0.98  # of the steps that fit the time: reaching 0 early costs less than not at all
REWARM_STEPS = 100
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Options:
    """How to train. `minutes` counts from the start of `train`; whichever of `steps`, `minutes` and
    `schedule_steps` is reached first ends the run. `schedule_steps` 0 is "auto": what fits
    `minutes`."""

    out: Path
    steps: int | None = None
    minutes: float | None = None
    schedule_steps: int | None = None
    decay_fraction: float = 0.3
    warmup_steps: int = 300
    batch_size: int = 128
    sequence_length: int = 512
    seed: int = 0
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    mtp_weight: float = 0.2
    balance_weight: float = 1e-4
    z_weight: float = 1e-5
    bias_rate: float = 1e-3
    dtype: str = "bfloat16"
    num_devices: int | None = None
    log_every: int = 10
    checkpoint_every: int = 2000
    init_from: Path | None = None
    num_workers: int = 8

    @property
    def data_key(self) -> dict[str, int]:
        """What a place in the data means something with."""
        names = ("batch_size", "sequence_length", "seed", "num_workers")
        return {name: getattr(self, name) for name in names}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    step: Int32[Array, ""]
    params: model.Parameters
    optimiser: optax.OptState
    correction_bias: Float32[Array, "R E"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate's factor; a pure function of the step."""

    warmup_steps: int
    decay_fraction: float
    total_steps: int | None = None
    start: int = 0
    """Where the warm-up begins: not at 0 for a run that lost its optimiser's state."""

    def warmup(self, step: int) -> float:
        return min(1.0, (step - self.start + 1) / max(self.warmup_steps, 1))

    def decay(self, step: int) -> float:
        if self.total_steps is None:
            return 1.0
        length = max(self.total_steps * self.decay_fraction, 1)
        return min(1.0, max(0.0, (self.total_steps - step) / length))

    def factor(self, step: int) -> float:
        return self.warmup(step) * self.decay(step)


def make_optimiser(weight_decay: float) -> optax.GradientTransformation:
    """AdamW without the learning rate. Norms, biases and embeddings are not decayed."""

    def is_decayed(params):
        return {
            name: value.ndim > 1 and name not in (model.EMBEDDING, model.HEAD)
            for name, value in params.items()
        }

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(weight_decay, mask=is_decayed),
    )


def train_step(
    state: TrainState,
    batch: PackedBatch,
    learning_rate: Float32[Array, ""],
    bias_rate: Float32[Array, ""],
    *,
    config: ModelConfig,
    options: Options,
) -> tuple[TrainState, tuple[Metrics, Float32[Array, ""]]]:
    """The next state, this batch's metrics and the norm of its gradient."""
    loss = partial(
        model.loss,
        config=config,
        dtype=DTYPES[options.dtype],
        mtp_weight=options.mtp_weight,
        balance_weight=options.balance_weight,
        z_weight=options.z_weight,
    )
    gradients, metrics = jax.grad(loss, has_aux=True)(state.params, state.correction_bias, batch)
    optimiser = make_optimiser(options.weight_decay)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
        updates, optimiser_state = optimiser.update(gradients, state.optimiser, state.params)
    params = jax.tree.map(lambda p, u: p - learning_rate * u, state.params, updates)
    load = metrics.expert_load
    shortfall = jnp.sign(load.mean(-1, keepdims=True) - load)
    next_state = TrainState(
        step=state.step + 1,
        params=params,
        optimiser=optimiser_state,
        correction_bias=state.correction_bias + bias_rate * shortfall,
    )
    squares = jax.tree.map(lambda g: jnp.sum(g * g), gradients)
    return next_state, (metrics, jnp.sqrt(sum(jax.tree.leaves(squares), jnp.float32(0))))


def make_step(config: ModelConfig, options: Options, mesh: Mesh) -> Callable[..., Any]:
    """`train_step`, jitted: rows spread over the mesh, the state on every device, donated."""
    replicated = NamedSharding(mesh, P())
    return jax.jit(
        partial(train_step, config=config, options=options),
        donate_argnums=0,
        in_shardings=(replicated, _by_row(mesh), replicated, replicated),
        out_shardings=replicated,
    )


def initial_state(config: ModelConfig, options: Options, *, has_mtp: bool) -> TrainState:
    if options.init_from is not None:
        params, correction_bias = load_export(options.init_from)
    else:
        params = model.initialise(config, options.seed, has_mtp=has_mtp)
        shape = (model.num_routers(config, has_mtp=has_mtp), config.n_routed_experts)
        correction_bias = jnp.zeros(shape, jnp.float32)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        optimiser=make_optimiser(options.weight_decay).init(params),
        correction_bias=correction_bias,
    )


def train(
    dataset: Any,
    config_json: dict[str, Any],
    options: Options,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    at_end: Callable[[TrainState], None] = lambda state: None,
) -> TrainState:
    """Train, or go on training, in `options.out`; returns the last state, which is checkpointed.

    `at_end` gets it first: Grain can take minutes to let go of its workers after that.

    `dataset` is a `grain.IterDataset` of the batches that `data.make_dataset` describes.
    """
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    config_path = options.out / "config.json"
    config_path.write_text(json.dumps(config_json, indent=2), encoding="utf-8")
    config = ModelConfig.from_hf(config_json)
    has_mtp = bool(config_json.get("num_nextn_predict_layers", 0))
    mesh = _make_mesh(options)
    replicated = NamedSharding(mesh, P())
    by_row = _by_row(mesh)
    schedule = Schedule(options.warmup_steps, options.decay_fraction)

    with contextlib.ExitStack() as stack:
        # Closed, or Grain's workers complain while the interpreter ends.
        iterator = stack.enter_context(contextlib.closing(iter(dataset)))
        checkpoints = stack.enter_context(_checkpoints(options.out))
        state = jax.device_put(initial_state(config, options, has_mtp=has_mtp), replicated)
        progress = None
        if (latest := checkpoints.latest_step()) is not None:
            state, progress = _restore(checkpoints, latest, state)
        elif options.init_from is not None:
            path = options.init_from / PROGRESS_FILE
            if path.is_file():
                progress = json.loads(path.read_text(encoding="utf-8"))
                state = dataclasses.replace(
                    state, step=jax.device_put(jnp.int32(progress["step"]), replicated)
                )
                progress["schedule"]["start"] = progress["step"]
                progress["schedule"]["warmup_steps"] = REWARM_STEPS
        if progress is not None:
            if progress["data_key"] != options.data_key:
                raise ValueError(
                    f"{options.out} was trained with {progress['data_key']}, now given "
                    f"{options.data_key}: its place in the data means nothing"
                )
            iterator.set_state(progress["data"])
            schedule = Schedule(**progress["schedule"])
        first = step = int(state.step)
        is_auto = options.schedule_steps == 0
        if options.schedule_steps is not None:
            total = None if is_auto else options.schedule_steps
            schedule = dataclasses.replace(
                schedule, total_steps=total, decay_fraction=options.decay_fraction
            )

        def save() -> None:
            checkpoints.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    progress=ocp.args.JsonSave(
                        progress_of(step, iterator.get_state(), schedule, options)
                    ),
                ),
            )

        run = make_step(config, options, mesh)
        log = stack.enter_context(contextlib.closing(Log(options)))
        running: collections.deque[Any] = collections.deque()
        deadline = None if options.minutes is None else started + 60 * options.minutes
        while not _is_done(step, schedule, options, deadline) and not should_stop():
            waited = time.monotonic()
            batch = _to_batch(next(iterator))
            waited = time.monotonic() - waited
            factor = schedule.factor(step)
            # The biases settle together with the weights.
            bias_rate = options.bias_rate * schedule.decay(step)
            learning_rate = options.learning_rate * factor
            state, results = run(
                state,
                jax.device_put(batch, by_row),
                np.float32(learning_rate),
                np.float32(bias_rate),
            )
            running.append((step, learning_rate, waited, results))
            step += 1
            if len(running) > RUN_AHEAD:
                log.add(*running.popleft())
            if step - first == STEPS_TO_MEASURE and deadline is not None:
                fit = log.steps_that_fit(deadline)
                print(f"{fit:.0f} more steps fit into {options.minutes:g} minutes", flush=True)
            if is_auto and deadline is not None and step - first >= STEPS_TO_MEASURE:
                # Until the decay begins, the better estimate is the later one.
                if schedule.total_steps is None or schedule.decay(step) == 1:
                    total = step + int(AUTO_MARGIN * log.steps_that_fit(deadline))
                    schedule = dataclasses.replace(schedule, total_steps=total)
            if step % options.checkpoint_every == 0:
                save()
        while running:
            log.add(*running.popleft())
        if step > first and checkpoints.latest_step() != step:
            save()
        checkpoints.wait_until_finished()
        progress = progress_of(step, iterator.get_state(), schedule, options)
        (options.out / PROGRESS_FILE).write_text(json.dumps(progress), encoding="utf-8")
        at_end(state)
    print(f"stopped after step {step}; the schedule has {schedule.total_steps} steps", flush=True)
    return state


def progress_of(step: int, data: Any, schedule: Schedule, options: Options) -> dict[str, Any]:
    """What is not an array and has to go on: JSON."""
    return {
        "step": step,
        "data": data,
        "data_key": options.data_key,
        "schedule": dataclasses.asdict(schedule),
    }


def load_run(out: Path | str) -> tuple[TrainState, dict[str, Any]]:
    """The last checkpoint of a run and its model's config.json."""
    out = Path(out)
    config_json = json.loads((out / "config.json").read_text(encoding="utf-8"))
    has_mtp = bool(config_json.get("num_nextn_predict_layers", 0))
    empty = initial_state(ModelConfig.from_hf(config_json), Options(out=out), has_mtp=has_mtp)
    with _checkpoints(out) as checkpoints:
        latest = checkpoints.latest_step()
        if latest is None:
            raise FileNotFoundError(f"no checkpoint in {out}")
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        state, _ = _restore(checkpoints, latest, jax.device_put(empty, device))
    return state, config_json


class Log:
    """Means over `log_every` steps as JSON lines in the run's folder; a printed line now and then.

    A line's expert loads are over its steps: the most loaded expert's tokens over the mean, for
    each router, the MTP layer's last. `tokens_per_s` counts the time between two lines.
    """

    def __init__(self, options: Options):
        self._options = options
        self._file: TextIO = (options.out / LOG_FILE).open("a", encoding="utf-8")
        self._tokens = options.batch_size * options.sequence_length
        self._rows: list[dict[str, Any]] = []
        self._load: np.ndarray | None = None
        self._num_done = 0
        self._started = self._line_started = self._printed = time.monotonic()
        self._steady: tuple[int, float] | None = None

    def add(self, step: int, learning_rate: float, waited: float, results: Any) -> None:
        metrics, gradient_norm = jax.device_get(results)
        now = time.monotonic()
        if self._num_done == 0:
            print(f"first step after {now - self._started:.1f} s", flush=True)
            # Compiling is not training.
            self._line_started = now
        self._num_done += 1
        if self._steady is None and self._num_done >= min(2 * RUN_AHEAD, STEPS_TO_MEASURE):
            self._steady = self._num_done, now
        self._rows.append(
            {
                "loss": float(metrics.loss),
                "mtp_loss": float(metrics.mtp_loss),
                "accuracy": float(metrics.accuracy),
                "mtp_accuracy": float(metrics.mtp_accuracy),
                "balance_loss": float(metrics.balance_loss),
                "gradient_norm": float(gradient_norm),
                "data_wait_s": waited,
            }
        )
        load = np.asarray(metrics.expert_load, np.float64)
        self._load = load if self._load is None else self._load + load
        if not np.isfinite(metrics.loss):
            raise FloatingPointError(f"the loss of step {step} is {metrics.loss}")
        if (step + 1) % self._options.log_every == 0:
            self._write(step + 1, learning_rate, now)

    def steps_that_fit(self, deadline: float) -> float:
        """At the speed so far, from now to the deadline."""
        if self._steady is None or self._num_done == self._steady[0]:
            return 0.0
        num_done, since = self._steady
        now = time.monotonic()
        return max(0.0, (self._num_done - num_done) / (now - since) * (deadline - now))

    def close(self) -> None:
        self._file.close()

    def _write(self, step: int, learning_rate: float, now: float) -> None:
        assert self._load is not None
        seconds = max(now - self._line_started, 1e-9)
        num_steps = len(self._rows)
        line: dict[str, Any] = {
            "step": step,
            "tokens": step * self._tokens,
            **{name: float(np.mean([row[name] for row in self._rows])) for name in self._rows[0]},
            "learning_rate": learning_rate,
            "tokens_per_s": num_steps * self._tokens / seconds,
            "expert_load_max": [
                round(float(value), 4)
                for value in self._load.max(-1) / np.maximum(self._load.mean(-1), 1e-9)
            ],
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if now - self._printed >= PRINT_SECONDS:
            self._printed = now
            print(
                f"step {step}  loss {line['loss']:.4f}  mtp {line['mtp_loss']:.4f}  "
                f"right {line['accuracy']:.2%}  lr {learning_rate:.2e}  "
                f"{line['tokens_per_s'] / 1e3:.0f}k tokens/s ({num_steps / seconds:.2f} steps/s)  "
                f"load {max(line['expert_load_max']):.2f}  "
                f"data wait {1e3 * line['data_wait_s']:.1f} ms",
                flush=True,
            )
        self._rows, self._load, self._line_started = [], None, now


def _is_done(step: int, schedule: Schedule, options: Options, deadline: float | None) -> bool:
    return (
        (options.steps is not None and step >= options.steps)
        or (schedule.total_steps is not None and step >= schedule.total_steps)
        or (deadline is not None and time.monotonic() >= deadline)
    )


def _make_mesh(options: Options) -> Mesh:
    devices = jax.local_devices()[: options.num_devices]
    if options.batch_size % len(devices):
        raise ValueError(
            f"batch_size ({options.batch_size}) must be divisible by the devices ({len(devices)})"
        )
    return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))


def _by_row(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P(mesh.axis_names[0]))


def _to_batch(arrays: dict[str, np.ndarray]) -> PackedBatch:
    return PackedBatch(
        tokens=arrays["tokens"],
        weights=arrays["loss_mask"],
        positions=arrays["positions"],
        segment_ids=arrays["segment_ids"],
    )


def _checkpoints(out: Path) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        (out / "checkpoints").absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=2),
        item_names=("state", "progress"),
    )


def _restore(
    checkpoints: ocp.CheckpointManager, step: int, like: TrainState
) -> tuple[TrainState, dict[str, Any]]:
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
    )
    restored = checkpoints.restore(
        step,
        args=ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), progress=ocp.args.JsonRestore()
        ),
    )
    return restored["state"], restored["progress"]


def parse_options(argv: list[str] | None = None) -> tuple[Options, argparse.Namespace]:
    defaults = Options(out=Path())
    parser = argparse.ArgumentParser(
        description="Train the embedded model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the run's folder; a run in it goes on")
    add("--config", type=Path, default=HERE / "config.json", help="the model's config.json")
    add("--tokenizer", type=Path, default=EMBEDDED_MODEL, help="folder of tokenizer.json")
    add("--steps", type=int, help="stop after this step")
    add("--minutes", type=float, help="stop after this time, then checkpoint and export")
    add(
        "--schedule-steps",
        type=lambda text: 0 if text == "auto" else int(text),
        metavar="TOTAL",
        help="the learning rate is 0 after this step; 'auto' is what fits --minutes; left out, "
        "it stays",
    )
    add("--export", type=Path, metavar="DIR", help="write a Hugging Face directory at the end")
    add("--with-tokenizer", action="store_true", help="copy the tokenizer into the export")
    add("--init-from", type=Path, metavar="DIR", help="begin with the weights of an export, and go "
        "on at its step, if the run's folder has no checkpoint")  # fmt: skip
    for name, help_text in (
        ("decay_fraction", "part of the schedule's steps in which the learning rate falls"),
        ("warmup_steps", "steps in which it rises"),
        ("batch_size", "rows"),
        ("sequence_length", "tokens of a row"),
        ("seed", "of weights and data"),
        ("num_workers", "processes that make batches"),
        ("learning_rate", "at its highest"),
        ("weight_decay", "of matrices"),
        ("mtp_weight", "of the MTP layer's loss"),
        ("balance_weight", "of the sequence-wise balance loss"),
        ("z_weight", "of the square of log Z"),
        ("bias_rate", "what a step moves a correction bias by"),
        ("log_every", "steps of a line of the log"),
        ("checkpoint_every", "steps"),
    ):
        default = getattr(defaults, name)
        add("--" + name.replace("_", "-"), type=type(default), default=default, help=help_text)
    add("--dtype", choices=sorted(DTYPES), default=defaults.dtype, help="of the matmuls")
    add("--num-devices", type=int, help="of this host; all by default")
    args = parser.parse_args(argv)
    if args.steps is None and args.minutes is None and not args.schedule_steps:
        parser.error("give --steps, --minutes or --schedule-steps, or it would never end")
    if args.schedule_steps == 0 and args.minutes is None:
        parser.error("--schedule-steps auto needs --minutes")
    fields = {field.name for field in dataclasses.fields(Options)}
    options = Options(**{name: value for name, value in vars(args).items() if name in fields})
    return options, args


def main(argv: list[str] | None = None) -> int:
    # Grain's workers import this module: nothing heavy before this point, and no device.
    from examples.train_tiny.data import make_dataset

    options, args = parse_options(argv)
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain reads absl's flags when it starts workers
    if args.export is not None and args.export.exists() and any(args.export.iterdir()):
        raise ValueError(f"{args.export} exists and is not empty: exporting never overwrites")
    jax.config.update("jax_compilation_cache_dir", str((options.out / "jax_cache").absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stopped.append(received))
    config_json = json.loads(args.config.read_text(encoding="utf-8"))
    dataset = make_dataset(
        args.tokenizer,
        seed=options.seed,
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
        num_workers=options.num_workers,
    )
    print(f"training on {jax.local_device_count()} {jax.devices()[0].device_kind}", flush=True)

    def export_if_asked(state: TrainState) -> None:
        if args.export is None:
            return
        progress = (options.out / PROGRESS_FILE).read_text(encoding="utf-8")
        export(
            args.export,
            state.params,
            state.correction_bias,
            config_json,
            tokenizer_dir=args.tokenizer if args.with_tokenizer else None,
            extra_files={PROGRESS_FILE: progress},
        )
        print(f"exported to {args.export}", flush=True)

    train(
        dataset,
        config_json,
        options,
        should_stop=lambda: bool(stopped),
        at_end=export_if_asked,
    )
    return 0


def read_log(path: Path | str) -> Iterator[dict[str, Any]]:
    """The lines of a run's log. A resumed run may have repeated steps; the later ones count."""
    lines: dict[int, dict[str, Any]] = {}
    for text in Path(path).read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        lines[line["step"]] = line
    yield from sorted(lines.values(), key=lambda line: line["step"])


if __name__ == "__main__":
    sys.exit(main())
