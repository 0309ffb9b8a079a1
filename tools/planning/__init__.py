"""Plans of a training run for machines that need not be there; the program is `tools.plan`."""
