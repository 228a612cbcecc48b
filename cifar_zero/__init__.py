"""Trains CIFAR classifiers under plain PyTorch, DDP, FSDP2 and DeepSpeed, and checks each against plain PyTorch."""
