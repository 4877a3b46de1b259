"""`jaxmoe serve` as several processes."""

import contextlib
import random
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.processes import Process


pytestmark = pytest.mark.slow

FLAGS = (
    "--port", "0", "--ep-size", "4", "--max-running-requests", "4",
    "--context-length", "128", "--chunked-prefill-size", "16", "--page-size", "16",
)  # fmt: skip
ANSWERS = {
    "What is 9 * 268?": "9*268=9*200+9*60+9*8=1800+540+72=2340+72=2412\n#### 2412",
    "What is 23 * 3?": "23*3=69\n#### 69",
}


def free_port():
    """Below the ports that the kernel hands out: no other test gets it before it is used."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def shared_memory():
    """Of groups that servers named; tests that run meanwhile name theirs otherwise."""
    return {path for path in Path("/dev/shm").iterdir() if re.match("jaxmoe-[0-9a-f]", path.name)}


def node(node_rank, *flags, program="serving.cli"):
    return Process(program, "serve", "--node-rank", str(node_rank), *flags)


def ask(url, question):
    messages = [{"role": "user", "content": question}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 64}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize("num_nodes", [2, 4])
def test_processes_answer_as_one_and_end_together(num_nodes, tmp_path):
    flags = (*FLAGS, "--nnodes", str(num_nodes), "--dist-init-addr", f"127.0.0.1:{free_port()}",
             "--compilation-cache-dir", str(tmp_path))  # fmt: skip
    before = shared_memory()
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(node(rank, *flags)) for rank in reversed(range(num_nodes))]
        member, front = nodes[-2:]
        url = front.read_until(r"Ready: (\S+)")[1]
        questions = list(ANSWERS) * 4
        with ThreadPoolExecutor(8) as threads:
            replies = list(threads.map(lambda question: ask(url, question), questions))
        found = [reply.json()["choices"][0]["message"]["content"] for reply in replies]
        assert found == [ANSWERS[question] for question in questions]
        metrics = httpx.get(f"{url}/metrics").text
        for rank in range(num_nodes):
            tokens = re.search(rf'generation_tokens_total{{member="{rank}"}} (\S+)', metrics)
            assert float(tokens.group(1)) > 0
            assert f'jaxmoe_compilations_after_ready{{member="{rank}"}} 0.0' in metrics
        steps = re.findall(r'step_seconds_count{member="\d",phase="decode"} (\S+)', metrics)
        assert len(steps) == num_nodes and len(set(steps)) == 1
        sent = re.findall(r'jaxmoe_ep_remote_bytes_total{member="\d"} (\S+)', metrics)
        assert len(sent) == num_nodes and min(map(float, sent)) > 0

        member.process.send_signal(signal.SIGKILL)
        member.process.wait()
        reply = ask(url, "What is 23 * 3?")
        assert reply.status_code in (500, 503)
        assert "member 1" in reply.text
        front.process.send_signal(signal.SIGINT)
        for node_ in nodes[:-2]:
            assert node_.process.wait(30) == 1, node_.lines
            assert "member 1" in "".join(node_.lines)
        assert front.process.wait(30) == 1
    assert not shared_memory() - before


def test_experts_move_between_processes_that_serve(tmp_path):
    flags = (*FLAGS, "--nnodes", "4", "--dist-init-addr", f"127.0.0.1:{free_port()}",
             "--compilation-cache-dir", str(tmp_path), "--ep-num-redundant-experts", "8",
             "--enable-eplb", "--eplb-rebalance-num-iterations", "40",
             "--eplb-rebalance-layers-per-chunk", "2")  # fmt: skip

    def numbers(name):
        metrics = httpx.get(f"{url}/metrics").text
        return [float(found) for found in re.findall(rf"{name}{{[^}}]*}} (\S+)", metrics)]

    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(node(rank, *flags, program="tests.serving.eager_eplb"))
            for rank in range(4)
        ]
        url = nodes[0].read_until(r"Ready: (\S+)")[1]
        questions = list(ANSWERS) * 4
        for _ in range(20):
            with ThreadPoolExecutor(8) as threads:
                replies = list(threads.map(lambda question: ask(url, question), questions))
            found = [reply.json()["choices"][0]["message"]["content"] for reply in replies]
            assert found == [ANSWERS[question] for question in questions]
            if numbers("jaxmoe_eplb_rebalances_total")[0] >= 2:
                break
        moved = numbers("jaxmoe_eplb_moved_slots_total")
        assert len(moved) == 4 and len(set(moved)) == 1 and moved[0] > 0
        assert numbers("jaxmoe_eplb_abandoned_total") == [0.0] * 4
        assert numbers("jaxmoe_compilations_after_ready") == [0.0] * 4
        nodes[0].process.send_signal(signal.SIGINT)
        for node_ in nodes:
            assert node_.process.wait(30) == 0, node_.lines


def test_nodes_that_differ_are_refused():
    address = ("--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}")
    with node(0, *FLAGS, *address):
        other = node(1, *FLAGS, *address, "--page-size", "32")
        with other:
            assert other.process.wait(60) == 2
        assert re.search("--page-size", "\n".join(other.lines)), other.lines
