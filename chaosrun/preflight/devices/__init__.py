"""What is done with a node's GPUs and CPU: whose they are, what they say of themselves, whether they compute."""
