"""Trains CIFAR classifiers under plain PyTorch, DDP, FSDP2 and DeepSpeed, and checks each strategy against plain
PyTorch."""
