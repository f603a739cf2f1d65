"""The code of the forkserver and of the ranks that it forks."""
