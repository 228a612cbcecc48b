"""A training with the Hugging Face Trainer, and the LightningModule to which it was migrated."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

STEPS = 30


def network() -> nn.Module:
    """Returns a small BERT without dropout, for three classes."""
    from transformers import BertConfig, BertForSequenceClassification  # pyright: ignore[reportMissingImports]

    sizes: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=50, **sizes)
    config.num_labels = 3  # pyright does not know this argument
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return BertForSequenceClassification(config)


class Migrated(LightningModule):
    """Trains like the Hugging Face Trainer."""

    def __init__(self):
        super().__init__()
        self.model = network()

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the model's own loss."""
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        """Returns the AdamW of the Hugging Face Trainer, with a learning rate that falls to 0."""
        from transformers import get_linear_schedule_with_warmup  # pyright: ignore[reportMissingImports]

        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)
        scheduler = get_linear_schedule_with_warmup(optimizer, 0, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def rows() -> list[dict[str, Tensor]]:
    """Returns 64 sentences of 10 tokens with labels."""
    draw = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(50, (64, 10), generator=draw), torch.randint(3, (64,), generator=draw)
    return [{"input_ids": tokens[row], "labels": labels[row]} for row in range(64)]


def main() -> None:
    from transformers import Trainer, TrainingArguments  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    options: dict[str, Any] = {"per_device_train_batch_size": 4, "learning_rate": 1e-3}
    options |= {"max_steps": STEPS, "use_cpu": True, "report_to": [], "save_strategy": "no"}
    Trainer(network(), TrainingArguments(**options), train_dataset=rows()).train()


if __name__ == "__main__":
    main()
