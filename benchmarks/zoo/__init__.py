"""Small models of many architectures, and the table of how each of them is split."""
