"""Trace and budget in, plan out. No torch."""

from memfit.planner.make import SOLVERS, Frontier, Solver, find_frontier, plan
from memfit.planner.problem import Choice, Problem

__all__ = ["SOLVERS", "Choice", "Frontier", "Problem", "Solver", "find_frontier", "plan"]
