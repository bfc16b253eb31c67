"""GLM-4.5 with its multi-token prediction module in plain NumPy, for one sequence.

It follows DeepSeek-V3's technical report, section 2.2, with the tensor names of published checkpoints.
"""

import numpy as np


def ahead(tensors, raw, tokens, following):
    """Return logits `[T, vocab_size]` of the next tokens, and of the tokens after them."""
    x = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(raw["num_hidden_layers"]):
        x = block(tensors, raw, f"model.layers.{layer}", x)
    x = norm(x, tensors["model.norm.weight"])
    first, one = x @ tensors["lm_head.weight"].T, f"model.layers.{raw['num_hidden_layers']}"
    embedded = norm(tensors["model.embed_tokens.weight"][following], tensors[f"{one}.enorm.weight"])
    both = np.concatenate([embedded, norm(x, tensors[f"{one}.hnorm.weight"])], -1)
    y = block(tensors, raw, one, both @ tensors[f"{one}.eh_proj.weight"].T)
    return first, norm(y, tensors[f"{one}.shared_head.norm.weight"]) @ tensors["lm_head.weight"].T


def norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def block(tensors, raw, name, x):
    x = x + attention(tensors, raw, f"{name}.self_attn", norm(x, tensors[f"{name}.input_layernorm.weight"]))
    between = norm(x, tensors[f"{name}.post_attention_layernorm.weight"])
    if f"{name}.mlp.gate.weight" not in tensors:
        return x + network(tensors, f"{name}.mlp", between)
    return x + np.stack([mixture(tensors, raw, f"{name}.mlp", token) for token in between])


def attention(tensors, raw, name, x):
    heads, groups, dim = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
    q, k, v = (x @ tensors[f"{name}.{kind}_proj.weight"].T for kind in "qkv")
    q, k, v = q.reshape(-1, heads, dim), k.reshape(-1, groups, dim), v.reshape(-1, groups, dim)
    q, k = rotated(norm(q, tensors[f"{name}.q_norm.weight"])), rotated(norm(k, tensors[f"{name}.k_norm.weight"]))
    y = np.zeros_like(q)
    for t, head in np.ndindex(q.shape[:2]):
        at = head // (heads // groups)
        shares = np.exp(k[: t + 1, at] @ q[t, head] / np.sqrt(dim))
        y[t, head] = shares / shares.sum() @ v[: t + 1, at]
    return y.reshape(len(x), -1) @ tensors[f"{name}.o_proj.weight"].T


def rotated(x):
    """Rotate the first half of the channels; the channels of a pair are a quarter apart."""
    turned, quarter = x.copy(), x.shape[-1] // 4
    angles = np.arange(len(x))[:, None, None] * 1e4 ** -(np.arange(quarter) / quarter)
    a, b = x[..., :quarter], x[..., quarter : 2 * quarter]
    turned[..., :quarter] = a * np.cos(angles) - b * np.sin(angles)
    turned[..., quarter : 2 * quarter] = b * np.cos(angles) + a * np.sin(angles)
    return turned


def network(tensors, name, x):
    gate, up, down = (tensors[f"{name}.{kind}_proj.weight"].T for kind in ("gate", "up", "down"))
    between = x @ gate
    return (between / (1 + np.exp(-between)) * (x @ up)) @ down


def mixture(tensors, raw, name, token):
    scores = 1 / (1 + np.exp(-token @ tensors[f"{name}.gate.weight"].T))
    biased = (scores + tensors[f"{name}.gate.e_score_correction_bias"]).reshape(raw["n_group"], -1)
    best = np.sort(biased, 1)[:, -2:].sum(1).argsort()[-raw["topk_group"] :]
    allowed = np.full_like(biased, -np.inf)
    allowed[best] = biased[best]
    chosen = allowed.reshape(-1).argsort()[-raw["num_experts_per_tok"] :]
    weights = scores[chosen] / scores[chosen].sum() * raw["routed_scaling_factor"]
    routed = sum(w * network(tensors, f"{name}.experts.{e}", token) for e, w in zip(chosen, weights, strict=True))
    return routed + network(tensors, f"{name}.shared_experts", token)
