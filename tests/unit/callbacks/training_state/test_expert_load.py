"""The load of each expert, compared with the choices of the routers."""

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from mfwrap.callbacks.training_state.expert_load import ExpertLoad, drop_rate, imbalance
from support.versions import needs

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def mixtral() -> MixtralForCausalLM:
    """Return a small Mixtral of four experts, two for each token."""
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)).train()


def gpt_oss() -> GptOssForCausalLM:
    """Return a small GPT-OSS of four experts."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=8, rope_parameters=rope
    )
    model = GptOssForCausalLM(config).train()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.router.weight)
    return model


def deepseek() -> DeepseekV3ForCausalLM:
    """Return a small DeepSeek with a dense first layer and grouped routing."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **SIZES,
        moe_intermediate_size=8,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    )
    return DeepseekV3ForCausalLM(config).train()


def chosen_by_routers(model, batches) -> dict[str, torch.Tensor]:
    """Return the share of each expert, counted from the inputs of the expert modules."""
    counts = {}

    def note(name):
        def hook(module, inputs):
            for expert in range(module.num_experts):
                counts.setdefault(name, [0] * module.num_experts)
                counts[name][expert] += (inputs[1] == expert).sum().item()

        return hook

    handles = [
        module.register_forward_pre_hook(note(name))
        for name, module in model.named_modules()
        if name.endswith("experts") and "shared" not in name
    ]
    for batch in batches:
        model(input_ids=batch)
    for handle in handles:
        handle.remove()
    return {name: torch.tensor(each) / sum(each) for name, each in counts.items()}


@needs("transformers", "5.0", "a module with the experts of a layer")
@pytest.mark.parametrize("make", [mixtral, gpt_oss, deepseek])
def test_shares(make):
    """Each layer's shares cover all micro-batches, but no evaluation and no later forward."""
    model = make()
    batches = [torch.randint(32, (2, 6)), torch.randint(32, (1, 5))]
    load = ExpertLoad(model)
    load.begin()
    for batch in batches:
        model(input_ids=batch)
    model.eval()
    model(input_ids=batches[0])
    shares = load.end()
    model.train()
    expected = chosen_by_routers(model, batches)

    assert list(shares) == list(expected)
    assert len(shares) == (1 if make is deepseek else 2)
    for name, each in shares.items():
        assert torch.allclose(each, expected[name])
        assert each.std() > 0
    assert load.end() == {}


@needs("transformers", "5.0", "a module with the experts of a layer")
def test_against_the_logits_of_the_router():
    """Mixtral's shares agree with the two highest router logits of each token."""
    model, tokens = mixtral(), torch.randint(32, (3, 6))
    load = ExpertLoad(model)
    load.begin()
    logits = model(input_ids=tokens, output_router_logits=True).router_logits
    shares = load.end()

    assert len(logits) == len(shares) == 2
    for each, share in zip(logits, shares.values(), strict=True):
        chosen = each.topk(2).indices
        assert torch.equal(share, torch.bincount(chosen.reshape(-1), minlength=4) / chosen.numel())


def test_a_forward_that_is_repeated_in_the_backward():
    """Gradient checkpointing does not change the shares."""
    shares = []
    for checkpointing in (False, True):
        model = mixtral()
        if checkpointing:
            renamed = getattr(model, "activation_checkpointing_enable", None)
            (renamed or model.gradient_checkpointing_enable)()
        load = ExpertLoad(model)
        load.begin()
        torch.manual_seed(1)
        tokens = torch.randint(32, (2, 6))
        model(input_ids=tokens, labels=tokens).loss.backward()
        shares.append(load.end())

    assert shares[0].keys() == shares[1].keys()
    for name, each in shares[0].items():
        assert torch.equal(each, shares[1][name])


@pytest.mark.parametrize(
    ("shares", "busiest", "dropped"),
    [([0.25] * 4, 1.0, 0.0), ([1.0, 0, 0, 0], 4.0, 0.625), ([0.5, 0.4, 0.1, 0], 2.0, 0.15)],
)
def test_balance(shares, busiest, dropped):
    """Imbalance and drop rate, at a capacity of 1.5, agree with their formulas."""
    tensor = torch.tensor(shares)

    assert imbalance(tensor).item() == pytest.approx(busiest)
    assert drop_rate(tensor, 1.5).item() == pytest.approx(dropped)
