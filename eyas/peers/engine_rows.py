"""Flags of vLLM and SGLang that concern an engine: memory, steps, GPUs, kernels and drafts.

Rows of `eyas.peers.table`, which lists them all.
"""

from __future__ import annotations

from eyas.peers import values
from eyas.peers.meanings import (
    BOTH,
    NONE,
    SGLANG,
    SWITCH,
    VLLM,
    AcceptedFlag,
    AcceptedValues,
    AcceptedWith,
    AliasFlag,
    FlagRow,
    RefusedFlag,
    SameFlag,
    TranslatedFlag,
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
        AliasFlag("--mem-fraction-static", note="of weights and KV; graphs and activations come on top"),
        example="0.9",
    ),
    FlagRow(SGLANG, ("--mem-fraction-static",), SameFlag(), example="0.9"),
    FlagRow(VLLM, ("--max-num-seqs",), AliasFlag("--max-running-requests")),
    FlagRow(SGLANG, ("--max-running-requests",), SameFlag()),
    FlagRow(SGLANG, ("--max-queued-requests",), SameFlag()),
    FlagRow(
        VLLM, ("--max-num-batched-tokens",), AliasFlag("--chunked-prefill-size", values.size), example="2k"
    ),
    FlagRow(SGLANG, ("--chunked-prefill-size",), SameFlag()),
    FlagRow(
        SGLANG,
        ("--max-prefill-tokens",),
        RefusedFlag("set `--chunked-prefill-size`, which bounds a step's prompts"),
    ),
    FlagRow(
        SGLANG,
        ("--prefill-max-requests",),
        RefusedFlag("set `--chunked-prefill-size`, which bounds a step's prompts"),
    ),
    FlagRow(VLLM, ("--enable-chunked-prefill",), AcceptedFlag("long prompts are computed in chunks"), SWITCH),
    FlagRow(
        VLLM,
        ("--no-enable-chunked-prefill",),
        RefusedFlag("set `--chunked-prefill-size` to the longest prompt"),
        NONE,
    ),
    FlagRow(
        SGLANG,
        ("--enable-mixed-chunk",),
        AcceptedFlag("a step computes prompts and decodes (`--mixed-step-tokens`)"),
        NONE,
    ),
    FlagRow(
        SGLANG,
        ("--enable-dynamic-chunking",),
        RefusedFlag("set `--mixed-step-tokens`, which bounds what running answers wait for"),
        NONE,
    ),
    FlagRow(
        VLLM,
        ("--max-num-partial-prefills", "--max-long-partial-prefills", "--long-prefill-token-threshold"),
        RefusedFlag("leave it out: short prompts do not wait for long ones to end"),
    ),
    FlagRow(VLLM, ("--enable-prefix-caching",), AcceptedFlag("beginnings of prompts are cached"), SWITCH),
    FlagRow(
        VLLM,
        ("--no-enable-prefix-caching",),
        RefusedFlag(
            "leave it out: the cache changes no answer, and its pages are free for requests that need them"
        ),
        NONE,
    ),
    FlagRow(
        SGLANG,
        ("--disable-radix-cache",),
        RefusedFlag(
            "leave it out: the cache changes no answer, and its pages are free for requests that need them"
        ),
        NONE,
    ),
    FlagRow(
        VLLM,
        ("--prefix-caching-hash-algo",),
        AcceptedFlag("pages are named by a hash of all their tokens"),
        example="sha256",
    ),
    FlagRow(
        SGLANG,
        ("--radix-eviction-policy",),
        AcceptedValues(("lru",), "so it is", "leave it out"),
        example="lru",
    ),
    FlagRow(
        VLLM,
        ("--block-size",),
        AcceptedValues(("16",), "so it is", "leave it out: a page has 16 tokens"),
        example="16",
    ),
    FlagRow(
        SGLANG,
        ("--page-size",),
        AcceptedValues(("1", "16"), "a page has 16 tokens", "leave it out: a page has 16 tokens"),
        example="16",
    ),
    FlagRow(
        VLLM, ("--num-gpu-blocks-override",), AliasFlag("--num-pages", note="of 16 tokens"), example="64"
    ),
    FlagRow(
        SGLANG,
        ("--max-total-tokens",),
        TranslatedFlag(values.pages, "`--num-pages`, of 16 tokens each"),
        example="1024",
    ),
    FlagRow(
        VLLM,
        ("--kv-cache-memory-bytes",),
        RefusedFlag("set `--num-pages` or `--mem-fraction-static`"),
        example="1G",
    ),
    FlagRow(
        VLLM, ("--kv-offloading-size",), AliasFlag("--host-cache-gb", note="GiB, per worker"), example="0.5"
    ),
    FlagRow(
        VLLM,
        ("--kv-offloading-backend",),
        AcceptedValues(("native",), "so it is", "leave it out"),
        example="native",
    ),
    FlagRow(SGLANG, ("--hicache-size",), AliasFlag("--host-cache-gb", note="GiB, per worker"), example="0.5"),
    FlagRow(
        SGLANG,
        ("--enable-hierarchical-cache", "--enable-hicache"),
        AcceptedWith(
            ("--host-cache-gb",),
            "the cache in host memory is on where it has memory",
            "set `--host-cache-gb N`",
        ),
        NONE,
    ),
    FlagRow(SGLANG, ("--hicache-ratio",), RefusedFlag("set `--host-cache-gb N`")),
    FlagRow(
        SGLANG,
        ("--hicache-write-policy", "--hicache-io-backend", "--hicache-mem-layout"),
        RefusedFlag("leave it out: pages are copied as they are evicted"),
        example="a",
    ),
    FlagRow(
        SGLANG,
        ("--hicache-storage-backend",),
        RefusedFlag("set `--host-cache-gb N` with `--disk-cache-dir DIR` or `--kv-store URL`"),
        example="file",
    ),
    FlagRow(
        SGLANG,
        ("--enable-lmcache",),
        RefusedFlag("set `--host-cache-gb N`, with `--disk-cache-dir DIR` or `--kv-store URL`"),
        NONE,
    ),
    FlagRow(
        VLLM,
        ("--swap-space",),
        AcceptedValues(
            ("0",),
            "requests that are set back are computed again",
            "leave it out; `--host-cache-gb N` keeps evicted pages",
        ),
        example="0",
    ),
    FlagRow(
        BOTH,
        ("--cpu-offload-gb",),
        AcceptedValues(("0",), "so it is", "weights lie on the GPU: take more of them (`--tp`)"),
        example="0",
    ),
    FlagRow(
        VLLM,
        ("--calculate-kv-scales",),
        RefusedFlag("leave it out: each key and value in FP8 has its own scale"),
        NONE,
    ),
    FlagRow(
        VLLM,
        ("--disable-sliding-window",),
        RefusedFlag("leave it out: layers attend as config.json says"),
        NONE,
    ),
    FlagRow(
        VLLM, ("--disable-hybrid-kv-cache-manager",), AcceptedFlag("all layers share one kind of page"), NONE
    ),
    FlagRow(
        VLLM,
        ("--scheduling-policy",),
        AcceptedValues(
            ("priority", "fcfs"), "first come, first served, but for a request's `priority`", "leave it out"
        ),
        example="fcfs",
    ),
    FlagRow(
        SGLANG,
        ("--schedule-policy",),
        AcceptedValues(
            ("fcfs",),
            "first come, first served, but for a request's `priority`",
            "leave it out: prompts with a cached beginning wait their turn too",
        ),
        example="fcfs",
    ),
    FlagRow(
        SGLANG,
        ("--enable-priority-scheduling",),
        AcceptedFlag("a request's `priority` counts, lower is earlier"),
        NONE,
    ),
    FlagRow(SGLANG, ("--schedule-low-priority-values-first",), AcceptedFlag("lower is earlier"), NONE),
    FlagRow(
        SGLANG,
        ("--schedule-conservativeness",),
        RefusedFlag("leave it out: `--max-running-requests` bounds a step"),
    ),
    FlagRow(
        VLLM,
        ("--preemption-mode",),
        AcceptedValues(("recompute",), "so it is", "leave it out"),
        example="recompute",
    ),
    FlagRow(SGLANG, ("--num-continuous-decode-steps",), AcceptedValues(("1",), "so it is", "leave it out")),
    FlagRow(VLLM, ("--num-scheduler-steps",), AcceptedValues(("1",), "so it is", "leave it out")),
    FlagRow(
        BOTH, ("--stream-interval",), AcceptedValues(("1",), "tokens are sent as they come", "leave it out")
    ),
    FlagRow(
        SGLANG, ("--allow-auto-truncate",), RefusedFlag("a request says it: `truncate_prompt_tokens`"), NONE
    ),
)

_WORKERS = AliasFlag("--workers", note="of the unified and auto layouts")
_SHARED_EXPERTS = "take `--dp-attention N`: N processes share a model's experts, whole"
_REPLICAS = "take `--dp-attention N --expert-replicas M`: room for M replicas on each of N processes"
_SHARE_LAYERS = AcceptedValues(("1",), "so it is", "share the model by `--tensor-parallel-size`")

COMPUTING = (
    FlagRow(BOTH, ("--tensor-parallel-size", "--tp"), SameFlag(), example="1"),
    FlagRow(SGLANG, ("--tp-size",), AliasFlag("--tensor-parallel-size"), example="1"),
    FlagRow(VLLM, ("-tp",), AliasFlag("--tensor-parallel-size"), example="1"),
    FlagRow(BOTH, ("--data-parallel-size",), _WORKERS, example="2"),
    FlagRow(SGLANG, ("--dp-size", "--dp"), _WORKERS, example="2"),
    FlagRow(VLLM, ("-dp",), _WORKERS, example="2"),
    FlagRow(
        SGLANG,
        ("--enable-dp-attention",),
        RefusedFlag("take `--dp-attention N`, without `--tp` and `--dp-size`"),
        NONE,
    ),
    FlagRow(VLLM, ("--enable-expert-parallel", "-ep"), RefusedFlag(_SHARED_EXPERTS), NONE),
    FlagRow(
        SGLANG,
        ("--ep-size", "--ep", "--expert-parallel-size"),
        AcceptedValues(("1",), "so it is", _SHARED_EXPERTS),
    ),
    FlagRow(BOTH, ("--enable-eplb",), RefusedFlag(_REPLICAS), NONE),
    FlagRow(SGLANG, ("--ep-num-redundant-experts",), RefusedFlag(_REPLICAS), example="32"),
    FlagRow(VLLM, ("--eplb-config",), RefusedFlag(_REPLICAS), example='{"num_redundant_experts": 32}'),
    FlagRow(
        SGLANG, ("--moe-a2a-backend",), AcceptedValues(("none",), "so it is", _SHARED_EXPERTS), example="none"
    ),
    FlagRow(VLLM, ("--all2all-backend",), RefusedFlag(_SHARED_EXPERTS), example="naive"),
    FlagRow(
        SGLANG,
        ("--moe-runner-backend",),
        AcceptedValues(("auto", "triton"), "so it is", "leave it out"),
        example="auto",
    ),
    FlagRow(
        VLLM,
        ("--moe-backend",),
        AcceptedValues(("auto", "triton"), "so it is", "leave it out"),
        example="auto",
    ),
    FlagRow(BOTH, ("--pipeline-parallel-size",), _SHARE_LAYERS),
    FlagRow(SGLANG, ("--pp-size",), _SHARE_LAYERS),
    FlagRow(VLLM, ("-pp",), _SHARE_LAYERS),
    FlagRow(BOTH, ("--nnodes",), AcceptedValues(("1",), "so it is", _ONE_HOST)),
    FlagRow(BOTH, ("--node-rank",), AcceptedValues(("0",), "so it is", _ONE_HOST), example="0"),
    FlagRow(SGLANG, ("--dist-init-addr", "--nccl-init-addr"), RefusedFlag(_ONE_HOST), example="h:1"),
    FlagRow(SGLANG, ("--nccl-port",), RefusedFlag("leave it out: free ports are taken")),
    FlagRow(VLLM, ("--master-addr", "--master-port"), RefusedFlag(_ONE_HOST), example="h"),
    FlagRow(
        VLLM,
        ("--distributed-executor-backend",),
        AcceptedValues(("mp", "uni"), "a process per GPU", _ONE_HOST),
        example="mp",
    ),
    FlagRow(
        VLLM,
        ("--data-parallel-backend",),
        AcceptedValues(("mp",), "a process per GPU", _ONE_HOST),
        example="mp",
    ),
    FlagRow(
        VLLM,
        (
            "--data-parallel-address",
            "--data-parallel-rpc-port",
            "--data-parallel-size-local",
            "--data-parallel-rank",
        ),
        RefusedFlag("start `eyas worker` on each host, and `eyas gateway` for all"),
        example="1",
    ),
    FlagRow(
        SGLANG,
        ("--load-balance-method",),
        RefusedFlag(
            "leave it out: requests go where their beginning is cached, then where the load is least"
        ),
        example="round_robin",
    ),
    FlagRow(
        SGLANG, ("--base-gpu-id", "--gpu-id-step"), RefusedFlag("name the GPUs: `--gpus 2,3`"), example="2"
    ),
    FlagRow(BOTH, ("--attention-backend",), SameFlag(_ATTENTION), example="torch"),
    FlagRow(SGLANG, ("--prefill-attention-backend",), SameFlag(_ATTENTION), example="torch"),
    FlagRow(
        SGLANG,
        ("--decode-attention-backend",),
        AliasFlag("--attention-backend", _ATTENTION),
        example="torch_native",
    ),
    FlagRow(
        SGLANG,
        ("--sampling-backend",),
        RefusedFlag("leave it out: a step samples in kernels of its own"),
        example="pytorch",
    ),
    FlagRow(VLLM, ("--enforce-eager",), AliasFlag("--disable-cuda-graph"), NONE),
    FlagRow(VLLM, ("--no-enforce-eager",), AcceptedFlag("a GPU has CUDA graphs"), NONE),
    FlagRow(SGLANG, ("--disable-cuda-graph",), SameFlag()),
    FlagRow(SGLANG, ("--cuda-graph-max-bs",), SameFlag(), example="8"),
    FlagRow(SGLANG, ("--cuda-graph-max-bs-decode",), AliasFlag("--cuda-graph-max-bs"), example="8"),
    FlagRow(SGLANG, ("--cuda-graph-bs",), SameFlag(), example="8"),
    FlagRow(SGLANG, ("--cuda-graph-bs-decode",), AliasFlag("--cuda-graph-bs"), example="8"),
    FlagRow(
        VLLM,
        ("--cudagraph-capture-sizes", "--cuda-graph-sizes"),
        AliasFlag("--cuda-graph-bs", note="sequences, whatever is drafted"),
        example="8",
    ),
    FlagRow(
        VLLM,
        ("--max-cudagraph-capture-size",),
        AliasFlag("--cuda-graph-max-bs", note="sequences, whatever is drafted"),
        example="8",
    ),
    FlagRow(SGLANG, ("--disable-cuda-graph-padding",), RefusedFlag(f"leave it out; {_GRAPHS}"), NONE),
    FlagRow(VLLM, ("--compilation-config", "-O", "-cc"), RefusedFlag(_GRAPHS), example="3"),
    FlagRow(
        VLLM,
        ("-O3", "-O2", "-O1"),
        AcceptedFlag("a GPU has CUDA graphs, and nothing is compiled by torch"),
        NONE,
    ),
    FlagRow(VLLM, ("-O0",), AliasFlag("--disable-cuda-graph"), NONE),
    FlagRow(SGLANG, ("--enable-torch-compile",), RefusedFlag(_NO_TORCH_COMPILE), NONE),
    FlagRow(SGLANG, ("--torch-compile-max-bs",), RefusedFlag(_NO_TORCH_COMPILE)),
    FlagRow(
        VLLM,
        ("--async-scheduling",),
        AcceptedFlag("on a GPU a step is planned while the one before it runs"),
        NONE,
    ),
    FlagRow(VLLM, ("--no-async-scheduling",), AliasFlag("--disable-overlap-schedule"), NONE),
    FlagRow(SGLANG, ("--disable-overlap-schedule",), SameFlag()),
    FlagRow(SGLANG, ("--enable-deterministic-inference",), AliasFlag("--deterministic"), NONE),
    FlagRow(
        BOTH,
        ("--disable-custom-all-reduce",),
        RefusedFlag("leave it out: small sums go by GPUs' own reads where they can, and by NCCL elsewhere"),
        NONE,
    ),
    FlagRow(
        SGLANG,
        ("--enable-nccl-nvls", "--enable-symm-mem", "--enable-mscclpp", "--enable-p2p-check"),
        RefusedFlag("leave it out: what GPUs can do is found out"),
        NONE,
    ),
    FlagRow(
        SGLANG,
        ("--enable-two-batch-overlap", "--enable-single-batch-overlap"),
        RefusedFlag("leave it out: a step is one batch"),
        NONE,
    ),
    FlagRow(VLLM, ("--enable-dbo",), RefusedFlag("leave it out: a step is one batch"), NONE),
    FlagRow(SGLANG, ("--enable-memory-saver",), AliasFlag("--memory-saver"), NONE),
    FlagRow(VLLM, ("--enable-sleep-mode",), AliasFlag("--memory-saver"), NONE),
    FlagRow(SGLANG, ("--sleep-on-idle",), AcceptedFlag("an idle engine waits without a busy loop"), NONE),
    FlagRow(
        SGLANG,
        ("--skip-server-warmup",),
        RefusedFlag("leave it out: kernels run once before a worker serves"),
        NONE,
    ),
    FlagRow(
        SGLANG,
        ("--watchdog-timeout",),
        RefusedFlag("leave it out: an engine that hangs is ended and started again"),
        example="300",
    ),
)

DRAFTS = (
    FlagRow(
        VLLM,
        ("--speculative-config", "-sc"),
        TranslatedFlag(
            values.from_json,
            "`--draft` and `--spec-steps`, from `method`, `model` and `num_speculative_tokens`",
        ),
        example='{"method": "ngram", "num_speculative_tokens": 3}',
    ),
    FlagRow(
        SGLANG,
        ("--speculative-algorithm", "--speculative-algo"),
        TranslatedFlag(
            values.from_algorithm,
            "EAGLE, EAGLE3, NEXTN: the head of `--draft`, without it `--draft mtp`; STANDALONE, DFLASH: "
            "that of `--draft`, which they need; NGRAM: `--draft ngram`",
        ),
        example="NGRAM",
    ),
    FlagRow(
        SGLANG,
        ("--speculative-draft-model-path", "--speculative-draft-model"),
        AliasFlag("--draft"),
        example="none",
    ),
    FlagRow(
        VLLM,
        ("--speculative-model",),
        AliasFlag("--draft", values.spelled({"[ngram]": "ngram"})),
        example="[ngram]",
    ),
    FlagRow(SGLANG, ("--speculative-num-steps",), SameFlag(), example="5"),
    FlagRow(VLLM, ("--num-speculative-tokens",), AliasFlag("--spec-steps"), example="5"),
    FlagRow(SGLANG, ("--speculative-eagle-topk",), SameFlag()),
    FlagRow(SGLANG, ("--speculative-num-draft-tokens",), SameFlag(), example="6"),
    FlagRow(SGLANG, ("--speculative-token-map",), SameFlag(), example="f"),
    FlagRow(SGLANG, ("--speculative-adaptive",), SameFlag()),
    FlagRow(
        SGLANG,
        ("--speculative-draft-model-revision",),
        RefusedFlag("fetch that revision, and name its folder"),
        example="main",
    ),
    FlagRow(
        SGLANG,
        ("--speculative-draft-model-quantization",),
        RefusedFlag("leave it out: a head's own config.json says it"),
        example="fp8",
    ),
    FlagRow(
        SGLANG,
        ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"),
        AcceptedValues(("1", "1.0"), "so it is", "leave it out: drafts never change what a model answers"),
        example="1.0",
    ),
    FlagRow(
        SGLANG,
        ("--speculative-attention-mode",),
        RefusedFlag("leave it out: verifying attends as decoding does"),
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
        RefusedFlag("leave it out: the longest match counts (docs/lookup.md)"),
    ),
)
