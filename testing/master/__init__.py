"""A stand-in for a Determined 0.37 master, for tests.

It speaks the part of the REST API that the unmodified SDK 0.37.0 uses: the client, custom searches
with `RemoteSearchRunner`, and all that `core.init` and launchers call in trials, which run as real
local processes. It answers nothing that the real master would not; what it cannot do it refuses.

    from testing.master import StandIn

    with StandIn(tmp_path, nodes=(2,)) as master:
        client = Determined(master.url, "tester", master.users["tester"])   # the real SDK
        experiment = client.create_experiment({...}, "model_dir")
        assert master.wait_ended(experiment.id) == "STATE_COMPLETED"
        [trial] = master.trials(experiment.id)
        assert master.metrics(trial.id) == [{"loss": 1.0}]
        print(master.log(trial.id))

A command of a user finds it by `master.client_environment(home)`: the variables DET_MASTER,
DET_USER, DET_PASS and a folder for the token cache.

- *What happened:* `experiments`, `experiment(id)`, `trials(id)`, `metrics(trial_id, group)`,
  `log(trial_id)`, `checkpoint_paths(trial_id)`, `context_files(id)`, `posted(id)` (searcher
  operations), `seen` (requests and their status), `wait_until(holds, what)`, `wait_ended(id)`.
- *What users do* goes through the real client: `client.get_trial(id).kill()`,
  `experiment.pause()`, `.activate()`, `.cancel()`, `.kill()`.
- *Faults:* `fault(r"POST .*/searcher_operations", status=502, times=2)`, kinds `status`, `drop`
  (nothing done), `drop_answer` (done, then dropped); `signal(trial_id)` (SIGKILL to all processes
  of a container), `redeliver(id, event)`, `restart(down_s)`, `expire_tokens()`.
- *Time:* a long poll lasts `poll_s` (2 s) where the real one lasts 60; launchers wait `grace_s`
  (0.2 s) after their workers' end, in reality 5.

A container is a folder under `<folder>/containers/<allocation id>`: `workdir`, `home`, and `run`
for `/run/determined`. It has the interpreter of the tests with their packages, but no dsat: a trial
imports it from the experiment's context. Slots are CPUs; `nodes` are their numbers on each agent,
all on this machine. Containers end with the process that holds the stand-in.

`states`, `allocation`, `trial`, `experiment`, `cluster` are the state machine, after the master's
Go sources; `requests`, `client_api`, `task_api`, `views` are the REST API on it; `server` is HTTP
with faults; `processes` and `container/` are the agents; `standin` holds it all.
"""

from testing.master.standin import StandIn

__all__ = ["StandIn"]
