"""The Llama against transformers' on the same weights, its parameter counts, its masks, and its flavors."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from torchtitan.config.schema import Model, RopeScaling
from torchtitan.models.decoder.model import Transformer, initialize
from torchtitan.models.families import find_model
from torchtitan.models.layers import CausalAttention, exchange_attention, rope_table
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.spec import LLAMA3
from torchtitan.models.spec import Blueprint
from torchtitan.parallel.cpu_attention import AttentionByProducts, causal_attention
from torchtitan.parallel.documents.attention import DocumentAttention

HF = LLAMA3.hugging_face()
TINY = LlamaArgs(dim=64, n_layers=3, n_heads=4, n_kv_heads=4, hidden_dim=160, vocab_size=97, rope_theta=10000.0)
# The stretched frequencies differ from the plain ones within 64 positions only if the original length is short.
SCALED = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=32)

SHAPES = {
    "plain": TINY,
    "grouped queries": replace(TINY, n_kv_heads=2),
    "scaled rotation": replace(TINY, rope_scaling=SCALED, rope_theta=500000.0),
    "tied embeddings": replace(TINY, tied_embeddings=True),
    "all of it": replace(TINY, n_kv_heads=1, rope_scaling=SCALED, tied_embeddings=True),
}

PARAMETER_COUNTS = {
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("llama3", "1B"): 1_235_814_400,
    ("llama3", "3B"): 3_212_749_824,
    ("llama2", "7B"): 6_738_415_616,
    ("llama2", "13B"): 13_015_864_320,
    ("llama2", "70B"): 68_976_648_192,
}


def random_model(args: LlamaArgs) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(args)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.1)
    return model


def transformers_twin(model: Transformer) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    args, scaling = model.args, model.args.rope_scaling
    rope: dict = {"rope_type": "default", "rope_theta": args.rope_theta}
    if scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        intermediate_size=args.hidden_dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        rms_norm_eps=args.norm_eps,
        tie_word_embeddings=args.tied_embeddings,
        max_position_embeddings=512,
        rope_parameters=rope,
        attn_implementation="eager",
    )
    twin = LlamaForCausalLM(config)
    weights = {HF.to_name(name): parameter.detach().clone() for name, parameter in model.named_parameters()}
    missing, unexpected = twin.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return twin


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_gradients_equal_those_of_transformers(shape: str) -> None:
    model = random_model(SHAPES[shape])
    twin = transformers_twin(model)
    tokens = torch.randint(97, (2, 64))
    labels = tokens.roll(-1, dims=1)

    ours, theirs = model(tokens), twin(tokens).logits
    assert (ours - theirs).abs().max() <= 1e-4
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))

    for logits in (ours, theirs):
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    their_gradients = {name: p.grad for name, p in twin.named_parameters()}
    for name, parameter in model.named_parameters():
        assert (parameter.grad - their_gradients[HF.to_name(name)]).abs().max() <= 1e-4, name


@pytest.mark.parametrize("flavor", PARAMETER_COUNTS, ids=" ".join)
def test_a_flavor_has_exactly_its_published_number_of_parameters(flavor: tuple[str, str]) -> None:
    blueprint = find_model(Model(name=flavor[0], flavor=flavor[1]))
    with torch.device("meta"):
        model = blueprint.spec.build(blueprint.shape)
    built = sum(p.numel() for p in model.parameters())
    assert built == blueprint.num_parameters == PARAMETER_COUNTS[flavor]


def test_flops_of_a_token_of_8b_are_those_torchtitan_counts() -> None:
    assert find_model(Model(flavor="8B")).flops_per_token(8192) / 1e9 == pytest.approx(57.9, abs=0.05)


def test_a_tied_embedding_is_counted_once_and_multiplied_once() -> None:
    untied, tied = (Blueprint("", LLAMA3, replace(TINY, tied_embeddings=is_tied)) for is_tied in (False, True))
    assert untied.num_parameters - tied.num_parameters == 97 * 64
    assert untied.flops_per_token(128) == tied.flops_per_token(128)


def test_documents_of_a_sequence_do_not_see_each_other() -> None:
    model = random_model(SHAPES["grouped queries"])
    first, second = torch.randint(97, (1, 20)), torch.randint(97, (1, 12))
    apart = [model(first), model(second)]
    exchange_attention(model, lambda causal: DocumentAttention(causal, by_mask=False))
    together = model(torch.cat([first, second], dim=1), mask=torch.tensor([[0, 20, 32]]))
    assert torch.allclose(together[:, :20], apart[0], atol=1e-5)
    # Rotation is relative, so the second document's place in the sequence changes nothing.
    assert torch.allclose(together[:, 20:], apart[1], atol=1e-4)
    assert (model(first) == apart[0]).all()  # a single text needs no starts


@pytest.mark.parametrize("seq_len", [3, 128, 300, 1100])  # one piece, and the last one shorter than the others
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
def test_attention_by_products_equals_torchs(seq_len: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    shapes, results = [(2, seq_len, 4, 16), (2, seq_len, 2, 16), (2, seq_len, 2, 16)], []
    drawn, arriving = [torch.randn(shape) for shape in shapes], torch.randn(shapes[0])
    for attend, type_ in ((lambda *inputs: CausalAttention()(*inputs, None), torch.float32), (causal_attention, dtype)):
        q, k, v = (tensor.to(dtype).to(type_).requires_grad_() for tensor in drawn)
        out = attend(q, k, v)
        out.backward(arriving.to(type_))
        results.append([out, q.grad, k.grad, v.grad])
    for reference, ours in zip(*results, strict=True):
        assert ours.dtype == dtype
        assert (ours - reference).abs().max() < tolerance * reference.abs().max()


def test_compiled_what_backward_needs_grows_with_the_sequence_and_not_with_its_square() -> None:
    compiled = torch.compile(causal_attention, backend="aot_eager_decomp_partition", dynamic=False)
    saved = []
    for seq_len in (256, 1024):
        q, k, v = (torch.randn(1, seq_len, heads, 16, requires_grad=True) for heads in (2, 1, 1))
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            compiled(q, k, v)
        saved.append(sum(sizes))
    assert 0 < saved[1] < 4.5 * saved[0]


def test_what_is_long_is_left_to_torchs_kernel() -> None:
    attend = AttentionByProducts(lambda q, k, v, mask: "kernel")
    q, kv = torch.randn(1, 8, 2, 4), torch.randn(1, 8, 1, 4)
    assert attend(q, kv, kv, None).shape == q.shape
    assert attend(torch.randn(1, 5000, 2, 4), kv, kv, None) == "kernel"


def test_positions_say_where_in_the_text_a_token_stands() -> None:
    model = random_model(TINY)
    tokens = torch.randint(97, (1, 16))
    assert torch.equal(model(tokens), model(tokens, positions=torch.arange(16)))
    assert torch.allclose(model(tokens), model(tokens, positions=torch.arange(16) + 100), atol=1e-4)
    assert not torch.allclose(model(tokens), model(tokens, positions=torch.arange(16) * 3), atol=1e-2)


def test_a_part_without_embedding_and_output_works_as_a_stage() -> None:
    whole = random_model(TINY)
    first, last = random_model(TINY), random_model(TINY)
    first.norm = first.output = last.tok_embeddings = None
    del first.layers["2"], last.layers["0"], last.layers["1"]
    tokens = torch.randint(97, (2, 8))
    assert torch.equal(whole(tokens), last(first(tokens)))
    assert {*first.state_dict(), *last.state_dict()} == {*whole.state_dict()}


def test_rotation_is_computed_in_float32_whatever_the_activations_are() -> None:
    cos, sin = rope_table(torch.arange(8), TINY.head_size, TINY.rope_theta)
    assert cos.dtype == sin.dtype == torch.float32


def test_a_shape_whose_heads_do_not_come_out_even_is_refused() -> None:
    shape = SHAPES[next(iter(SHAPES))]
    with pytest.raises(ValueError, match="dim = 200 with n_heads = 6: .* use a multiple of 12"):
        replace(shape, dim=200, n_heads=6)
    with pytest.raises(ValueError, match="n_kv_heads = 4 does not divide n_heads = 6"):
        replace(shape, dim=192, n_heads=6, n_kv_heads=4)


def test_a_weight_that_hugging_face_has_no_name_for_is_refused() -> None:
    for name in ("layers.0.attention.q_norm.weight", "value_head.weight"):
        with pytest.raises(ValueError, match=f"{name} has no name in Hugging Face's Llama; give it one"):
            HF.to_name(name)


def test_initial_weights_depend_on_the_name_and_shrink_with_depth() -> None:
    weight = torch.empty(400, 400)
    spreads = {}
    for name in ("tok_embeddings.weight", "layers.0.attention.wq.weight", "layers.0.attention.wo.weight",
                 "layers.2.attention.wo.weight", "output.weight"):  # fmt: skip
        initialize(name, weight, TINY, torch.Generator().manual_seed(0))
        spreads[name] = weight.std().item()
        assert weight.abs().max() <= 3.01 * spreads[name] / 0.98
    assert spreads["tok_embeddings.weight"] == pytest.approx(1.0, rel=0.02)
    assert spreads["layers.0.attention.wq.weight"] == pytest.approx(0.02, rel=0.02)
    assert spreads["layers.2.attention.wo.weight"] == pytest.approx(
        spreads["layers.0.attention.wo.weight"] / 3**0.5, rel=0.01
    )
    assert spreads["output.weight"] == pytest.approx(64**-0.5, rel=0.02)
    initialize("layers.0.ffn_norm.weight", weight, TINY, torch.Generator())
    assert (weight == 1).all()


def test_the_vocabulary_is_the_configs_else_the_flavors_else_the_tokenizers() -> None:
    assert find_model(Model(flavor="debugmodel")).with_vocabulary(50).shape.vocab_size == 50
    assert find_model(Model(flavor="60M")).with_vocabulary(50).shape.vocab_size == 32000
    assert find_model(Model(flavor="60M", vocab_size=128)).with_vocabulary(50).shape.vocab_size == 128


def test_a_tokenizer_larger_than_the_embedding_is_refused() -> None:
    with pytest.raises(ValueError, match="the tokenizer has 98 ids, but llama3 60M has only 60 rows .* = 98 or more"):
        find_model(Model(flavor="60M", vocab_size=60)).with_vocabulary(98)


@pytest.mark.parametrize("flavor", ["1B", "8B"])
def test_the_rotation_is_that_of_transformers_to_the_bit_at_far_positions_too(flavor: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    args = LLAMA3.flavors[flavor]
    config = LlamaConfig(**HF.to_config(args, "float32", 1, 2))
    positions = torch.tensor([[0, 1, 5_000, 120_000, args.max_seq_len - 1]])
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    ours = rope_table(positions, args.head_size, args.rope_theta, args.rope_scaling)
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(torch.cat((own, own), dim=-1), other)
