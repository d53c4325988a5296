"""What runs inside confined processes: the standard library and each other, nothing else. `launch` sends the sources along."""
