"""Keys of the model: its family and shape, and how its layers are recomputed, compiled and quantized."""

from typing import Annotated, Literal

from pydantic import Field

from torchtitan.config.section import Fraction, PositiveFloat, PositiveInt, Section


class RopeScaling(Section):
    """How low rotary frequencies are stretched for contexts longer than those of the first training. Not in
    torchtitan."""

    factor: PositiveFloat = 8.0
    """Low frequencies are divided by this number."""

    low_freq_factor: PositiveFloat = 1.0
    """A frequency is low if it makes fewer than this many turns in `original_max_seq_len` tokens."""

    high_freq_factor: PositiveFloat = 4.0
    """A frequency that makes more than this many turns in `original_max_seq_len` tokens is not changed; frequencies
    between low and high are interpolated."""

    original_max_seq_len: PositiveInt = 8192
    """Longest sequence, in tokens, of the first training."""


class Model(Section):
    """Which model to train."""

    name: str = "llama3"
    """Family of the model: a name that the recipe knows (the error for a wrong name lists them all), or
    `package.module:SPEC` or `path/to/file.py:SPEC`, a ModelSpec that is imported when the run starts. A module or file
    is looked for beside the TOML first."""

    flavor: str = "debugmodel"
    """Size of the model: one that the family names, for example 8B, or `config.json` for the shape that config.json in
    `hf_assets_path` describes. The keys from `dim` to `max_seq_len` override single values of it."""

    hf_assets_path: str = "./tests/assets/tokenizer"
    """Folder or file of the tokenizer: Hugging Face's tokenizer.json, or a tokenizer.model of tiktoken or
    SentencePiece. With `flavor = "config.json"` the folder describes the model too."""

    chat_template: str | None = None
    """File with the Jinja template that conversations follow. None: that of `hf_assets_path`. Not in torchtitan."""

    dim: PositiveInt | None = None
    """Width of the model, the size of the vector that stands for a token between layers. None: the flavor's. A
    complete set (`dim`, `n_layers`, `n_heads`, `n_kv_heads`, `hidden_dim`, and `head_dim` where the family needs it)
    replaces the flavor altogether, including its `rope_scaling`. Not in torchtitan."""

    n_layers: PositiveInt | None = None
    """Number of transformer blocks. None: the flavor's. Not in torchtitan."""

    n_heads: PositiveInt | None = None
    """Number of query heads in attention. None: the flavor's. Not in torchtitan."""

    n_kv_heads: PositiveInt | None = None
    """Number of key and value heads in attention; it must divide `n_heads`. None: the flavor's. Not in torchtitan."""

    head_dim: PositiveInt | None = None
    """Width of an attention head. None: the flavor's. Not in torchtitan."""

    hidden_dim: PositiveInt | None = None
    """Width of the hidden layer in each feed-forward network. None: the flavor's. Not in torchtitan."""

    vocab_size: PositiveInt | None = None
    """Number of rows of the embedding, at least the tokenizer's size. None: the flavor's, or the tokenizer's size
    where the flavor leaves it open. Not in torchtitan."""

    norm_eps: PositiveFloat | None = None
    """Each norm adds this number before it divides, so that it never divides by zero. None: the flavor's. Not in
    torchtitan."""

    rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies; a larger base suits longer contexts. None: the flavor's. Not in torchtitan."""

    rope_scaling: RopeScaling | None = None
    """Stretches the rotary frequencies for longer contexts: a `[model.rope_scaling]` table, in the TOML file only.
    None: the flavor's. Not in torchtitan."""

    tied_embeddings: bool | None = None
    """Whether the embedding and the output layer share one weight. None: the flavor's. Not in torchtitan."""

    max_seq_len: PositiveInt | None = None
    """Longest sequence, in tokens, that the model takes; a longer `seq_len` is refused. None: the flavor's. Not in
    torchtitan."""

    num_experts: PositiveInt | None = None
    """Number of experts in each layer, where the family has experts. None: the flavor's. Not in torchtitan."""

    experts_per_token: PositiveInt | None = None
    """Number of experts that each token uses. None: the flavor's. Not in torchtitan."""

    balance: Literal["loss", "bias", "none"] | None = None
    """What keeps experts equally busy: an added `loss`, a `bias` that follows the load, or nothing (`none`). None: the
    flavor's. Not in torchtitan."""

    balance_rate: PositiveFloat | None = None
    """Coefficient of that loss, or how far a step moves a bias. None: the flavor's. Not in torchtitan."""

    attn_mask_type: Literal["causal", "block_causal"] = "causal"
    """Which tokens a token attends to, besides itself: `causal` all earlier ones of its sequence, `block_causal` only
    the earlier ones of its own document. Not in torchtitan."""

    converters: list[Literal["quantize.linear.float8"]] = []
    """Sections that replace layers of the model before training. `["quantize.linear.float8"]` computes linear layers
    in float8."""


class ActivationCheckpoint(Section):
    """Recompute activations in backward instead of keeping them in memory."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    """What backward recomputes: `full` every block, `selective` what `selective_ac_option` says, `memory_budget` what
    the compiler chooses. `none` is the fastest and needs the most memory."""

    selective_ac_option: str = "2"
    """With `mode = "selective"`: a number n recomputes every n-th block. `"op"` recomputes all operations of every
    block, except attention, reduce-scatters and every second matrix product."""

    early_stop: bool = False
    """Ends the recomputation of a block as soon as all that backward needs is there. The result is the same."""

    memory_budget: Fraction = 0.5
    """With `mode = "memory_budget"`: how much activation memory the compiler may use, from 0 (as with `full`) to
    1 (as with `none`). It needs `compile.enable`."""

    preserve_rng_state: bool = True
    """Recomputes with the random state of the first pass. Set it to false only if the model draws no random
    numbers."""

    determinism_check: Literal["default", "none"] = "default"
    """Compares the shapes and types of recomputed tensors with those of the first pass; `none` leaves this check
    out."""

    @property
    def by_operation(self) -> bool:
        """Whether single operations of each block are recomputed, instead of whole blocks."""
        return self.mode == "selective" and self.selective_ac_option == "op"


class Compile(Section):
    """Whether and how torch.compile is used."""

    enable: bool = False
    """Compiles the components below: the first step takes longer, the others are faster."""

    components: list[Literal["model", "loss"]] = ["model", "loss"]
    """What is compiled: `model` stands for each transformer block, `loss` for the loss."""

    backend: str = "inductor"
    """Backend of torch.compile. Change it to debug."""

    @property
    def model(self) -> bool:
        """Whether the transformer blocks are compiled."""
        return self.enable and "model" in self.components


class Float8(Section):
    """Linear layers that torchao computes in float8, if `model.converters` names this section."""

    enable_fsdp_float8_all_gather: bool = False
    """Casts weights to float8 before FSDP gathers them, which makes the gather smaller. It needs one scale per tensor
    (`recipe_name`)."""

    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Computes the scales of all weights at once after the update, instead of each before its gather. It needs
    `enable_fsdp_float8_all_gather`."""

    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """Which values share a scale: `tensorwise` (the same as None) has one scale per tensor, `rowwise` one per row, and
    `rowwise_with_gw_hp` one per row and computes the gradients of weights in high precision."""

    filter_fqns: list[str] = []
    """Leaves out layers whose name contains one of these texts. `"auto_filter_small_kn"` leaves out layers that are
    too small to gain."""

    emulate: bool = False
    """Computes as if in float8 on any device, slowly, for tests. The model must not be compiled."""


class QuantizeLinear(Section):
    """Ways to compute linear layers in low precision."""

    float8: Float8 = Float8()


class Quantize(Section):
    """Low precision."""

    linear: QuantizeLinear = QuantizeLinear()


class Lora(Section):
    """An adapter (LoRA): two small matrices beside linear layers, which are trained while the model is frozen."""

    rank: PositiveInt | None = None
    """Trains an adapter of this rank, as 16. None: trains the model itself. Not in torchtitan."""

    alpha: PositiveFloat = 16.0
    """The adapter is scaled by `alpha / rank`. Not in torchtitan."""

    rslora: bool = False
    """Scales by `alpha / sqrt(rank)` instead, for large ranks (arXiv:2312.03732). Not in torchtitan."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that training sets to zero. What it draws depends on the layout. Not in
    torchtitan."""

    targets: list[str] = []
    """Linear layers that get an adapter, by name or end of a name, with `*`: ["wq", "layers.3", "layers.*.w1"]. []: all
    of the blocks. Not in torchtitan."""

    initial_load_path: str | None = None
    """Folder of an adapter that `peft` or `convert` wrote, with which a new run begins. Not in torchtitan."""
