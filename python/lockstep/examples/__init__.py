"""Complete training programs to run and to read: ``python -m lockstep.examples.digits``."""
