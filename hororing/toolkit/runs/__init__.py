"""Thousands of run records: a table, a page, and what the best run owes its place to.

``python -m hororing runs FOLDER`` is the command (docs/tracking.md).
"""

from hororing.toolkit.runs.collection import Collection, export, load
from hororing.toolkit.runs.page import page

__all__ = ["Collection", "export", "load", "page"]
