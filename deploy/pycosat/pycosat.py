"""pycosat's `solve` and `itersolve` on python-sat's CaDiCaL.

reasoning-gym depends on pycosat (for its zebra puzzles), which is published as C source only, so that installing it
needs a compiler and Python's headers. This package takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pysat.solvers import Solver

UNSATISFIABLE = "UNSAT"


def itersolve(clauses: Iterable[Iterable[int]]) -> Iterator[list[int]]:
    """Every assignment that satisfies all clauses (DIMACS literals), as the list of its true literals."""
    with Solver(name="cadical153", bootstrap_with=[list(clause) for clause in clauses]) as solver:
        yield from solver.enum_models()


def solve(clauses: Iterable[Iterable[int]]) -> list[int] | str:
    """One such assignment, or "UNSAT"."""
    return next(itersolve(clauses), UNSATISFIABLE)
