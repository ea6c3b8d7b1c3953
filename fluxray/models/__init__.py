"""Library models as block stacks."""
