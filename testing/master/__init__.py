"""A stand-in for a Determined 0.37 master, for tests.

It speaks the part of the REST API that the unmodified SDK 0.37.0 uses: the client, custom searches
and all that `core.init` and launchers call in trials. It answers nothing that the real master would
not; what it cannot do it refuses.

    with StandIn(tmp_path, nodes=(2,)) as master:
        client = Determined(master.url, "tester", master.users["tester"])   # the real SDK
        experiment = client.create_experiment({...}, "model_dir")
        assert master.wait_ended(experiment.id) == "STATE_COMPLETED"
        print(master.log(master.trials(experiment.id)[0].id))

- *Trials* are local processes, with the interpreter of the tests but no dsat: a trial imports it
  from its experiment's context. Or they are made up, and whole searches take a second.
- *What users do* goes through the real client.
- *Faults:* `fault(r"POST .*/searcher_operations", status=502, times=2)`, kinds `status`, `drop`
  (nothing done), `drop_answer` (done, then dropped); `preempt`, `redeliver`, `http.stop`.

`states`, `allocation`, `trial`, `experiment`, `cluster` are the state machine, after the master's
Go sources; `requests`, `client_api`, `task_api`, `views` are the REST API on it; `server` is HTTP
with faults; `processes`, `container/` and `made_up` are the agents; `standin` holds it all.
"""

from testing.master.standin import StandIn

__all__ = ["StandIn"]
