"""Fifteen further regressions of other kinds, and eight harmless edits, of the example loops in docs/examples.

After the first thirty regressions, the plugin's rules were changed until they caught more of them, so the rules are fitted to
that list. These edits were written down before those changes. `more_regressions_before.json` is the run with the old rules, and
`more_regressions.json` the run with the present ones.

`right` follows the same rule as in `regressions.py`. If an edit changes a value that a later line copies or allocates, this
later line is right, too. A harmless edit copies no more and holds no more than before, so a test must not fail because of it.
"""

from __future__ import annotations

from tests.testing.regressions import Regression

_STEP = "        total += loss.detach()\n"
_BACKWARD = "        loss.backward()\n"
_STORED = "        answer[i] = tokens[0, 0]\n"
_RETURN = "    return answer.tolist()"
_TOTAL = "    total = torch.zeros((), device=device)\n"
_IMPORT = "from model import Cache, Model\n"
_LOSSES = '    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")\n'
_MEAN = "    return (losses * weights.flatten()).mean()\n"
_EVALUATED = "        right += (logits.argmax(-1) == tokens[:, 1:]).float().mean()\n"

MORE = (
    Regression(
        "a synchronize for a timer",
        "train.py",
        _BACKWARD,
        _BACKWARD + "        torch.get_device_module(device).synchronize()\n",
        ("torch.get_device_module(device).synchronize()",),
    ),
    Regression(
        "a comparison of two tensors",
        "train.py",
        _BACKWARD,
        "        assert torch.equal(loss, loss + 0)\n" + _BACKWARD,
        ("assert torch.equal(loss, loss + 0)",),
    ),
    Regression(
        "a loop over a tensor on the GPU",
        "serve.py",
        "    for i in range(number):\n",
        "    for i in torch.arange(number, device=device):\n",
        ("for i in torch.arange(number, device=device):", "answer[i] = tokens[0, 0]"),
    ),
    Regression(
        "a snapshot of the weights in each step",
        "train.py",
        _STEP,
        _STEP + "        best = {name: value.clone() for name, value in model.state_dict().items()}\n",
        ("best = {name: value.clone() for name, value in model.state_dict().items()}",),
    ),
    Regression(
        "activations kept by an attribute",
        "model.py",
        "        return x + self.down(F.gelu(self.up(self.norm2(x))))\n",
        "        self.last = x + self.down(F.gelu(self.up(self.norm2(x))))\n        return self.last\n",
        ("self.last = x + self.down(F.gelu(self.up(self.norm2(x))))",),
    ),
    Regression(
        "a cycle of references",
        "serve.py",
        "    cache = Cache(1, device)\n",
        "    cache = Cache(1, device)\n    cache.owner = cache\n",
        ("cache.owner = cache",),
    ),
    Regression(
        "an error kept with its frames",
        "serve.py",
        _RETURN,
        "    try:\n        model.vocabulary\n    except AttributeError as error:\n        ERRORS.append(error)\n" + _RETURN,
        ("ERRORS.append(error)",),
        ((_IMPORT, _IMPORT + "\nERRORS = []\n"),),
    ),
    Regression(
        "a third state of the optimizer",
        "train.py",
        "torch.optim.AdamW(model.parameters(), lr=1e-3)",
        "torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)",
        ("optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)",),
    ),
    Regression(
        "a prompt padded to the context",
        "serve.py",
        "torch.tensor([prompt], device=device)",
        "torch.tensor([prompt + [0] * (CONTEXT - number - len(prompt))], device=device)",
        ("tokens = torch.tensor([prompt + [0] * (CONTEXT - number - len(prompt))], device=device)",),
        ((_IMPORT, "from model import CONTEXT, Cache, Model\n"),),
    ),
    Regression(
        "logits read at the end instead of tokens",
        "serve.py",
        _RETURN,
        "    return answer.cpu().argmax(-1).tolist()",
        ("answer = torch.empty(number, VOCABULARY, device=device)", "return answer.cpu().argmax(-1).tolist()"),
        (
            (_IMPORT, "from model import VOCABULARY, Cache, Model\n"),
            ("torch.empty(number, dtype=torch.long, device=device)", "torch.empty(number, VOCABULARY, device=device)"),
            (_STORED, "        answer[i] = logits[0, -1]\n"),
        ),
    ),
    Regression(
        "a loss with one-hot targets",
        "train.py",
        _LOSSES,
        "    targets = F.one_hot(tokens[:, 1:], VOCABULARY).float()\n"
        "    losses = -(F.log_softmax(logits, -1) * targets).sum(-1).flatten()\n",
        (
            "targets = F.one_hot(tokens[:, 1:], VOCABULARY).float()",
            "losses = -(F.log_softmax(logits, -1) * targets).sum(-1).flatten()",
        ),
    ),
    Regression(
        "an index in a Python list",
        "model.py",
        "            x = x[:, -1:]\n",
        "            x = x[:, [-1]]\n",
        ("x = x[:, [-1]]",),
    ),
    Regression(
        "gradients with a graph of their own",
        "train.py",
        "loss.backward()",
        "loss.backward(create_graph=True)",
        ("loss.backward(create_graph=True)",),
    ),
    Regression(
        "a moving average of the loss",
        "train.py",
        _STEP,
        _STEP + "        average = 0.9 * average + 0.1 * loss\n",
        ("average = 0.9 * average + 0.1 * loss",),
        ((_TOTAL, _TOTAL + "    average = 0.0\n"),),
    ),
    Regression(
        "gradients freed after the next forward pass",
        "train.py",
        _BACKWARD,
        "        optimizer.zero_grad()\n" + _BACKWARD,
        ("optimizer.zero_grad()",),
        (("        optimizer.step()\n        optimizer.zero_grad()\n", "        optimizer.step()\n"),),
    ),
)

HARMLESS = (
    Regression(
        "a line split in two", "train.py", _MEAN, "    weighted = losses * weights.flatten()\n    return weighted.mean()\n", ()
    ),
    Regression(
        "a variable renamed",
        "train.py",
        _LOSSES,
        _LOSSES.replace("losses", "errors"),
        (),
        ((_MEAN, _MEAN.replace("losses", "errors")),),
    ),
    Regression(
        "two uploads swapped",
        "train.py",
        "        tokens = tokens.to(device, non_blocking=True)\n        weights = weights.to(device, non_blocking=True)\n",
        "        weights = weights.to(device, non_blocking=True)\n        tokens = tokens.to(device, non_blocking=True)\n",
        (),
    ),
    Regression("a comment added", "train.py", _BACKWARD, "\n        # Gradients of all parameters.\n" + _BACKWARD, ()),
    Regression(
        "a helper function",
        "train.py",
        _MEAN,
        "    return mean_of(losses, weights)\n\n\ndef mean_of(losses, weights):\n" + _MEAN,
        (),
    ),
    Regression("logits freed early", "train.py", _EVALUATED, _EVALUATED + "        del logits\n", ()),
    Regression(
        "a smaller optimizer",
        "train.py",
        "torch.optim.AdamW(model.parameters(), lr=1e-3)",
        "torch.optim.SGD(model.parameters(), lr=1e-3)",
        (),
    ),
    Regression(
        "gradients freed before the forward pass",
        "train.py",
        "        loss = loss_of(model, tokens, weights)\n",
        "        optimizer.zero_grad()\n        loss = loss_of(model, tokens, weights)\n",
        (),
        (("        optimizer.step()\n        optimizer.zero_grad()\n", "        optimizer.step()\n"),),
    ),
)
