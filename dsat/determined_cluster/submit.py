"""The command on a Determined cluster: prepares the search here, has it run there."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dsat import __version__
from dsat.app.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from dsat.app.prepare import check_config_path, check_max_slots, check_ranks, plan_of
from dsat.determined_cluster import client as clients
from dsat.determined_cluster import job, upload
from dsat.determined_cluster.client import Client, Ended
from dsat.determined_cluster.job import Job
from dsat.determined_cluster.select_master import Choice, auth_file, choose, logins_of
from dsat.errors import UserInputError
from dsat.inputs import entrypoint as entrypoints
from dsat.inputs import experiment, script_args
from dsat.inputs.experiment import Experiment
from dsat.inputs.settings import BY_FORMULA, BY_SIMULATION, Settings
from dsat.tuning.strategies import make_space
from dsat.values import memory_size

# What has a meaning on this machine only.
_LOCAL_ONLY = ("cold", "resume", "run_dir", "arg_mappings", "command")


@dataclass(frozen=True)
class Submission:
    """Everything that is sent to the master.

    Attributes:
        config: of the search runner's experiment.
        entries: the trials' files.
    """

    user: Experiment
    job: Job
    config: dict[str, Any]
    entries: list[upload.Entry]


def where(chosen: Settings) -> Choice:
    """Whether trials run on a cluster; says so, if nobody asked for it."""
    local_only = [name for name in _LOCAL_ONLY if getattr(chosen, name)]
    found = choose(chosen.engine, os.environ, logins_of(auth_file()), fits=not local_only)
    if found.master is not None and local_only:
        [flag, *_] = local_only
        raise UserInputError(
            "is for trials on this machine",
            where="a command instead of CONFIG MODEL_DIR"
            if flag == "command"
            else f"--{flag.removesuffix('s').replace('_', '-')}",
            hint="Use --engine local.",
        )
    return found


def tune(chosen: Settings, choice: Choice) -> int:
    """Submits the search and follows it; returns the exit status."""
    assert choice.master is not None
    clients.check_installed(choice.master)
    stream = sys.stderr if chosen.json else sys.stdout

    def say(line: str) -> None:
        print(line, file=stream, flush=True)

    where_to = (
        f"tuning on the Determined cluster {choice.master} ({choice.reason}; --engine local tunes "
        "on this machine)"
    )
    ready = prepare(chosen, choice.master)
    size = upload.check_size(ready.entries)
    if chosen.dry_run:
        say(where_to)
        _print_plan(ready, size)
        return EXIT_OK
    client = clients.connect(choice.master)
    say(where_to)
    with tempfile.TemporaryDirectory(prefix="dsat-") as folder:
        upload.stage(ready.entries, ready.job.to_text(), Path(folder))
        number = client.submit(ready.config, Path(folder))
    say(f"Created experiment {number}: {client.url(number)}")
    hints = _hints(client, number)
    if chosen.detach:
        for line in hints:
            say(line)
        return _result(chosen, client, number, None)
    try:
        ended = client.follow(number, say)
    except KeyboardInterrupt:
        say("detached: the search goes on")
        for line in hints:
            say(line)
        return EXIT_INTERRUPTED
    if ended.state != "COMPLETED":
        say(f"experiment {number} ended: {ended.state.lower()}; see {client.url(number)}")
    return _result(chosen, client, number, ended)


def prepare(chosen: Settings, master: str) -> Submission:
    """Reads and checks everything the user gave.

    Raises:
        UserInputError: something of it is wrong.
    """
    assert chosen.config is not None and chosen.model_dir is not None
    user = experiment.read(chosen.config, chosen.model_dir, chosen.include)
    slots = chosen.slots or user.slots_per_trial
    try:
        program = entrypoints.parse(user.entrypoint, user.model_dir)
    except UserInputError:  # a cluster runs more than this machine could
        args: tuple[str, ...] = ()
    else:
        check_config_path(user, program)
        check_ranks(program, slots)
        args = program.args
    user = replace(user, arg_mappings=script_args.checked({}, args, where="--arg-mapping"))
    check_max_slots(chosen, slots)
    if chosen.memory_model == BY_SIMULATION:
        chosen = replace(chosen, memory_model=BY_FORMULA)  # the runner has no model to simulate
    plan = plan_of(chosen, user, slots, args=args, switches={}, offload_helps=True)
    changes = (
        {}
        if chosen.search_runner_config is None
        else experiment.read_mapping(chosen.search_runner_config)
    )
    found = upload.entries(user.model_dir, user.includes, upload.detignore())
    upload.check_script(found, user.model_dir)
    told = Job(
        plan=plan,
        info={
            "name": user.name,
            "dsat": __version__,
            "machine": f"Determined cluster {master}, {slots} slots per trial",
        },
        config=job.without_secrets(user.config),
        hparams=user.hparams,
        steps=(chosen.start_profile_step, chosen.end_profile_step, chosen.max_profile_steps),
        trial_timeout_s=chosen.trial_timeout_s,
        max_concurrent_trials=chosen.max_concurrent_trials,
        max_slots=chosen.max_slots,
        slot_memory_bytes=chosen.slot_memory_bytes,
        run_full_experiment=chosen.run_full_experiment,
    )
    config = job.runner_config(
        user, plan, max_restarts=chosen.max_search_runner_restarts, changes=changes
    )
    return Submission(user, told, config, found)


def _print_plan(ready: Submission, size_bytes: int) -> None:
    plan = ready.job.plan
    print(f"{ready.user.name}: {plan.method} search for the best {plan.metric}")
    print(f"{plan.slots_per_trial} slots per trial, {ready.job.num_slots} at once")
    print(f"at most {plan.max_trials} trials: the model profile, your own configuration, then:")
    for line in make_space(plan).describe():
        print(f"  {line}")
    print(f"the search runner's entrypoint: {shlex.join(ready.config['entrypoint'])}")
    print(f"to upload: {len(ready.entries)} files and folders, {memory_size.readable(size_bytes)}")


def _hints(client: Client, number: int) -> list[str]:
    det = f"det -m {client.address}"
    return [
        f"Follow it: {det} experiment logs --follow {number}, or {client.url(number)}",
        f"End it, and its trials: {det} experiment cancel {number}",
        f"Its result: best_ds_config.json and summary.md in the latest checkpoint of experiment "
        f"{number}",
    ]


def _result(chosen: Settings, client: Client, number: int, ended: Ended | None) -> int:
    result = json.loads(ended.result) if ended is not None and ended.result else {}
    if chosen.json:
        state = None if ended is None else asdict(ended)["state"]
        told = {"experiment_id": number, "url": client.url(number), "state": state, **result}
        print(json.dumps(told, indent=2), flush=True)
    if ended is None:
        return EXIT_OK
    good = ended.state == "COMPLETED" and result.get("over") and result.get("best") is not None
    return EXIT_OK if good else EXIT_FAILED
