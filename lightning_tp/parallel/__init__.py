"""How a planned model runs: collectives, local parameters, linears, random state, and their application."""
