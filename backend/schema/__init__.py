"""What the processes say to each other. Standard library only."""
