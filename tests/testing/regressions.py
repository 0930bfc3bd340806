"""Thirty seeded regressions of the example loops in docs/examples, to count how many the pytest plugin catches.

They were written down, with the lines that a reviewer would want to be shown, before the plugin ran on any of them. Each is one
edit as it happens in practice: a value that is read back, a lost option, a cast, a list that grows. `right` holds the source
text of the lines that are the right answer. If the edit adds or changes a line, that is this line. If it removes protection
(`no_grad`, pinned memory), it is the line that was protected.

`python -m tests.testing.report` applies each one to a copy of the examples, runs their tests, and writes the record.
`regressions_first.json` is the plugin's first run. Two rules for memory changed after it: the first line that allocates more
is to blame even if it holds nothing at the peak, and baselines also have the bytes of each line at the peak, for lines that
held more at another time. `regressions_before.json` is the run with these rules. Rules for retained and kept graphs and for
unchanged lines followed: `regressions.json` is the run with the present ones.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Regression:
    """An edit of a file in docs/examples: `before`, which occurs once, becomes `after`."""

    name: str
    file: str
    before: str
    after: str
    right: tuple[str, ...]
    also: tuple[tuple[str, str], ...] = ()  # further edits of the file, such as an import


_STEP = "        total += loss.detach()\n"
_EVALUATED = "        right += (logits.argmax(-1) == tokens[:, 1:]).float().mean()\n"
_NEXT = "        tokens = logits[:, -1].argmax(-1, keepdim=True)\n"
_STORED = "        answer[i] = tokens[0, 0]\n"
_BACKWARD = "        loss.backward()\n"

REGRESSIONS = (
    Regression(
        "a stray .item() in a condition",
        "train.py",
        _BACKWARD,
        "        if loss.item() > 1e4:\n            break\n" + _BACKWARD,
        ("if loss.item() > 1e4:",),
    ),
    Regression(
        "losses logged as floats",
        "train.py",
        _STEP,
        _STEP + "        history = [float(loss)]\n",
        ("history = [float(loss)]",),
    ),
    Regression(
        "a tensor in a formatted message",
        "train.py",
        _STEP,
        _STEP + '        print(f"loss {loss:.3f}")\n',
        ('print(f"loss {loss:.3f}")',),
    ),
    Regression(
        "a check for NaN",
        "train.py",
        _BACKWARD,
        "        if torch.isnan(loss):\n            raise ValueError\n" + _BACKWARD,
        ("if torch.isnan(loss):",),
    ),
    Regression(
        "pinned memory lost",
        "train.py",
        "made.append((tokens.pin_memory(), weights.pin_memory()))",
        "made.append((tokens, weights))",
        ("tokens = tokens.to(device, non_blocking=True)", "weights = weights.to(device, non_blocking=True)"),
    ),
    Regression(
        "non_blocking lost",
        "train.py",
        "weights = weights.to(device, non_blocking=True)",
        "weights = weights.to(device)",
        ("weights = weights.to(device)",),
    ),
    Regression(
        "a list of losses that grows",
        "train.py",
        _STEP,
        _STEP.replace("total", "history.append(loss)\n        total"),
        ("history.append(loss)",),
    ),
    Regression("detach lost", "train.py", _STEP, "        total = total + loss\n", ("total = total + loss",)),
    Regression("no_grad lost in evaluation", "train.py", "@torch.no_grad()\n", "", ("logits = model(tokens[:, :-1])",)),
    Regression(
        "weights cast to float64 before the upload",
        "train.py",
        "weights = weights.to(device, non_blocking=True)",
        "weights = weights.double().pin_memory().to(device, non_blocking=True).float()",
        ("weights = weights.double().pin_memory().to(device, non_blocking=True).float()",),
    ),
    Regression(
        "logits cast to float64",
        "train.py",
        "    losses = F.cross_entropy(logits.flatten(0, 1),",
        "    logits = logits.double()\n    losses = F.cross_entropy(logits.flatten(0, 1),",
        ("logits = logits.double()",),
    ),
    Regression(
        "gradients zeroed instead of freed",
        "train.py",
        "optimizer.zero_grad()",
        "optimizer.zero_grad(set_to_none=False)",
        ("optimizer.zero_grad(set_to_none=False)",),
    ),
    Regression(
        "a retained graph",
        "train.py",
        "loss.backward()",
        "loss.backward(retain_graph=True)",
        ("loss.backward(retain_graph=True)",),
    ),
    Regression(
        "clipping that checks for infinity",
        "train.py",
        "clip_grad_norm_(model.parameters(), 1.0)",
        "clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)",
        ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)",),
    ),
    Regression(
        "a constant uploaded in each step",
        "train.py",
        "    return (losses * weights.flatten()).mean()",
        "    scale = torch.tensor(0.5, device=losses.device)\n    return (losses * scale * weights.flatten()).mean()",
        ("scale = torch.tensor(0.5, device=losses.device)",),
    ),
    Regression(
        "a mask made on the host",
        "model.py",
        "        attended = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)",
        "        mask = torch.ones(length, k.shape[2]).tril(k.shape[2] - length).bool().to(x.device)\n"
        "        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)",
        ("mask = torch.ones(length, k.shape[2]).tril(k.shape[2] - length).bool().to(x.device)",),
    ),
    Regression(
        "attention written out",
        "model.py",
        "        attended = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)",
        "        attended = torch.softmax(q @ k.transpose(2, 3) / q.shape[3] ** 0.5, -1) @ v",
        ("attended = torch.softmax(q @ k.transpose(2, 3) / q.shape[3] ** 0.5, -1) @ v",),
    ),
    Regression(
        "a needless clone",
        "model.py",
        "            x = block(x, cache)",
        "            x = block(x.clone(), cache)",
        ("x = block(x.clone(), cache)",),
    ),
    Regression(
        "outputs of an evaluation kept",
        "train.py",
        _EVALUATED,
        _EVALUATED + "        outputs.append(logits)\n",
        ("outputs.append(logits)",),
    ),
    Regression(
        "an evaluation on the host",
        "train.py",
        _EVALUATED,
        _EVALUATED.replace("logits.argmax(-1)", "logits.cpu().argmax(-1).to(device)"),
        (_EVALUATED.replace("logits.argmax(-1)", "logits.cpu().argmax(-1).to(device)").strip(),),
    ),
    Regression(
        "a token read back to look for the end",
        "serve.py",
        _STORED,
        _STORED + "        if tokens.item() == 0:\n            break\n",
        ("if tokens.item() == 0:",),
    ),
    Regression(
        "tokens streamed one by one",
        "serve.py",
        _STORED,
        _STORED + "        list(map(str, tokens[0].tolist()))\n",
        ("list(map(str, tokens[0].tolist()))",),
    ),
    Regression(
        "a cache that is concatenated",
        "model.py",
        "        held = self.memory[layer, :, :, :, :end].to(keys.dtype)\n        return held[0], held[1]\n",
        '        old = getattr(self, f"old{layer}", keys[:, :, :0].expand(2, -1, -1, -1, -1))\n'
        "        grown = torch.cat([old, torch.stack([keys, values])], dim=3)\n"
        '        setattr(self, f"old{layer}", grown)\n'
        "        return grown[0], grown[1]\n",
        ("grown = torch.cat([old, torch.stack([keys, values])], dim=3)",),
    ),
    Regression("no_grad lost in serving", "serve.py", "@torch.no_grad()\n", "", ("logits = model(tokens, cache)",)),
    Regression(
        "the position uploaded for each token",
        "model.py",
        "        places = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)",
        "        places = torch.tensor(list(range(begin, begin + tokens.shape[1])), device=tokens.device)",
        ("places = torch.tensor(list(range(begin, begin + tokens.shape[1])), device=tokens.device)",),
    ),
    Regression(
        "logits of the whole prompt",
        "model.py",
        "            x = x[:, -1:]\n        return self.head(self.norm(x))",
        "            return self.head(self.norm(x))\n        return self.head(self.norm(x))",
        ("return self.head(self.norm(x))",),
    ),
    Regression(
        "a choice by a mask",
        "serve.py",
        _NEXT,
        "        likely = logits[logits > 0]\n" + _NEXT,
        ("likely = logits[logits > 0]",),
    ),
    Regression(
        "sampling on the host",
        "serve.py",
        _NEXT,
        "        tokens = logits[:, -1].cpu().argmax(-1, keepdim=True).to(device)\n",
        ("tokens = logits[:, -1].cpu().argmax(-1, keepdim=True).to(device)",),
    ),
    Regression(
        "a cache in float32",
        "model.py",
        "device=device, dtype=torch.bfloat16)",
        "device=device)",
        ("self.memory = torch.zeros(shape, device=device)",),
    ),
    Regression(
        "caches kept after their reply",
        "serve.py",
        "    return answer.tolist()",
        "    FINISHED.append(cache)\n    return answer.tolist()",
        ("FINISHED.append(cache)",),
    ),
)

# Lists that grow need a list: added where the loop or the module begins.
_LISTS = {
    "a list of losses that grows": ("    total = torch.zeros((), device=device)\n", "    history = []\n"),
    "outputs of an evaluation kept": ("    right = torch.zeros((), device=device)\n", "    outputs = []\n"),
    "caches kept after their reply": ("from model import Cache, Model\n", "\nFINISHED = []\n"),
}


def edited(regression: Regression, text: str) -> str:
    """Return the text of the regression's file with the regression in it."""
    edits = [*regression.also, (regression.before, regression.after)]
    if regression.name in _LISTS:
        line, made = _LISTS[regression.name]
        edits.append((line, line + made))
    for before, after in edits:
        if text.count(before) != 1:
            raise ValueError(f"{regression.name}: {before!r} occurs {text.count(before)} times in {regression.file}")
        text = text.replace(before, after)
    return text
