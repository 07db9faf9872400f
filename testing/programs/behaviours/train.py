"""A plain DeepSpeed script that trains or misbehaves, as its configuration's `behaviour` says.

A behaviour with ` on 1` in its name goes wrong on rank 1 only, after rank 0 has called
`deepspeed.initialize`.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

WIDTH = 16
FOLDER = Path(os.environ["DSAT_TRIAL_DIR"])


def train(config: dict[str, Any], steps: int = 1000, own_batch: int | None = None) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    size = own_batch or engine.train_micro_batch_size_per_gpu()
    for _ in range(steps * engine.gradient_accumulation_steps()):
        loss = engine(torch.randn(size, WIDTH, device=engine.device)).square().mean()
        engine.backward(loss)
        engine.step()


def fail_beside_others() -> None:
    write("here", os.getpid())
    while True:  # until another trial has written its file
        here = {int(path.read_text()) for path in FOLDER.parent.glob("*/here")} - {os.getpid()}
        if here:
            break
        time.sleep(0.05)
    if any(Path(f"/proc/{pid}").exists() for pid in here):
        raise RuntimeError("another trial is in my folder")


def compile_an_operator() -> None:
    """Build an operator as DeepSpeed does, with a slow compiler that fails."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    class Slow(OpBuilder):  # type: ignore[misc]
        absolute_name = sources = None

        def is_compatible(self, verbose: bool = False) -> bool:
            time.sleep(1.5)
            return False

    with contextlib.suppress(RuntimeError):
        Slow("slow").jit_load()


def go_wrong(behaviour: str) -> None:
    if behaviour == "crashes":
        prepare_the_data()
    elif behaviour == "hangs":
        time.sleep(10_000)
    elif behaviour == "exhausts memory":
        torch.empty(2**44)
    elif behaviour == "exhausts the slot":
        kept = [torch.zeros(2**18, WIDTH) for _ in range(256)]  # 4 GiB
        print(len(kept))
    elif behaviour == "sys.exit":
        sys.exit(3)
    elif behaviour == "exit":
        os._exit(3)
    elif behaviour == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif behaviour == "raises from a library":
        torch.ones(2, 3) @ torch.ones(2, 3)
    else:
        raise AssertionError(behaviour)


def prepare_the_data() -> None:
    try:
        labels: dict[str, int] = {}
        print(labels["label"])
    except KeyError as error:
        raise ValueError("the data set has no labels\nnor anything else") from error


def leave_processes(ways: str) -> None:
    """Start one helper in each way, wait for none, and write their pids to a file."""
    pids = [leave_process(how) for how in ways.split(", ")]
    write(f"left{os.environ['RANK']}.json", pids)


def leave_process(how: str) -> int | None:
    """Start a helper; return its pid, or None if it is no process."""
    sleep = [sys.executable, "-c", "import time; time.sleep(10000)"]
    if how == "child":
        return subprocess.Popen(sleep).pid
    if how == "worker":  # like a data loader's: forked, and not killed with its parent
        worker = torch.multiprocessing.get_context("fork").Process(target=time.sleep, args=(1e4,))
        worker.start()
        return worker.pid
    if how == "session":
        return subprocess.Popen(sleep, start_new_session=True).pid
    if how == "shared memory":  # Python's resource tracker must unlink it
        blocks = [shared_memory.SharedMemory(create=True, size=64) for _ in range(2000)]
        (FOLDER / "blocks.txt").write_text(" ".join(block.name for block in blocks))
        return None
    # A daemon: a process in a new session whose parent has ended; `exec` makes it another program.
    end, begin = os.pipe()
    between = os.fork()
    if between == 0:
        os.setsid()
        pid = os.fork()
        if pid == 0:
            if how == "daemon by exec":
                os.execv(sleep[0], sleep)
            while True:
                time.sleep(1)
        os.write(begin, str(pid).encode())
        os._exit(0)
    pid = int(os.read(end, 32))
    os.waitpid(between, 0)
    return pid


def write(name: str, facts: Any) -> None:
    """Write a file atomically: the test waits for the file and reads it at once."""
    part = FOLDER / f"{name}.part"
    part.write_text(json.dumps(facts))
    os.replace(part, FOLDER / name)


def train_with_workers(config: dict[str, Any]) -> None:
    """Train with data from loader processes, which the forked rank forks."""
    model = nn.Linear(WIDTH, 1)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    size = engine.train_micro_batch_size_per_gpu()
    samples = torch.utils.data.TensorDataset(torch.randn(100 * size, WIDTH))
    for (batch,) in torch.utils.data.DataLoader(samples, size, num_workers=2):
        engine.backward(engine(batch).square().mean())
        engine.step()


def spawn_helpers() -> None:
    """Start a process as a data loader with `multiprocessing_context="spawn"` does."""
    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(abs, [-1]) == [1]


def refuse_segments() -> None:
    """Reject expandable segments, as vLLM's CuMemAllocator does."""
    segments = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    assert not segments, "Expandable segments are not compatible with memory pool."


def refuse_a_fork() -> None:
    if "dsat.engines.agent.supervisor" in Path("/proc/self/cmdline").read_text():
        raise RuntimeError("this library cannot be forked")


TRAINED: dict[str, dict[str, int]] = {
    "runs": {},
    "ends early": {"steps": 3},
    "exits early": {"steps": 3},
    "ends between": {"steps": 6},
    "feeds its own batch": {"own_batch": 7},
}
# Actions before the training.
DISTURBED = {
    "spawns": spawn_helpers,
    "compiles": compile_an_operator,
    "fails beside others": fail_beside_others,
    "refuses segments": refuse_segments,
    "cannot be forked": refuse_a_fork,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--deepspeed_config", required=True)
    config = json.loads(Path(parser.parse_args().deepspeed_config).read_text())
    behaviour = config.pop("behaviour", "runs")
    rank = int(os.environ["RANK"])
    print(f"rank {rank} {behaviour}")
    facts = {
        "pid": os.getpid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "environment": dict(os.environ),
        "file": __file__,
        "arguments": sys.argv,
        "ignores": [s.name for s in signal.Signals if signal.getsignal(s) is signal.SIG_IGN],
        "blocks": [signal.Signals(s).name for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "folder": os.getcwd(),
    }
    write(f"facts{rank}.json", facts)
    name, on_1_only, _ = behaviour.partition(" on 1")
    kind, _, ways = behaviour.partition(": ")
    if name in DISTURBED:
        DISTURBED[name]()
        train(config)
    elif name in TRAINED:
        train(config, **TRAINED[name])
        if behaviour == "exits early":
            os._exit(0)
    elif kind == "leaves":
        leave_processes(ways)
        train(config)
    elif kind == "leaves and hangs":
        train(config, steps=1)
        leave_processes(ways)
        time.sleep(10_000)
    elif behaviour == "never initializes":
        print("nothing to train")
    elif behaviour == "has workers":
        train_with_workers(config)
    elif behaviour == "hangs at first":
        mark = FOLDER.parent / f"{FOLDER.name.removesuffix('-again')}.began{rank}"
        if not mark.exists():
            train(config, steps=1)
            mark.touch()
            time.sleep(10_000)
        train(config)
    elif on_1_only and rank == 0:
        train(config)
    else:
        while on_1_only and not (FOLDER / "ports").exists():
            time.sleep(0.01)
        go_wrong(name)


if __name__ == "__main__":
    main()
