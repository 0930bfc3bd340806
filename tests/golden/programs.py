"""Small programs, each run on a real CUDA device under CUPTI: memcpys (direction, bytes) and peak allocated bytes.

python programs.py OUT.json     (on the GPU)
Every program is a function of a device string, so the same file replays them on any other device.
"""

# ruff: noqa  (kept as it was when it ran on the H200)
import collections, json, os, sys, tempfile, torch

T = os.path.join(tempfile.mkdtemp(), "trace.json")

P = {}


def prog(f):
    P[f.__name__] = f
    return f


# ---- raw torch
@prog
def item_loop(d):
    x = torch.arange(16, device=d)
    return sum(int(x[i].item()) for i in range(16))


@prog
def tensor_from_list(d):
    return torch.tensor([1.0, 2.0, 3.0], device=d).cpu()


@prog
def to_dtype_device(d):
    return torch.ones(1000).to(d, torch.bfloat16).to("cpu", torch.float32)


@prog
def cast_on_device(d):
    return torch.ones(1000, device=d).to(torch.bfloat16)


@prog
def clone_contiguous(d):
    return torch.ones(64, 64, device=d).clone()


@prog
def contiguous_noncontig(d):
    return torch.ones(64, 32, device=d).t().contiguous()


@prog
def copy_row(d):
    k = torch.zeros(128, 16, device=d)
    k[5].copy_(torch.ones(16, device=d))
    return k


@prog
def setitem_scalar(d):
    k = torch.zeros(16, device=d)
    k[3] = 7
    return k


@prog
def index_with_cpu_index(d):
    return torch.ones(100, 8, device=d)[torch.tensor([1, 5, 7])]


@prog
def boolean_mask(d):
    x = torch.arange(100, device=d)
    return x[x > 50]


@prog
def masked_fill_where(d):
    x = torch.ones(32, 32, device=d)
    return torch.where(x > 0, x, torch.zeros_like(x)).masked_fill(x > 2, -1)


@prog
def cat_growing(d):
    x = torch.ones(1, 4, device=d)
    for _ in range(10):
        x = torch.cat([x, torch.ones(1, 4, device=d)])
    return x


@prog
def stack(d):
    return torch.stack([torch.ones(8, device=d) for _ in range(4)])


@prog
def topk_sort_argmax(d):
    x = torch.arange(1000.0, device=d).flip(0)
    return x.topk(5)[1], x.sort()[0], x.argmax()


@prog
def pinned_async(d):
    h = torch.ones(4096).pin_memory() if d == "cuda" else torch.ones(4096)
    x = h.to(d, non_blocking=True)
    o = torch.empty(4096, pin_memory=(d == "cuda"))
    o.copy_(x, non_blocking=True)
    return o


@prog
def index_copy_kv(d):
    k = torch.zeros(1, 2, 64, 8, device=d)
    pos = torch.tensor([3], device=d)
    for i in range(4):
        k.index_copy_(2, pos, torch.ones(1, 2, 1, 8, device=d))
        pos += 1
    return k


@prog
def position_from_host(d):
    pos = torch.zeros(1, dtype=torch.long, device=d)
    for i in range(8):
        pos.copy_(torch.tensor([i]))
    return pos


@prog
def position_in_place(d):
    pos = torch.zeros(1, dtype=torch.long, device=d)
    for i in range(8):
        pos.add_(1)
    return pos


@prog
def tril_mask_sdpa(d):
    q = torch.ones(1, 4, 32, 16, device=d)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)


@prog
def matmul_peak(d):
    a = torch.ones(1024, 1024, device=d)
    b = a @ a
    c = b @ a
    del b
    return (c + a).sum()


@prog
def odd_sizes(d):
    keep = [torch.empty(n, dtype=torch.uint8, device=d) for n in (1, 511, 512, 513, 1 << 20, (1 << 20) + 1, 3000001)]
    return len(keep)


@prog
def repeat_interleave_tensor(d):
    return torch.arange(4, device=d).repeat_interleave(torch.tensor([1, 2, 3, 4], device=d))


# ---- Hugging Face models, tiny and random, unmodified generate()
def hf(model, n=16, **kw):
    def f(d):
        torch.manual_seed(0)
        m = model().eval()
        with torch.no_grad():
            m = m.to(d)
            x = torch.arange(8)[None].to(d)
            o = m.generate(x, max_new_tokens=n, do_sample=False, pad_token_id=0, **kw)
            return o.cpu().tolist()

    return f


def qwen3():
    from transformers import Qwen3Config as C, Qwen3ForCausalLM as M

    return M(
        C(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            eos_token_id=None,
        )
    )


def llama():
    from transformers import LlamaConfig as C, LlamaForCausalLM as M

    return M(
        C(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            eos_token_id=None,
        )
    )


def gptneox():
    from transformers import GPTNeoXConfig as C, GPTNeoXForCausalLM as M

    return M(
        C(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            eos_token_id=None,
        )
    )


for name in ("qwen3", "llama", "gptneox"):
    P["hf_" + name] = hf(globals()[name])


def measure(f, d="cuda"):
    from torch.profiler import profile, ProfilerActivity

    f(d)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    import gc

    gc.collect()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    r = f(d)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - base
    r = None
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        r = f(d)
        torch.cuda.synchronize()
    p.export_chrome_trace(T)
    c = collections.Counter()
    kernels = 0
    syncs = collections.Counter()
    sets = 0
    for e in json.load(open(T))["traceEvents"]:
        if e.get("cat") == "gpu_memcpy":
            c[(e["name"].split(" (")[0][7:], e["args"]["bytes"], e["name"].split("(")[1][:-1])] += 1
        if e.get("cat") == "gpu_memset":
            sets += 1
        if e.get("cat") == "kernel":
            kernels += 1
        if e.get("cat") == "cuda_runtime" and "Synchronize" in e["name"]:
            syncs[e["name"]] += 1
    val = r if isinstance(r, (list, int, float)) else None
    return dict(
        copies=sorted([*k, n] for k, n in c.items()),
        kernels=kernels,
        memsets=sets,
        syncs=dict(syncs),
        peak_allocated=peak,
        base_allocated=base,
        value=val,
    )


if __name__ == "__main__":
    import transformers

    out = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, transformers=transformers.__version__, programs={})
    for n, f in P.items():
        try:
            out["programs"][n] = measure(f)
        except Exception as e:
            out["programs"][n] = dict(error=repr(e)[:300])
        r = out["programs"][n]
        print(n, r.get("error") or (r["copies"], r["kernels"], r["peak_allocated"]), flush=True)
    json.dump(out, open(sys.argv[1], "w"), indent=1)
