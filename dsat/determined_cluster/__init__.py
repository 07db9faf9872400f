"""Trials on a Determined cluster (master 0.28 to 0.37).

    on the laptop           on the cluster, 0 slots              on the cluster's slots
    -------------           -----------------------              ----------------------
    submit                  runner                               the user's own entrypoint
    the `single`     ---->  the `custom` experiment        ---->  dsat.in_trial.cluster_rank: meter,
    experiment,             tuner + engine, events in,     <----  report: searcher metric, log
    context                 operations out

`submit`, `client` and `upload` run on your machine. `runner` and the modules that it imports run in
the search runner's container, whose image needs only Determined. Both sides send requests through
`master`.
"""
