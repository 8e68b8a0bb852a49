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
    FlagRow,
    Only,
    Refused,
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
    FlagRow(
        VLLM,
        ("--gpu-memory-utilization",),
        Alias("--mem-fraction-static", note="of weights and KV; graphs and activations come on top"),
        example="0.9",
    ),
    FlagRow(SGLANG, ("--mem-fraction-static",), Same(), example="0.9"),
    FlagRow(VLLM, ("--max-num-seqs",), Alias("--max-running-requests")),
    FlagRow(SGLANG, ("--max-running-requests",), Same()),
    FlagRow(SGLANG, ("--max-queued-requests",), Same()),
    FlagRow(VLLM, ("--max-num-batched-tokens",), Alias("--chunked-prefill-size", values.size), example="2k"),
    FlagRow(SGLANG, ("--chunked-prefill-size",), Same()),
    FlagRow(
        SGLANG,
        ("--max-prefill-tokens",),
        Refused("set `--chunked-prefill-size`, which bounds a step's prompts"),
    ),
    FlagRow(
        SGLANG,
        ("--prefill-max-requests",),
        Refused("set `--chunked-prefill-size`, which bounds a step's prompts"),
    ),
    FlagRow(VLLM, ("--enable-chunked-prefill",), Usual("long prompts are computed in chunks"), SWITCH),
    FlagRow(
        VLLM,
        ("--no-enable-chunked-prefill",),
        Refused("set `--chunked-prefill-size` to the longest prompt"),
        NONE,
    ),
    FlagRow(
        SGLANG,
        ("--enable-mixed-chunk",),
        Usual("a step computes prompts and decodes (`--mixed-step-tokens`)"),
        NONE,
    ),
    FlagRow(
        SGLANG,
        ("--enable-dynamic-chunking",),
        Refused("set `--mixed-step-tokens`, which bounds what running answers wait for"),
        NONE,
    ),
    FlagRow(
        VLLM,
        ("--max-num-partial-prefills", "--max-long-partial-prefills", "--long-prefill-token-threshold"),
        Refused("leave it out: short prompts do not wait for long ones to end"),
    ),
    FlagRow(VLLM, ("--enable-prefix-caching",), Usual("beginnings of prompts are cached"), SWITCH),
    FlagRow(
        VLLM,
        ("--no-enable-prefix-caching",),
        Refused(
            "leave it out: the cache changes no answer, and its pages are free for requests that need them"
        ),
        NONE,
    ),
    FlagRow(
        SGLANG,
        ("--disable-radix-cache",),
        Refused(
            "leave it out: the cache changes no answer, and its pages are free for requests that need them"
        ),
        NONE,
    ),
    FlagRow(
        VLLM,
        ("--prefix-caching-hash-algo",),
        Usual("pages are named by a hash of all their tokens"),
        example="sha256",
    ),
    FlagRow(SGLANG, ("--radix-eviction-policy",), Only(("lru",), "so it is", "leave it out"), example="lru"),
    FlagRow(
        VLLM, ("--block-size",), Only(("16",), "so it is", "leave it out: a page has 16 tokens"), example="16"
    ),
    FlagRow(
        SGLANG,
        ("--page-size",),
        Only(("1", "16"), "a page has 16 tokens", "leave it out: a page has 16 tokens"),
        example="16",
    ),
    FlagRow(VLLM, ("--num-gpu-blocks-override",), Alias("--num-pages", note="of 16 tokens"), example="64"),
    FlagRow(
        SGLANG,
        ("--max-total-tokens",),
        Translated(values.pages, "`--num-pages`, of 16 tokens each"),
        example="1024",
    ),
    FlagRow(
        VLLM,
        ("--kv-cache-memory-bytes",),
        Refused("set `--num-pages` or `--mem-fraction-static`"),
        example="1G",
    ),
    FlagRow(VLLM, ("--kv-offloading-size",), Alias("--host-cache-gb", note="GiB, per worker"), example="0.5"),
    FlagRow(
        VLLM, ("--kv-offloading-backend",), Only(("native",), "so it is", "leave it out"), example="native"
    ),
    FlagRow(SGLANG, ("--hicache-size",), Alias("--host-cache-gb", note="GiB, per worker"), example="0.5"),
    FlagRow(
        SGLANG,
        ("--enable-hierarchical-cache", "--enable-hicache"),
        With(
            ("--host-cache-gb",),
            "the cache in host memory is on where it has memory",
            "set `--host-cache-gb N`",
        ),
        NONE,
    ),
    FlagRow(SGLANG, ("--hicache-ratio",), Refused("set `--host-cache-gb N`")),
    FlagRow(
        SGLANG,
        ("--hicache-write-policy", "--hicache-io-backend", "--hicache-mem-layout"),
        Refused("leave it out: pages are copied as they are evicted"),
        example="a",
    ),
    FlagRow(
        SGLANG,
        ("--hicache-storage-backend",),
        Refused("leave it out: pages are cached in GPU and host memory (`--host-cache-gb`)"),
        example="file",
    ),
    FlagRow(SGLANG, ("--enable-lmcache",), Refused("set `--host-cache-gb N`"), NONE),
    FlagRow(
        VLLM,
        ("--swap-space",),
        Only(
            ("0",),
            "requests that are set back are computed again",
            "leave it out; `--host-cache-gb N` keeps evicted pages",
        ),
        example="0",
    ),
    FlagRow(
        BOTH,
        ("--cpu-offload-gb",),
        Only(("0",), "so it is", "weights lie on the GPU: take more of them (`--tp`)"),
        example="0",
    ),
    FlagRow(VLLM, ("--calculate-kv-scales",), Refused("leave it out: FP8 latents carry their scales"), NONE),
    FlagRow(
        VLLM, ("--disable-sliding-window",), Refused("leave it out: layers attend as config.json says"), NONE
    ),
    FlagRow(VLLM, ("--disable-hybrid-kv-cache-manager",), Usual("all layers share one kind of page"), NONE),
    FlagRow(
        VLLM,
        ("--scheduling-policy",),
        Only(
            ("priority", "fcfs"), "first come, first served, but for a request's `priority`", "leave it out"
        ),
        example="fcfs",
    ),
    FlagRow(
        SGLANG,
        ("--schedule-policy",),
        Only(
            ("fcfs",),
            "first come, first served, but for a request's `priority`",
            "leave it out: prompts with a cached beginning wait their turn too",
        ),
        example="fcfs",
    ),
    FlagRow(
        SGLANG,
        ("--enable-priority-scheduling",),
        Usual("a request's `priority` counts, lower is earlier"),
        NONE,
    ),
    FlagRow(SGLANG, ("--schedule-low-priority-values-first",), Usual("lower is earlier"), NONE),
    FlagRow(
        SGLANG,
        ("--schedule-conservativeness",),
        Refused("leave it out: `--max-running-requests` bounds a step"),
    ),
    FlagRow(
        VLLM, ("--preemption-mode",), Only(("recompute",), "so it is", "leave it out"), example="recompute"
    ),
    FlagRow(SGLANG, ("--num-continuous-decode-steps",), Only(("1",), "so it is", "leave it out")),
    FlagRow(VLLM, ("--num-scheduler-steps",), Only(("1",), "so it is", "leave it out")),
    FlagRow(BOTH, ("--stream-interval",), Only(("1",), "tokens are sent as they come", "leave it out")),
    FlagRow(SGLANG, ("--allow-auto-truncate",), Refused("a request says it: `truncate_prompt_tokens`"), NONE),
)

_WORKERS = Alias("--workers", note="of the unified and auto layouts")
_SHARED_EXPERTS = "take `--dp-attention N`: N processes share a model's experts, whole"
_SHARE_LAYERS = Only(("1",), "so it is", "share the model by `--tensor-parallel-size`")

COMPUTING = (
    FlagRow(BOTH, ("--tensor-parallel-size", "--tp"), Same(), example="1"),
    FlagRow(SGLANG, ("--tp-size",), Alias("--tensor-parallel-size"), example="1"),
    FlagRow(VLLM, ("-tp",), Alias("--tensor-parallel-size"), example="1"),
    FlagRow(BOTH, ("--data-parallel-size",), _WORKERS, example="2"),
    FlagRow(SGLANG, ("--dp-size", "--dp"), _WORKERS, example="2"),
    FlagRow(VLLM, ("-dp",), _WORKERS, example="2"),
    FlagRow(
        SGLANG,
        ("--enable-dp-attention",),
        Refused("take `--dp-attention N`, without `--tp` and `--dp-size`"),
        NONE,
    ),
    FlagRow(VLLM, ("--enable-expert-parallel", "-ep"), Refused(_SHARED_EXPERTS), NONE),
    FlagRow(
        SGLANG, ("--ep-size", "--ep", "--expert-parallel-size"), Only(("1",), "so it is", _SHARED_EXPERTS)
    ),
    FlagRow(BOTH, ("--enable-eplb",), Refused(_SHARED_EXPERTS), NONE),
    FlagRow(SGLANG, ("--moe-a2a-backend",), Only(("none",), "so it is", _SHARED_EXPERTS), example="none"),
    FlagRow(VLLM, ("--all2all-backend",), Refused(_SHARED_EXPERTS), example="naive"),
    FlagRow(
        SGLANG,
        ("--moe-runner-backend",),
        Only(("auto", "triton"), "so it is", "leave it out"),
        example="auto",
    ),
    FlagRow(VLLM, ("--moe-backend",), Only(("auto", "triton"), "so it is", "leave it out"), example="auto"),
    FlagRow(BOTH, ("--pipeline-parallel-size",), _SHARE_LAYERS),
    FlagRow(SGLANG, ("--pp-size",), _SHARE_LAYERS),
    FlagRow(VLLM, ("-pp",), _SHARE_LAYERS),
    FlagRow(BOTH, ("--nnodes",), Only(("1",), "so it is", _ONE_HOST)),
    FlagRow(BOTH, ("--node-rank",), Only(("0",), "so it is", _ONE_HOST), example="0"),
    FlagRow(SGLANG, ("--dist-init-addr", "--nccl-init-addr"), Refused(_ONE_HOST), example="h:1"),
    FlagRow(SGLANG, ("--nccl-port",), Refused("leave it out: free ports are taken")),
    FlagRow(VLLM, ("--master-addr", "--master-port"), Refused(_ONE_HOST), example="h"),
    FlagRow(
        VLLM,
        ("--distributed-executor-backend",),
        Only(("mp", "uni"), "a process per GPU", _ONE_HOST),
        example="mp",
    ),
    FlagRow(VLLM, ("--data-parallel-backend",), Only(("mp",), "a process per GPU", _ONE_HOST), example="mp"),
    FlagRow(
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
    FlagRow(
        SGLANG,
        ("--load-balance-method",),
        Refused("leave it out: requests go where their beginning is cached, then where the load is least"),
        example="round_robin",
    ),
    FlagRow(SGLANG, ("--base-gpu-id", "--gpu-id-step"), Refused("name the GPUs: `--gpus 2,3`"), example="2"),
    FlagRow(BOTH, ("--attention-backend",), Same(_ATTENTION), example="torch"),
    FlagRow(SGLANG, ("--prefill-attention-backend",), Same(_ATTENTION), example="torch"),
    FlagRow(
        SGLANG,
        ("--decode-attention-backend",),
        Alias("--attention-backend", _ATTENTION),
        example="torch_native",
    ),
    FlagRow(
        SGLANG,
        ("--sampling-backend",),
        Refused("leave it out: a step samples in kernels of its own"),
        example="pytorch",
    ),
    FlagRow(VLLM, ("--enforce-eager",), Alias("--disable-cuda-graph"), NONE),
    FlagRow(VLLM, ("--no-enforce-eager",), Usual("a GPU has CUDA graphs"), NONE),
    FlagRow(SGLANG, ("--disable-cuda-graph",), Same()),
    FlagRow(SGLANG, ("--cuda-graph-max-bs",), Same(), example="8"),
    FlagRow(SGLANG, ("--cuda-graph-max-bs-decode",), Alias("--cuda-graph-max-bs"), example="8"),
    FlagRow(SGLANG, ("--cuda-graph-bs",), Same(), example="8"),
    FlagRow(SGLANG, ("--cuda-graph-bs-decode",), Alias("--cuda-graph-bs"), example="8"),
    FlagRow(
        VLLM,
        ("--cudagraph-capture-sizes", "--cuda-graph-sizes"),
        Alias("--cuda-graph-bs", note="sequences, whatever is drafted"),
        example="8",
    ),
    FlagRow(
        VLLM,
        ("--max-cudagraph-capture-size",),
        Alias("--cuda-graph-max-bs", note="sequences, whatever is drafted"),
        example="8",
    ),
    FlagRow(SGLANG, ("--disable-cuda-graph-padding",), Refused(f"leave it out; {_GRAPHS}"), NONE),
    FlagRow(VLLM, ("--compilation-config", "-O", "-cc"), Refused(_GRAPHS), example="3"),
    FlagRow(
        VLLM, ("-O3", "-O2", "-O1"), Usual("a GPU has CUDA graphs, and nothing is compiled by torch"), NONE
    ),
    FlagRow(VLLM, ("-O0",), Alias("--disable-cuda-graph"), NONE),
    FlagRow(SGLANG, ("--enable-torch-compile",), Refused(_NO_TORCH_COMPILE), NONE),
    FlagRow(SGLANG, ("--torch-compile-max-bs",), Refused(_NO_TORCH_COMPILE)),
    FlagRow(
        VLLM, ("--async-scheduling",), Usual("on a GPU a step is planned while the one before it runs"), NONE
    ),
    FlagRow(VLLM, ("--no-async-scheduling",), Alias("--disable-overlap-schedule"), NONE),
    FlagRow(SGLANG, ("--disable-overlap-schedule",), Same()),
    FlagRow(SGLANG, ("--enable-deterministic-inference",), Alias("--deterministic"), NONE),
    FlagRow(
        BOTH,
        ("--disable-custom-all-reduce",),
        Refused("leave it out: small sums go by GPUs' own reads where they can, and by NCCL elsewhere"),
        NONE,
    ),
    FlagRow(
        SGLANG,
        ("--enable-nccl-nvls", "--enable-symm-mem", "--enable-mscclpp", "--enable-p2p-check"),
        Refused("leave it out: what GPUs can do is found out"),
        NONE,
    ),
    FlagRow(
        SGLANG,
        ("--enable-two-batch-overlap", "--enable-single-batch-overlap"),
        Refused("leave it out: a step is one batch"),
        NONE,
    ),
    FlagRow(VLLM, ("--enable-dbo",), Refused("leave it out: a step is one batch"), NONE),
    FlagRow(
        SGLANG, ("--enable-memory-saver",), Refused("leave it out: stop the server to free the GPU"), NONE
    ),
    FlagRow(VLLM, ("--enable-sleep-mode",), Refused("leave it out: stop the server to free the GPU"), NONE),
    FlagRow(SGLANG, ("--sleep-on-idle",), Usual("an idle engine waits without a busy loop"), NONE),
    FlagRow(
        SGLANG,
        ("--skip-server-warmup",),
        Refused("leave it out: kernels run once before a worker serves"),
        NONE,
    ),
    FlagRow(
        SGLANG,
        ("--watchdog-timeout",),
        Refused("leave it out: an engine that hangs is ended and started again"),
        example="300",
    ),
)

DRAFTS = (
    FlagRow(
        VLLM,
        ("--speculative-config", "-sc"),
        Translated(
            speculation.from_json,
            "`--draft` and `--spec-steps`, from `method`, `model` and `num_speculative_tokens`",
        ),
        example='{"method": "ngram", "num_speculative_tokens": 3}',
    ),
    FlagRow(
        SGLANG,
        ("--speculative-algorithm", "--speculative-algo"),
        Translated(
            speculation.from_algorithm,
            "EAGLE, EAGLE3, NEXTN: the head of `--draft`, without it `--draft mtp`; NGRAM: `--draft ngram`",
        ),
        example="NGRAM",
    ),
    FlagRow(
        SGLANG,
        ("--speculative-draft-model-path", "--speculative-draft-model"),
        Alias("--draft"),
        example="none",
    ),
    FlagRow(
        VLLM,
        ("--speculative-model",),
        Alias("--draft", values.spelled({"[ngram]": "ngram"})),
        example="[ngram]",
    ),
    FlagRow(SGLANG, ("--speculative-num-steps",), Same(), example="5"),
    FlagRow(VLLM, ("--num-speculative-tokens",), Alias("--spec-steps"), example="5"),
    FlagRow(SGLANG, ("--speculative-eagle-topk",), Same()),
    FlagRow(SGLANG, ("--speculative-num-draft-tokens",), Same(), example="6"),
    FlagRow(SGLANG, ("--speculative-token-map",), Same(), example="f"),
    FlagRow(SGLANG, ("--speculative-adaptive",), Same()),
    FlagRow(
        SGLANG,
        ("--speculative-draft-model-revision",),
        Refused("fetch that revision, and name its folder"),
        example="main",
    ),
    FlagRow(
        SGLANG,
        ("--speculative-draft-model-quantization",),
        Refused("leave it out: a head's own config.json says it"),
        example="fp8",
    ),
    FlagRow(
        SGLANG,
        ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"),
        Only(("1", "1.0"), "so it is", "leave it out: drafts never change what a model answers"),
        example="1.0",
    ),
    FlagRow(
        SGLANG,
        ("--speculative-attention-mode",),
        Refused("leave it out: verifying attends as decoding does"),
        example="decode",
    ),
    FlagRow(
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
