"""The search of the best configuration, from the settings to the files of the result."""
