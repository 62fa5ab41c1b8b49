"""Conflicts of a run that reads conversations."""

from collections.abc import Iterator

from torchtitan.config.schema import Config
from torchtitan.config.section import Finding


def find_chat_conflicts(config: Config) -> Iterator[Finding]:
    if config.model.attn_mask_type != "block_causal":
        yield (
            ("model.attn_mask_type",),
            f'model.attn_mask_type = "{config.model.attn_mask_type}" with conversations (chat): one conversation would '
            'attend to the others in its sequence; set model.attn_mask_type = "block_causal"',
        )
    if config.training.sources and config.training.chat:
        yield (
            ("training.chat", "training.sources"),
            "training.chat is set beside [[training.sources]]; set chat in each source whose rows are conversations",
        )
