"""What the Kubernetes and Slurm examples start is accepted by the commands they start."""

import argparse
import importlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.cli import COMMANDS
from serving.config import from_arguments
from serving.router.pool import worker_url


EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "slurm" / "jaxmoe.sbatch"
MANIFESTS = [
    document
    for path in sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]
WORKLOADS = [manifest for manifest in MANIFESTS if manifest["kind"] != "Service"]
SERVICES = {manifest["metadata"]["name"]: manifest["spec"] for manifest in MANIFESTS
            if manifest["kind"] == "Service"}  # fmt: skip
WORKLOADS_BY_ROLE = {
    workload["spec"]["template"]["metadata"]["labels"]["role"]: workload for workload in WORKLOADS
}

# Flags of `jaxmoe serve`, each with a value, that ServerConfig does not have yet.
PENDING_FLAGS = ("--disaggregation-mode", "--disaggregation-bootstrap-port", "--router")


def parse(command: list[str]) -> argparse.Namespace:
    """A `jaxmoe ...` command by its own parser, checked as when it runs."""
    program, name, *arguments = command
    assert program == "jaxmoe"
    parser = argparse.ArgumentParser(conflict_handler="resolve")  # real flags replace pending ones
    for flag in PENDING_FLAGS if name == "serve" else ():
        parser.add_argument(flag)
    importlib.import_module(COMMANDS[name][0]).add_arguments(parser)
    args = parser.parse_args(arguments)
    if name == "serve":
        from_arguments(args)
    return args


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container


def command_of(workload: dict[str, Any]) -> argparse.Namespace:
    container = container_of(workload)
    return parse([*container["command"], *container["args"]])


def test_there_is_a_workload_for_each_role():
    assert sorted(WORKLOADS_BY_ROLE) == ["decode", "prefill", "router"]
    assert len(WORKLOADS) == 3


@pytest.mark.parametrize("role", WORKLOADS_BY_ROLE)
def test_ports_probes_and_labels_agree(role):
    workload = WORKLOADS_BY_ROLE[role]
    spec, container = workload["spec"], container_of(workload)
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == command_of(workload).port
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert container["livenessProbe"]["httpGet"]["port"] == "http"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_register_at_the_router_under_their_own_address(role):
    workload = WORKLOADS_BY_ROLE[role]
    args = command_of(workload)
    assert args.disaggregation_mode == role
    host, port = args.router.removeprefix("http://").split(":")
    (service_port,) = SERVICES[host]["ports"]
    assert service_port["port"] == int(port)
    assert SERVICES[host]["publishNotReadyAddresses"], "it is ready only once workers are there"
    (pod_ip,) = container_of(workload)["env"]
    assert args.host == f"$({pod_ip['name']})"
    assert pod_ip["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_may_drain_before_they_are_killed(role):
    workload = WORKLOADS_BY_ROLE[role]
    grace = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= command_of(workload).drain_timeout + 10


def test_the_transfer_port_is_open():
    workload = WORKLOADS_BY_ROLE["prefill"]
    ports = {port["name"]: port["containerPort"] for port in container_of(workload)["ports"]}
    assert ports["transfer"] == int(command_of(workload).disaggregation_bootstrap_port)


def test_services_lead_to_the_router():
    labels = WORKLOADS_BY_ROLE["router"]["spec"]["template"]["metadata"]["labels"]
    for service in SERVICES.values():
        assert service["selector"] == labels
        assert [port["targetPort"] for port in service["ports"]] == ["http"]


def run_script(tmp_path: Path, hosts: list[str], *arguments: str, **environment: str):
    """The script with stand-ins for Slurm's programs; it and the commands srun was given."""
    calls = tmp_path / "calls"
    calls.mkdir()
    # The job ends with its router, which therefore ends when all others have been started.
    srun = f"""trap "" TERM
printf "%s\\0" "$@" > "$(mktemp {calls}/XXXXXX)"
if [[ "$*" == *"jaxmoe router"* ]]; then
  until (( $(ls {calls} | wc -l) > {len(hosts)} )); do sleep 0.1; done
fi"""
    programs = {
        "srun": srun,
        "scontrol": f'[ "$*" = "show hostnames nodes" ] && printf "%s\\n" {" ".join(hosts)}',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", SCRIPT, *arguments], capture_output=True, text=True, timeout=30,
        env={"PATH": f"{tmp_path}:{os.defpath}", "SLURM_JOB_NODELIST": "nodes"} | environment,
    )  # fmt: skip
    commands = [path.read_text().split("\0")[:-1] for path in calls.iterdir()]
    return done, [(c[: c.index("jaxmoe")], c[c.index("jaxmoe") :]) for c in commands]


def test_the_script_is_well_formed():
    done = subprocess.run(["bash", "-n", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_script_starts_a_router_and_a_worker_on_each_node(tmp_path):
    hosts = ["n1", "n2", "n3"]
    done, commands = run_script(tmp_path, hosts, "--ep-size", "8", NUM_PREFILL="1")
    assert done.returncode == 0, done.stderr
    assert "the router is http://n1:30000" in done.stdout
    started = {}
    for srun, command in commands:
        (node,) = [o.removeprefix("--nodelist=") for o in srun if o.startswith("--nodelist=")]
        args = parse(command)
        if command[1] == "router":
            assert (node, args.host, args.port) == ("n1", "0.0.0.0", 30000)
            continue
        assert (args.host, args.ep_size) == (node, 8)
        assert worker_url(args.router) == "http://n1:30000" and args.port != 30000
        started[node] = args.disaggregation_mode
    assert len(commands) == 4
    assert started == {"n1": "prefill", "n2": "decode", "n3": "decode"}


@pytest.mark.parametrize("num_prefill", ["0", "2"])
def test_the_script_refuses_a_job_without_a_role(tmp_path, num_prefill):
    done, commands = run_script(tmp_path, ["n1", "n2"], NUM_PREFILL=num_prefill)
    assert done.returncode == 2 and commands == []
    assert done.stderr == (f"NUM_PREFILL must be between 1 and 1 on 2 nodes, got {num_prefill}\n")
