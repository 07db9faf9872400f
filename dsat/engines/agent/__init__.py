"""The agent on each host: a supervisor, which starts and ends the processes of trials."""
