"""Tools of this project: soak, mutants, reports."""
