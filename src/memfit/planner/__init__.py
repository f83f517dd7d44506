"""Trace and budget in, plan out. No torch."""

from memfit.planner.make import SOLVERS, Frontier, Solver, check, find_frontier, plan
from memfit.planner.problem import Choice, Problem

__all__ = ["SOLVERS", "Choice", "Frontier", "Problem", "Solver", "check", "find_frontier", "plan"]
