"""Runs the training loop of the PyTorch tutorial "Training a Classifier" on images of noise."""

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

from cifar_zero.models.net import Net

if __name__ == "__main__":
    images = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))
    trainloader = DataLoader(images, batch_size=4, shuffle=True)
    net = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    for _ in range(2):
        for inputs, labels in trainloader:
            optimizer.zero_grad()
            outputs = net(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
