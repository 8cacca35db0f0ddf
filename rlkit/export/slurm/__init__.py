"""`rlkit export --slurm`: a SLURM batch file that trains on some nodes, serves vLLM on others and survives preemption.

job.sbatch is the program, the same for every job; job.py writes the values of one job into it; options.py reads them
from a command line. docs/slurm.md says how the job behaves. Left out: a server over several nodes (each serving node
runs a whole server), and restarts of single processes by torchrun (--max-restarts=0: a process cannot rejoin a weight
transfer group).
"""

from rlkit.export.slurm.job import SlurmSettings, slurm_job

__all__ = ["SlurmSettings", "slurm_job"]
