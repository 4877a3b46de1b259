"""The training curve of a run as a picture; needs matplotlib.

python -m examples.train_tiny.plot DIR/log.jsonl curve.png
"""

import argparse
from pathlib import Path

from examples.train_tiny.train import read_log


def plot(log_path: Path | str, image_path: Path | str) -> None:
    """Losses over tokens, with the learning rate, and the expert load of each router."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = list(read_log(log_path))
    if not lines:
        raise ValueError(f"{log_path} has no lines")
    millions = [line["tokens"] / 1e6 for line in lines]
    figure, (losses, loads) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 2), layout="constrained"
    )
    losses.plot(millions, [line["loss"] for line in lines], label="next token")
    losses.plot(millions, [line["mtp_loss"] for line in lines], label="token after it (MTP)")
    losses.set_yscale("log")
    losses.set_ylabel("cross-entropy")
    rate = losses.twinx()
    rate.plot(millions, [line["learning_rate"] for line in lines], color="grey", linestyle=":")
    rate.set_ylabel("learning rate (dotted)")
    losses.legend(loc="upper right")
    for router, values in enumerate(zip(*(line["expert_load_max"] for line in lines), strict=True)):
        loads.plot(millions, values, label=f"router {router}", linewidth=0.8)
    loads.axhline(1, color="grey", linewidth=0.5)
    loads.set_ylabel("busiest expert / mean")
    loads.set_xlabel("million tokens")
    loads.legend(ncols=3, fontsize="small", loc="upper right")
    figure.savefig(image_path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw a run's training curve.")
    parser.add_argument("log", type=Path, help="the run's log.jsonl")
    parser.add_argument("image", type=Path, help="a .png")
    args = parser.parse_args(argv)
    plot(args.log, args.image)


if __name__ == "__main__":
    main()
