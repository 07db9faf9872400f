"""The search for the best configuration, from the settings to the result files."""
