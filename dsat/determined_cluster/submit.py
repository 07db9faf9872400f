"""Prepare a search on your machine, submit it to a Determined cluster, and fetch its results."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsat import __version__
from dsat.command import ds_config, script_args
from dsat.command import entrypoint as entrypoints
from dsat.command import experiment as experiments
from dsat.command.entrypoint import Entrypoint
from dsat.command.switches import is_set_by_script, is_switch
from dsat.determined_cluster import client as clients
from dsat.determined_cluster import job, result, upload
from dsat.determined_cluster.job import Job
from dsat.determined_cluster.master import Master
from dsat.determined_cluster.select_master import NOT_CONFIGURED, Choice, choose
from dsat.engines.places import AUTO
from dsat.errors import DsatError, UserInputError
from dsat.prepare import source
from dsat.run.journal import ENGINE, FILE_NAME, to_text
from dsat.run.run import Run
from dsat.search import BUILT_IN
from dsat.show import summary
from dsat.show.view import RunView
from dsat.space.plan import BY_FORMULA, BY_SIMULATION
from dsat.tuning import run_folders
from dsat.tuning.dry_run import describe_search
from dsat.tuning.plans import make_plan
from dsat.tuning.preparation import apply_section, check_max_slots, searcher_of_full_run
from dsat.tuning.settings import Settings
from dsat.values import format as fmt
from dsat.values.files import write_atomically
from dsat.values.format import count
from dsat.values.text import redacted_command

_log = logging.getLogger(__name__)

_MAX_SLOTS = "resources.max_slots"
# Settings that have a meaning on this machine only.
_LOCAL_ONLY = ("cold", "resume", "run_dir", "arg_mappings", "command")


@dataclass(frozen=True)
class Submission:
    """A checked search, ready to be submitted to the master.

    Attributes:
        files: sources of the files and folders in the trials' folder, by relative path there.
        size_bytes: size of the upload.
        package_folders: folders of `files` into which this package is also copied.
    """

    choice: Choice
    name: str
    job: Job
    config: dict[str, Any]
    files: dict[Path, Path]
    size_bytes: int
    package_folders: Collection[Path]

    @property
    def place(self) -> str:
        return (
            f"tuning on the Determined cluster {self.choice.master} ({self.choice.reason}; "
            "--engine local tunes on this machine)"
        )

    def describe(self) -> Iterator[str]:
        """Yield lines on the search and its upload, for a dry run."""
        limit = f"at most {count(self.job.num_slots, 'device')} at a time"
        yield from describe_search(self.name, self.job.plan, limit)
        entrypoint = redacted_command(self.config["entrypoint"])
        yield f"the search runner's entrypoint: {entrypoint}"
        num_files = sum(source.is_file() for source in self.files.values())
        yield f"to upload: {count(num_files, 'file')}, {fmt.memory(self.size_bytes)}"


@dataclass(frozen=True)
class Submitted:
    """A submitted search.

    Attributes:
        experiment_id, url: id and web page of the search runner's experiment.
        state: the experiment's last state, one of `OVER`; None if not followed to its end.
        result: result of the ended search (`result.to_json`); empty if unknown.
        interrupted: whether Ctrl-C stopped following the search, which continues.
        run_dir: the folder on this machine that holds the result files; None if there is none.
    """

    experiment_id: int
    url: str
    state: str | None = None
    result: Mapping[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    run_dir: Path | None = None

    @property
    def has_result(self) -> bool:
        is_over = self.state == "COMPLETED" and bool(self.result.get("over"))
        return is_over and self.result.get("best") is not None

    @property
    def failure(self) -> str:
        """Reason for the missing result, with the best trial so far, if any."""
        best = self.result.get("best")
        if best is None:
            why = self.result.get("stop_reason") or "no configuration was measured"
            return f"the search on the cluster measured nothing: {why}"
        return f"the search on the cluster ended early; best so far {best['name']}"

    def to_json(self) -> dict[str, Any]:
        where = {"experiment_id": self.experiment_id, "url": self.url, "state": self.state}
        run_dir = None if self.run_dir is None else str(self.run_dir)
        return {**where, "run_dir": run_dir, **self.result}


def select_place(settings: Settings) -> Choice:
    """Choose between a cluster and this machine.

    Raises UserInputError for options that a chosen cluster does not support.
    """
    choice, is_auto = choose(settings.engine), settings.engine == AUTO
    needs_note = is_auto and settings.config is not None and choice.reason != NOT_CONFIGURED
    if choice.master is not None and is_auto and settings.command:
        hint = "to tune there, name such a file and its folder"
        reason = f"{choice.reason}, but a cluster runs only experiment files: {hint}"
        choice, needs_note = Choice(None, reason), True
    if choice.master is None:
        if needs_note:
            _log.info("tuning without a Determined cluster: %s", choice.reason)
        return choice
    hint = f"Use --engine local, because trials would run on {choice.master} ({choice.reason})."
    for name in (name for name in _LOCAL_ONLY if getattr(settings, name)):
        where = "a command" if name == "command" else settings.name_of(name)
        raise UserInputError("works on this machine only", where=where, hint=hint)
    if settings.method not in BUILT_IN:
        raise UserInputError(
            f"the registered search {settings.method!r} works on this machine only",
            where=settings.name_of("method"),
            hint=hint,
        )
    for name in ("tune", "listed_switches"):
        for switch in getattr(settings, name):
            if is_switch(switch) and not is_set_by_script(switch):
                raise UserInputError(
                    f"trials on a cluster set switches in the script, which cannot set {switch}",
                    where=settings.name_of(name),
                    hint=hint,
                )
    return choice


def submit(ready: Submission, *, detach: bool) -> Submitted:
    """Submit a search and, unless `detach`, follow it to its end."""
    assert ready.choice.master is not None
    master = clients.connect(ready.choice.master, _log.info)
    _log.info(ready.place)
    with tempfile.TemporaryDirectory(prefix="dsat-") as folder:
        text = json.dumps(ready.job.to_json(), indent=1) + "\n"
        upload.lay_out(ready.files, text, Path(folder), ready.package_folders)
        with clients.explain_errors(ready.choice.master):
            number = master.create(ready.config, Path(folder))
    submitted = Submitted(number, master.url(number))
    _log.info("Created experiment %d: %s", number, submitted.url)
    if detach:
        _log_how_to_follow(master, number)
        return submitted
    return _follow(master, submitted, ready.name)


def follow(experiment_id: int) -> Submitted:
    """Follow a search to its end; raise UserInputError if `experiment_id` has no search."""
    choice = choose("determined")
    assert choice.master is not None
    clients.check_installed(choice.master)
    master = clients.connect(choice.master, _log.info)
    with clients.explain_errors(choice.master):
        config = master.submitted_config(experiment_id)
    if job.RUNNER_MODULE not in str(config.get("entrypoint")):
        raise UserInputError(
            f"experiment {experiment_id} is not a search of dsat", where=master.address
        )
    name = str(config.get("name", "")).removeprefix(job.RUNNER_NAME)
    return _follow(master, Submitted(experiment_id, master.url(experiment_id)), name)


def _follow(master: Master, submitted: Submitted, name: str) -> Submitted:
    """Log the lines of a search runner until its end, then write the result files."""
    number = submitted.experiment_id
    try:
        state, outcome = clients.follow(master, number, _log.info)
    except UserInputError:
        _log.info("dsat no longer follows the search, which continues")
        _log_how_to_follow(master, number)
        raise
    except KeyboardInterrupt:
        _log.info("detached: the search continues")
        _log_how_to_follow(master, number)
        return replace(submitted, interrupted=True)
    if state != "COMPLETED":
        ending = job.describe_state(state)
        if outcome.get("best") is None and outcome.get("stop_reason"):
            ending = f"failed ({outcome['stop_reason']})"
        elif state == "ERROR":
            with contextlib.suppress(UserInputError):  # the log may be out of reach
                reason = clients.reason_of_failure(master, number)
                ending = f"{ending} ({reason})" if reason else ending
        _log.info("experiment %d ended: %s; see %s", number, ending, submitted.url)
    if not outcome.get("over"):
        ended = clients.end_search_of(master, number)
        if ended is not None:
            _log.info("also ended the trials of the search, experiment %d", ended)
    run_dir = _bring_results(master, number, outcome.pop("events", []), name)
    return replace(submitted, state=state, result=outcome, run_dir=run_dir)


def _bring_results(
    master: Master, number: int, events: Sequence[Mapping[str, Any]], name: str
) -> Path | None:
    """Write the results to this machine and return the folder; on failure, log where they are."""
    try:
        if events:
            with clients.explain_errors(master.address):
                text = master.file(number, job.JOB_FILE)
            return _write_run(result.restore_events(events, Job.from_json(json.loads(text))), name)
    # The search has ended anyway. Another version of dsat may have written the job.
    except (DsatError, OSError, ValueError, KeyError) as error:
        _log.warning("the results could not be written to this machine: %s", error)
    try:
        with clients.explain_errors(master.address):
            uuid = master.newest_checkpoint(number)
    except UserInputError as error:
        _log.warning("%s", error)
        return None
    if uuid is not None:
        det = f"det -m {master.address} checkpoint download {uuid}"
        _log.info("To get the best configuration so far: %s", det)
    return None


def _write_run(events: Sequence[Mapping[str, Any]], name: str) -> Path:
    """Write the journal and the result files into a new run folder; return the folder."""
    view = RunView(Run(events))
    with contextlib.ExitStack() as locks:
        folder = run_folders.choose(Settings(method=""), name, locks)
        write_atomically(folder / FILE_NAME, to_text(events))
        summary.write_files(view, folder, "")
    _log.info("Result files: %s", folder)
    return folder


def prepare(settings: Settings, choice: Choice) -> Submission:
    """Read and check the user's files and settings; return the search to submit."""
    assert choice.master is not None
    clients.check_installed(choice.master)
    import determined  # noqa: F401  # knows whether this process is a trial

    source.refuse_in_trial()
    experiment = source.read_experiment(settings)
    slots = settings.slots or experiment.slots_per_trial
    try:
        program = entrypoints.parse(experiment.entrypoint, experiment.model_dir)
    except UserInputError:  # a cluster also runs entrypoints that dsat cannot start itself
        program = Entrypoint()
        _check_auto_batch(experiment)
    else:
        source.check_config_path(experiment, program)
        source.check_ranks(program, slots)
    args = program.args
    section, settings = apply_section(settings, experiment, program.config_path)
    for note in section.notes if section is not None else ():
        _log.info(note)
    _check_mappings(settings)
    slots = settings.slots or experiment.slots_per_trial
    settings = _set_max_slots(settings, experiment, slots)
    if settings.run_full_experiment:
        _check_full_run(experiment)
    if settings.memory_model == BY_SIMULATION:
        settings = replace(settings, memory_model=BY_FORMULA)  # the runner has no model to simulate
    plan = make_plan(settings, experiment, slots, args=args, switches={}, offload_helps=True)
    files = upload.collect_files(experiment.model_dir, experiment.includes)
    users = upload.check_script(files, experiment.model_dir, program)
    folders = upload.package_folders(program, users)
    size = upload.check_size(files, folders)
    submitted = Job(
        plan=plan,
        info={
            "name": experiment.name,
            "dsat": __version__,
            ENGINE: "determined",
            "machine": f"Determined cluster {choice.master}, {count(slots, 'slot')} per trial",
        },
        config=job.remove_secrets(experiment.config),
        hparams=experiment.hparams,
        trial=settings.trial_options(plan.own_batch),
        max_concurrent_trials=settings.max_concurrent_trials,
        max_slots=settings.max_slots,
        run_full_experiment=settings.run_full_experiment,
    )
    changes = _read_runner_changes(settings)
    config = job.runner_config(
        experiment, plan, max_restarts=settings.max_search_runner_restarts, changes=changes
    )
    return Submission(choice, experiment.name, submitted, config, files, size, folders)


def _read_runner_changes(settings: Settings) -> dict[str, Any]:
    """Return the content of `--search-runner-config`, without the keys that dsat sets itself."""
    path = settings.search_runner_config
    changes = {} if path is None else experiments.read_mapping(path)
    fixed = changes.keys() & job.OF_RUNNER
    if fixed:
        _log.info("note: %s: dsat sets %s itself", path, ", ".join(sorted(fixed)))
    return {key: value for key, value in changes.items() if key not in fixed}


def _check_auto_batch(experiment: experiments.Experiment) -> None:
    """Raise UserInputError for "auto" batch sizes, because dsat cannot read the script's flags."""
    base = experiment.base_config
    sizes = script_args.batch_from_args(base, (), {}, experiment.hparams)
    values = [sizes.get(key) for key in ds_config.BATCH_KEYS[:2]]
    if ds_config.AUTO in values and not any(isinstance(size, int) for size in values):
        raise UserInputError(
            'dsat cannot read the script\'s arguments, and the batch size is "auto"',
            where=f"{experiment.path}: entrypoint",
            hint=f"Write {experiments.OVERRIDES}.train_micro_batch_size_per_gpu: N, with the "
            "number that the script uses.",
        )


def _check_mappings(settings: Settings) -> None:
    """Raise UserInputError for flags that `dsat.get_hf_args_with_overwrites` does not set."""
    for setting, flag in settings.arg_mappings.items():
        if script_args.HF_BATCH_FLAGS.get(setting) != flag:
            raise UserInputError(
                f"trials on a cluster cannot set {flag}",
                where=f"{settings.name_of('arg_mappings')}.{setting}",
                hint="Remove it, or use --engine local.",
            )


def _set_max_slots(settings: Settings, experiment: experiments.Experiment, slots: int) -> Settings:
    """Return the settings with the limit on devices, by default the experiment's.

    Raises UserInputError if a trial needs more devices.
    """
    where, limit = None, settings.max_slots
    if limit is None and (user_limit := ds_config.at(experiment.config, _MAX_SLOTS)) is not None:
        where = f"{experiment.path}: {_MAX_SLOTS}"
        limit = ds_config.whole_number(user_limit, where)
    settings = replace(settings, max_slots=limit)
    check_max_slots(settings, slots, where=where)
    return settings


def _check_full_run(experiment: experiments.Experiment) -> None:
    """Raise UserInputError unless the experiment's searcher describes one full-length training."""
    name = searcher_of_full_run(experiment, "name", "metric", "max_length")["name"]
    if name != "single":
        raise UserInputError(
            f"is {name!r}, which makes many trials",
            where=f"{experiment.path}: searcher.name",
            hint="Set it to single, which --run-full-experiment needs.",
        )


def _log_how_to_follow(master: Master, number: int) -> None:
    det = f"det -m {master.address}"
    _log.info("To follow the search: dsat watch %d, or %s", number, master.url(number))
    _log.info("To end the search and its trials: %s experiment cancel %d", det, number)
    _log.info(
        "The result will be in the latest checkpoint of experiment %d. dsat watch also writes it "
        "to a folder in dsat_runs",
        number,
    )
