"""The first minutes with a GPU, and an archive of wheels for a machine without a network."""
