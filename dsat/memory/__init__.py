"""Memory predictions: formulas, corrected by simulations and by trials."""
