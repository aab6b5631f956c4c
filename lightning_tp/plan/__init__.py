"""What is split: the sharding plan, and the way it is found (probe, localize, prove)."""
