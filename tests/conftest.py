"""Every test runs on 8 virtual CPU devices with strict promotion, unless it is for a GPU."""

import jax
import pytest


jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Their engines, the fixtures of all tests of `serving`, would be compiled once for each worker.
SHARE_ENGINES = {f"tests/serving/test_{name}.py" for name in ("front", "loop", "overlap", "peers")}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file to a worker, as `--dist loadfile` does, but the files of `SHARE_ENGINES` to one."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "engines" if file in SHARE_ENGINES else file

    return Scheduling(config, log)
