"""Writes a trained model as safetensors or ONNX, or what was trained over it; see --help."""

from cifar_zero.core.interrupt import start

if __name__ == "__main__":
    start("cifar_zero.exporting.export")
