"""Large batches: formulas, groups and arrays of the toolkit, without a framework."""
