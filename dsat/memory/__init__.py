"""Memory predictions: closed form, corrected by simulations and by trials."""
