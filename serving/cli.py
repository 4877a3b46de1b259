"""The `jaxmoe` command."""

import argparse
import importlib
import sys


# A command's module has add_arguments(parser) and run(args) -> exit status. It is imported when the
# command is chosen, so that no command pays for another's imports.
COMMANDS = {
    "serve": ("serving.launch", "serve a model over HTTP, OpenAI-compatible"),
    "router": ("serving.router.cli", "spread requests over prefill and decode workers"),
    "generate": ("jaxmoe.offline.cli", "answer a file of prompts"),
    "convert": ("jaxmoe.checkpoint.store", "turn a Hugging Face checkpoint into an Orbax one"),
    "eval": ("jaxmoe.evaluation.cli", "measure accuracy on the evaluation sets"),
    "quantize": ("jaxmoe.checkpoint.quantize", "make an FP8 checkpoint of a bfloat16 one"),
    "compare": ("jaxmoe.reference.compare", "compare with the PyTorch reference, layer by layer"),
    "eplb": ("jaxmoe.eplb.cli", "plan and simulate where experts lie, from recordings"),
    "trace": ("jaxmoe.overlap.trace", "write when a step computes and communicates, for Perfetto"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status; what is refused is said in one line, status 2."""
    parser = argparse.ArgumentParser(
        prog="jaxmoe",
        description="DeepSeek-V3-class mixture-of-experts serving in JAX.",
        epilog="\n".join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, help="`jaxmoe COMMAND --help` for its flags")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    module_name, summary = COMMANDS[chosen.command]
    module = importlib.import_module(module_name)
    command = argparse.ArgumentParser(prog=f"jaxmoe {chosen.command}", description=summary)
    module.add_arguments(command)
    args = command.parse_args(chosen.arguments)
    try:
        return module.run(args)
    except (ValueError, OSError) as error:
        print(f"jaxmoe {chosen.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
