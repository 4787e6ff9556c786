"""Which process of a job goes where, and the mpirun line for it. Guide: docs/launching.md."""
