"""Finds a run's data before the ranks meet, and opens it as the loader of training or validation."""

import torch

from torchtitan.config.layout import BatchPlan
from torchtitan.config.schema import Config, DataSource, Training, Validation
from torchtitan.data.batch import OwnSlots, Shape
from torchtitan.data.cursor import Order
from torchtitan.data.loader import Loader, open_sources
from torchtitan.data.texts.location import IN_ANY_ORDER
from torchtitan.data.texts.sources import SHIPPED, locate_text
from torchtitan.data.tokenizers.tokenizer import Tokenizer
from torchtitan.hardware import Place
from torchtitan.models.stages import holds_an_end
from torchtitan.observe.log import logger
from torchtitan.parallel.collectives import any_says_so
from torchtitan.parallel.mesh import Mesh


def holds_out(config: Config) -> bool:
    """Whether validation takes a part of the training's text: where that is the user's, and the text here is not."""
    training, validation = config.training, config.validation
    if training.sources or training.dataset_path is None or not validation.enable:
        return False
    is_from_here = validation.dataset_path is None and validation.dataset in SHIPPED
    return is_from_here and locate_text("", training.dataset_path).kind in IN_ANY_ORDER


def needs_data(config: Config, place: Place) -> bool:
    """Whether this rank reads text: in a pipeline the first and the last stage do, and all if masks need documents."""
    pp_rank = place.rank * config.parallelism.pipeline_parallel_degree // place.world_size
    return holds_an_end(config.parallelism, pp_rank) or config.model.attn_mask_type == "block_causal"


def build_training_loader(
    config: Config,
    plan: BatchPlan,
    tokenizer: Tokenizer,
    mesh: Mesh,
    seed: int,
    device: torch.device,
    part: tuple[int, int] = (0, 1),
) -> Loader:
    """This rank's streams of the training data, or of one of so many parts of it, where others read the rest."""
    training, layout = config.training, own_slots(plan, mesh, part)
    given, divided = training.sources or [source_of(training)], holds_out(config)
    given, shape = shape_of(config, given, training.seq_len, tokenizer, device, pads=False)
    sources = open_sources(given, tokenizer, layout, training.epochs, divided=divided, pads=False)
    return Loader(sources, tokenizer, layout, shape, Order(layout.num_streams, seed, training.shuffle))


def source_of(section: Training | Validation) -> DataSource:
    return DataSource(**{key: getattr(section, key) for key in ("dataset", "dataset_path", "text_key", "chat")})


def own_slots(plan: BatchPlan, mesh: Mesh, part: tuple[int, int] = (0, 1)) -> OwnSlots:
    """As if all parts were one run, each with as many ranks as this one."""
    number, count = part
    dp, rank = mesh.dims.dp, mesh.batch.get_local_rank()
    return OwnSlots(plan.global_batch_size * count, plan.num_streams * count, number * dp + rank, dp * count)


def shape_of(
    config: Config, given: list[DataSource], seq_len: int, tokenizer: Tokenizer, device: torch.device, pads: bool
) -> tuple[list[DataSource], Shape]:
    """The sources, with what encodes conversations, and what the batches look like."""
    block_causal, pin_memory = config.model.attn_mask_type == "block_causal", device.type == "cuda"
    shape = Shape(seq_len, tokenizer.eos_id, block_causal, pin_memory, pads)
    if not any(source.chat for source in given):
        return given, shape
    from torchtitan.data.chat.sources import open_chats

    given, packer = open_chats(given, config, seq_len, tokenizer)
    return given, shape._replace(packer=packer)


def build_validation_loader(
    config: Config, plan: BatchPlan, tokenizer: Tokenizer, mesh: Mesh, device: torch.device
) -> Loader:
    """The held-out data in file order.

    It ends when no rank has any left; the last batches are filled up with ignored tokens. Its batches are as large as
    the training's, so `validation.steps` batches hold the same text on any number of ranks.
    """
    divided = holds_out(config)
    source = source_of(config.training if divided else config.validation)
    if divided:
        logger.info(
            f"validation reads every 20th document of {source.dataset_path}, and training the others; to validate on "
            "other text, set validation.dataset_path"
        )
    layout = own_slots(plan, mesh)
    given, shape = shape_of(config, [source], config.validation.seq_len, tokenizer, device, pads=True)
    sources = open_sources(given, tokenizer, layout, 1, divided=divided, pads=True)
    return Loader(sources, tokenizer, layout, shape, Order(plan.num_streams, 0, shuffle=False), any_says_so)
