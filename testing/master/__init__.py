"""A stand-in for a Determined 0.37 master, for tests.

It implements the part of the REST API that the unmodified SDK 0.37.0 uses: the client, custom
searches, and the calls of `core.init` and launchers in trials. It gives only answers that the real
master would give, and refuses all else.

    with StandIn(tmp_path, nodes=(2,)) as master:
        client = Determined(master.url, "tester", master.users["tester"])   # the real SDK
        experiment = client.create_experiment({...}, "model_dir")
        assert master.wait_ended(experiment.id) == "STATE_COMPLETED"
        print(master.log(master.trials(experiment.id)[0].id))

- *Trials* are local processes with the tests' interpreter but without dsat: a trial imports dsat
  from its experiment's context. Or they are made up, and a whole search takes a second.
- *Users' requests* go through the real client.
- *Faults:* `fault(r"POST .*/searcher_operations", status=502, times=2)`. Its kinds are `status`,
  `drop` (the request is not executed) and `drop_answer` (executed, but not answered). Others are
  `preempt`, `redeliver` and `http.stop`.

`states`, `allocation`, `trial`, `experiment` and `cluster` are the state machine, after the
master's Go sources. `requests`, `client_api`, `task_api` and `views` are the REST API, and `server`
is HTTP with faults. `processes`, `container/` and `made_up` are the agents. `standin` combines all.
"""

from testing.master.standin import StandIn

__all__ = ["StandIn"]
