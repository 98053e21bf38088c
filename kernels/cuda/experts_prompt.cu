// Routed experts, prompt form: tiles of rows that chose one expert, listed by `experts_sort` (experts.cu).
// Three kernels: gate and up into scratch; silu(gate) * up and its codes; down. Compiled for the layer's
// kinds, none dense. Grid of the products: x blocks of 128 outputs (of gate, then of up), y places of the
// tile list, taken in turn, of which only the first tile_count are there. With `wide`, only rows that are
// marked there are done: what the warpgroup form cannot do (align.cu).
#include "linear_prompt.cuh"

struct ExpertMatrix {
    Packed weights;
    uint kind;
    uint form;
};

struct PromptCodes {
    const uchar* codes;
    const float* units;
    const float* sums;
};

struct ExpertPromptArgs {
    const ExpertMatrix* matrices;  // [gate, up, down][experts]
    const uint* starts;            // [experts + 1] into `order`
    const uint* order;             // pairs by expert
    const uint* tiles;             // count, then pairs of words: expert, first place in `order`
    float* gate_up;                // [2][pairs][inner]
    float* out;                    // [pairs, width]
    PromptCodes codes[3];          // of x, by `form`
    PromptCodes inner_codes;       // [pairs, inner], written by experts_inner
    uint pairs, k, experts, width, inner, tile_rows;
    const uint* wide;        // marks of rows, or none
    const uint* inner_wide;  // marks of pairs, or none
};

struct Tile {
    const uint* pairs;
    uint count, expert;
};

SHARED Tile find_tile(const ExpertPromptArgs& args, uint at) {
    uint expert = args.tiles[2 + 2 * at], first = args.tiles[3 + 2 * at];
    return Tile{args.order + first, min(args.starts[expert + 1] - first, args.tile_rows), expert};
}

// f(tile, block) for the tiles and blocks of outputs of this block that have to be done. `divisor`: from a
// tile's pairs to what is marked.
template <class F>
SHARED void each_tile(const ExpertPromptArgs& args, const uint* marks, uint divisor, uint blocks, F f) {
    // Marks of rows are few enough to be looked through by each block, and most often there is none.
    if (marks && divisor > 1 && !any_marked(marks, args.pairs / divisor)) return;
    for (uint at = blockIdx.y; at < args.tiles[0]; at += gridDim.y) {
        Tile tile = find_tile(args, at);
        TileRows in = {nullptr, nullptr, nullptr, tile.pairs, divisor, 0, tile.count, 0};
        if (marks && !any_marked(marks, in)) continue;
        for (uint block = blockIdx.x; block < blocks; block += gridDim.x) {
            f(tile, block);
            __syncthreads();
        }
    }
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, BLOCKS)
    experts_gate_up(const __grid_constant__ ExpertPromptArgs args) {
    extern __shared__ __align__(128) uchar smem[];
    wait_for_launches_before();
    start_next_launch();
    uint half = (args.inner + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    each_tile(args, args.wide, args.k, 2 * half, [&](const Tile& tile, uint block) {
        uint which = block / half;
        const ExpertMatrix& matrix = args.matrices[which * args.experts + tile.expert];
        const PromptCodes& codes = args.codes[matrix.form];
        TileRows in = {codes.codes, codes.units, codes.sums, tile.pairs, args.k, 0, tile.count, args.width};
        auto place = [&](uint n) -> float* {
            if (args.wide && !args.wide[tile.pairs[n] / args.k]) return nullptr;
            return args.gate_up + ((ulong)which * args.pairs + tile.pairs[n]) * args.inner;
        };
        with_kind(matrix.kind, [&](auto kind) {
            multiply_tile<typename decltype(kind)::Stored>(smem, matrix.weights, in, args.inner,
                                                           block % half * 8, place);
        });
    });
}

// silu(gate) * up of each pair and its codes in groups of INNER_GROUP. A thread has four values, INNER_GROUP
// / 4 lanes share a group. Grid: pairs; INNER_GROUP divides `inner`.
extern "C" __global__ void __launch_bounds__(256)
    experts_inner(const __grid_constant__ ExpertPromptArgs args) {
    wait_for_launches_before();
    start_next_launch();
    uint pair = blockIdx.x, groups = args.inner / INNER_GROUP;
    const float* gate = args.gate_up + (ulong)pair * args.inner;
    const float* up = gate + (ulong)args.pairs * args.inner;
    for (uint quad = threadIdx.x; quad < (args.inner / 4 + 31) / 32 * 32; quad += blockDim.x) {
        float values[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (quad < args.inner / 4) {
            float4 g = ((const float4*)gate)[quad], u = ((const float4*)up)[quad];
            values[0] = silu_exact(g.x) * u.x, values[1] = silu_exact(g.y) * u.y;
            values[2] = silu_exact(g.z) * u.z, values[3] = silu_exact(g.w) * u.w;
        }
        uint magnitude = 0;
        for (int j = 0; j < 4; j++) magnitude = max(magnitude, BITS(values[j]) & 0x7fffffffu);
        for (uint h = INNER_GROUP / 8; h > 0; h >>= 1)
            magnitude = max(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, h));
        float factor = quantize_factor(14, magnitude), sum = 0.0f;
        for (int j = 0; j < 4; j++) {
            values[j] = quantize_code(values[j], factor);
            sum = sum + values[j];
        }
        for (uint h = INNER_GROUP / 8; h > 0; h >>= 1) sum = sum + __shfl_xor_sync(0xffffffffu, sum, h);
        if (quad >= args.inner / 4) continue;
        uint2 codes = make_uint2(half_pair(values[0], values[1]), half_pair(values[2], values[3]));
        ((uint2*)(args.inner_codes.codes + (ulong)pair * args.inner * 2))[quad] = codes;
        if (quad % (INNER_GROUP / 4) == 0) {
            ulong at = (ulong)pair * groups + quad / (INNER_GROUP / 4);
            ((float*)args.inner_codes.units)[at] = quantize_unit(14, magnitude);
            ((float*)args.inner_codes.sums)[at] = sum;
        }
    }
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, BLOCKS)
    experts_down_prompt(const __grid_constant__ ExpertPromptArgs args) {
    extern __shared__ __align__(128) uchar smem[];
    wait_for_launches_before();
    start_next_launch();
    uint blocks = (args.width + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    each_tile(args, args.inner_wide, 1, blocks, [&](const Tile& tile, uint block) {
        const ExpertMatrix& matrix = args.matrices[2 * args.experts + tile.expert];
        const PromptCodes& codes = args.inner_codes;
        TileRows in = {codes.codes, codes.units, codes.sums, tile.pairs, 1, 0, tile.count, args.inner};
        auto place = [&](uint n) -> float* {
            if (args.inner_wide && !args.inner_wide[tile.pairs[n]]) return nullptr;
            return args.out + (ulong)tile.pairs[n] * args.width;
        };
        with_kind(matrix.kind, [&](auto kind) {
            typedef typename decltype(kind)::Stored Stored;
            multiply_tile<Stored>(smem, matrix.weights, in, args.width, block * 8, place);
        });
    });
}
