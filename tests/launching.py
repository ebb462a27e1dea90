"""Starts `distributed_run.py` on several processes, with a watchdog, and reads what they wrote."""

import json
import os
import subprocess
import sys
from pathlib import Path


RECIPES = Path(__file__).parent.parent / "recipes" / "accelerate_configs"
RUN = str(Path(__file__).parent / "distributed_run.py")


def run(command: list[str], timeout: int, **environment) -> tuple[int, str]:
    """Exit status and output of a command; one that hangs is killed, and its output shown."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            raise AssertionError(f"{command} did not end within {timeout} s:\n{output[-10000:]}") from None
    return process.returncode, output


def launch(num_processes: int, model, output, *scenarios: str, config: str | None = None, timeout=240, **environment):
    """
    Run scenarios on processes, with DDP or with one of `recipes/accelerate_configs`.

    Returns exit status and output of the launcher, and under each scenario the results of the processes by rank.
    """
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    if config is not None:
        start = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(RECIPES / f"{config}.yaml")]
        start += ["--num_processes", str(num_processes), "--mixed_precision", "no", "--main_process_port", "0"]
        # Each collective operation is checked to be the same one, of the same shape, on all processes. (DDP of torch
        # 2.13 ends in a segmentation fault with it.)
        environment["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    environment["WATCHDOG_SECONDS"] = str(timeout - 20)
    returncode, text = run([*start, RUN, str(model), str(output), *scenarios], timeout, **environment)
    results = {"returncode": returncode, "output": text}
    for path in Path(output).glob("*.json"):
        name, rank = path.stem.rsplit("-", 1)
        results.setdefault(name, {})[int(rank)] = json.loads(path.read_text(encoding="utf-8"))
    return results


def by_rank(results, name: str, num_processes: int) -> list:
    """What the processes wrote in a scenario, which all of them reached the end of."""
    assert name in results and len(results[name]) == num_processes, results["output"][-10000:]
    return [results[name][rank] for rank in range(num_processes)]
