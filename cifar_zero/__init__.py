"""Trains CIFAR classifiers under plain PyTorch, DDP, FSDP2 and DeepSpeed with the same maths, and compares them."""
