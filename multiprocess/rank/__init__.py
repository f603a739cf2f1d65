"""What runs in the forkserver and in the ranks that it forks."""
