"""Flags of vLLM and SGLang that concern an engine: memory, steps, GPUs, kernels and drafts.

Rows of `eyas.peers.table`, which knows them all.
"""

from __future__ import annotations

from eyas.peers import speculation, values
from eyas.peers.meanings import (
    BOTH,
    NONE,
    SGLANG,
    SWITCH,
    VLLM,
    Alias,
    Only,
    Refused,
    Row,
    Same,
    Translated,
    Usual,
    With,
)

_ATTENTION = values.spelled(
    {"TRITON_ATTN": "triton", "FLASHINFER": "flashinfer", "TORCH_SDPA": "torch", "torch_native": "torch"}
)
_ONE_HOST = "GPUs that share a model are of one host: on several hosts, start `eyas worker` on each"
_SHARED_EXPERTS = "take `--dp-attention N`: N processes share a model's experts, whole"
_GRAPHS = "set `--cuda-graph-max-bs`, `--cuda-graph-bs` or `--disable-cuda-graph`"
_NO_TORCH_COMPILE = "nothing is compiled by torch: leave it out"

MEMORY = (
    Row(
        VLLM,
        ("--gpu-memory-utilization",),
        Alias("--mem-fraction-static", note="of weights and KV; graphs and activations come on top"),
        example="0.9",
    ),
    Row(SGLANG, ("--mem-fraction-static",), Same(), example="0.9"),
    Row(VLLM, ("--max-num-seqs",), Alias("--max-running-requests")),
    Row(SGLANG, ("--max-running-requests",), Same()),
    Row(SGLANG, ("--max-queued-requests",), Same()),
    Row(VLLM, ("--max-num-batched-tokens",), Alias("--chunked-prefill-size", values.size), example="2k"),
    Row(SGLANG, ("--chunked-prefill-size",), Same()),
    Row(
        SGLANG,
        ("--max-prefill-tokens",),
        Refused("set `--chunked-prefill-size`, which bounds a step's prompts"),
    ),
    Row(
        SGLANG,
        ("--prefill-max-requests",),
        Refused("set `--chunked-prefill-size`, which bounds a step's prompts"),
    ),
    Row(VLLM, ("--enable-chunked-prefill",), Usual("long prompts are computed in chunks"), SWITCH),
    Row(
        VLLM,
        ("--no-enable-chunked-prefill",),
        Refused("set `--chunked-prefill-size` to the longest prompt"),
        NONE,
    ),
    Row(
        SGLANG,
        ("--enable-mixed-chunk",),
        Usual("a step computes prompts and decodes (`--mixed-step-tokens`)"),
        NONE,
    ),
    Row(
        SGLANG,
        ("--enable-dynamic-chunking",),
        Refused("set `--mixed-step-tokens`, which bounds what running answers wait for"),
        NONE,
    ),
    Row(
        VLLM,
        ("--max-num-partial-prefills", "--max-long-partial-prefills", "--long-prefill-token-threshold"),
        Refused("leave it out: short prompts do not wait for long ones to end"),
    ),
    Row(VLLM, ("--enable-prefix-caching",), Usual("beginnings of prompts are cached"), SWITCH),
    Row(
        VLLM,
        ("--no-enable-prefix-caching",),
        Refused(
            "leave it out: the cache changes no answer, and its pages are free for requests that need them"
        ),
        NONE,
    ),
    Row(
        SGLANG,
        ("--disable-radix-cache",),
        Refused(
            "leave it out: the cache changes no answer, and its pages are free for requests that need them"
        ),
        NONE,
    ),
    Row(
        VLLM,
        ("--prefix-caching-hash-algo",),
        Usual("pages are named by a hash of all their tokens"),
        example="sha256",
    ),
    Row(SGLANG, ("--radix-eviction-policy",), Only(("lru",), "so it is", "leave it out"), example="lru"),
    Row(
        VLLM, ("--block-size",), Only(("16",), "so it is", "leave it out: a page has 16 tokens"), example="16"
    ),
    Row(
        SGLANG,
        ("--page-size",),
        Only(("1", "16"), "a page has 16 tokens", "leave it out: a page has 16 tokens"),
        example="16",
    ),
    Row(VLLM, ("--num-gpu-blocks-override",), Alias("--num-pages", note="of 16 tokens"), example="64"),
    Row(
        SGLANG,
        ("--max-total-tokens",),
        Translated(values.pages, "`--num-pages`, of 16 tokens each"),
        example="1024",
    ),
    Row(
        VLLM,
        ("--kv-cache-memory-bytes",),
        Refused("set `--num-pages` or `--mem-fraction-static`"),
        example="1G",
    ),
    Row(VLLM, ("--kv-offloading-size",), Alias("--host-cache-gb", note="GiB, per worker"), example="0.5"),
    Row(VLLM, ("--kv-offloading-backend",), Only(("native",), "so it is", "leave it out"), example="native"),
    Row(SGLANG, ("--hicache-size",), Alias("--host-cache-gb", note="GiB, per worker"), example="0.5"),
    Row(
        SGLANG,
        ("--enable-hierarchical-cache", "--enable-hicache"),
        With(
            ("--host-cache-gb",),
            "the cache in host memory is on where it has memory",
            "set `--host-cache-gb N`",
        ),
        NONE,
    ),
    Row(SGLANG, ("--hicache-ratio",), Refused("set `--host-cache-gb N`")),
    Row(
        SGLANG,
        ("--hicache-write-policy", "--hicache-io-backend", "--hicache-mem-layout"),
        Refused("leave it out: pages are copied as they are evicted"),
        example="a",
    ),
    Row(
        SGLANG,
        ("--hicache-storage-backend",),
        Refused("leave it out: pages are cached in GPU and host memory (`--host-cache-gb`)"),
        example="file",
    ),
    Row(SGLANG, ("--enable-lmcache",), Refused("set `--host-cache-gb N`"), NONE),
    Row(
        VLLM,
        ("--swap-space",),
        Only(
            ("0",),
            "requests that are set back are computed again",
            "leave it out; `--host-cache-gb N` keeps evicted pages",
        ),
        example="0",
    ),
    Row(
        BOTH,
        ("--cpu-offload-gb",),
        Only(("0",), "so it is", "weights lie on the GPU: take more of them (`--tp`)"),
        example="0",
    ),
    Row(VLLM, ("--calculate-kv-scales",), Refused("leave it out: FP8 latents carry their scales"), NONE),
    Row(
        VLLM, ("--disable-sliding-window",), Refused("leave it out: layers attend as config.json says"), NONE
    ),
    Row(VLLM, ("--disable-hybrid-kv-cache-manager",), Usual("all layers share one kind of page"), NONE),
    Row(
        VLLM,
        ("--scheduling-policy",),
        Only(
            ("priority", "fcfs"), "first come, first served, but for a request's `priority`", "leave it out"
        ),
        example="fcfs",
    ),
    Row(
        SGLANG,
        ("--schedule-policy",),
        Only(
            ("fcfs",),
            "first come, first served, but for a request's `priority`",
            "leave it out: prompts with a cached beginning wait their turn too",
        ),
        example="fcfs",
    ),
    Row(
        SGLANG,
        ("--enable-priority-scheduling",),
        Usual("a request's `priority` counts, lower is earlier"),
        NONE,
    ),
    Row(SGLANG, ("--schedule-low-priority-values-first",), Usual("lower is earlier"), NONE),
    Row(
        SGLANG,
        ("--schedule-conservativeness",),
        Refused("leave it out: `--max-running-requests` bounds a step"),
    ),
    Row(VLLM, ("--preemption-mode",), Only(("recompute",), "so it is", "leave it out"), example="recompute"),
    Row(SGLANG, ("--num-continuous-decode-steps",), Only(("1",), "so it is", "leave it out")),
    Row(VLLM, ("--num-scheduler-steps",), Only(("1",), "so it is", "leave it out")),
    Row(BOTH, ("--stream-interval",), Only(("1",), "tokens are sent as they come", "leave it out")),
    Row(SGLANG, ("--allow-auto-truncate",), Refused("a request says it: `truncate_prompt_tokens`"), NONE),
)

_WORKERS = Alias("--workers", note="of the unified and auto layouts")
_SHARED_EXPERTS = "take `--dp-attention N`: N processes share a model's experts, whole"
_SHARE_LAYERS = Only(("1",), "so it is", "share the model by `--tensor-parallel-size`")

COMPUTING = (
    Row(BOTH, ("--tensor-parallel-size", "--tp"), Same(), example="1"),
    Row(SGLANG, ("--tp-size",), Alias("--tensor-parallel-size"), example="1"),
    Row(VLLM, ("-tp",), Alias("--tensor-parallel-size"), example="1"),
    Row(BOTH, ("--data-parallel-size",), _WORKERS, example="2"),
    Row(SGLANG, ("--dp-size", "--dp"), _WORKERS, example="2"),
    Row(VLLM, ("-dp",), _WORKERS, example="2"),
    Row(
        SGLANG,
        ("--enable-dp-attention",),
        Refused("take `--dp-attention N`, without `--tp` and `--dp-size`"),
        NONE,
    ),
    Row(VLLM, ("--enable-expert-parallel", "-ep"), Refused(_SHARED_EXPERTS), NONE),
    Row(SGLANG, ("--ep-size", "--ep", "--expert-parallel-size"), Only(("1",), "so it is", _SHARED_EXPERTS)),
    Row(BOTH, ("--enable-eplb",), Refused(_SHARED_EXPERTS), NONE),
    Row(SGLANG, ("--moe-a2a-backend",), Only(("none",), "so it is", _SHARED_EXPERTS), example="none"),
    Row(VLLM, ("--all2all-backend",), Refused(_SHARED_EXPERTS), example="naive"),
    Row(
        SGLANG,
        ("--moe-runner-backend",),
        Only(("auto", "triton"), "so it is", "leave it out"),
        example="auto",
    ),
    Row(VLLM, ("--moe-backend",), Only(("auto", "triton"), "so it is", "leave it out"), example="auto"),
    Row(BOTH, ("--pipeline-parallel-size",), _SHARE_LAYERS),
    Row(SGLANG, ("--pp-size",), _SHARE_LAYERS),
    Row(VLLM, ("-pp",), _SHARE_LAYERS),
    Row(BOTH, ("--nnodes",), Only(("1",), "so it is", _ONE_HOST)),
    Row(BOTH, ("--node-rank",), Only(("0",), "so it is", _ONE_HOST), example="0"),
    Row(SGLANG, ("--dist-init-addr", "--nccl-init-addr"), Refused(_ONE_HOST), example="h:1"),
    Row(SGLANG, ("--nccl-port",), Refused("leave it out: free ports are taken")),
    Row(VLLM, ("--master-addr", "--master-port"), Refused(_ONE_HOST), example="h"),
    Row(
        VLLM,
        ("--distributed-executor-backend",),
        Only(("mp", "uni"), "a process per GPU", _ONE_HOST),
        example="mp",
    ),
    Row(VLLM, ("--data-parallel-backend",), Only(("mp",), "a process per GPU", _ONE_HOST), example="mp"),
    Row(
        VLLM,
        (
            "--data-parallel-address",
            "--data-parallel-rpc-port",
            "--data-parallel-size-local",
            "--data-parallel-rank",
        ),
        Refused("start `eyas worker` on each host, and `eyas gateway` for all"),
        example="1",
    ),
    Row(
        SGLANG,
        ("--load-balance-method",),
        Refused("leave it out: requests go where their beginning is cached, then where the load is least"),
        example="round_robin",
    ),
    Row(SGLANG, ("--base-gpu-id", "--gpu-id-step"), Refused("name the GPUs: `--gpus 2,3`"), example="2"),
    Row(BOTH, ("--attention-backend",), Same(_ATTENTION), example="torch"),
    Row(SGLANG, ("--prefill-attention-backend",), Same(_ATTENTION), example="torch"),
    Row(
        SGLANG,
        ("--decode-attention-backend",),
        Alias("--attention-backend", _ATTENTION),
        example="torch_native",
    ),
    Row(
        SGLANG,
        ("--sampling-backend",),
        Refused("leave it out: a step samples in kernels of its own"),
        example="pytorch",
    ),
    Row(VLLM, ("--enforce-eager",), Alias("--disable-cuda-graph"), NONE),
    Row(VLLM, ("--no-enforce-eager",), Usual("a GPU has CUDA graphs"), NONE),
    Row(SGLANG, ("--disable-cuda-graph",), Same()),
    Row(SGLANG, ("--cuda-graph-max-bs",), Same(), example="8"),
    Row(SGLANG, ("--cuda-graph-max-bs-decode",), Alias("--cuda-graph-max-bs"), example="8"),
    Row(SGLANG, ("--cuda-graph-bs",), Same(), example="8"),
    Row(SGLANG, ("--cuda-graph-bs-decode",), Alias("--cuda-graph-bs"), example="8"),
    Row(
        VLLM,
        ("--cudagraph-capture-sizes", "--cuda-graph-sizes"),
        Alias("--cuda-graph-bs", note="sequences, whatever is drafted"),
        example="8",
    ),
    Row(
        VLLM,
        ("--max-cudagraph-capture-size",),
        Alias("--cuda-graph-max-bs", note="sequences, whatever is drafted"),
        example="8",
    ),
    Row(SGLANG, ("--disable-cuda-graph-padding",), Refused(f"leave it out; {_GRAPHS}"), NONE),
    Row(VLLM, ("--compilation-config", "-O", "-cc"), Refused(_GRAPHS), example="3"),
    Row(VLLM, ("-O3", "-O2", "-O1"), Usual("a GPU has CUDA graphs, and nothing is compiled by torch"), NONE),
    Row(VLLM, ("-O0",), Alias("--disable-cuda-graph"), NONE),
    Row(SGLANG, ("--enable-torch-compile",), Refused(_NO_TORCH_COMPILE), NONE),
    Row(SGLANG, ("--torch-compile-max-bs",), Refused(_NO_TORCH_COMPILE)),
    Row(
        VLLM, ("--async-scheduling",), Usual("on a GPU a step is planned while the one before it runs"), NONE
    ),
    Row(VLLM, ("--no-async-scheduling",), Alias("--disable-overlap-schedule"), NONE),
    Row(SGLANG, ("--disable-overlap-schedule",), Same()),
    Row(SGLANG, ("--enable-deterministic-inference",), Alias("--deterministic"), NONE),
    Row(
        BOTH,
        ("--disable-custom-all-reduce",),
        Refused("leave it out: small sums go by GPUs' own reads where they can, and by NCCL elsewhere"),
        NONE,
    ),
    Row(
        SGLANG,
        ("--enable-nccl-nvls", "--enable-symm-mem", "--enable-mscclpp", "--enable-p2p-check"),
        Refused("leave it out: what GPUs can do is found out"),
        NONE,
    ),
    Row(
        SGLANG,
        ("--enable-two-batch-overlap", "--enable-single-batch-overlap"),
        Refused("leave it out: a step is one batch"),
        NONE,
    ),
    Row(VLLM, ("--enable-dbo",), Refused("leave it out: a step is one batch"), NONE),
    Row(SGLANG, ("--enable-memory-saver",), Refused("leave it out: stop the server to free the GPU"), NONE),
    Row(VLLM, ("--enable-sleep-mode",), Refused("leave it out: stop the server to free the GPU"), NONE),
    Row(SGLANG, ("--sleep-on-idle",), Usual("an idle engine waits without a busy loop"), NONE),
    Row(
        SGLANG,
        ("--skip-server-warmup",),
        Refused("leave it out: kernels run once before a worker serves"),
        NONE,
    ),
    Row(
        SGLANG,
        ("--watchdog-timeout",),
        Refused("leave it out: an engine that hangs is ended and started again"),
        example="300",
    ),
)

DRAFTS = (
    Row(
        VLLM,
        ("--speculative-config", "-sc"),
        Translated(
            speculation.from_json,
            "`--draft` and `--spec-steps`, from `method`, `model` and `num_speculative_tokens`",
        ),
        example='{"method": "ngram", "num_speculative_tokens": 3}',
    ),
    Row(
        SGLANG,
        ("--speculative-algorithm", "--speculative-algo"),
        Translated(
            speculation.from_algorithm,
            "EAGLE, EAGLE3, NEXTN: the head of `--draft`, without it `--draft mtp`; NGRAM: `--draft ngram`",
        ),
        example="NGRAM",
    ),
    Row(
        SGLANG,
        ("--speculative-draft-model-path", "--speculative-draft-model"),
        Alias("--draft"),
        example="none",
    ),
    Row(
        VLLM,
        ("--speculative-model",),
        Alias("--draft", values.spelled({"[ngram]": "ngram"})),
        example="[ngram]",
    ),
    Row(SGLANG, ("--speculative-num-steps",), Same(), example="5"),
    Row(VLLM, ("--num-speculative-tokens",), Alias("--spec-steps"), example="5"),
    Row(SGLANG, ("--speculative-eagle-topk",), Same()),
    Row(SGLANG, ("--speculative-num-draft-tokens",), Same(), example="6"),
    Row(SGLANG, ("--speculative-token-map",), Same(), example="f"),
    Row(SGLANG, ("--speculative-adaptive",), Same()),
    Row(
        SGLANG,
        ("--speculative-draft-model-revision",),
        Refused("fetch that revision, and name its folder"),
        example="main",
    ),
    Row(
        SGLANG,
        ("--speculative-draft-model-quantization",),
        Refused("leave it out: a head's own config.json says it"),
        example="fp8",
    ),
    Row(
        SGLANG,
        ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"),
        Only(("1", "1.0"), "so it is", "leave it out: drafts never change what a model answers"),
        example="1.0",
    ),
    Row(
        SGLANG,
        ("--speculative-attention-mode",),
        Refused("leave it out: verifying attends as decoding does"),
        example="decode",
    ),
    Row(
        SGLANG,
        (
            "--speculative-ngram-max-trie-depth",
            "--speculative-ngram-max-bfs-breadth",
            "--speculative-ngram-min-bfs-breadth",
            "--speculative-ngram-capacity",
        ),
        Refused("leave it out: the longest match counts (docs/lookup.md)"),
    ),
)
