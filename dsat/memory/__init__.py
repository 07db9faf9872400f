"""Memory of a configuration before it has run: closed form, simulation, calibration."""
